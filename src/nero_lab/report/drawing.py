"""Building blocks of the figures: styles, panels and curves."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nero_lab.report.names import display_name
from nero_lab.report.published import Measure, Published, PublishedRow
from nero_lab.report.runs import Run, Runs

GREY = "#555555"
SMALL_PT = 8.5
DASH_PT = 4.0


class Style(NamedTuple):
    """A contender's colour and marker."""

    colour: str
    marker: str


# colours of Okabe and Ito, safe for colour-blind readers; markers for print in grey
NERO = Style("#0072B2", "o")
STYLES = {
    "nero": NERO,
    "sgd": Style("#D55E00", "s"),
    "adam": Style("#009E73", "^"),
    "lamb": Style("#CC79A7", "D"),
    "madam": Style("#E69F00", "v"),
    # the ablation: paler blue to grey as constraints are removed
    "nero-both": NERO,
    "nero-norm": Style("#56B4E9", "D"),
    "nero-mean": Style("#8A8FA3", "s"),
    "nero-neither": Style("#30343F", "v"),
    # two scales of the raw weights, both trained by Adam
    "sigma-1": Style("#009E73", "^"),
    "sigma-100": Style("#004D38", "s"),
    # variants have a darker or paler colour of their optimiser
    "sgd-decay": Style("#8C3D00", "P"),
    "nero-tuned": Style("#003F63", "D"),
    "nero-free-gains": Style("#56B4E9", "v"),
    "lamb-momentum": Style("#7A3E5E", "d"),
    "adam-momentum": Style("#004D38", "v"),
    "nero-scaled": Style("#56B4E9", "v"),
    # the study of today: Nero in blue, balanced optimisers in green, others in warm colours and grey
    "nero-momentum": Style("#56B4E9", "D"),
    "nero-momentum-free": Style("#2A1FE0", "X"),
    "nero-auto": Style("#003F63", "*"),
    "nero-momentum-auto": Style("#6A4FB3", "P"),
    "muon-balanced": Style("#009E73", "^"),
    "adamw-balanced": Style("#5FA83C", "v"),
    "muon": Style("#E69F00", "s"),
    "normuon": Style("#9A6B00", "p"),
    "soap": Style("#CC79A7", "h"),
    "lion": Style("#A14A3B", "<"),
    "adamw": Style("#555555", ">"),
    "adamw-clipped": Style("#999999", "d"),
}
#: Seeds whose last values differ by a larger factor are drawn one by one.
MAX_SEED_RATIO = 3.0
#: A contender without a style of its own.
DEFAULT_STYLE = Style("#777777", "X")


class Entry(NamedTuple):
    """A contender in a figure: its published row, style, label, and our runs."""

    row: PublishedRow
    style: Style
    label: str
    runs: list[Run]

    @property
    def is_highlighted(self) -> bool:
        """True for Nero, which is drawn in bold."""
        return self.style is NERO

    def means(self, measure: Measure) -> list[float]:
        """Return the mean over seeds in each epoch; empty if there is no run."""
        return [sum(values) / len(values) for values in zip(*(run.curves[measure] for run in self.runs), strict=True)]


def make_entry(row: PublishedRow, runs: Runs, label: str | None = None) -> Entry:
    """Collect a contender's style, label and runs."""
    style = STYLES.get(row.optimiser, DEFAULT_STYLE)
    return Entry(row, style, label or display_name(row.optimiser), list(runs.counted(row).values()))


def all_values(entries: Sequence[Entry], measure: Measure) -> list[float]:
    """Return a measure's values in every run and epoch."""
    return [value for entry in entries for run in entry.runs for value in run.curves[measure]]


def have_outliers(entries: Sequence[Entry], measure: Measure) -> bool:
    """Return whether the seeds of a contender end so far apart that a mean and a range show none of them."""
    last = [[run.curves[measure][-1] for run in entry.runs] for entry in entries if entry.runs]
    return any(max(values) > MAX_SEED_RATIO * min(values) for values in last)


def make_panels(
    width: float, height: float, rows: int = 1, columns: Sequence[float] = (1,)
) -> tuple[Figure, list[Axes]]:
    """Make a figure and its panels; ``columns`` holds their relative widths."""
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12, wspace=0.02, hspace=0.01)
    panels = figure.subplots(rows, len(columns), width_ratios=columns, squeeze=False)
    return figure, list(panels.flat)


def draw_curve(
    axes: Axes, entry: Entry, measure: Measure, place: int, entries: int, *, show_seeds: bool = False
) -> None:
    """Draw the mean over seeds by epoch, and the seeds' range.

    Args:
        axes: the panel.
        entry: the contender; nothing is drawn if it has no run.
        measure: the curve to draw.
        place: the entry's index in the panel. It shifts the markers, so that overlapping curves show all of them.
        entries: the number of entries in the panel.
        show_seeds: draw every seed as a thin line instead of the range, which would hide that some seeds fail.
    """
    if not entry.runs:
        return
    by_epoch = {
        epoch: values
        for epoch, values in enumerate(zip(*(run.curves[measure] for run in entry.runs), strict=True), start=1)
        if not any(map(math.isnan, values))
    }
    epochs = list(by_epoch)
    means = [sum(values) / len(values) for values in by_epoch.values()]
    marker_gap = max(1, len(epochs) // 8)
    widths = (1.5, 2.4) if len(epochs) < 100 else (1.2, 2.0)
    colour, marker = entry.style
    axes.plot(
        epochs, means, color=colour, linewidth=widths[entry.is_highlighted], zorder=3 + entry.is_highlighted,
        marker=marker, markersize=5 + 0.5 * entry.is_highlighted, markevery=(marker_gap * place // entries, marker_gap),
    )  # fmt: skip
    if len(entry.runs) > 1 and show_seeds:
        for values in zip(*by_epoch.values(), strict=True):
            axes.plot(epochs, values, color=colour, alpha=0.5, linewidth=0.9, zorder=2)
    elif len(entry.runs) > 1:
        low, high = ([extreme(values) for values in by_epoch.values()] for extreme in (min, max))
        axes.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0, zorder=2)


def draw_stored(axes: Axes, entry: Entry, facts: Published, *, has_markers: bool = False, phase: float = 0) -> None:
    """Draw the mean of the authors' stored curves, dashed.

    The phase shifts the dashes, so that of two equal curves one fills the other's gaps.
    """
    means = stored_means(entry, facts)
    colour, marker = entry.style
    axes.plot(
        range(1, len(means) + 1), means, color=colour, linewidth=0.9, linestyle=(phase, (DASH_PT, DASH_PT)), zorder=3,
        marker=marker if has_markers else "", markersize=9, markerfacecolor="none",
    )  # fmt: skip


def stored_means(entry: Entry, facts: Published) -> list[float]:
    """Return the mean of the authors' stored curves in each epoch."""
    return [sum(values) / len(values) for values in zip(*facts.stored_values(entry.row.optimiser), strict=True)]


def draw_paper_strip(axes: Axes, entries: list[Entry], facts: Published) -> None:
    """Draw the paper's last values on a grey strip to the right of the curves."""
    start, step = 1.03 * facts.epochs, 0.046 * facts.epochs
    end = start + step * len(entries)
    axes.axvspan(start, end, color="#f2f2f2", linewidth=0, zorder=0)
    for place, entry in enumerate(entries):
        if math.isnan(entry.row.mean):
            continue
        x, (colour, marker) = start + (place + 0.5) * step, entry.style
        axes.plot([x], [entry.row.mean], color=colour, marker=marker, markersize=5, markerfacecolor="white")
        axes.errorbar(x, entry.row.mean, entry.row.spread, color=colour, elinewidth=1.2, capsize=2.5, zorder=4)
    top: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
    axes.text((start + end) / 2, 0.985, "paper", color=GREY, fontsize=SMALL_PT, **top)
    axes.set_xlim(0, end)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick < start])
