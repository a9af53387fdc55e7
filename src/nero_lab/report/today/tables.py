"""The tables of docs/today: one function per table, and one block for each figure that has runs to show."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from nero_lab.report.markdown import plural, render_table
from nero_lab.report.names import display_name
from nero_lab.report.tables import NOT_RUN
from nero_lab.report.today import OURS, SERIES, Run, Study, goal_of
from nero_lab.report.today.figures import FIGURES, TARGET

#: The tasks that rank contenders, each with its name on the overview.
RANKED = {"gpt": "GPT", "gpt-large": "GPT, large", "vit": "ViT", "airbench": "airbench"}
#: Seeds at the best rate; the overview marks contenders with fewer.
SEEDS = 3


def overview(study: Study) -> str:
    """Set the means of all contenders with a run beside each other, task by task.

    A mean is bold if all contenders of the task were run, and it is better than all others by the rule.
    """
    known = dict.fromkeys(contender for task in RANKED for contender in study.contenders(task))
    contenders = [name for name in known if any(study.values(task, name) for task in RANKED)]
    if not contenders:
        return NOT_RUN
    rows = []
    for contender in contenders:
        cells = [_overview_cell(study, task, contender) for task in RANKED]
        rows.append([_name(contender), *cells, _state(study.best_runs("gpt", contender))])
    head = ["contender", *(f"{name}: {goal_of(task).name}" for task, name in RANKED.items())]
    return render_table([*head, "GPT: state, bytes a parameter"], rows)


def runs(study: Study) -> str:
    """Count the runs of each task, and name their precision and device."""
    rows = []
    series = (task for tasks in SERIES.values() for task in tasks.values())
    for task in dict.fromkeys([*RANKED, "gpt-variants", *series]):
        found = study.runs(task)
        tried = [contender for contender in study.contenders(task) if study.search(task, contender)]
        row: list[object] = [task, len(found) or NOT_RUN]
        if found:
            grids = [len(study.search(task, contender)) for contender in tried]
            seeds = [len(study.best_runs(task, contender)) for contender in tried]
            row += [f"{len(tried)} of {len(study.contenders(task))}", _span(grids), _span(seeds)]
            row += [f"{sum(run.seconds for run in found) / 60:.0f}"]
            row += [", ".join(sorted({getattr(run, name) for run in found})) for name in ("precision", "device")]
        else:
            row += ["-"] * 6
        rows.append(row)
    head = [
        "task",
        "runs",
        "contenders",
        "rates each",
        "seeds at the best rate",
        "minutes of runs",
        "precision",
        "device",
    ]
    return render_table(head, rows)


def ranking(study: Study, task: str) -> str:
    """Rank the contenders of a task by their means, with whom each is better than by the rule."""
    order = study.ranking(task)
    if not order:
        return NOT_RUN
    goal, rows = goal_of(task), list[list[object]]()
    for place, contender in enumerate(order, 1):
        best, width = study.best_runs(task, contender), study.width(task, contender)
        rows.append(
            [
                place,
                _name(contender),
                _mean(study, task, contender),
                plural(len(best), "seed"),
                _rate(study, task, contender),
                "-" if width is None else ("≥ " if width.is_open else "") + f"{width.factor:.1f}",
                _state(best),
                _seconds(study, task, contender),
                _beaten(study, task, order, contender),
            ]
        )
    rows += [["-", _name(name), NOT_RUN, *["-"] * 6] for name in study.contenders(task) if name not in order]
    head = ["", "contender", goal.name, "seeds", "best rate", f"width at {goal.tolerance}", "state, bytes a parameter"]
    table = render_table([*head, "seconds of steps", "better than"], rows, left=2)
    return "\n\n".join([table, *_short_note(study, task)])


def ours(study: Study, task: str) -> str:
    """Compare each of our contenders with other people's, by the rule."""
    order = study.ranking(task)
    theirs = [contender for contender in order if contender not in OURS]
    rows = []
    for contender in (contender for contender in order if contender in OURS):
        better = [other for other in theirs if study.is_better(task, contender, other)]
        worse = [other for other in theirs if study.is_better(task, other, contender)]
        open_ = [other for other in theirs if other not in better + worse]
        rows.append([_name(contender), *(", ".join(map(display_name, part)) or "-" for part in (better, worse, open_))])
    return render_table(["ours", "better than", "worse than", "not decided"], rows, left=4) if rows else NOT_RUN


def rates(study: Study, task: str) -> str:
    """List the result of the search at each rate, the best of each contender in bold."""
    digits, rows = goal_of(task).digits, []
    for contender in study.ranking(task):
        found, best = study.search(task, contender), study.best_rate(task, contender)
        cells = []
        for rate, run in found.items():
            value = f"{run.value:.{digits}f}" if math.isfinite(run.value) else "diverged"
            cells.append(f"{rate:g}: **{value}**" if rate == best else f"{rate:g}: {value}")
        rows.append([_name(contender), *cells])
    if not rows:
        return NOT_RUN
    columns = max(map(len, rows))
    rows = [row + [""] * (columns - len(row)) for row in rows]
    return render_table(["contender", *(f"rate {place}" for place in range(1, columns))], rows)


def transfer(study: Study, kind: str) -> str:
    """List the best rates by width or by depth, and what it costs to keep the smallest network's rate."""
    sizes, tasks = list(SERIES[kind]), list(SERIES[kind].values())
    tried = dict.fromkeys(name for task in tasks for name in study.contenders(task) if study.search(task, name))
    rows = []
    for contender in tried:
        searches = [study.search(task, contender) for task in tasks]
        best = [study.best_rate(task, contender) for task in tasks]
        cells = [
            NOT_RUN if rate is None else f"{_rate(study, task, contender)} ({_value(found[rate])})"
            for task, rate, found in zip(tasks, best, searches, strict=True)
        ]
        known = [rate for rate, found in zip(best, searches, strict=True) if rate is not None and len(found) > 1]
        cost = "-"
        if best[0] is not None and best[-1] is not None and best[0] in searches[-1] and len(searches[-1]) > 1:
            kept, tuned = (searches[-1][rate].value for rate in (best[0], best[-1]))
            cost = f"{100 * (kept / tuned - 1):.2f} %" if math.isfinite(kept) else "diverges"
        factor = f"{max(known) / min(known):.3g}" if len(known) > 1 else "-"
        rows.append([_name(contender), *cells, factor, cost])
    if not rows:
        return NOT_RUN
    head = ["contender", *(f"{kind} {size}" for size in sizes), "best rates differ by"]
    return render_table([*head, f"cost of {sizes[0]}'s rate at {sizes[-1]}"], rows)


def airbench(study: Study) -> str:
    """Rank the contenders of airbench by mean accuracy, with standard errors."""
    order = study.ranking("airbench")
    if not order:
        return NOT_RUN
    rows: list[list[object]] = []
    for place, contender in enumerate(order, 1):
        best = study.best_runs("airbench", contender)
        accuracies = [100 - run.value for run in best]
        mean = statistics.fmean(accuracies)
        error = statistics.stdev(accuracies) / math.sqrt(len(best)) if len(best) > 1 and math.isfinite(mean) else None
        share = sum(accuracy >= TARGET for accuracy in accuracies) / len(best)
        rows.append(
            [
                place,
                _name(contender),
                f"{best[0].rate:g}",
                len(best),
                f"{mean:.3f}" if math.isfinite(mean) else "diverged",
                "-" if error is None else f"{error:.3f}",
                f"{100 * share:.0f} %",
                _seconds(study, "airbench", contender),
                _state(best),
                _beaten(study, "airbench", order, contender),
            ]
        )
    rows += [["-", _name(name), NOT_RUN, *["-"] * 7] for name in study.contenders("airbench") if name not in order]
    head = ["", "contender", "rate", "runs", "mean accuracy, %", "standard error", f"runs at {TARGET:g} % or above"]
    table = render_table([*head, "seconds of steps", "state, bytes a parameter", "better than"], rows, left=2)
    return "\n\n".join([table, *_short_note(study, "airbench")])


def airbench_rates(study: Study) -> str:
    """List the accuracy of the first seed at each rate that was tried, and the mean of all runs."""
    rows = []
    for contender in study.ranking("airbench"):
        for rate, first in study.search("airbench", contender).items():
            values = [run.value for run in study.at_rate("airbench", contender, rate)]
            found = (100 - first.value, 100 - statistics.fmean(values))
            accuracies = [f"{each:.3f}" if math.isfinite(each) else "diverged" for each in found]
            rows.append([_name(contender), f"{rate:g}", accuracies[0], len(values), accuracies[1]])
    head = ["contender", "rate", "accuracy of the first seed, %", "runs", "mean accuracy, %"]
    return render_table(head, rows) if rows else NOT_RUN


def figure(study: Study, name: str) -> str:
    """Show a figure, if there are runs to draw."""
    title, has_runs, _ = FIGURES[name]
    return f"![{title}](figures/{name}.png)" if has_runs(study) else NOT_RUN


TABLES: dict[str, Callable[[Study], str]] = {
    "overview": overview,
    "runs": runs,
    **{task: partial(ranking, task=task) for task in ("gpt", "gpt-large", "vit")},
    **{f"{task}-ours": partial(ours, task=task) for task in RANKED},
    **{f"{task}-rates": partial(rates, task=task) for task in ("gpt", "gpt-large", "gpt-variants", "vit")},
    "widths": partial(transfer, kind="width"),
    "depths": partial(transfer, kind="depth"),
    "airbench": airbench,
    "airbench-rates": airbench_rates,
    **{f"figure-{name}": partial(figure, name=name) for name in FIGURES},
}


def _name(contender: str) -> str:
    """Return the display name, bold for one of ours."""
    return f"**{display_name(contender)}**" if contender in OURS else display_name(contender)


def _value(run: Run) -> str:
    return f"{run.value:.{goal_of(run.task).digits}f}" if math.isfinite(run.value) else "diverged"


def _mean(study: Study, task: str, contender: str) -> str:
    """Format mean ± standard deviation between seeds, and count seeds that diverged."""
    values, digits = study.values(task, contender), goal_of(task).digits
    if lost := sum(not math.isfinite(value) for value in values):
        return f"{lost} of {len(values)} diverged"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _rate(study: Study, task: str, contender: str) -> str:
    """Format the best rate, marked if it is an end of the grid: a better one may lie beyond."""
    best, tried = study.best_rate(task, contender), list(study.search(task, contender))
    mark = "≤ " if best == tried[0] else "≥ " if best == tried[-1] else ""
    return f"{mark}{best:g}" if len(tried) > 1 else f"{best:g} alone"


def _overview_cell(study: Study, task: str, contender: str) -> str:
    if contender not in study.contenders(task):
        return "-"
    values = study.values(task, contender)
    if not values:
        return NOT_RUN
    text = _mean(study, task, contender).partition(" ±")[0]
    text += f" ({plural(len(values), 'seed')})" if len(values) < SEEDS and all(map(math.isfinite, values)) else ""
    others = [other for other in study.ranking(task) if other != contender]
    is_run = len(others) + 1 == len(study.contenders(task))
    is_best = is_run and all(study.is_better(task, contender, other) for other in others)
    return f"**{text}**" if is_best else text


def _state(found: Sequence[Run]) -> str:
    if not found or found[0].state is None:
        return "-"
    return f"{found[0].state:.2f}" if found[0].state >= 0.1 else f"{found[0].state:.1g}"


def _seconds(study: Study, task: str, contender: str) -> str:
    seconds = study.seconds.get((task, contender))
    return "not timed" if seconds is None else f"{seconds:#.3g}"


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def _beaten(study: Study, task: str, order: Sequence[str], contender: str) -> str:
    """Return the places of the contenders that this one is better than, as ranges."""
    if len(study.values(task, contender)) < 2:
        return "-"
    places = [place for place, other in enumerate(order, 1) if study.is_better(task, contender, other)]
    ranges = []
    for _, group in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        members = [place for _, place in group]
        ranges.append(f"{members[0]}" if len(members) == 1 else f"{members[0]} to {members[-1]}")
    return ", ".join(ranges) or "none"


def _short_note(study: Study, task: str) -> list[str]:
    short = study.short.get(task, 0)
    return [f"Left out, with fewer intervals than the others: {plural(short, 'run')}."] if short else []
