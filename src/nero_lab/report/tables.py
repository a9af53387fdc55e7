"""Tables of a task's page, from runs and published numbers."""

from collections.abc import Callable, Sequence

from nero_lab.report.markdown import (
    DIVERGED,
    PAPER_SEEDS,
    mean_and_spread,
    number,
    over_seeds,
    plural,
    render_table,
    signed,
    with_spread,
)
from nero_lab.report.names import dataset_name, display_name
from nero_lab.report.published import Measure, Published, PublishedRow, all_published
from nero_lab.report.runs import Run, Runs

NOT_RUN = "not run"
#: Column names of the measures of each kind of task.
CLASSIFICATION: dict[Measure, str] = {"train_accuracy": "train accuracy", "test_error": "test error"}
TEXT: dict[Measure, str] = {"valid_perplexity": "validation perplexity", "test_perplexity": "test perplexity"}
IMAGES: dict[Measure, str] = {
    "test_distance": "Fréchet distance to test images",
    "train_distance": "to training images",
}
GAMES: dict[Measure, str] = {"reward": "mean return of the last 100 episodes"}


def task_tables(task: str, runs: Runs) -> dict[str, str]:
    """Return the tables of a task's page by the names in its markers."""
    facts = all_published()[task]
    tables: dict[str, Callable[[Published, Runs], str]] = {"seeds": seeds_table}
    if facts.search:
        tables["search"] = search_table
    elif facts.stored_curves:
        tables["epochs"] = epochs_table
    tables |= {"precision": precision_table, "runs": runs_table}
    return {name: make(facts, runs) for name, make in tables.items()}


def seeds_table(facts: Published, runs: Runs) -> str:
    """Compare every contender's seeds at the paper's best rate with the published row.

    A contender has a second row at another rate if several seeds were run there.
    """
    by_row = {tried: runs.counted(tried) for row in facts.rows for tried in (row, *_other_rates(row, runs))}
    seeds = sorted({*range(PAPER_SEEDS), *(seed for by_seed in by_row.values() for seed in by_seed)})
    lines = []
    for row, by_seed in by_row.items():
        finals = [run.final(facts.measure) for run in by_seed.values()]
        lines.append(
            (
                display_name(row.optimiser),
                f"{row.rate:g}",
                *(last_value(by_seed.get(seed), facts.measure) for seed in seeds),
                our_result(facts, runs, row),
                with_spread(row.mean, row.spread),
                *(_difference(row, finals) if facts.is_comparable else ()),
                next((run.precision for run in by_seed.values()), "-"),
            )
        )
    published = f"{facts.origin}: {facts.paper_measure}"
    compared = (facts.origin, "difference", "in spreads") if facts.is_comparable else (published,)
    header = (_contender_column(facts), "rate", *(f"seed {seed}" for seed in seeds), "ours", *compared, "precision")
    stand_in = runs.stand_in(facts.task)
    note = f"On {dataset_name(stand_in)}, a stand-in for {facts.task}.\n\n" if stand_in else ""
    return note + render_table(header, lines)


def search_table(facts: Published, runs: Runs) -> str:
    """Compare the learning-rate search on seed 0 with the authors'; their choice is in bold."""
    rows = {row.optimiser: row for row in facts.rows}
    measures = list(dict.fromkeys(measure for cell in facts.search for measure in cell.ends))
    lines = []
    for cell in facts.search:
        row = rows[cell.optimiser]
        run = runs.counted(row, cell.rate).get(0)
        rate = f"**{cell.rate:g}**" if cell.rate == row.rate else f"{cell.rate:g}"
        until = "" if cell.epochs is None else f" (epoch {cell.epochs})"
        pairs = [(last_value(run, measure), number(cell.ends[measure]) + until) for measure in measures]
        lines.append((display_name(cell.optimiser), rate, *(value for pair in pairs for value in pair)))
    parts = {"train": "train", "valid": "validation", "test": "test"}
    names = [parts[measure.partition("_")[0]] for measure in measures]
    header = (f"{name}, {origin}" for name in names for origin in ("ours", facts.origin))
    return render_table((_contender_column(facts), "rate", *header), lines)


def epochs_table(facts: Published, runs: Runs) -> str:
    """Compare the mean over seeds with the authors' in every epoch."""
    lines = []
    for row in facts.rows:
        found = runs.counted(row).values()
        diverged = map(any, zip(*(run.nonfinite for run in found), strict=True))
        values = zip(*(run.curves[facts.measure] for run in found), strict=True)
        ours = (over_seeds(value, has_diverged=lost) for value, lost in zip(values, diverged, strict=True))
        theirs = map(over_seeds, zip(*facts.stored_values(row.optimiser), strict=True))
        lines.append((display_name(row.optimiser), "ours", *(ours if found else [NOT_RUN] * facts.epochs)))
        lines.append((display_name(row.optimiser), facts.origin, *theirs))
    header = (f"epoch {epoch}" for epoch in range(1, facts.epochs + 1))
    return render_table((_contender_column(facts), "whose", *header), lines, left=2)


def precision_table(facts: Published, runs: Runs) -> str:
    """Compare runs that differ only in precision."""
    groups = runs.precision_groups(facts.task)
    if not groups:
        return "No run was made in more than one precision."
    kinds = sorted({run.precision for group in groups for run in group}, key=lambda kind: (kind != "float32", kind))
    measures = _measures(facts)
    lines = []
    for group in groups:
        by_kind = {run.precision: run for run in group}
        ends = [last_value(by_kind.get(kind), measure) for measure in measures for kind in kinds]
        first = group[0]
        lines.append((display_name(first.optimiser), f"{first.rate:g}", str(first.seed), str(first.epochs), *ends))
    header = (f"{label}, {kind}" for label in measures.values() for kind in kinds)
    return render_table((_contender_column(facts), "rate", "seed", "after epoch", *header), lines)


def runs_table(facts: Published, runs: Runs) -> str:
    """List every run that has all epochs, and count those that do not."""
    found = runs.full(facts.task)
    short = runs.count_short(facts.task)
    note = f"\n\nLeft out, with fewer than {facts.epochs} epochs: {plural(short, 'record')}." if short else ""
    extra = _extra_columns(facts, found)
    measures = _measures(facts)
    lines = [
        (
            display_name(run.optimiser),
            f"{run.rate:g}",
            str(run.seed),
            run.precision,
            *(last_value(run, measure) for measure in measures),
            *(cell(run) for cell in extra.values()),
            "-" if run.seconds is None else f"{run.seconds:.0f}",
            str(run.side_by_side),
            run.device,
        )
        for run in found
    ]
    header = (_contender_column(facts), "rate", "seed", "precision", *measures.values(), *extra)
    table = render_table((*header, "seconds", "side by side", "device"), lines) if found else NOT_RUN
    return table + note


def measure_name(facts: Published) -> str:
    """Return the name of the measure that decides the claim, with its unit."""
    measures = _measures(facts)
    return measures[facts.measure] + (", %" if measures is CLASSIFICATION else "")


def our_result(facts: Published, runs: Runs, row: PublishedRow) -> str:
    """Format our mean and spread for a row, or name the other rates that were run."""
    by_seed = runs.counted(row)
    if by_seed:
        has_diverged = any(run.has_diverged for run in by_seed.values())
        return over_seeds([run.final(facts.measure) for run in by_seed.values()], has_diverged=has_diverged)
    rates = ", ".join(f"{rate:g}" for rate in runs.rates(row))
    return f"{NOT_RUN} (but at {rates})" if rates else NOT_RUN


def last_value(run: Run | None, measure: Measure) -> str:
    """Format a run's last value, marked if the run diverged."""
    return NOT_RUN if run is None else number(run.final(measure)) + (DIVERGED if run.has_diverged else "")


def _other_rates(row: PublishedRow, runs: Runs) -> list[PublishedRow]:
    """Return the row at every other rate with several seeds: our search found another best rate."""
    others = [row._replace(rate=rate) for rate in runs.rates(row) if rate != row.rate]
    return [other for other in others if len(runs.counted(other)) > 1]


def _difference(row: PublishedRow, values: Sequence[float]) -> tuple[str, str]:
    """Format our mean less the published one, in units and in published spreads."""
    if not values:
        return "-", "-"
    difference = mean_and_spread(values)[0] - row.mean
    # at chance, all seeds of the authors end on the same value
    return signed(difference, 2), "spread is 0" if row.spread < 1e-9 else signed(difference / row.spread, 1)


def _extra_columns(facts: Published, found: Sequence[Run]) -> dict[str, Callable[[Run], str]]:
    """Return the columns that only some tasks have."""
    extra: dict[str, Callable[[Run], str]] = {}
    if any(run.bleu is not None for run in found):
        extra["test BLEU"] = lambda run: "-" if run.bleu is None else f"{run.bleu:.2f}"
    if any("test_fid" in run.curves for run in found):
        extra["FID to test images"] = lambda run: last_value(run, "test_fid") if "test_fid" in run.curves else "-"
    names = {run.data or facts.task for run in found}
    if names - {facts.task}:
        is_ambiguous = len({dataset_name(name) for name in names}) < len(names)
        extra["data"] = lambda run: (str if is_ambiguous else dataset_name)(run.data or facts.task)
    return extra


def _contender_column(facts: Published) -> str:
    return "raw weights" if facts.task == "mnist-reparameterised" else "optimiser"


def _measures(facts: Published) -> dict[Measure, str]:
    return next((kind for kind in (TEXT, IMAGES, GAMES) if facts.measure in kind), CLASSIFICATION)
