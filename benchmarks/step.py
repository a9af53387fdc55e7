"""How long an optimiser's step takes: contenders take turns in one run, on the parameter shapes of known networks.

Prints a table and writes it as JSON, with the machine's name, into benchmarks/results. Refuses to
report if the backends do not agree.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from shapes import ALL, Shapes, groups

import nero

Make = Callable[[dict[Any, list[torch.nn.Parameter]]], torch.optim.Optimizer]


def _flat(parameters: dict[Any, list[torch.nn.Parameter]]) -> list[torch.nn.Parameter]:
    return [each for alike in parameters.values() for each in alike]


CONTENDERS: dict[str, Make] = {
    "Adam (fused)": lambda p: torch.optim.Adam(_flat(p), fused=True),
    "Adam (foreach)": lambda p: torch.optim.Adam(_flat(p), foreach=True),
    "SGD (fused)": lambda p: torch.optim.SGD(_flat(p), fused=True),
    "Nero (foreach)": lambda p: nero.Nero(groups(p), backend="foreach"),
    "Nero (numba)": lambda p: nero.Nero(groups(p), backend="numba"),
    "Nero (eager)": lambda p: nero.Nero(groups(p), backend="eager"),
}


def main() -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender that are timed (default 15)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.rounds < 3:
        parser.error("--rounds must be at least 3, so that there is a median")
    device = torch.device(arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)

    console, rows = Console(), []
    for shapes in ALL:
        check_backends(shapes, device)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing", total=len(ALL) * (arguments.rounds + 2))
        for shapes in ALL:
            rows += measure(shapes, device, arguments.rounds, lambda: progress.advance(task))
    console.print(table(rows))

    record = {
        "date": date.today().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "nero": nero.__version__,
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    path = arguments.out / f"step-{device.type}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {os.path.relpath(path)}")
    return 0


def measure(shapes: Shapes, device: torch.device, rounds: int, tick: Callable[[], object]) -> list[dict[str, Any]]:
    """Time every contender's step in turn, each on parameters of its own."""
    optimisers = {name: make(shapes.parameters(device)) for name, make in CONTENDERS.items()}
    times: dict[str, list[float]] = {name: [] for name in optimisers}
    for number in range(rounds + 2):  # the first two warm up
        for name, optimiser in optimisers.items():
            synchronise(device)
            start = time.perf_counter()
            optimiser.step()
            synchronise(device)
            if number >= 2:
                times[name].append(time.perf_counter() - start)
        tick()
    adam = optimisers["Adam (fused)"]
    return [
        {
            "shapes": shapes.name,
            "parameters": shapes.total,
            "tensors": sum(map(len, shapes.by_axes.values())),
            "optimiser": name,
            "milliseconds": round(1e3 * statistics.median(times[name]), 3),
            "quartiles": [round(1e3 * q, 3) for q in statistics.quantiles(times[name], n=4)[::2]],
            # of times taken next to each other, so that what else the machine does weighs on both
            "of_fused_adam": round(
                statistics.median(a / b for a, b in zip(times[name], times["Adam (fused)"], strict=True)), 3
            ),
            "state_bytes": state_bytes(optimiser),
            "state_of_adam": round(state_bytes(optimiser) / state_bytes(adam), 6),
        }
        for name, optimiser in optimisers.items()
    ]


def check_backends(shapes: Shapes, device: torch.device) -> None:
    """Stop if the backends disagree on these shapes after two steps."""
    results = []
    for backend in ("eager", "foreach", "numba"):
        parameters = shapes.parameters(device)
        optimiser = nero.Nero(groups(parameters), backend=backend)
        for _ in range(2):
            optimiser.step()
        results.append(_flat(parameters))
    for one, *others in zip(*results, strict=True):
        distance = max(float((one - other).detach().abs().max()) for other in others)
        if not distance <= 1e-5:
            raise SystemExit(f"{shapes.name}: the backends disagree by {distance}; no report")


def state_bytes(optimiser: torch.optim.Optimizer) -> int:
    """The size of an optimiser's state."""
    return sum(value.nbytes for state in optimiser.state.values() for value in state.values() if torch.is_tensor(value))


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    made = Table(title="A step (median) and the optimiser's state", box=None, pad_edge=False, title_justify="left")
    made.add_column("optimiser", no_wrap=True)
    for title in ("ms", "/ fused Adam", "state", "/ Adam"):
        made.add_column(title, justify="right", no_wrap=True)
    last = None
    for row in rows:
        if row["shapes"] != last:
            last = row["shapes"]
            made.add_row()
            made.add_row(f"[bold]{last}[/bold], {row['parameters'] / 1e6:.0f} M")
        made.add_row(
            f"  {row['optimiser']}",
            f"{row['milliseconds']:.1f}",
            f"{row['of_fused_adam']:.2f}",
            f"{row['state_bytes'] / 1e6:.3g} MB",
            f"{100 * row['state_of_adam']:.2f} %",
        )
    return made


def machine(device: torch.device) -> str:
    """The machine's name: its accelerator's, or its processor's with the number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if shutil.which("lscpu"):
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"^Model name:\s*(.+)$", listing, re.MULTILINE)
        name = found[1].strip() if found else name
    return f"{name}, {platform.machine()}, {os.cpu_count()} cores"


def synchronise(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(main())
