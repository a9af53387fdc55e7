"""The step of Nero with momentum on the shapes of GPT-2, beside plain Nero and torch's fused SGD and AdamW.

First compares the backends with the rule in float64, and exits without a report if they disagree. Writes
benchmarks/results/momentum-cuda.json or momentum-cpu.json.
"""

import os
import sys

import step
import torch
from bench import free_memory, measured, start_record
from contenders import ADAM_BYTES_PER_PARAMETER, REFERENCES, Contender, nero_by
from limits import MOMENTUM, MOMENTUM_BYTES_PER_PARAMETER
from records import command_line, out_folder, write_record
from rich.console import Console
from shapes import Shapes, flat, gpt2, gpt2_xl
from timing import Bench, Budget, Row

from nero.backends import backends_for


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--backend", help="of Nero; default: the fastest")
    arguments = parser.parse_args(argv)
    device, is_quick = torch.device(arguments.device), arguments.quick
    backend = arguments.backend or backends_for(device)[-1]
    path = out_folder(arguments) / f"momentum-{device.type}.json"
    console = Console(width=None if sys.stdout.isatty() else 120)
    record = start_record(path, device, is_quick)
    console.print(f"{record['machine']}: a copy moves {record['copy_bytes_per_second'] / 1e9:.0f} GB/s")
    budget = Budget(3, 0.01, 3, 0.0) if is_quick else Budget(20, 0.5)
    bench = Bench(device, budget, record["copy_bytes_per_second"], is_quick, compile_budget_s=0.0)
    rows: list[Row] = []
    for shapes in shape_sets(device, is_quick):
        for nesterov in (True, False):
            step.check_steps(shapes.distinct, device, [backend], momentum=MOMENTUM, nesterov=nesterov)
        new_rows = step.measure(shapes, contenders(backend), bench)
        console.print(step.table(new_rows), "")
        rows += new_rows
        made = {"left_out": {"momentum": bench.notes}, "measured": {"momentum": measured(bench.bandwidth)}}
        write_record(path, {**record, "momentum": rows, **made})
        free_memory(device)
    console.print(f"written to {os.path.relpath(path)}")
    return 0


def shape_sets(device: torch.device, is_quick: bool) -> list[Shapes]:
    """Return the shapes of GPT-2; the largest only on a GPU."""
    if is_quick:
        return [gpt2(False, 1, 32, 64, "GPT-2 tiny")]
    return [gpt2(), gpt2_xl()] if device.type == "cuda" else [gpt2()]


def contenders(backend: str) -> list[Contender]:
    """Return Nero with and without momentum, and torch's optimisers."""
    return [
        *REFERENCES,
        Contender("AdamW (fused)", lambda p: torch.optim.AdamW(flat(p), fused=True), ADAM_BYTES_PER_PARAMETER),
        Contender(
            "SGD with momentum (fused)",
            lambda p: torch.optim.SGD(flat(p), momentum=MOMENTUM, fused=True),
            MOMENTUM_BYTES_PER_PARAMETER,
        ),
        nero_by(backend, "Nero"),
        nero_by(backend, "Nero with momentum", MOMENTUM_BYTES_PER_PARAMETER, momentum=MOMENTUM),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
