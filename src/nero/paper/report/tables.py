"""The tables of the pages, as Markdown, from runs and from what is published; no number comes from anywhere else."""

import math
from collections.abc import Callable, Iterable, Sequence

from nero.paper.report.published import Final, Measure, Published, published
from nero.paper.report.runs import Run, Runs, mean_and_spread, name_of

SEEDS = (0, 1, 2)
NOT_RUN = "not run"
MEASURES: dict[Measure, str] = {"train_accuracy": "train accuracy", "test_error": "test error"}


def tables(task: str, runs: Runs) -> dict[str, str]:
    """The tables of a task's page, by the names that its markers have."""
    facts = published()[task]
    made: dict[str, Callable[[Published, Runs], str]] = {"seeds": seeds}
    made |= {"epochs": epochs} if facts.curves and not facts.search else {}
    made |= {"search": search} if facts.search else {}
    made |= {"precision": precision, "runs": every_run}
    return {name: make(facts, runs) for name, make in made.items()}


def index(runs: Runs) -> str:
    """One line a task: what it shows, how to run it, our headline numbers beside the paper's."""
    rows = []
    for task, facts in published().items():
        ours = [f"{name_of(row.optimiser)}: {_ours(facts, runs, row)}" for row in facts.headline]
        theirs = [f"{name_of(row.optimiser)}: {_with_spread(row.mean, row.spread)}" for row in facts.headline]
        none = not any(runs.at(row) for row in facts.headline)
        rows.append(
            (
                f"[{task}]({task}.md)",
                f"{facts.shows} ({facts.where})",
                f"`nero sweep {task}`",
                f"{MEASURES[facts.measure]}, %",
                NOT_RUN if none else "; ".join(ours),
                "; ".join(theirs),
            )
        )
    table = _markdown(("task", "what it shows", "command", "measure", "ours", "paper's"), rows, left=4)
    others = [f"{task} ({count})" for task, count in sorted(runs.elsewhere.items())]
    return _with_notes(
        table, [f"Records of tasks that have no page are not shown: {', '.join(others)}."] if others else []
    )


def seeds(facts: Published, runs: Runs) -> str:
    """The claim: each contender at the paper's best rate, every seed, and how far from the paper we are."""
    found = {row: runs.at(row) for row in facts.finals}
    numbers = sorted({*SEEDS, *(seed for by_seed in found.values() for seed in by_seed)})
    lines = []
    for row, by_seed in found.items():
        ends = [_value(by_seed[seed].final(facts.measure)) if seed in by_seed else NOT_RUN for seed in numbers]
        mean, _ = mean_and_spread([run.final(facts.measure) for run in by_seed.values()] or [math.nan])
        lines.append(
            (
                name_of(row.optimiser),
                f"{row.rate:g}",
                *ends,
                _ours(facts, runs, row),
                _with_spread(row.mean, row.spread),
                _signed(mean - row.mean, 2),
                _in_spreads(mean - row.mean, row.spread),
                ", ".join(sorted({run.precision for run in by_seed.values()})) or "-",
            )
        )
    header = (_who(facts), "rate", *(f"seed {seed}" for seed in numbers), "ours", facts.whose)
    return _markdown((*header, "difference", "in spreads", "precision"), lines)


def search(facts: Published, runs: Runs) -> str:
    """The search for the best rate, on seed 0; the authors' choice in bold."""
    rows = {row.optimiser: row for row in facts.finals}
    lines = []
    for cell in facts.search:
        row = rows[cell.optimiser]
        run = runs.at(row, cell.rate).get(0)
        ours = [_value(run.final(of)) if run else NOT_RUN for of in ("train_accuracy", "test_accuracy")]
        rate = f"**{cell.rate:g}**" if cell.rate == row.rate else f"{cell.rate:g}"
        lines.append((name_of(cell.optimiser), rate, ours[0], _value(cell.train), ours[1], _value(cell.test)))
    header = (f"{part}, {whose}" for part in ("train", "test") for whose in ("ours", facts.whose))
    return _markdown((_who(facts), "rate", *header), lines)


def epochs(facts: Published, runs: Runs) -> str:
    """The mean over seeds in each epoch, ours above the authors'."""
    lines = []
    for row in facts.finals:
        ours = [run.curves[facts.measure] for run in runs.at(row).values()]
        for whose, curves in (("ours", ours), (facts.whose, facts.curves_of(row.optimiser))):
            by_epoch = [_over_seeds(values) for values in zip(*curves, strict=True)] or [NOT_RUN] * facts.epochs
            lines.append((name_of(row.optimiser), whose, *by_epoch))
    header = (f"epoch {epoch}" for epoch in range(1, facts.epochs + 1))
    return _markdown((_who(facts), "whose", *header), lines, left=2)


def precision(facts: Published, runs: Runs) -> str:
    """Final values of runs that differ in nothing but their precision, side by side."""
    groups = runs.in_several_precisions(facts.task)
    if not groups:
        return "No run was made in more than one precision."
    kinds = sorted({run.precision for group in groups for run in group}, key=lambda kind: (kind != "float32", kind))
    shown: tuple[tuple[Measure, str], ...] = (("train_accuracy", "train accuracy"), ("test_error", "test error"))
    lines = []
    for group in groups:
        by_kind = {run.precision: run for run in group}
        ends = [
            _value(by_kind[kind].final(measure)) if kind in by_kind else NOT_RUN
            for measure, _ in shown
            for kind in kinds
        ]
        lines.append((name_of(group[0].optimiser), f"{group[0].rate:g}", str(group[0].seed), *ends))
    header = (f"{words}, {kind}" for _, words in shown for kind in kinds)
    return _markdown((_who(facts), "rate", "seed", *header), lines)


def every_run(facts: Published, runs: Runs) -> str:
    """All full runs, at whatever rate, and a note of what is left out."""
    found = runs.of(facts.task)
    header = (
        _who(facts), "rate", "seed", "precision", "train accuracy", "test error", "seconds", "side by side", "device",
    )  # fmt: skip
    table = _markdown(header, map(_line, found)) if found else "not run"
    notes = []
    if short := runs.short(facts.task):
        records = "1 record" if short == 1 else f"{short} records"
        notes.append(f"Left out for having fewer than {facts.epochs} epochs: {records}.")
    return _with_notes(table, notes)


def _who(facts: Published) -> str:
    """What the contenders differ in."""
    return "raw weights" if facts.task == "mnist-reparameterised" else "optimiser"


def _line(run: Run) -> tuple[str, ...]:
    return (
        name_of(run.optimiser),
        f"{run.rate:g}",
        str(run.seed),
        run.precision,
        _value(run.final("train_accuracy")),
        _value(run.final("test_error")),
        "-" if math.isnan(run.seconds) else f"{run.seconds:.0f}",
        str(run.side_by_side),
        run.device,
    )


def _ours(facts: Published, runs: Runs, row: Final) -> str:
    by_seed = runs.at(row)
    if by_seed:
        return _over_seeds([run.final(facts.measure) for run in by_seed.values()])
    elsewhere = ", ".join(f"{rate:g}" for rate in runs.rates(row))
    return f"{NOT_RUN} (but at {elsewhere})" if elsewhere else NOT_RUN


def _over_seeds(values: Sequence[float]) -> str:
    """Mean ± spread; the number of seeds where it is not three, and no spread of one."""
    lost = sum(map(math.isnan, values))
    if lost:
        return f"not finite ({lost} of {len(values)} seeds)" if len(values) > 1 else "not finite (1 seed)"
    mean, spread = mean_and_spread(values)
    if len(values) == 1:
        return f"{mean:.2f} (1 seed)"
    return _with_spread(mean, spread) + ("" if len(values) == len(SEEDS) else f" ({len(values)} seeds)")


def _value(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.2f}"


def _with_spread(mean: float, spread: float) -> str:
    return f"{mean:.2f} ± {spread:.2f}"


def _signed(value: float, digits: int) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def _in_spreads(difference: float, spread: float) -> str:
    # the authors' three seeds at chance all ended on the same number
    return "spread is 0" if spread < 1e-9 else _signed(difference / spread, 1)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first columns are words and stand to the left, and whose others are numbers."""
    rules = ["---" if column < left else "---:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *rows))


def _with_notes(table: str, notes: list[str]) -> str:
    return "\n\n".join([table, *notes])
