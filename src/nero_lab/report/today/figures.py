"""The figures of docs/today: sensitivity to the rate, curves, state beside the result, transfer, and airbench."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from nero_lab.report.axes import LABEL_GAP, PEAK_MARKER, spread_labels, style_axes
from nero_lab.report.drawing import DEFAULT_STYLE, GREY, SMALL_PT, STYLES, Style, make_panels
from nero_lab.report.names import display_name
from nero_lab.report.today import OURS, SERIES, Run, Study, Width, goal_of

PALE = "#d9d9d9"
COLUMNS = 3
#: Curves are shown from this share of the run on; before, all fall steeply.
SHOWN_FROM = 0.1
#: Place of the labels, as a share of the panel's width: far enough for lines that are not steep.
LABELS_AT = 1.1
#: The target of airbench, in per cent.
TARGET = 94.0


class Drawing(NamedTuple):
    """A figure of the study.

    Attributes:
        title: its alternative text.
        has_runs: whether the study has anything to draw.
        draw: draws it.
    """

    title: str
    has_runs: Callable[[Study], bool]
    draw: Callable[[Study], Figure]


def draw_sensitivity(study: Study, task: str) -> Figure:
    """Draw the result by rate, one panel a contender, with all others in grey behind it."""
    contenders = study.ranking(task)
    columns = min(COLUMNS, len(contenders))
    rows = math.ceil(len(contenders) / columns)
    figure, panels = make_panels(2.2 * columns + 0.6, 2.25 * rows + 0.7, rows, [1] * columns)
    goal = goal_of(task)
    searches = {name: study.search(task, name) for name in contenders}
    low, top = _frame([[run.value for run in found.values()] for found in searches.values()])
    rates = [rate for found in searches.values() for rate in found]
    for place, axes in enumerate(panels):
        if place >= len(contenders):
            axes.set_visible(False)
            continue
        contender = contenders[place]
        for other in contenders:
            if other != contender:
                _plot_search(axes, searches[other], Style(PALE, ""), low, top, width=0.9)
        _mark_seeds(axes, study.best_runs(task, contender), _style(contender), low, top)
        _plot_search(axes, searches[contender], _style(contender), low, top, width=2.0)
        best, width = study.best_rate(task, contender), study.width(task, contender)
        if width is not None and best is not None:
            least = searches[contender][best].value
            axes.axhspan(least, goal.limit(least), color="#e4e4e4", linewidth=0, zorder=0)
        axes.set(xscale="log", xlim=(min(rates) / 1.6, max(rates) * 1.6), ylim=(low, top))
        axes.xaxis.set_minor_formatter(NullFormatter())  # within a decade their labels would overlap
        axes.yaxis.set_major_locator(MaxNLocator(5))
        is_first, is_last = place % columns == 0, place + columns >= len(contenders)
        style_axes(axes, "learning rate" if is_last else "", "")
        _title(axes, contender, _note(searches[contender], best, width))
        axes.tick_params(labelleft=is_first, labelsize=8)
        axes.set_ylabel(goal.name if is_first else "", fontsize=9)
    _key(
        figure,
        Line2D([], [], color=GREY, linewidth=2, marker="o", markersize=4, label="first seed at each rate"),
        Line2D([], [], color=GREY, linewidth=0, marker="_", markersize=9, label="each seed at the best rate"),
        Line2D([], [], color="#e4e4e4", linewidth=7, label=f"within {goal.tolerance} of its best"),
        Line2D([], [], color=GREY, linewidth=0, marker=PEAK_MARKER, markersize=5, label="above the frame"),
        Line2D([], [], color=GREY, linewidth=0, marker="x", markersize=6, label="diverged"),
    )
    return figure


def draw_curves(study: Study, task: str) -> Figure:
    """Draw the mean curve over seeds of each contender at its best rate, by steps, and by seconds if all were timed.

    A contender that takes more than twice the median time leaves the panel of times.
    """
    goal, has_times = goal_of(task), study.has_times(task)
    figure, panels = make_panels(11 if has_times else 7, 4.8, columns=(1.15, 1) if has_times else (1,))
    contenders = study.ranking(task)
    means = {name: _mean_curve(study.best_runs(task, name)) for name in contenders}
    shown = {name: [v for v in curve[int(SHOWN_FROM * len(curve)) :] if v < math.inf] for name, curve in means.items()}
    finite = [value for values in shown.values() for value in values]
    ends = [values[-1] for values in shown.values() if values]
    low, top = (min(finite), max(finite)) if finite else (0.0, 1.0)
    top = min(top, low + 2 * max(max(ends) - low, 0.1 * low)) if ends else top  # the ends fill half of the panel
    for contender, curve in means.items():
        seconds = study.seconds.get((task, contender), math.nan)
        steps = [float(goal.interval * place) for place in range(1, len(curve) + 1)]
        times = [seconds * place / len(curve) for place in range(1, len(curve) + 1)]
        for axes, x in zip(reversed(panels), (steps, times), strict=False):  # the times may have no panel
            axes.plot(x, [v if v < math.inf else math.nan for v in curve], **_line(contender))
        if has_times:  # in the panel of steps, the labels have the markers
            panels[0].plot(times[-1], curve[-1], color=_style(contender).colour, marker=_style(contender).marker)
    for axes in panels:
        axes.set_ylim(_padded(low, top))
        axes.set_xlim(0, None)
    panels[-1].set_xlim(0, goal.interval * max(map(len, means.values())))  # no gap between the ends and their labels
    quantity = "Test error in %" if goal.is_accuracy else CURVE_NAMES[goal.curve]
    style_axes(panels[-1], goal.unit, f"{quantity}, by {goal.unit}")
    if has_times:
        style_axes(panels[0], "seconds of steps, with nothing else on the GPU", f"{quantity}, by time")
        usual = statistics.median(study.seconds[task, name] for name in contenders)
        panels[0].set_xlim(0, min(panels[0].get_xlim()[1], 2 * usual))
    _label_ends(panels[-1], study, task, {name: curve[-1] for name, curve in means.items()})
    return figure


#: Axis label of a curve of the records.
CURVE_NAMES = {"valid_loss": "Validation loss in nats a token"}


def draw_state(study: Study, task: str) -> Figure:
    """Draw the optimiser's bytes a parameter beside the result."""
    figure, (axes,) = make_panels(7, 4.6)
    points = {}
    for contender in study.ranking(task):
        if state := _state(study, task, contender):
            values = study.values(task, contender)
            points[contender] = state, statistics.fmean(values), min(values), max(values)
    for contender, (state, mean, lowest, highest) in points.items():
        colour, marker = _style(contender)
        axes.plot([state, state], [lowest, highest], color=colour, linewidth=1.2)
        axes.plot(state, mean, color=colour, marker=marker, markersize=8)
    values = [value for point in points.values() for value in point[2:]]
    axes.set(xscale="log", ylim=_padded(min(values), max(values)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    states = [point[0] for point in points.values()]
    axes.set_xlim(min(states) / 2, max(states) * 2)
    style_axes(axes, "state of the optimiser, bytes a parameter", f"{_capital(goal_of(task).name)}, by state")
    _label_ends(axes, study, task, {name: point[1] for name, point in points.items()})
    return figure


def draw_transfer(study: Study) -> Figure:
    """Draw the result by rate at each width and depth that was run, one row a contender; a star is the best rate."""
    series = {kind: list(tasks.values()) for kind, tasks in SERIES.items() if _has_series(study, kind)}
    known = [(task, name) for tasks in series.values() for task in tasks for name in study.contenders(task)]
    contenders = list(dict.fromkeys(name for task, name in known if study.search(task, name)))
    columns = len(series)
    figure, panels = make_panels(3 * columns + 0.6, 2.2 * len(contenders) + 0.7, len(contenders), [1] * columns)
    handles = []
    known_searches = [study.search(*pair) for pair in known]
    low, top = _frame([[run.value for run in found.values()] for found in known_searches if found])
    for column, (kind, tasks) in enumerate(series.items()):
        searches = {name: [study.search(task, name) for task in tasks] for name in contenders}
        for row, contender in enumerate(contenders):
            axes, is_last = panels[row * columns + column], row == len(contenders) - 1
            for place, found in enumerate(searches[contender]):
                _plot_search(axes, found, Style(_shade(place), "o"), low, top, width=1.6)
                best = study.best_rate(tasks[place], contender)
                if best is not None and found[best].value < math.inf:
                    options: dict[str, Any] = {"markersize": 13, "markeredgecolor": "black", "zorder": 5}
                    axes.plot(best, found[best].value, "*", color=_shade(place), **options)
            axes.set(xscale="log", ylim=(low, top))
            axes.xaxis.set_minor_formatter(NullFormatter())  # within a decade their labels would overlap
            _tick_rates(axes, [rate for found in searches[contender] for rate in found])
            style_axes(axes, "learning rate" if is_last else "", "")
            _title(axes, contender, f"by {kind}")
            axes.tick_params(labelsize=8.5)
            axes.set_ylabel(goal_of(tasks[0]).name if not column else "", fontsize=9)
        handles += [
            Line2D([], [], color=_shade(place), marker="o", markersize=4, label=f"{kind} {size}")
            for place, size in enumerate(SERIES[kind])
        ]
    grey: dict[str, Any] = {"color": GREY, "linewidth": 0}
    handles += [
        Line2D([], [], marker="*", markersize=11, markeredgecolor="black", label="best rate", **grey),
        Line2D([], [], marker=PEAK_MARKER, markersize=5, label="above the frame", **grey),
        Line2D([], [], marker="x", markersize=6, label="diverged", **grey),
    ]
    options = {"ncols": columns + 1, "frameon": False, "fontsize": 9, "borderaxespad": 0.8}
    figure.legend(handles=handles, loc="outside upper left", **options)
    return figure


def draw_airbench(study: Study) -> Figure:
    """Draw the accuracy of every run, with the mean and its standard error."""
    contenders = study.ranking("airbench")[::-1]
    figure, (axes,) = make_panels(7, 0.75 * len(contenders) + 1.3)
    for place, contender in enumerate(contenders):
        colour, _ = _style(contender)
        found = [100 - value for value in study.values("airbench", contender) if math.isfinite(value)]
        shifts = [0.16 * math.sin(12.9898 * index) for index in range(len(found))]
        axes.plot(found, [place + shift for shift in shifts], "o", color=colour, alpha=0.35, markersize=4, mew=0)
        if found:
            error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0
            axes.errorbar(
                statistics.fmean(found), place + 0.32, xerr=error, color=colour, marker="D", markersize=5, capsize=3
            )
    counts = [len(study.values("airbench", name)) for name in contenders]
    runs = [f"{count} run{'s' if count > 1 else ''}" for count in counts]
    names = [f"{display_name(name)} ({count})" for name, count in zip(contenders, runs, strict=True)]
    axes.set_yticks(range(len(contenders)), names)
    for tick, contender in zip(axes.get_yticklabels(), contenders, strict=True):
        tick.set(color=_style(contender).colour, fontweight="bold" if contender in OURS else "normal")
    axes.axvline(TARGET, color=GREY, linestyle="--", linewidth=1)
    axes.set_ylim(-0.5, len(contenders) - 0.3)
    title = "Every run; a diamond is the mean, with one standard error"
    style_axes(axes, "test accuracy with test-time augmentation, %", title)
    axes.grid(axis="y", visible=False)
    return figure


def _state(study: Study, task: str, contender: str) -> float | None:
    """Return a contender's bytes of state a parameter, if they are known and no seed has diverged."""
    is_finite = all(map(math.isfinite, study.values(task, contender)))
    return study.best_runs(task, contender)[0].state if is_finite else None


def _has_runs(study: Study, task: str) -> bool:
    return bool(study.runs(task))


def _has_series(study: Study, kind: str) -> bool:
    """Tell whether two sizes of a series were run, which can be compared."""
    return sum(bool(study.runs(task)) for task in SERIES[kind].values()) > 1


def _has_state(study: Study, task: str) -> bool:
    return any(_state(study, task, contender) for contender in study.ranking(task))


def _drawing(title: str, draw: Callable[..., Figure], task: str) -> Drawing:
    has_runs = _has_state if draw is draw_state else _has_runs
    return Drawing(title, lambda study: has_runs(study, task), partial(draw, task=task))


#: The figures by the names of their files.
FIGURES = {
    "gpt-rates": _drawing("GPT: bits per byte by learning rate, one panel a contender", draw_sensitivity, "gpt"),
    "gpt-curves": _drawing("GPT: validation loss during training", draw_curves, "gpt"),
    "gpt-state": _drawing("GPT: bits per byte by the optimiser's bytes a parameter", draw_state, "gpt"),
    "gpt-large-curves": _drawing("Large GPT: validation loss during training", draw_curves, "gpt-large"),
    "gpt-transfer": Drawing(
        "GPT: bits per byte by learning rate at each width and depth",
        lambda study: any(_has_series(study, kind) for kind in SERIES),
        draw_transfer,
    ),
    "vit-rates": _drawing("ViT: test error by learning rate, one panel a contender", draw_sensitivity, "vit"),
    "vit-curves": _drawing("ViT: test error during training", draw_curves, "vit"),
    "airbench": Drawing(
        "airbench: accuracy of every run, by contender", lambda study: _has_runs(study, "airbench"), draw_airbench
    ),
}


def _plot_search(axes: Axes, found: dict[float, Run], style: Style, low: float, top: float, width: float) -> None:
    """Draw the result at each rate; a marker at the top stands for a value above the frame or a diverged run."""
    is_pale = style.colour == PALE
    rates = list(found)
    inside = [run.value if run.value < math.inf else math.nan for run in found.values()]
    axes.plot(
        rates, inside, color=style.colour, linewidth=width, marker=style.marker, markersize=0 if is_pale else 4.5,
        zorder=1 if is_pale else 3,
    )  # fmt: skip
    if is_pale:
        return
    edge = top - 0.02 * (top - low)
    for rate, run in found.items():
        if run.value > top:
            marker = PEAK_MARKER if run.value < math.inf else "x"
            axes.plot(rate, edge, color=style.colour, marker=marker, markersize=6, clip_on=False, zorder=4)


def _mark_seeds(axes: Axes, found: Sequence[Run], style: Style, low: float, top: float) -> None:
    """Mark every seed at the best rate with a dash."""
    inside = [run for run in found if low <= run.value <= top]
    if len(found) > 1:
        rates, values = [run.rate for run in inside], [run.value for run in inside]
        axes.plot(rates, values, linestyle="", color=style.colour, marker="_", markersize=11, zorder=4)


def _frame(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return limits that show every contender's best, and as much again above it."""
    bests = [best for found in values if (best := min(found)) < math.inf]
    if not bests:
        return 0.0, 1.0
    low, high = min(bests), max(bests)
    highest = max(value for found in values for value in found if value < math.inf)
    top = min(highest, high + max(high - low, 0.06 * low))
    return _padded(low, top)


def _padded(low: float, top: float) -> tuple[float, float]:
    gap = 0.07 * (top - low) or 0.01 * abs(low) or 1.0
    return low - gap, top + gap


def _mean_curve(found: Sequence[Run]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*(run.curve for run in found), strict=True)]


def _label_ends(axes: Axes, study: Study, task: str, ends: dict[str, float]) -> None:
    """Write each contender's name and last value to the right of the panel, joined to its end by a thin line."""
    low, top = axes.get_ylim()
    wanted = [min(max((min(value, top) - low) / (top - low), 0.0), 1.0) for value in ends.values()]
    for contender, height, place in zip(ends, wanted, spread_labels(wanted, 0.9 * LABEL_GAP), strict=True):
        colour, marker = _style(contender)
        options: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": colour}
        axes.plot([1.0, LABELS_AT], [height, place], linewidth=0.9, alpha=0.7, **options)
        axes.plot([LABELS_AT], [place], marker=marker, markersize=5.5, **options)
        axes.annotate(
            _label(study, task, contender, ends[contender]), (LABELS_AT, place), xytext=(7, 0),
            xycoords="axes fraction", textcoords="offset points", va="center", fontsize=9,
            fontweight="bold" if contender in OURS else "normal", color=colour, annotation_clip=False,
        )  # fmt: skip


def _label(study: Study, task: str, contender: str, end: float) -> str:
    """Return the contender's name with its last value, and its seeds unless there are three."""
    result = f"{end:.{min(goal_of(task).digits, 3)}f}" if end < math.inf else "diverged"
    count = len(study.best_runs(task, contender))
    seeds = {1: ", 1 seed", 3: ""}.get(count, f", {count} seeds")
    return f"{display_name(contender)}  {result}{seeds}"


def _line(contender: str) -> dict[str, Any]:
    is_ours = contender in OURS
    return {"color": _style(contender).colour, "linewidth": 2.0 if is_ours else 1.3, "zorder": 3 + is_ours}


def _title(axes: Axes, contender: str, note: str) -> None:
    options: dict[str, Any] = {"fontsize": 9.5, "fontweight": "bold" if contender in OURS else "normal"}
    pad = 19 if note else 8
    axes.set_title(display_name(contender), loc="left", color=_style(contender).colour, pad=pad, **options)
    axes.annotate(note, (0, 1.03), xycoords="axes fraction", va="bottom", fontsize=SMALL_PT, color=GREY)


def _note(found: dict[float, Run], best: float | None, width: Width | None) -> str:
    if best is None or found[best].value == math.inf:
        return "all diverged"
    rates = list(found)
    mark = "" if len(rates) == 1 else {rates[0]: "≤ ", rates[-1]: "≥ "}.get(best, "")
    return f"best at {mark}{best:g}" + (f", width {'≥ ' * width.is_open}{width.factor:.1f}" if width else "")


def _tick_rates(axes: Axes, rates: Sequence[float]) -> None:
    """Label up to five of the rates that were tried."""
    tried = sorted(set(rates))
    shown = tried[:: max(1, math.ceil(len(tried) / 5))]
    axes.set_xticks(shown, [f"{rate:.3g}" for rate in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _key(figure: Figure, *handles: Line2D) -> None:
    columns = len(handles) if figure.get_figwidth() > 10 else 3
    options = {"ncols": columns, "frameon": False, "fontsize": SMALL_PT, "borderaxespad": 0.8}
    figure.legend(handles=handles, loc="outside upper left", **options)


def _style(contender: str) -> Style:
    return STYLES.get(contender, DEFAULT_STYLE)


def _shade(place: int) -> Any:
    return colormaps["viridis"](0.85 - 0.38 * place)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
