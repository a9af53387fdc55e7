"""``python -m nero_lab.claims``: run studies of the paper's claims and append their records to a file."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from nero_lab.claims import load_digits, measurements, studies
from nero_lab.provenance import commit, device_name
from nero_lab.report.markdown import plural
from nero_lab.session import exit_on_error
from nero_lab.store import read_json_lines

#: Digits of the numbers in a record.
DIGITS = 5
STUDIES = {**studies.STUDIES, **measurements.STUDIES}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every study asked for; runs that are on record are left out, so an interrupted command can be repeated."""
    parser = argparse.ArgumentParser(prog="python -m nero_lab.claims", description=__doc__)
    parser.add_argument("studies", nargs="+", choices=STUDIES, metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--data", type=Path, help="the folder with MNIST (default: $NERO_DATA, else ~/.cache/nero)")
    parser.add_argument("--out", type=Path, default=Path("out/claims.jsonl"), help="the file to append records to")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {key(record) for record in read_json_lines(options.out)} if options.out.exists() else set()
    data, console = load_digits(options.data), Console()
    for name in options.studies:
        study = STUDIES[name]
        left = [settings for settings in study.settings() if key({"study": name, "settings": settings}) not in done]
        console.print(f"{name}: {study.asks} {plural(len(left), 'run')} to do")
        for settings in track(left, description=name, console=console, disable=not console.is_terminal):
            begin = time.perf_counter()
            record = {
                "study": name,
                "settings": settings,
                "results": rounded(study.run(data, settings)),
                "seconds": round(time.perf_counter() - begin, 1),
                "device": device_name(torch.device("cpu")),
                "torch": torch.__version__,
                "commit": commit(),
            }
            with options.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")


def key(record: dict[str, Any]) -> str:
    """Return the text that identifies a run."""
    return json.dumps([record["study"], record["settings"]], sort_keys=True)


def rounded(value: Any) -> Any:
    """Round all numbers of a result."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    with exit_on_error("nero_lab.claims"):
        main()
