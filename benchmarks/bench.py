"""The benchmark of a step: Nero beside other optimisers, by size, and within a training step.

Prints tables and writes them as JSON, with the machine's name, into benchmarks/results. Exits without a report if the
backends disagree.
"""

import gc
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import end_to_end
import sections
import step
import torch
from records import command_line, machine, out_folder, terminal, write_record
from rich.progress import Progress
from rich.table import Table
from timing import Bench, Budget, Job, Row, copy_bandwidth

import nero
from nero_lab.provenance import commit

#: Keys that two records must share for their sections to be in one file; a section has its own date and version.
SHARED_KEYS = ("machine", "torch", "triton", "threads", "quick")


class Section(NamedTuple):
    """A part of the benchmark: its jobs, and the table of their rows."""

    jobs: Callable[[Bench], list[Job]]
    table: Callable[[list[Row]], Table]


SECTIONS = {
    "step": Section(step.jobs, step.table),
    "limits": Section(sections.limits, step.table),
    "growth": Section(sections.growth, step.table),
    "momentum": Section(sections.momentum, step.table),
    "end-to-end": Section(end_to_end.jobs, end_to_end.table),
}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="default: %(default)s; others stay as recorded")
    parser.add_argument("--compiling", type=float, default=100, help="seconds for torch.compile on a GPU (100)")
    arguments = parser.parse_args(argv)
    names = arguments.sections.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--sections must be among {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    torch.set_float32_matmul_precision("highest")  # no TF32
    device, is_quick = torch.device(arguments.device), arguments.quick
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: take --device cpu")
    path = out_folder(arguments) / f"{record_name(device)}.json"
    if path.parent.exists() and not path.parent.is_dir():
        parser.error(f"--out must be a folder, got {path.parent}")

    console = terminal()
    record = start_record(path, device, is_quick)
    console.print(f"{record['machine']}: a copy moves {record['copy_bytes_per_second'] / 1e9:.0f} GB/s")
    bench = Bench(
        device,
        budget=Budget(5, 0.01, 3, 0.0) if is_quick else Budget() if device.type == "cuda" else Budget(15, 3.0),
        bandwidth=record["copy_bytes_per_second"],
        is_quick=is_quick,
        compile_budget_s=arguments.compiling if device.type == "cuda" else 0.0,
    )
    # no refresh thread: it would be timed with the steps
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        bench.tick = progress.refresh
        for shapes in progress.track(step.shape_sets(bench), description="checking"):
            step.check_backends(shapes, device)
        for name in names:
            run_section(name, bench, record, path, progress)
    console.print(f"written to {os.path.relpath(path)}")
    return 0


def run_section(name: str, bench: Bench, record: dict[str, Any], path: Path, progress: Progress) -> None:
    """Run a section, and write the record after every job."""
    task = progress.add_task(name, total=None)
    bench.notes = []
    rows: list[Row] = []
    jobs = SECTIONS[name].jobs(bench)
    progress.update(task, total=len(jobs))
    for job in jobs:
        new_rows = job()
        progress.console.print(SECTIONS[name].table(new_rows), "")
        rows += new_rows
        record[name], record["left_out"][name], record["measured"][name] = rows, bench.notes, measured(bench.bandwidth)
        write_record(path, record)
        progress.advance(task)
        free_memory(bench.device)
    for note in bench.notes:
        progress.console.print(f"left out: {note}", style="dim")


def record_name(device: torch.device) -> str:
    """Return the name of a device's record; processors of two architectures have one each."""
    return f"cpu-{platform.machine()}" if device.type == "cpu" else device.type


def start_record(path: Path, device: torch.device, is_quick: bool) -> dict[str, Any]:
    """Return a new record, with the sections of an earlier one of the same machine and versions."""
    triton = importlib.util.find_spec("triton") and importlib.import_module("triton")
    size = 1 << 20 if is_quick else 1 << 30 if device.type == "cuda" else 1 << 28
    record: dict[str, Any] = {
        "machine": machine(device),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else None,
        "threads": torch.get_num_threads(),
        "quick": is_quick,
        "copy_bytes_per_second": round(copy_bandwidth(device, size)),
        "left_out": {},
        "measured": {},
    }
    earlier = json.loads(path.read_text()) if path.exists() else {}
    if all(earlier.get(key) == record[key] for key in SHARED_KEYS):
        return {**record, **earlier, "copy_bytes_per_second": record["copy_bytes_per_second"]}
    return record


def measured(bandwidth: float) -> dict[str, Any]:
    """Return when and by which code a section was measured, and the bandwidth of a copy at that time."""
    today = date.today().isoformat()
    return {"date": today, "nero": nero.__version__, "commit": commit(), "copy_bytes_per_second": round(bandwidth)}


def free_memory(device: torch.device) -> None:
    """Free the GPU memory of the last job."""
    if device.type == "cuda":
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
