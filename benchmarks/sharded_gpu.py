"""The step of shards on a GPU: Nero on DTensors beside Nero on plain tensors of the local size, and fused Adam's.

One process: a mesh of one GPU by NCCL, or the first of several imagined processes. Where neurons are whole, a step
communicates nothing, so it takes the same time as in a real run. Writes benchmarks/results/sharded-cuda-gpt2.json.
"""

import json
import statistics
from typing import Any

import torch
from records import command_line, origin, write_record
from rich.console import Console
from shapes import Parameters, flat, gpt2, gpt2_xl, groups
from timing import Budget, Clock, Row, burst_length, device_time, milliseconds, ratio, take_turns
from torch import Tensor, distributed, nn

import nero


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line."""
    parser = command_line(__doc__, has_device=False, has_quick=False)
    parser.add_argument("--processes", type=int, default=1, help="more than one are imagined (%(default)s)")
    parser.add_argument("--device", default="cuda", help="cpu for a rehearsal with tiny shapes (%(default)s)")
    arguments = parser.parse_args(argv)
    device, processes = torch.device(arguments.device), arguments.processes
    start_processes(device, processes)
    shapes = [gpt2(), gpt2_xl()] if device.type == "cuda" else [gpt2(layers=1, width=32, vocabulary=64)]
    rows = [{"workload": each.name, "processes": processes, **measure(each, device)} for each in shapes]
    Console().print_json(data=rows)
    path = arguments.out / f"sharded-{device.type}-gpt2.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in before if row["processes"] != processes]
    write_record(path, {**origin(device), "rows": kept + rows})
    distributed.destroy_process_group()
    return 0


def start_processes(device: torch.device, processes: int) -> None:
    """Join a process group of this process alone, or of imagined ones."""
    if processes > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    else:
        store = torch._C._distributed_c10d.HashStore()
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)


def measure(shapes: Any, device: torch.device) -> Row:
    """Time the contenders in turn: steps back to back, and on the device alone."""
    plain, sharded, adams = (
        [*made(shapes, device)] for made in (local_parameters, sharded_parameters, sharded_parameters)
    )
    optimisers: dict[str, Any] = {
        "plain": nero.Nero(groups(dict(plain))),
        "sharded": nero.Nero(groups(dict(sharded))),
        "adam": torch.optim.Adam(flat(dict(adams)), fused=device.type == "cuda"),
    }
    clock, budget = Clock(device), Budget()
    row: Row = {}
    steps = {name: optimiser.step for name, optimiser in optimisers.items()}
    for step in steps.values():
        for _ in range(5):
            step()
    counts = {name: burst_length(step, clock, budget) for name, step in steps.items()}
    times = take_turns(steps, counts, clock, budget)
    for name, rounds in times.items():
        row[f"loop_ms_{name}"] = milliseconds(statistics.median(rounds.values()))
    row["loop_of_plain"] = round(ratio(times["sharded"], times["plain"]), 3)
    row["loop_of_adam"] = round(ratio(times["sharded"], times["adam"]), 3)
    for name, step in steps.items():
        row[f"device_ms_{name}"] = milliseconds(device_time(step, 5, clock.host_seconds(step), clock))
    return row


def sharded_parameters(shapes: Any, device: torch.device) -> Any:
    """Make the parameters of a network, sharded by rows, with gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))

    def shard(values: Tensor) -> Any:
        return DTensor.from_local(values, mesh, [Shard(0)], run_check=False)

    for axes, alike in local_parameters(shapes, device):
        made = [nn.Parameter(shard(parameter.detach())) for parameter in alike]
        for parameter, plain in zip(made, alike, strict=True):
            parameter.grad = shard(plain.grad)
        yield axes, made


def local_parameters(shapes: Any, device: torch.device) -> Any:
    """Make plain parameters of the size of this process's shards, with gradients."""
    processes = distributed.get_world_size()
    parts = {axes: [(-(-shape[0] // processes), *shape[1:]) for shape in own] for axes, own in shapes.by_axes.items()}
    made: Parameters = shapes._replace(by_axes=parts).parameters(device)
    yield from made.items()


if __name__ == "__main__":
    raise SystemExit(main())
