"""Labels at the ends of the curves, and the key above the panels."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nero_lab.report.drawing import DASH_PT, GREY, SMALL_PT, Entry
from nero_lab.report.published import Published

#: Smallest distance between two labels, as a share of the panel's height.
LABEL_GAP = 0.062


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
