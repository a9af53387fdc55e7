"""Tables over all tasks: what was run, the paper's Table 1, and the experiments outside it."""

from nero_lab.report.markdown import DIVERGED, mean_and_spread, number, plural, render_table, seeds_note, with_spread
from nero_lab.report.names import dataset_name, display_name
from nero_lab.report.published import Published, PublishedRow, all_published
from nero_lab.report.runs import Runs
from nero_lab.report.tables import NOT_RUN, measure_name, our_result

#: The optimisers of the paper's Table 1.
TABLE1_COLUMNS = ("nero", "sgd", "adam", "lamb")
#: Characters of contenders' names in a cell; beyond it, those with the fewest seeds are counted instead.
MAX_NAMES_LENGTH = 60


def overview_tables(runs: Runs) -> dict[str, str]:
    """Return the tables of the index page by the names in its markers."""
    return {"index": index_table(runs), "table1-full": full_table1(runs), "others": others_table(runs)}


def index_table(runs: Runs) -> str:
    """List every task that has records, with its claim, its place in the paper and its runs; then name the others."""
    lines = [
        (f"[{facts.task}]({facts.task}.md)", facts.claim, facts.reference, _coverage(facts, runs))
        for facts in _with_records(runs)
    ]
    table = render_table(("task", "what the paper claims", "in the paper", "run here"), lines, left=4)
    missing = [task for task in all_published() if task not in runs.tasks]
    unknown = [f"{task} ({count})" for task, count in sorted(runs.unknown_tasks.items())]
    notes = [f"Not run: {', '.join(missing)}."] if missing else []
    notes += [f"Records of tasks without a page are not shown: {', '.join(unknown)}."] if unknown else []
    return "\n\n".join([table, *notes])


def full_table1(runs: Runs) -> str:
    """Render the paper's Table 1 with means and spreads, ours above the paper's, as far as there are records."""
    lines = []
    for facts in _with_records(runs):
        if facts.table1_name is None:
            continue
        rows = table1_rows(facts)
        lines.append((facts.table1_name, measure_name(facts), "ours", *(our_result(facts, runs, row) for row in rows)))
        lines.append(("", facts.paper_measure, "paper", *(with_spread(row.mean, row.spread) for row in rows)))
    return render_table(("task", "measure", "whose", *map(display_name, TABLE1_COLUMNS)), lines, left=3)


def table1_rows(facts: Published) -> list[PublishedRow]:
    """Return a task's rows of Table 1, with the means and spreads that are printed there."""
    rows = {row.optimiser: row for row in facts.rows}
    values = {name: facts.table1_values.get(name, rows[name][-2:]) for name in TABLE1_COLUMNS}
    return [rows[name]._replace(mean=mean, spread=spread) for name, (mean, spread) in values.items()]


def compact_table1(runs: Runs) -> str:
    """Render the paper's Table 1 with one row per task and the means "ours / paper" in each cell."""
    lines = []
    for facts in all_published().values():
        if facts.table1_name is None:
            continue
        measure = measure_name(facts)
        if not facts.is_comparable:
            measure = f"{measure} (ours) / {facts.paper_measure} (paper)"
        lines.append((facts.table1_name, measure, *(_ours_and_paper(facts, runs, row) for row in table1_rows(facts))))
    return render_table(("task", "measure", *map(display_name, TABLE1_COLUMNS)), lines, left=2)


def others_table(runs: Runs) -> str:
    """Compare every contender of the tasks outside Table 1 that have records with what is published."""
    lines = []
    for facts in _with_records(runs):
        if facts.table1_name is not None:
            continue
        source = {"paper": "paper", "authors": "authors' stored runs"}[facts.origin]
        for place, row in enumerate(facts.rows):
            lines.append(
                (
                    f"[{facts.task}]({facts.task}.md)" if place == 0 else "",
                    measure_name(facts) if place == 0 else "",
                    display_name(row.optimiser),
                    our_result(facts, runs, row),
                    with_spread(row.mean, row.spread),
                    source if facts.is_comparable else f"{source}: {facts.paper_measure}",
                )
            )
    return render_table(("task", "measure", "contender", "ours", "published", "published by"), lines, left=3)


def _with_records(runs: Runs) -> list[Published]:
    return [all_published()[task] for task in runs.tasks]


def _coverage(facts: Published, runs: Runs) -> str:
    """Summarise the seeds, precisions and data of the runs at the paper's best rates."""
    by_row = {row: runs.counted(row) for row in facts.rows}
    counted_runs = [run for by_seed in by_row.values() for run in by_seed.values()]
    if not counted_runs:
        short = runs.count_short(facts.task)
        return f"{NOT_RUN} for all {facts.epochs} epochs ({plural(short, 'short record')})" if short else NOT_RUN
    parts = _seeds_by_contender({display_name(row.optimiser): len(by_seed) for row, by_seed in by_row.items()})
    stand_in = runs.stand_in(facts.task)
    parts += [f"on {dataset_name(stand_in)}"] if stand_in else []
    return f"{', '.join(sorted({run.precision for run in counted_runs}))}: {'; '.join(parts)}"


def _seeds_by_contender(seeds: dict[str, int]) -> list[str]:
    """Group contenders by their number of seeds: "3 seeds of Nero", "1 of SGD, Adam", "LAMB not run"."""
    names: dict[int, list[str]] = {}
    for name, count in seeds.items():
        names.setdefault(count, []).append(name)
    missing = names.pop(0, [])
    most, *fewer = sorted(names, reverse=True)
    if not fewer and not missing:
        return [f"{plural(most, 'seed')} each"]
    groups = {count: ", ".join(names[count]) for count in (most, *fewer)}
    if fewer and sum(map(len, groups.values())) > MAX_NAMES_LENGTH:
        groups[fewer[-1]] = f"{len(names[fewer[-1]])} others"
        if sum(map(len, groups.values())) > MAX_NAMES_LENGTH:
            groups = {count: plural(len(names[count]), "contender") for count in groups}
    parts = [f"{plural(most, 'seed')} of {groups[most]}", *(f"{count} of {groups[count]}" for count in fewer)]
    return [*parts, f"{', '.join(missing)} {NOT_RUN}"] if missing else parts


def _ours_and_paper(facts: Published, runs: Runs, row: PublishedRow) -> str:
    by_seed = runs.counted(row)
    ours = NOT_RUN
    if by_seed:
        mean, _ = mean_and_spread([run.final(facts.measure) for run in by_seed.values()])
        mark = DIVERGED if any(run.has_diverged for run in by_seed.values()) else ""
        ours = number(mean) + mark + seeds_note(len(by_seed))
    return f"{ours} / {number(row.mean)}"
