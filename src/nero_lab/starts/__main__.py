"""``python -m nero_lab.starts``: run the study and append its records to a file."""

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from nero_lab.starts.cases import CASES
from nero_lab.starts.run import CONTENDERS, run, train_base

BASES = {case.base for case in CASES.values()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case asked for, with every contender and seed."""
    parser = argparse.ArgumentParser(prog="python -m nero_lab.starts", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the data sets")
    parser.add_argument("--out", type=Path, required=True, help="the file to append records to")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name not in BASES])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), help="NAME or NAME@RATE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    bases = options.out.parent
    bases.mkdir(parents=True, exist_ok=True)
    for name in sorted({CASES[case].base for case in options.cases} - {""}):
        if not (bases / f"{name}.pt").exists():
            train_base(name, options.data, options.device, bases)
    runs = []
    for case, contender, seed in itertools.product(options.cases, options.contenders, options.seeds):
        name, _, rate = contender.partition("@")
        runs.append((case, name, float(rate or 0.01), seed, options.data, options.device, bases))
    with ExitStack() as stack:
        out = stack.enter_context(options.out.open("a"))
        do: Callable[..., Iterable[dict[str, Any]]] = map
        if options.jobs > 1:
            do = stack.enter_context(ProcessPoolExecutor(options.jobs, get_context("spawn"))).map
        for record in do(run, *zip(*runs, strict=True)):
            print(record["case"], record["contender"], record["lr"], record["seed"], f"{record['untrained']:.3f}",
                  *(f"{loss:.3f}" for loss in record["train"][:5]), f"valid {record['valid']:.4f}",
                  f"{record['seconds']} s", flush=True)  # fmt: skip
            out.write(json.dumps(record) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
