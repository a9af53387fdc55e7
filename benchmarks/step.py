"""The time of an optimiser's step on the parameter shapes of known networks."""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from contenders import ADAM, SGD, Contender, find_contenders
from rich.table import Table
from shapes import Parameters, Shapes, deep_mlp, flat, gpt2, gpt2_xl, groups, resnet50, twin
from timing import Bench, Clock, Job, Rounds, Row, Step, burst_length, device_time, milliseconds, ratio, take_turns

import nero
from nero.backends import backends_for

#: The largest difference of a backend from the rule in float64, after two steps, relative to weights above one.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
#: Above this many parameters, the backends are compared on one tensor of each shape.
MAX_CHECKED_PARAMETERS = {"cuda": 200_000_000, "cpu": 100_000_000}
#: Backends that are not worth timing with fresh gradients on a GPU.
SLOW = ("Nero (eager)", "Nero (foreach)")
#: Above this many tensors, torch.compile takes too long.
MAX_COMPILED_TENSORS = 250


class Running(NamedTuple):
    """A contender whose optimiser is made and warmed up."""

    contender: Contender
    optimiser: torch.optim.Optimizer
    step: Step


def jobs(bench: Bench) -> list[Job]:
    """Return one job per set of shapes."""
    contenders, left_out = find_contenders(bench.device, bench.compile_budget_s > 0)
    bench.notes.extend(left_out)
    return [partial(measure, shapes, contenders, bench) for shapes in shape_sets(bench)]


def shape_sets(bench: Bench) -> list[Shapes]:
    """Return the networks; the largest only on a GPU, and last."""
    if bench.is_quick:
        return [deep_mlp(3, 32), gpt2(True, 1, 32, 64, "GPT-2 tiny")]
    return [deep_mlp(), resnet50(), gpt2(), gpt2(transposed=True)] + [gpt2_xl()] * (bench.device.type == "cuda")


def measure(shapes: Shapes, contenders: Sequence[Contender], bench: Bench) -> list[Row]:
    """Time every contender's step in turn, then the shares of the device and of the host."""
    shared = shapes.parameters(bench.device)
    running = {each.name: started for each in contenders if (started := _start(each, shapes, shared, bench))}
    clock = Clock(bench.device)
    counts = {name: burst_length(each.step, clock, bench.budget) for name, each in running.items()}
    steps = {name: each.step for name, each in running.items()}
    times = take_turns(steps, counts, clock, bench.budget, always=(ADAM, SGD), tick=bench.tick)
    fresh = _fresh(running, clock) if clock.is_gpu else {}
    adam_bytes = state_bytes(running[ADAM].optimiser)
    rows = []
    for name, (contender, optimiser, step) in running.items():
        parameters = _parameters(optimiser)
        total, seconds = sum(map(torch.numel, parameters)), statistics.median(times[name].values())
        row: Row = {
            "shapes": shapes.name,
            "dtype": str(shapes.dtype).removeprefix("torch."),
            "parameters": total,
            "tensors": len(parameters),
            "optimiser": name,
            "note": contender.note,
            "rounds": len(times[name]),
            "burst": counts[name],
            "milliseconds": milliseconds(seconds),
            "quartiles": [milliseconds(each) for each in statistics.quantiles(times[name].values(), n=4)[::2]],
            "device_milliseconds": None,
            "host_milliseconds": None,
            "host_moving_milliseconds": None,
            "of_fused_adam": round(ratio(times[name], times[ADAM]), 3),
            "of_fused_sgd": round(ratio(times[name], times[SGD]), 3),
            "bytes_per_parameter": (needed := _bytes_per_parameter(contender, shapes)),
            "of_copy_bandwidth": _bandwidth_share(needed, total, seconds, bench),
            "device_of_copy_bandwidth": None,
            "state_bytes": state_bytes(optimiser),
            "state_of_adam": round(state_bytes(optimiser) / adam_bytes, 6),
        }
        if clock.is_gpu:
            host = statistics.median(clock.host_seconds(step) for _ in range(10))
            row["host_milliseconds"] = milliseconds(host)
            alone = device_time(step, counts[name], host, clock)
            row["device_milliseconds"] = milliseconds(alone)
            row["device_of_copy_bandwidth"] = alone and _bandwidth_share(needed, total, alone, bench)
        if name in fresh:
            row["host_moving_milliseconds"] = milliseconds(statistics.median(fresh[name].values()))
        rows.append(row)
        bench.tick()
    return rows


def _bytes_per_parameter(contender: Contender, shapes: Shapes) -> int | None:
    needed = contender.bytes_per_parameter
    return needed and needed * shapes.dtype.itemsize // torch.float32.itemsize


def _bandwidth_share(needed: int | None, total: int, seconds: float, bench: Bench) -> float | None:
    """Return the bandwidth of a step, counting only the bytes that it must move, relative to a copy's."""
    return needed and round(needed * total / seconds / bench.bandwidth, 4)


def _start(contender: Contender, shapes: Shapes, shared: Parameters, bench: Bench) -> Running | None:
    """Make an optimiser and warm it up; note a failure. Only Nero gets parameters of its own."""
    begin = time.perf_counter()
    if contender.is_compiled and (bench.compile_budget_s <= 0 or len(flat(shared)) > MAX_COMPILED_TENSORS):
        bench.notes.append(f"{contender.name}, {shapes.name}: compiling would take too long")
        return None
    try:
        optimiser = contender.make(twin(shared, shapes.dtype) if contender.is_nero else shared)
        step: Step = torch.compile(lambda: optimiser.step()) if contender.is_compiled else optimiser.step
        Clock(bench.device).burst(step, 3)
    except Exception as error:
        if contender.is_nero or contender.name in (ADAM, SGD):
            raise
        bench.notes.append(f"{contender.name}, {shapes.name}: {type(error).__name__}: {str(error).strip()[:200]}")
        return None
    finally:
        bench.compile_budget_s -= time.perf_counter() - begin if contender.is_compiled else 0.0
        bench.tick()
    return Running(contender, optimiser, step)


def _fresh(running: dict[str, Running], clock: Clock) -> dict[str, Rounds]:
    """Time, in turn, the call of a step whose gradients are new tensors, as after a backward pass."""
    chosen = [name for name, each in running.items() if name == SGD or (each.contender.is_nero and name not in SLOW)]
    times: dict[str, Rounds] = {name: {} for name in chosen}
    for number in range(30):
        for name in chosen:
            optimiser = running[name].optimiser
            for parameter in _parameters(optimiser):
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            times[name][number] = clock.host_seconds(optimiser.step)
    return times


def check_backends(shapes: Shapes, device: torch.device) -> None:
    """Exit if a backend differs from the rule."""
    shapes = shapes if shapes.total <= MAX_CHECKED_PARAMETERS[device.type] else shapes.distinct
    check_steps(shapes, device, backends_for(device))


def check_steps(shapes: Shapes, device: torch.device, backends: Sequence[str], **options: Any) -> None:
    """Exit if two steps by a backend, with these options, differ from the rule in float64."""
    start = shapes.parameters(device)

    def after_two_steps(backend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        parameters = twin(start, dtype)
        optimiser = nero.Nero(groups(parameters), backend=backend, **options)
        for _ in range(2):
            optimiser.step()
        return [parameter.detach() for parameter in flat(parameters)]

    exact = after_two_steps("eager", torch.float64)
    for backend in backends:
        pairs = zip(after_two_steps(backend, shapes.dtype), exact, strict=True)
        apart = max(float(((one - other) / other.abs().clamp(min=1)).abs().max()) for one, other in pairs)
        if not apart <= TOLERANCES[shapes.dtype]:
            raise SystemExit(f"{shapes.name}: the backends disagree: {backend} is {apart:.2g} from the rule; no report")


def state_bytes(optimiser: torch.optim.Optimizer) -> int:
    """Return the size of an optimiser's state."""
    return sum(value.nbytes for state in optimiser.state.values() for value in state.values() if torch.is_tensor(value))


def _parameters(optimiser: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def table(rows: list[Row]) -> Table:
    """Format the rows of one set of shapes for a terminal."""
    first = rows[0]
    made = Table(box=None, pad_edge=False, title_justify="left", title_style="bold")
    made.title = f"{first['shapes']}, {first['parameters'] / 1e6:.4g} M in {first['tensors']} tensors"
    made.add_column("optimiser", no_wrap=True)
    for title in ("ms", "device", "host", "moving", "/ Adam", "/ SGD", "of copy", "device", "state / Adam", "rounds"):
        made.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        times = [row[f"{kind}milliseconds"] for kind in ("", "device_", "host_", "host_moving_")]
        shares = [row[f"{kind}of_copy_bandwidth"] for kind in ("", "device_")]
        made.add_row(
            row["optimiser"] + (" *" if row["note"] else ""),
            *("" if value is None else f"{value:.3g}" for value in times),
            f"{row['of_fused_adam']:.2f}",
            f"{row['of_fused_sgd']:.2f}",
            *("" if value is None else f"{value:.0%}" for value in shares),
            f"{row['state_of_adam']:.2%}",
            f"{row['rounds']}",
        )
    notes = dict.fromkeys(f"* {row['note']}" for row in rows if row["note"])
    made.caption = "; ".join(notes) or None
    return made
