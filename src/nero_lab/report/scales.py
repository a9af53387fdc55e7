"""Axes of the figures: logarithmic scales, and marks for what leaves the frame."""

import math
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullLocator

from nero_lab.report.drawing import Entry, all_values, stored_means
from nero_lab.report.published import Measure, Published

#: The smallest error on a logarithmic axis, in per cent.
MIN_ERROR = 0.005
#: Perplexities are shown from the first epoch if the highest is at most this many times the lowest.
MAX_RANGE = 50
#: A triangle whose base lies on the point: matplotlib's CARETUPBASE.
PEAK_MARKER: Literal[10] = 10


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
