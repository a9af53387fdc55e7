"""How long an optimiser's step takes, on the parameter shapes of known networks."""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from contenders import ADAM, SGD, Contender, everyone
from rich.table import Table
from shapes import Parameters, Shapes, deep_mlp, flat, gpt2, gpt2_xl, groups, resnet50, twin
from timing import Bench, Clock, Job, Row, Step, burst_length, device_time, milliseconds, ratio, take_turns

import nero

#: How far the backends may be apart after two steps.
TOLERANCE = 1e-5
#: Above so many parameters, the backends are compared on one of each shape.
MANY = {"cuda": 200_000_000, "cpu": 100_000_000}
#: Above so many tensors, compiling takes too long.
COMPILED_TENSORS = 250


class Running(NamedTuple):
    """A contender at work."""

    contender: Contender
    optimiser: torch.optim.Optimizer
    step: Step


def jobs(bench: Bench) -> list[Job]:
    """A job for each set of shapes."""
    those, left_out = everyone(bench.device, bench.compiling > 0)
    bench.notes.extend(left_out)
    return [partial(measure, shapes, those, bench) for shapes in shape_sets(bench)]


def shape_sets(bench: Bench) -> list[Shapes]:
    """The networks; the largest on a GPU alone, and last."""
    if bench.quick:
        return [deep_mlp(3, 32), gpt2(True, 1, 32, 64, "GPT-2 tiny")]
    return [deep_mlp(), resnet50(), gpt2(), gpt2(transposed=True)] + [gpt2_xl()] * (bench.device.type == "cuda")


def measure(shapes: Shapes, those: Sequence[Contender], bench: Bench) -> list[Row]:
    """Time every contender's step in turn, then what of it is the device's and what the host's."""
    shared = shapes.parameters(bench.device)
    running = {each.name: made for each in those if (made := _start(each, shapes, shared, bench))}
    clock = Clock(bench.device)
    counts = {name: burst_length(each.step, clock, bench.plan) for name, each in running.items()}
    steps = {name: each.step for name, each in running.items()}
    times = take_turns(steps, counts, clock, bench.plan, always=(ADAM, SGD), tick=bench.tick)
    adam = state_bytes(running[ADAM].optimiser)
    rows = []
    for name, (contender, optimiser, step) in running.items():
        parameters = _parameters(optimiser)
        total, seconds = sum(each.numel() for each in parameters), statistics.median(times[name].values())
        row: Row = {
            "shapes": shapes.name,
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
            "bytes_per_parameter": contender.traffic,
            "of_copy_bandwidth": _fraction(contender, total, seconds, bench),
            "device_of_copy_bandwidth": None,
            "state_bytes": state_bytes(optimiser),
            "state_of_adam": round(state_bytes(optimiser) / adam, 6),
        }
        if clock.gpu:
            host = statistics.median(clock.until_return(step) for _ in range(10))
            row["host_milliseconds"] = milliseconds(host)
            alone = device_time(step, counts[name], host, clock)
            row["device_milliseconds"] = milliseconds(alone)
            row["device_of_copy_bandwidth"] = alone and _fraction(contender, total, alone, bench)
            if contender.ours:
                row["host_moving_milliseconds"] = milliseconds(_host_moving(optimiser, clock))
        rows.append(row)
        bench.tick()
    return rows


def _fraction(contender: Contender, total: int, seconds: float, bench: Bench) -> float | None:
    """Of the bandwidth of a copy, what a step so long makes of it with the bytes that it cannot do without."""
    return contender.traffic and round(contender.traffic * total / seconds / bench.bandwidth, 4)


def _start(contender: Contender, shapes: Shapes, shared: Parameters, bench: Bench) -> Running | None:
    """Make an optimiser and warm it up. Ours, which notice when others move a parameter, have some of their own."""
    begin = time.perf_counter()
    if contender.compiled and (bench.compiling <= 0 or len(flat(shared)) > COMPILED_TENSORS):
        bench.notes.append(f"{contender.name}, {shapes.name}: compiling it would take too long")
        return None
    try:
        optimiser = contender.make(twin(shared) if contender.ours else shared)
        step = _compiled(optimiser) if contender.compiled else optimiser.step
        Clock(bench.device).burst(step, 3)
    except Exception as error:
        if contender.ours or contender.name in (ADAM, SGD):
            raise
        bench.notes.append(f"{contender.name}, {shapes.name}: {type(error).__name__}: {str(error).strip()[:200]}")
        return None
    finally:
        bench.compiling -= time.perf_counter() - begin if contender.compiled else 0.0
        bench.tick()
    return Running(contender, optimiser, step)


def _compiled(optimiser: torch.optim.Optimizer) -> Step:
    return torch.compile(lambda: optimiser.step())


def _host_moving(optimiser: torch.optim.Optimizer, clock: Clock) -> float:
    """Seconds until a step returns if its gradients are new tensors, as after a backward pass."""
    parameters, times = _parameters(optimiser), []
    before = [each.grad for each in parameters]
    for _ in range(10):
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        times.append(clock.until_return(optimiser.step))
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    return statistics.median(times)


def check_backends(shapes: Shapes, device: torch.device) -> None:
    """Stop if any backend is not where the rule in double precision is, after two steps."""
    shapes = shapes if shapes.total <= MANY[device.type] else shapes.one_of_each
    start = shapes.parameters(device)

    def after_two_steps(backend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        parameters = twin(start, dtype)
        optimiser = nero.Nero(groups(parameters), backend=backend)
        for _ in range(2):
            optimiser.step()
        return [each.detach() for each in flat(parameters)]

    exact = after_two_steps("eager", torch.float64)
    for backend in nero.backends.backends_for(device):
        pairs = zip(after_two_steps(backend, torch.float32), exact, strict=True)
        apart = max(float((one - other).abs().max()) for one, other in pairs)
        if not apart <= TOLERANCE:
            raise SystemExit(f"{shapes.name}: the backends disagree: {backend} is {apart:.2g} from the rule; no report")


def state_bytes(optimiser: torch.optim.Optimizer) -> int:
    """The size of an optimiser's state."""
    return sum(value.nbytes for state in optimiser.state.values() for value in state.values() if torch.is_tensor(value))


def _parameters(optimiser: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [each for group in optimiser.param_groups for each in group["params"]]


def table(rows: list[Row]) -> Table:
    """The rows of a set of shapes for a terminal."""
    first = rows[0]
    made = Table(box=None, pad_edge=False, title_justify="left", title_style="bold")
    made.title = f"{first['shapes']}, {first['parameters'] / 1e6:.4g} M in {first['tensors']} tensors"
    made.add_column("optimiser", no_wrap=True)
    for title in ("ms", "device", "host", "moving", "/ Adam", "/ SGD", "of copy", "device", "state / Adam", "rounds"):
        made.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        times = [row[f"{kind}milliseconds"] for kind in ("", "device_", "host_", "host_moving_")]
        made.add_row(
            row["optimiser"] + (" *" if row["note"] else ""),
            *("" if each is None else f"{each:.3g}" for each in times),
            f"{row['of_fused_adam']:.2f}",
            f"{row['of_fused_sgd']:.2f}",
            *(
                "" if row[f"{kind}of_copy_bandwidth"] is None else f"{row[f'{kind}of_copy_bandwidth']:.0%}"
                for kind in ("", "device_")
            ),
            f"{row['state_of_adam']:.2%}",
            f"{row['rounds']}",
        )
    notes = dict.fromkeys(f"* {row['note']}" for row in rows if row["note"])
    made.caption = "; ".join(notes) or None
    return made
