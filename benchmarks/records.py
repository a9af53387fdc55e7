"""The command line and the JSON records that the benchmarks share."""

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nero_lab.provenance import commit, cpu_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


def command_line(doc: str | None, *, has_device: bool = True, has_quick: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the options ``--out``, ``--device`` and ``--quick``, described by a docstring's first line."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if has_device:
        here = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help=f"default: {here}")
    if has_quick:
        parser.add_argument("--quick", action="store_true", help="tiny sizes: a rehearsal of seconds")
        parser.add_argument("--out", type=Path, help="folder for the JSON (benchmarks/results; with --quick, out)")
    else:
        parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return parser


def out_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder for the record of a benchmark that has ``--quick``."""
    return arguments.out or (ROOT / "out" if arguments.quick else RESULTS)


def terminal(*, is_quiet: bool = False) -> Console:
    """Return a console as wide as the terminal, or of 120 columns in a log."""
    return Console(width=None if sys.stdout.isatty() else 120, quiet=is_quiet)


def machine(device: torch.device) -> str:
    """Return the name of the accelerator, or of the processor with its number of cores."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {os.cpu_count()} cores"


def origin(device: torch.device) -> dict[str, Any]:
    """Return when, where and by which code a record is made."""
    versions = {"torch": torch.__version__, "commit": commit()}
    return {"date": date.today().isoformat(), "machine": machine(device), **versions}


def record_of(rows: list[dict[str, Any]], device: torch.device, is_quick: bool, **others: Any) -> dict[str, Any]:
    """Return the record of a benchmark: its origin, what else it depends on, and its rows."""
    return {**origin(device), **others, "threads": torch.get_num_threads(), "quick": is_quick, "rows": rows}


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the record whole, or leave the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    new.replace(path)
