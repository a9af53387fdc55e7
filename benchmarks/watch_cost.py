"""The cost of ``nero.watch``: a reading every hundred steps of the optimiser, and every hundred training steps.

Blocks of a hundred steps, with and without a reading at the end, take turns. Writes
benchmarks/results/watch-cuda.json or watch-cpu.json.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import torch
from end_to_end import OPTIMISERS, Trainer, perceptron, transformer
from records import command_line, out_folder, record_of, terminal, write_record
from rich.table import Table
from shapes import groups
from step import shape_sets
from timing import Bench, Budget, Clock, Row, Step, milliseconds, take_turns

import nero

STEPS_PER_READING = 100


class NullWriter:
    """A summary writer that writes nothing."""

    def add_scalar(self, *_: object) -> None: ...


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which each block has a turn (5)")
    parser.add_argument("--longest", type=float, default=12.0, help="longest block that is timed, in seconds (12)")
    arguments = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")  # no TF32
    device = torch.device(arguments.device)
    console = terminal()
    bench = Bench(device, Budget(), bandwidth=1.0, is_quick=arguments.quick, compile_budget_s=0.0)
    rows: list[Row] = []
    for name, optimiser, step in workloads(bench):
        rows.append(measure(name, optimiser, step, Clock(device), arguments.rounds, arguments.longest))
        console.print(table(rows[-1:]), "")
    record = record_of(rows, device, arguments.quick, every=STEPS_PER_READING)
    write_record(out_folder(arguments) / f"watch-{device.type}.json", record)
    return 0


def workloads(bench: Bench) -> Iterator[tuple[str, nero.Nero, Step]]:
    """Yield steps of the optimiser on the shapes of known networks, then training steps, made one by one."""
    for shapes in shape_sets(bench):
        optimiser = nero.Nero(groups(shapes.parameters(bench.device)))
        yield f"{shapes.name}, the optimiser alone", optimiser, optimiser.step
    for make in (perceptron, transformer):
        trainer = Trainer(make(bench), OPTIMISERS["Nero"])
        assert isinstance(trainer.optimiser, nero.Nero)
        yield f"{trainer.workload.name}, training", trainer.optimiser, trainer.train


def measure(name: str, optimiser: nero.Nero, step: Step, clock: Clock, rounds: int, longest: float) -> Row:
    """Time a step, a reading, and blocks of steps with and without a reading, in turn."""
    watched = nero.watch(optimiser)
    for warm_up in (step, watched.read, step, watched.read):
        warm_up()
    singles: dict[str, Step] = {
        "step": step,
        "reading": watched.read,
        "asked": lambda: watched.read().layers,
        "written": lambda: watched.read().write(NullWriter()),
    }
    budget = Budget(rounds=4 * rounds, seconds=4.0, min_rounds=3)
    times = take_turns(singles, dict.fromkeys(singles, 1), clock, budget, always=singles)
    taken = {each: statistics.median(each_round.values()) for each, each_round in times.items()}
    blocks: dict[str, Step] = {"plain": partial(block, step), "watched": partial(block, step, watched.read)}
    measured = None
    if STEPS_PER_READING * taken["step"] <= longest:
        turns = take_turns(blocks, dict.fromkeys(blocks, 1), clock, Budget(rounds=rounds, seconds=1e9), always=blocks)
        ratios = [turns["watched"][each] / turns["plain"][each] for each in turns["plain"]]
        measured = [round(100 * (ratio - 1), 2) for ratio in (min(ratios), statistics.median(ratios), max(ratios))]
    return {
        "workload": name,
        "parameters": sum(part.parameter.numel() for part in optimiser.parts()),
        "tensors": len(list(optimiser.parts())),
        "neurons": watched.neurons,
        "kept_bytes": watched.nbytes,
        "weights_bytes": sum(part.parameter.nbytes for part in optimiser.parts()),
        "rounds": len(times["step"]),
        "milliseconds_a_step": milliseconds(taken["step"]),
        "milliseconds_a_reading": milliseconds(taken["reading"]),
        "milliseconds_a_reading_asked": milliseconds(taken["asked"]),
        "milliseconds_a_reading_written": milliseconds(taken["written"]),
        "per_cent_slower": round(100 * taken["reading"] / (STEPS_PER_READING * taken["step"]), 3),
        "per_cent_slower_asked": round(100 * taken["asked"] / (STEPS_PER_READING * taken["step"]), 3),
        "per_cent_slower_in_blocks": measured,
    }


def block(step: Step, then: Step | None = None) -> None:
    """Do the steps between two readings, and then a reading."""
    for _ in range(STEPS_PER_READING):
        step()
    if then is not None:
        then()


def table(rows: list[Row]) -> Table:
    """Format the rows for a terminal."""
    made = Table(box=None, pad_edge=False)
    made.add_column("workload", no_wrap=True)
    for title in ("step, ms", "reading, ms", "asked", "written", "slower", "in blocks (min, median, max)"):
        made.add_column(title, justify="right")
    for row in rows:
        times = [
            f"{row[f'milliseconds_{kind}']:.4g}"
            for kind in ("a_step", "a_reading", "a_reading_asked", "a_reading_written")
        ]
        blocks = row["per_cent_slower_in_blocks"]
        made.add_row(
            row["workload"], *times, f"{row['per_cent_slower']:.2g} %",
            "-" if blocks is None else ", ".join(f"{each:.2g} %" for each in blocks),
        )  # fmt: skip
    return made


if __name__ == "__main__":
    raise SystemExit(main())
