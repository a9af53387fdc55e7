"""The cost of ``nero.balance_after_step``: steps of AdamW, and of Muon with AdamW, on the shapes of GPT-2 small.

Steps with and without it take turns. Writes benchmarks/results/balance-cuda.json or balance-cpu.json. Muon is left out
on a CPU, where its matrix products take minutes.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from records import command_line, out_folder, record_of, terminal, write_record
from rich.table import Table
from shapes import Shapes, flat, gpt2
from timing import Budget, Clock, Row, Step, burst_length, device_time, difference, milliseconds, take_turns
from torch import nn

import nero

#: The first tensors of GPT-2: its tables of tokens and of positions.
TABLES = 2

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line."""
    parser = command_line(__doc__)
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    shapes = gpt2(layers=1, width=32, vocabulary=64, name="GPT-2 tiny") if arguments.quick else gpt2()
    budget = Budget(3, 0.01, 3, 0.0) if arguments.quick else Budget() if device.type == "cuda" else Budget(11, 10.0)
    rows = [measure(shapes, name, make, Clock(device), budget, device) for name, make in contenders(device).items()]
    terminal().print(table(rows))
    write_record(out_folder(arguments) / f"balance-{device.type}.json", record_of(rows, device, arguments.quick))
    return 0


def contenders(device: torch.device) -> dict[str, Make]:
    """Return the optimisers: AdamW for all parameters, and on a GPU Muon for the hidden matrices, if torch has it."""
    found: dict[str, Make] = {"AdamW (fused)": lambda model: [torch.optim.AdamW(model.parameters(), fused=True)]}
    muon: Any = getattr(torch.optim, "Muon", None)

    def make_both(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [weight for weight in model.parameters() if weight.dim() == 2][TABLES:]
        hidden = set(matrices)
        rest = [weight for weight in model.parameters() if weight not in hidden]
        return [muon(matrices), torch.optim.AdamW(rest, fused=True)]

    return found | ({"Muon and AdamW (fused)": make_both} if muon and device.type == "cuda" else {})


def measure(shapes: Shapes, name: str, make: Make, clock: Clock, budget: Budget, device: torch.device) -> Row:
    """Time steps with and without the constraints, in turn; then the shares of the host and of the device."""
    steps: dict[str, Step] = {}
    for kind in ("plain", "balanced"):
        model = nn.ParameterList(flat(shapes.parameters(device)))
        optimisers = make(model)
        if kind == "balanced":
            for optimiser in optimisers:
                nero.balance_after_step(optimiser, model)
        steps[kind] = lambda optimisers=optimisers: [optimiser.step() for optimiser in optimisers]  # type: ignore[misc]
        clock.burst(steps[kind], 3 if clock.is_gpu else 1)
    counts = dict.fromkeys(steps, max(burst_length(step, clock, budget) for step in steps.values()))
    times = take_turns(steps, counts, clock, budget, always=steps)
    added = difference(times["balanced"], times["plain"])
    plain = statistics.median(times["plain"].values())
    row: Row = {
        "shapes": shapes.name,
        "parameters": shapes.total,
        "tensors": sum(map(len, shapes.by_axes.values())),
        "optimiser": name,
        "rounds": len(times["plain"]),
        "milliseconds_a_step": milliseconds(plain),
        "milliseconds_added": milliseconds(added),
        "per_cent_slower": round(100 * added / plain, 2),
    }
    for kind, step in steps.items() if clock.is_gpu else ():
        host = statistics.median(clock.host_seconds(step) for _ in range(10))
        row[f"host_milliseconds_{kind}"] = milliseconds(host)
        row[f"device_milliseconds_{kind}"] = milliseconds(device_time(step, counts[kind], host, clock))
    return row


def table(rows: list[Row]) -> Table:
    """Format the rows for a terminal."""
    made = Table(box=None, pad_edge=False, title=rows[0]["shapes"], title_justify="left", title_style="bold")
    titles = ("optimiser", "step, ms", "added, ms", "slower", "host, ms", "balanced", "device, ms", "balanced")
    for title in titles:
        made.add_column(title, justify="left" if title == "optimiser" else "right", no_wrap=True)
    for row in rows:
        shares = [row.get(f"{of}_milliseconds_{kind}") for of in ("host", "device") for kind in ("plain", "balanced")]
        times = [row["milliseconds_a_step"], row["milliseconds_added"]]
        made.add_row(
            row["optimiser"],
            *(f"{time:.4g}" for time in times),
            f"{row['per_cent_slower']:.3g} %",
            *("" if share is None else f"{share:.4g}" for share in shares),
        )
    return made


if __name__ == "__main__":
    raise SystemExit(main())
