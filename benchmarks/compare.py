"""Time a step of this checkout beside one of another, such as the parent commit.

    git worktree add ../before HEAD~1
    python benchmarks/compare.py ../before/src
    python benchmarks/compare.py --profile      # where the host's time of a fresh step goes, in this checkout

Each checkout runs in a process of its own; the two take turns, so that both meet the same machine. Two
times per step: ``in place``, with gradients that stay where they are, and ``fresh``, with new gradient
tensors at each step, as after ``zero_grad()``. The ratio is the median over the rounds.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parents[1]
KINDS = ("in place", "fresh")


def shapes_to_time(quick: bool) -> dict[str, list[tuple[int, ...]]]:
    """Return parameter shapes by name."""
    if quick:
        return {"rehearsal": [(40, 30), (40,)]}
    return {
        "100-layer MLP": [(784, 784), (784,)] * 100,
        "transformer": [(768, 768), (3072, 768), (768, 3072), (768,), (768,)] * 12,
        "convolutions": [(256, 128, 3, 3), (256,), (256,), (512, 256, 1, 1)] * 12,
        "small": [(40, 30)] * 300,
    }


def serve(device: torch.device, quick: bool) -> None:
    """Answer requests on standard input: time so many steps of an optimiser."""
    import nero

    optimisers: dict[str, torch.optim.Optimizer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["name"]
        if name not in optimisers:
            torch.manual_seed(0)
            made = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes_to_time(quick)[name]]
            for parameter in made:
                parameter.grad = torch.randn_like(parameter)
            optimisers = {name: nero.Nero(made)}  # one at a time, to spare memory
        print(json.dumps(measure(optimisers[name], request["kind"], request["steps"], device)), flush=True)


def measure(optimiser: torch.optim.Optimizer, kind: str, steps: int, device: torch.device) -> float:
    """Return the seconds per step of the optimiser alone."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    total = 0.0
    for _ in range(steps if kind == "fresh" else 1):
        if kind == "fresh":
            for parameter in parameters:
                parameter.grad = parameter.grad.clone()
        _wait(device)
        start = time.perf_counter()
        for _ in range(1 if kind == "fresh" else steps):
            optimiser.step()
        _wait(device)
        total += time.perf_counter() - start
    return total / steps


def profile(device: torch.device, quick: bool, steps: int = 200, lines: int = 20) -> None:
    """Print the functions that take most of the host's time in a step with new gradients."""
    import nero

    for name, shapes in shapes_to_time(quick).items():
        made = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        optimiser, profiler = nero.Nero(made), cProfile.Profile()
        for number in range(10 + steps):
            for parameter in made:
                parameter.grad = torch.randn_like(parameter)
            _wait(device)
            if number < 10:  # the first steps make tables, and compile
                optimiser.step()
            else:
                profiler.runcall(optimiser.step)
        found: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        print(
            f"{name}: {1e6 * sum(times[2] for times in found.values()) / steps:.0f} us per step; profiling adds to it"
        )
        for (file, line, function), times in sorted(found.items(), key=lambda item: -item[1][2])[:lines]:
            print(
                f"{1e6 * times[2] / steps:9.1f} us {times[1] / steps:6.1f} calls  {Path(file).name}:{line} {function}"
            )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ask(worker: "subprocess.Popen[str]", **request: Any) -> float:
    """Send a request to a worker and return its answer."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    return float(json.loads(worker.stdout.readline()))


def main(argv: list[str] | None = None) -> int:
    """Compare two checkouts from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, nargs="?", help="the src folder of the other checkout")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each checkout")
    parser.add_argument("--quick", action="store_true", help="one small network, for a rehearsal")
    parser.add_argument("--profile", action="store_true", help="profile this checkout alone")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if arguments.serve:
        serve(device, arguments.quick)
        return 0
    if arguments.profile:
        profile(device, arguments.quick)
        return 0
    if arguments.before is None or not (arguments.before / "nero").is_dir():
        parser.error("name the src folder of another checkout, which holds the package nero")
    command = [sys.executable, __file__, "--serve", "--device", arguments.device, *["--quick"] * arguments.quick]
    workers = {
        label: subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(source.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for label, source in (("before", arguments.before), ("now", HERE / "src"))
    }
    for name in shapes_to_time(arguments.quick):
        for kind in KINDS:
            steps = 1 if kind == "in place" and device.type == "cpu" else 20 if kind == "in place" else 5
            for worker in workers.values():
                ask(worker, name=name, kind=kind, steps=3)
            times: dict[str, list[float]] = {label: [] for label in workers}
            for _ in range(arguments.rounds):
                for label, worker in workers.items():
                    times[label].append(1e3 * ask(worker, name=name, kind=kind, steps=steps))
            ratios = [new / old for old, new in zip(times["before"], times["now"], strict=True)]
            before, now = map(statistics.median, times.values())
            print(f"{name:15} {kind:9} {before:9.3f} ms -> {now:9.3f} ms  x {statistics.median(ratios):.3f}")
    for worker in workers.values():
        worker.communicate()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
