"""The tables of the pages, as Markdown, from runs and from what is published; no number comes from anywhere else."""

import math
from collections.abc import Callable, Iterable, Sequence

from nero_lab.report.published import Final, Measure, Published, all_published
from nero_lab.report.runs import Run, Runs, called, mean_and_spread, name_of

SEEDS = (0, 1, 2)
NOT_RUN = "not run"
MARK = "†"
MARKED = f"{MARK} diverged: its loss was no longer finite"
#: What tables show of a run, in words: of classified images, of texts, of made images, and of games.
SHARES: dict[Measure, str] = {"train_accuracy": "train accuracy", "test_error": "test error"}
PERPLEXITIES: dict[Measure, str] = {"valid_perplexity": "validation perplexity", "test_perplexity": "test perplexity"}
DISTANCES: dict[Measure, str] = {
    "test_distance": "Fréchet distance to test images",
    "train_distance": "to training images",
}
REWARDS: dict[Measure, str] = {"reward": "mean return of the last 100 episodes"}
#: The columns of the paper's Table 1.
COLUMNS = ("nero", "sgd", "adam", "lamb")


def of_task(task: str, runs: Runs) -> dict[str, str]:
    """The tables of a task's page, by the names that its markers have."""
    facts = all_published()[task]
    made: dict[str, Callable[[Published, Runs], str]] = {"seeds": seeds}
    made |= {"epochs": epochs} if facts.curves and not facts.search else {}
    made |= {"search": search} if facts.search else {}
    made |= {"precision": precision, "runs": every_run}
    return {name: make(facts, runs) for name, make in made.items()}


def index(runs: Runs) -> str:
    """One line a task: the claim, how to run it, our headline numbers beside the paper's."""
    rows = []
    for task, facts in all_published().items():
        names = [name_of(row.optimiser) for row in facts.headline]
        ours = [_ours(facts, runs, row) for row in facts.headline]
        theirs = [_printed(facts, row) for row in facts.headline]
        other = "" if facts.comparable else f" ({facts.other})"
        rows.append(
            (
                f"[{task}]({task}.md)",
                f"{facts.shows} ({facts.where})",
                f"`nero sweep {task}`",
                _measured(facts),
                _on(facts, runs, "; ".join(map("{}: {}".format, names, ours)))
                if set(ours) != {NOT_RUN}
                else _none(facts, runs),
                "; ".join(map("{}: {}".format, names, theirs)) + other,
            )
        )
    table = _markdown(("task", "the paper's claim", "command", "measure", "ours", "paper's"), rows, left=4)
    others = [f"{task} ({count})" for task, count in sorted(runs.elsewhere.items())]
    notes = [f"Records of tasks that have no page are not shown: {', '.join(others)}."] if others else []
    return "\n\n".join([table, *notes])


def table_1(runs: Runs) -> str:
    """The paper's Table 1: every contender at the paper's best rate, ours above the paper's."""
    lines = []
    for facts in all_published().values():
        if facts.row is None:
            continue
        rows = {row.optimiser: row for row in facts.finals}
        lines.append((facts.row, _measured(facts), "ours", *(_ours(facts, runs, rows[name]) for name in COLUMNS)))
        theirs = [_printed(facts, rows[name]) for name in COLUMNS]
        lines.append(("", "" if facts.comparable else facts.other, "paper", *theirs))
    return _markdown(("task", "measure", "whose", *map(name_of, COLUMNS)), lines, left=3)


def seeds(facts: Published, runs: Runs) -> str:
    """The claim: each contender at the paper's best rate (and at our own, if another), every seed, beside the paper."""
    found = {each: runs.at(each) for row in facts.finals for each in (row, *_tuned(row, runs))}
    numbers = sorted({*SEEDS, *(seed for by_seed in found.values() for seed in by_seed)})
    lines = []
    for row, by_seed in found.items():
        ends = [_end(by_seed.get(seed), facts.measure) for seed in numbers]
        lines.append(
            (
                name_of(row.optimiser),
                f"{row.rate:g}",
                *ends,
                _ours(facts, runs, row),
                _with_spread(row.mean, row.spread),
                *(_beside(row, [run.final(facts.measure) for run in by_seed.values()]) if facts.comparable else ()),
                ", ".join(sorted({run.precision for run in by_seed.values()})) or "-",
            )
        )
    theirs = (facts.whose, "difference", "in spreads") if facts.comparable else (f"{facts.whose}: {facts.other}",)
    header = (_who(facts), "rate", *(f"seed {seed}" for seed in numbers), "ours")
    name = runs.stand_in(facts.task)
    told = f"On {called(name)}, a stand-in for {facts.task}.\n\n" if name else ""
    return told + _markdown((*header, *theirs, "precision"), lines)


def _tuned(row: Final, runs: Runs) -> list[Final]:
    """The row at other rates that were run on several seeds: where our search found another best than the paper's."""
    others = [row._replace(rate=rate) for rate in runs.rates(row) if rate != row.rate]
    return [other for other in others if len(runs.at(other)) > 1]


def search(facts: Published, runs: Runs) -> str:
    """The search for the best rate, on seed 0; the authors' choice in bold."""
    rows = {row.optimiser: row for row in facts.finals}
    lines = []
    measures = {measure: None for cell in facts.search for measure in cell.ends}
    for cell in facts.search:
        row = rows[cell.optimiser]
        run = runs.at(row, cell.rate).get(0)
        rate = f"**{cell.rate:g}**" if cell.rate == row.rate else f"{cell.rate:g}"
        until = "" if cell.epochs is None else f" (epoch {cell.epochs})"
        both = [(_end(run, measure), _number(cell.ends[measure]) + until) for measure in measures]
        lines.append((name_of(cell.optimiser), rate, *(value for pair in both for value in pair)))
    parts = {"train": "train", "valid": "validation", "test": "test"}
    names = [parts[measure.partition("_")[0]] for measure in measures]
    header = (f"{name}, {whose}" for name in names for whose in ("ours", facts.whose))
    return _markdown((_who(facts), "rate", *header), lines)


def epochs(facts: Published, runs: Runs) -> str:
    """The mean over seeds in each epoch, ours above the authors'."""
    lines = []
    for row in facts.finals:
        found = runs.at(row).values()
        lost = map(any, zip(*(run.lost for run in found), strict=True))
        ours = map(_over_seeds, zip(*(run.curves[facts.measure] for run in found), strict=True), lost)
        theirs = map(_over_seeds, zip(*facts.curves_of(row.optimiser), strict=True))
        lines.append((name_of(row.optimiser), "ours", *(ours if found else [NOT_RUN] * facts.epochs)))
        lines.append((name_of(row.optimiser), facts.whose, *theirs))
    header = (f"epoch {epoch}" for epoch in range(1, facts.epochs + 1))
    return _markdown((_who(facts), "whose", *header), lines, left=2)


def precision(facts: Published, runs: Runs) -> str:
    """Runs of one contender, rate and seed in several precisions, side by side."""
    groups = runs.in_several_precisions(facts.task)
    if not groups:
        return "No run was made in more than one precision."
    kinds = sorted({run.precision for group in groups for run in group}, key=lambda kind: (kind != "float32", kind))
    lines = []
    for group in groups:
        by_kind = {run.precision: run for run in group}
        ends = [_end(by_kind.get(kind), measure) for measure in _measures(facts) for kind in kinds]
        first = group[0]
        lines.append((name_of(first.optimiser), f"{first.rate:g}", str(first.seed), str(first.epochs), *ends))
    header = (f"{words}, {kind}" for words in _measures(facts).values() for kind in kinds)
    return _markdown((_who(facts), "rate", "seed", "after epoch", *header), lines)


def every_run(facts: Published, runs: Runs) -> str:
    """All full runs, at whatever rate, and a note of what is left out."""
    found = runs.of(facts.task)
    more: dict[str, Callable[[Run], str]] = {}
    if any(run.bleu is not None for run in found):
        more["test BLEU"] = lambda run: "-" if run.bleu is None else f"{run.bleu:.2f}"
    if any("test_fid" in run.curves for run in found):
        more["FID to test images"] = lambda run: _end(run, "test_fid") if "test_fid" in run.curves else "-"
    names = {run.data or facts.task for run in found}
    if names - {facts.task}:
        alike = len({called(name) for name in names}) < len(names)
        more["data"] = lambda run: (str if alike else called)(run.data or facts.task)
    header = (_who(facts), "rate", "seed", "precision", *_measures(facts).values(), *more)
    lines = [(*_line(facts, run), *(tell(run) for tell in more.values()), *_made(run)) for run in found]
    table = _markdown((*header, "seconds", "side by side", "device"), lines) if found else NOT_RUN
    short = runs.short(facts.task)
    return table + (f"\n\nLeft out for having fewer than {facts.epochs} epochs: {_records(short)}." if short else "")


def _who(facts: Published) -> str:
    """What the contenders differ in."""
    return "raw weights" if facts.task == "mnist-reparameterised" else "optimiser"


def _measures(facts: Published) -> dict[Measure, str]:
    """What there is to say of a run of the task."""
    kinds = (PERPLEXITIES, DISTANCES, REWARDS)
    return next((kind for kind in kinds if facts.measure in kind), SHARES)


def _measured(facts: Published) -> str:
    """What the claim is measured by, in words."""
    measures = _measures(facts)
    return measures[facts.measure] + (", %" if measures is SHARES else "")


def _line(facts: Published, run: Run) -> tuple[str, ...]:
    """Which run, and how it ended."""
    ends = (_end(run, measure) for measure in _measures(facts))
    return (name_of(run.optimiser), f"{run.rate:g}", str(run.seed), run.precision, *ends)


def _made(run: Run) -> tuple[str, ...]:
    """How a run was made."""
    return ("-" if run.seconds is None else f"{run.seconds:.0f}", str(run.side_by_side), run.device)


def _ours(facts: Published, runs: Runs, row: Final) -> str:
    by_seed = runs.at(row)
    if by_seed:
        lost = any(run.diverged for run in by_seed.values())
        return _over_seeds([run.final(facts.measure) for run in by_seed.values()], lost)
    elsewhere = ", ".join(f"{rate:g}" for rate in runs.rates(row))
    return f"{NOT_RUN} (but at {elsewhere})" if elsewhere else NOT_RUN


def _on(facts: Published, runs: Runs, text: str) -> str:
    """The text, and the stand-in that it is of, if it is of one."""
    name = runs.stand_in(facts.task)
    return f"{text} (on {called(name)})" if name else text


def _none(facts: Published, runs: Runs) -> str:
    """That nothing of a task was run, or nothing in full."""
    short = runs.short(facts.task)
    return f"{NOT_RUN} for all {facts.epochs} epochs ({_records(short)} left out)" if short else NOT_RUN


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def _over_seeds(values: Sequence[float], lost: bool = False) -> str:
    """Mean ± spread, marked if a seed diverged; the number of seeds where it is not three, and no spread of one."""
    mean, spread = mean_and_spread(values)
    mark = MARK if lost else ""
    if len(values) == 1:
        return f"{_number(mean)}{mark} (1 seed)"
    return _with_spread(mean, spread) + mark + ("" if len(values) == len(SEEDS) else f" ({len(values)} seeds)")


def _end(run: Run | None, measure: Measure) -> str:
    """A run's last value, marked if it diverged."""
    return NOT_RUN if run is None else _number(run.final(measure)) + (MARK if run.diverged else "")


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 1e5 else f"{value:.3g}"


def _printed(facts: Published, row: Final) -> str:
    """The mean and the spread that the paper prints; where it prints none, those of its authors' stored runs."""
    return _with_spread(*facts.printed.get(row.optimiser, (row.mean, row.spread)))


def _with_spread(mean: float, spread: float) -> str:
    if math.isnan(mean):
        return "-"
    return f"{_number(mean)} ± {_number(spread)}" if mean < math.inf else "inf"


def _beside(row: Final, values: Sequence[float]) -> tuple[str, str]:
    """How far our mean is from the paper's, in points and in its spreads."""
    if not values:
        return "-", "-"
    difference = mean_and_spread(values)[0] - row.mean
    # the authors' three seeds at chance all ended on the same number
    return _signed(difference, 2), "spread is 0" if row.spread < 1e-9 else _signed(difference / row.spread, 1)


def _signed(value: float, digits: int) -> str:
    if math.isnan(value):
        return "-"
    if value == math.inf:
        return "inf"
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first columns are words and stand to the left, and whose others are numbers; what a mark means."""
    rules = ["---" if column < left else "---:" for column in range(len(header))]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *rows))
    return f"{table}\n\n{MARKED}" if MARK in table else table
