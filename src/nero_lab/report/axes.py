"""Axes of the figures: logarithmic scales, marks for what leaves the frame, and the names of the curves."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullLocator

from nero_lab.report.drawing import DASH_PT, GREY, SMALL_PT, Entry, all_values, stored_means
from nero_lab.report.published import Measure, Published

#: The smallest error on a logarithmic axis, in per cent.
MIN_ERROR = 0.005
#: Perplexities are shown from the first epoch if the highest is at most this many times the lowest.
MAX_RANGE = 50
#: A triangle whose base lies on the point: matplotlib's CARETUPBASE.
PEAK_MARKER: Literal[10] = 10
#: Smallest distance between two labels, as a share of the panel's height.
LABEL_GAP = 0.062


def set_log_scale(axes: Axes, entries: list[Entry], measure: Measure, facts: Published) -> None:
    """Give a panel of errors or perplexities a logarithmic scale.

    The frame may cut off the first epochs, so that the ends of the curves stay apart. An error that rises again later
    raises the frame. A perplexity that does so is left to ``mark_above_frame``.
    """
    bottom, top = _limits(entries, measure, facts)
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(bottom, max(top, 1.5 * bottom))
    ticks = (1, 2, 5) if top / bottom > 20 else (1, 1.5, 2, 3, 5, 7) if top / bottom > 4 else range(1, 10)
    axes.yaxis.set_major_locator(LogLocator(subs=ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0, 1.02 * facts.epochs)
    axes.xaxis.set_major_locator(MultipleLocator(5 if facts.epochs < 50 else 20 if facts.epochs <= 100 else 50))
    if measure.endswith("error"):
        show_per_cent(axes)
    else:
        show_plain_numbers(axes)


def set_distance_scale(panels: Sequence[Axes], values: Sequence[float], epochs: int) -> None:
    """Give panels of distances the same logarithmic scale; without values, no ticks."""
    positive = [value for value in values if value > 0]
    for axes in panels:
        axes.set_xlim(0, 1.02 * epochs)
        if not positive:
            axes.set_yticks([])
            continue
        axes.set_yscale("log")
        axes.set_ylim(0.9 * min(positive), 1.1 * max(positive))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_minor_locator(NullLocator())
        show_plain_numbers(axes)


def mark_above_frame(axes: Axes, entries: list[Entry], measure: Measure, facts: Published) -> bool:
    """Mark where a curve has left the frame through its top, apart from the first epochs.

    Returns:
        True if something was marked.
    """
    top = axes.get_ylim()[1]
    is_marked = False
    for entry in entries:
        curves = [(entry.means(measure), entry.style.colour)]
        if facts.stored_curves and measure == facts.measure:
            curves.append((stored_means(entry, facts), "none"))
        for values, face in curves:
            if peaks := _peaks_above(values, top):
                is_marked = True
                axes.plot(
                    peaks, [1.0] * len(peaks), linestyle="", marker=PEAK_MARKER, markersize=4.5, markerfacecolor=face,
                    color=entry.style.colour, transform=axes.get_xaxis_transform(), clip_on=False, zorder=5,
                )  # fmt: skip
    return is_marked


def show_per_cent(*panels: Axes) -> None:
    """Label the vertical axes in per cent."""
    for axes in panels:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def show_plain_numbers(axes: Axes) -> None:
    """Label the vertical axis without powers of ten."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def style_axes(axes: Axes, x_label: str, title: str) -> None:
    """Set the title, the label and the grid of a panel."""
    axes.set_xlabel(x_label, fontsize=9.5)
    axes.set_title(title, fontsize=10, loc="left", pad=8)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _limits(entries: list[Entry], measure: Measure, facts: Published) -> tuple[float, float]:
    is_claim, is_error = measure == facts.measure, measure.endswith("error")
    published = [entry.row.mean for entry in entries if facts.is_comparable] if is_claim or not is_error else []
    stored = [value for curve in facts.stored_curves for value in curve.values] if is_claim else []
    measured = [value for value in (*all_values(entries, measure), *stored) if 0 < value < math.inf]
    published = [value for value in published if not math.isnan(value)]
    if not measured and not published:
        published = [10.0]
    bottom = max(MIN_ERROR, (0.8 if is_error else 0.9) * min(measured + published))
    if is_error and not is_claim:
        return bottom, 100.0
    ends = [end for entry in entries if entry.runs and (end := entry.means(measure)[-1]) < math.inf]
    if not is_error:
        highest = 1.1 * max(measured + published)
        return bottom, highest if highest < MAX_RANGE * bottom else min(highest, 2.5 * max(ends + published))
    top = 3.5 * max(ends + published)
    return bottom, min(100.0, max(top, 1.1 * _later_peak(entries, measure, top)))


def _later_peak(entries: list[Entry], measure: Measure, top: float) -> float:
    """Return the highest value of any run after it has first come below ``top``."""
    later = [0.0]
    for entry in entries:
        for run in entry.runs:
            values = run.curves[measure]
            later += values[_first_inside(values, top) :]
    return max(later)


def _peaks_above(values: Sequence[float], top: float) -> list[int]:
    """Return the epoch of the highest value of every stretch above ``top``, apart from the first epochs."""
    peaks: list[int] = []
    was_above = False
    for index in range(_first_inside(values, top), len(values)):
        is_above = values[index] > top
        if is_above and not was_above:
            peaks.append(index + 1)
        elif is_above and values[index] > values[peaks[-1] - 1]:
            peaks[-1] = index + 1
        was_above = is_above
    return peaks


def _first_inside(values: Sequence[float], top: float) -> int:
    return next((index for index, value in enumerate(values) if value <= top), len(values))


def label_ends(axes: Axes, entries: list[Entry], facts: Published) -> None:
    """Write a name to the right of each curve's end, without overlaps.

    A contender without a run is named beside its published value. If it has none, ``draw_key`` names it.
    """
    placed = [entry for entry in entries if not _is_absent(entry, facts)]
    values = [_end_value(entry, facts) for entry in placed]
    ends = [_height(axes, value, facts.epochs) for value in values]
    for entry, value, end, height in zip(placed, values, ends, spread_labels(ends, LABEL_GAP), strict=True):
        colour, marker = entry.style
        options: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": colour}
        if not math.isnan(value):
            axes.plot([1.0, 1.03], [end, height], linewidth=0.8, **options)
        face = colour if entry.runs else "white"
        axes.plot([1.03], [height], marker=marker, markersize=6, markerfacecolor=face, **options)
        axes.annotate(
            _label(entry, facts), (1.03, height), xytext=(7, 0), xycoords="axes fraction", textcoords="offset points",
            va="center", fontsize=9.5, fontweight="bold" if entry.is_highlighted and entry.runs else "normal",
            color=colour, annotation_clip=False,
        )  # fmt: skip


def spread_labels(wanted: Sequence[float], gap: float) -> list[float]:
    """Return heights in [0, 1], at least ``gap`` apart and as near as possible to the wanted ones.

    Example:
        >>> [round(height, 2) for height in spread_labels([0.5, 0.1, 0.5], 0.1)]
        [0.45, 0.1, 0.55]
    """
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    groups: list[tuple[float, list[int]]] = []  # the centre and the members of each group of touching labels
    for index in order:
        centre, members = wanted[index], [index]
        while groups and groups[-1][0] + gap * len(groups[-1][1]) / 2 > centre - gap * len(members) / 2 + 1e-12:
            other, earlier = groups.pop()
            centre = (other * len(earlier) + centre * len(members)) / (len(earlier) + len(members))
            members = earlier + members
            half = gap * (len(members) - 1) / 2
            centre = min(max(centre, half), 1 - half)
        groups.append((centre, members))
    placed = {
        index: centre + gap * (place - (len(members) - 1) / 2)
        for centre, members in groups
        for place, index in enumerate(members)
    }
    return [placed[index] for index in range(len(wanted))]


def draw_key(
    figure: Figure, entries: list[Entry], facts: Published, *, show_seeds: bool = False, marks: Sequence[Artist] = ()
) -> None:
    """Explain the line styles above the panels, and name the contenders that the panels cannot show.

    Args:
        figure: the figure.
        entries: the contenders of all panels.
        facts: what is published about the task.
        show_seeds: True if the seeds are drawn as lines instead of their range.
        marks: handles of further marks in the panels.
    """
    handles: list[Artist] = []
    runs = [run for entry in entries for run in entry.runs]
    has_seeds = any(len(entry.runs) > 1 for entry in entries)
    if runs:
        names = {"tf32": "TF32", "float32": "float32"}
        precisions = " and ".join(sorted({names.get(run.precision, run.precision) for run in runs}, reverse=True))
        label = ("ours, mean over seeds" if has_seeds else "ours") + f" ({precisions})" * (precisions != "float32")
        handles.append(Line2D([], [], color=GREY, linewidth=2, marker="o", label=label))
    if has_seeds:
        seeds = Line2D([], [], color=GREY, alpha=0.5, linewidth=0.9, label="ours, each seed")
        band = Patch(color=GREY, alpha=0.25, linewidth=0, label="ours, range over seeds")
        handles.append(seeds if show_seeds else band)
    if facts.is_comparable:
        style: Any = (0, (DASH_PT, DASH_PT)) if facts.stored_curves else ""
        label = "the authors', mean over seeds" if facts.stored_curves else "paper, mean ± spread"
        handles.append(Line2D([], [], color=GREY, linewidth=0.9, ls=style, marker="o", mfc="white", label=label))
    handles += marks
    for entry in entries:
        if _is_absent(entry, facts):
            colour, marker = entry.style
            label = _label(entry, facts)
            handles.append(Line2D([], [], color=colour, linewidth=0, marker=marker, mfc="white", label=label))
    columns = 4 if figure.get_figwidth() > 9 and len(handles) <= 4 else 3
    options = {"ncols": columns, "frameon": False, "fontsize": SMALL_PT, "borderaxespad": 1.4}
    figure.legend(handles=handles, loc="outside upper left", **options)


def note_if_empty(axes: Axes, entries: list[Entry]) -> None:
    """Write "not run" into a panel without runs."""
    if not any(entry.runs for entry in entries):
        options: dict[str, Any] = {"ha": "center", "va": "center", "color": GREY, "backgroundcolor": "white"}
        axes.text(0.4, 0.5, "not run", transform=axes.transAxes, **options)


def _is_absent(entry: Entry, facts: Published) -> bool:
    """Check that the figure has neither a run nor a published value to show."""
    return not entry.runs and (not facts.is_comparable or math.isnan(entry.row.mean))


def _end_value(entry: Entry, facts: Published) -> float:
    if not entry.runs:
        return entry.row.mean
    return next((mean for mean in reversed(entry.means(facts.measure)) if not math.isnan(mean)), math.nan)


def _height(axes: Axes, value: float, epoch: int) -> float:
    """Return a value's height in the panel, from 0 to 1; NaN is placed in the middle."""
    if math.isnan(value):
        return 0.5
    inside = min(value, axes.get_ylim()[1])
    height = axes.transAxes.inverted().transform(axes.transData.transform((epoch, inside)))[1]
    return min(max(float(height), 0.0), 1.0)


def _label(entry: Entry, facts: Published) -> str:
    """Return the name, the rate if rates differ, the seeds unless three, and whether a run diverged."""
    rate = f", {entry.row.rate:g}" if len({row.rate for row in facts.rows}) > 1 else ""
    seeds = {0: ", not run", 1: ", 1 seed", 3: ""}.get(len(entry.runs), f", {len(entry.runs)} seeds")
    # curves of accuracies and errors go on after a divergence; others end
    has_end = not facts.measure.endswith(("accuracy", "error")) and any(run.has_diverged for run in entry.runs)
    return entry.label + rate + seeds + (", diverged" if has_end else "")
