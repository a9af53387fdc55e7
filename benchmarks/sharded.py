"""The cost of sharding: a step of sharded tensors beside a step of plain tensors of the local size, Adam's and Muon's.

Gloo processes on this machine, with one thread each. Plain tensors, shards and Adam on the same shards take turns; the
ratio is the median over the rounds. Muon, whose matrix products take seconds on a CPU, is timed by itself in a few
steps. Writes benchmarks/results/sharded-cpu.json.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from records import command_line, out_folder, record_of, terminal, write_record
from rich.table import Table
from timing import MAX_BURST_STEPS, Budget, Clock, Rounds, Row, Step, milliseconds, ratio
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn

import nero
from nero.backends.available import numba_works

PROCESSES = 2
#: Steps before a measurement, which plan and compile.
WARM_UP_STEPS = 3
MUON_STEPS = 3


class Workload(NamedTuple):
    """Square matrices: how many, of what size, and the axis along which they are sharded."""

    tensors: int
    size: int
    axis: int

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.tensors} x {self.size}²{', neurons cut' if self.axis else ''}"


WORKLOADS = (Workload(10, 256, 0), Workload(4, 1024, 0), Workload(50, 64, 0), Workload(4, 1024, 1))


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line."""
    parser = command_line(__doc__, has_device=False)
    parser.add_argument("--rounds", type=int, default=30, help="rounds in which each contender has a turn (30)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        options = (folder, arguments.rounds, arguments.quick, out_folder(arguments))
        spawn(run_process, options, PROCESSES)  # type: ignore[no-untyped-call]
    return 0


def run_process(rank: int, folder: str, rounds: int, is_quick: bool, out: Path) -> None:
    """Measure in one of several processes; the first prints and writes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    console = terminal(is_quiet=rank > 0)
    rows: list[Row] = []
    for row in measure_all(rounds, is_quick):
        rows.append(row)
        console.print(table(rows[-1:]), "")
    if rank == 0:
        record = record_of(rows, torch.device("cpu"), is_quick, processes=PROCESSES)
        write_record(out / "sharded-cpu.json", record)
    distributed.destroy_process_group()


def measure_all(rounds: int, is_quick: bool) -> Iterator[Row]:
    """Measure every workload on every backend, in all processes together."""
    for workload in WORKLOADS:
        sized = workload._replace(size=8, tensors=min(workload.tensors, 3)) if is_quick else workload
        muon = measure_muon(sized)
        for backend in ("foreach", "numba"):
            if backend == "foreach" or numba_works():
                yield measure(sized, backend, rounds) | muon


def measure(workload: Workload, backend: str, rounds: int) -> Row:
    """Time the contenders in turn, and count the collectives of a sharded step."""
    shards = sharded_parameters(workload)
    plain = [with_gradient(shard.to_local().detach().clone()) for shard in shards]
    options: dict[str, Any] = {"backend": backend}
    steps: dict[str, Step] = {
        "plain": nero.Nero(plain, **options).step,
        "sharded": nero.Nero(shards, **options).step,
        "adam": torch.optim.Adam(sharded_parameters(workload), foreach=True).step,
    }
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    collectives = {name: collectives_of(steps[name]) for name in ("sharded", "adam")}
    times = take_turns_together(steps, rounds)
    taken = {name: statistics.median(each.values()) for name, each in times.items()}
    return {
        "workload": workload.name,
        "backend": backend,
        "rounds": rounds,
        "collectives": collectives["sharded"],
        "collectives_adam": collectives["adam"],
        **{f"milliseconds_{name}": milliseconds(seconds) for name, seconds in taken.items()},
        "of_plain": round(ratio(times["sharded"], times["plain"]), 3),
        "of_adam": round(ratio(times["sharded"], times["adam"]), 3),
    }


def measure_muon(workload: Workload) -> Row:
    """Time torch's Muon on the same shards, and count its collectives."""
    step = torch.optim.Muon(sharded_parameters(workload)).step
    collectives = collectives_of(step)  # and warm up
    clock = Clock(torch.device("cpu"))
    distributed.barrier()
    taken = statistics.median(clock.burst(step) for _ in range(MUON_STEPS))
    return {"collectives_muon": collectives, "milliseconds_muon": milliseconds(taken)}


def collectives_of(step: Step) -> int:
    """Take a step, and count its collectives."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:  # type: ignore[no-untyped-call]
        step()
    return int(mode.get_total_counts())


def take_turns_together(steps: dict[str, Step], rounds: int) -> dict[str, Rounds]:
    """Time the contenders in turn. Every process makes the same steps, since some of them wait for the others."""
    clock = Clock(torch.device("cpu"))
    counts = {name: agreed_length(step, clock) for name, step in steps.items()}
    times: dict[str, Rounds] = {name: {} for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            distributed.barrier()
            times[name][number] = clock.burst(step, counts[name])
    return times


def agreed_length(step: Step, clock: Clock) -> int:
    """Return the number of steps in a turn, by the clock of the first process."""
    distributed.barrier()
    taken = torch.tensor(clock.burst(step, 5))
    distributed.broadcast(taken, 0)
    return max(1, min(MAX_BURST_STEPS, math.ceil(Budget().burst_s / float(taken))))


def sharded_parameters(workload: Workload) -> list[Any]:
    """Make the matrices of a workload, sharded over all processes, with gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    tensors = [
        distribute_tensor(torch.randn(workload.size, workload.size), mesh, [Shard(workload.axis)])
        for _ in range(2 * workload.tensors)
    ]
    return [with_gradient(weight, gradient) for weight, gradient in zip(tensors[::2], tensors[1::2], strict=True)]


def with_gradient(values: Tensor, gradient: Tensor | None = None) -> nn.Parameter:
    """Make a parameter that has a gradient."""
    parameter = nn.Parameter(values)
    parameter.grad = torch.randn_like(values) if gradient is None else gradient
    return parameter


def table(rows: list[Row]) -> Table:
    """Format the rows for a terminal."""
    made = Table(box=None, pad_edge=False)
    made.add_column("workload", no_wrap=True)
    made.add_column("backend")
    titles = (
        "plain, ms",
        "sharded, ms",
        "/ plain",
        "Adam, ms",
        "/ Adam",
        "Muon, ms",
        "collectives: Nero",
        "Adam",
        "Muon",
    )
    for title in titles:
        made.add_column(title, justify="right")
    for row in rows:
        made.add_row(
            row["workload"],
            row["backend"],
            f"{row['milliseconds_plain']:.4g}",
            f"{row['milliseconds_sharded']:.4g}",
            f"{row['of_plain']:.3g}",
            f"{row['milliseconds_adam']:.4g}",
            f"{row['of_adam']:.3g}",
            f"{row['milliseconds_muon']:.4g}",
            str(row["collectives"]),
            str(row["collectives_adam"]),
            str(row["collectives_muon"]),
        )
    return made


if __name__ == "__main__":
    raise SystemExit(main())
