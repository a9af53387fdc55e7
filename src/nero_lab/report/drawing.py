"""What figures are made of: how contenders look, curves, labels at their ends, scales, and a key."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullLocator

from nero_lab.report.published import Final, Measure, Published
from nero_lab.report.runs import Run, Runs, name_of

GREY = "#555555"
SMALL = 8.5
DASH = 4.0


class Look(NamedTuple):
    """How a contender is drawn."""

    colour: str
    marker: str


# colours of Okabe and Ito, which the colour-blind can tell apart, as in the demo; markers for print in grey
NERO = Look("#0072B2", "o")
LOOKS = {
    "nero": NERO,
    "sgd": Look("#D55E00", "s"),
    "adam": Look("#009E73", "^"),
    "lamb": Look("#CC79A7", "D"),
    "madam": Look("#E69F00", "v"),
    # Nero with less: paler blue to grey
    "nero-both": NERO,
    "nero-norm": Look("#56B4E9", "D"),
    "nero-mean": Look("#8A8FA3", "s"),
    "nero-neither": Look("#30343F", "v"),
    # both are Adam
    "sigma-1": Look("#009E73", "^"),
    "sigma-100": Look("#004D38", "s"),
    # ImageNet's: each family in two or three shades
    "sgd-decay": Look("#8C3D00", "P"),
    "nero-tuned": Look("#003F63", "D"),
    "nero-free-gains": Look("#56B4E9", "v"),
    "lamb-momentum": Look("#7A3E5E", "d"),
    "adam-momentum": Look("#004D38", "v"),
    "nero-scaled": Look("#56B4E9", "v"),
}


class Entry(NamedTuple):
    """A row of the paper's, how it looks, what it is called in this figure, and our runs of it."""

    row: Final
    look: Look
    name: str
    runs: list[Run]

    @property
    def bold(self) -> bool:
        return self.look is NERO


def say_if_empty(axes: Axes, entries: list[Entry]) -> None:
    """Where nothing was run, say so in the panel's middle."""
    if not any(entry.runs for entry in entries):
        axes.text(
            0.4, 0.5, "not run",
            transform=axes.transAxes, ha="center", va="center", color=GREY, backgroundcolor="white",
        )  # fmt: skip


def entry_of(row: Final, runs: Runs, name: str | None = None) -> Entry:
    """Of a row of the paper's, called as it is everywhere or as this figure wants."""
    return Entry(row, LOOKS[row.optimiser], name or name_of(row.optimiser), list(runs.at(row).values()))


def canvas(width: float, height: float, rows: int = 1, columns: Sequence[float] = (1,)) -> tuple[Figure, list[Axes]]:
    """An empty figure and its panels."""
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12, wspace=0.02, hspace=0.01)
    panels = figure.subplots(rows, len(columns), width_ratios=columns, squeeze=False)
    return figure, list(panels.flat)


def draw_curve(axes: Axes, entry: Entry, measure: Measure, place: int, of: int, *, each: bool = False) -> None:
    """The mean over seeds by epoch, and their range, or each of them."""
    if not entry.runs:
        return
    by_epoch = {
        epoch: values
        for epoch, values in enumerate(zip(*(run.curves[measure] for run in entry.runs), strict=True), start=1)
        if not any(map(math.isnan, values))
    }
    means = [sum(values) / len(values) for values in by_epoch.values()]
    count = len(means)
    epochs = list(by_epoch)
    every = max(1, count // 8)
    colour, marker = entry.look
    axes.plot(
        epochs, means,
        color=colour, linewidth=(2.4 if entry.bold else 1.5) if count < 100 else (2.0 if entry.bold else 1.2),
        zorder=4 if entry.bold else 3,
        # by turns, so that curves on top of each other show all their markers
        marker=marker, markersize=5.5 if entry.bold else 5, markevery=(every * place // of, every),
    )  # fmt: skip
    if len(entry.runs) > 1 and each:  # where one learns and another does not, a range would hide it
        for run in zip(*by_epoch.values(), strict=True):
            axes.plot(epochs, run, color=colour, alpha=0.5, linewidth=0.9, zorder=2)
    elif len(entry.runs) > 1:
        low, high = ([extreme(values) for values in by_epoch.values()] for extreme in (min, max))
        axes.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0, zorder=2)


def draw_stored(axes: Axes, entry: Entry, facts: Published, *, marked: bool = False, phase: float = 0) -> None:
    """The mean of the authors' stored curves; of two on top of each other, one fills the other's gaps."""
    means = [sum(values) / len(values) for values in zip(*facts.curves_of(entry.row.optimiser), strict=True)]
    colour, marker = entry.look
    axes.plot(
        range(1, len(means) + 1), means, color=colour, linewidth=0.9, linestyle=(phase, (DASH, DASH)), zorder=3,
        marker=marker if marked else "", markersize=9, markerfacecolor="none",
    )  # fmt: skip


def draw_gutter(axes: Axes, entries: list[Entry], facts: Published) -> None:
    """What the paper printed for the last epoch, on a strip of its own beyond it."""
    start, step = 1.03 * facts.epochs, 0.042 * facts.epochs
    end = start + step * len(entries)
    axes.axvspan(start, end, color="#f2f2f2", linewidth=0, zorder=0)
    for place, entry in enumerate(entries):
        x, colour = start + (place + 0.5) * step, entry.look.colour
        if math.isnan(entry.row.mean):
            continue
        axes.plot([x], [entry.row.mean], color=colour, marker=entry.look.marker, markersize=5, markerfacecolor="white")
        axes.errorbar(x, entry.row.mean, entry.row.spread, color=colour, elinewidth=1.2, capsize=2.5, zorder=4)
    above = axes.get_xaxis_transform()
    axes.text((start + end) / 2, 0.985, "paper", transform=above, ha="center", va="top", color=GREY, fontsize=SMALL)
    axes.set_xlim(0, end)


def label_ends(axes: Axes, entries: list[Entry], facts: Published) -> None:
    """A name to the right of each curve's end, clear of the others."""
    heights, known = [], []
    for entry in entries:
        means = _means(entry, facts.measure)
        ends = [mean for mean in means if not math.isnan(mean)]
        value = ends[-1] if ends else entry.row.mean if facts.comparable and not means else math.nan
        known.append(not math.isnan(value))
        height = 0.5
        if known[-1]:
            top = min(value, axes.get_ylim()[1])
            height = axes.transAxes.inverted().transform(axes.transData.transform((facts.epochs, top)))[1]
        heights.append(min(max(float(height), 0.0), 1.0))
    for entry, end, height, pointed in zip(entries, heights, apart(heights, 0.062), known, strict=True):
        colour, marker = entry.look
        filled = colour if entry.runs else "white"
        where: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": colour}
        if pointed:
            axes.plot([1.0, 1.03], [end, height], linewidth=0.8, **where)
        axes.plot([1.03], [height], marker=marker, markersize=6, markerfacecolor=filled, **where)
        weight = "bold" if entry.bold and entry.runs else "normal"
        axes.text(1.055, height, _words(entry, facts), va="center", fontsize=9.5, fontweight=weight, **where)


def _words(entry: Entry, facts: Published) -> str:
    """A contender's name, its rate where rates differ, and what is wanting."""
    rate = f", {entry.row.rate:g}" if len({row.rate for row in facts.finals}) > 1 else ""
    seeds = {0: ", not run", 1: ", 1 seed", 3: ""}.get(len(entry.runs), f", {len(entry.runs)} seeds")
    # of which a figure by accuracy has a mark, or shows that it answers by chance
    lost = ", diverged" if any(run.diverged for run in entry.runs) and _may_end(facts) else ""
    return entry.name + rate + seeds + lost


def _may_end(facts: Published) -> bool:
    """Whether a run that diverges leaves no more numbers."""
    return not facts.measure.endswith(("accuracy", "error"))


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights as near to the wanted ones as a gap between them allows, within zero and one.

    Example:
        >>> [round(height, 2) for height in apart([0.5, 0.1, 0.5], 0.1)]
        [0.45, 0.1, 0.55]
    """
    order = sorted(range(len(wanted)), key=lambda number: (wanted[number], number))
    groups: list[tuple[float, list[int]]] = []  # a centre, and who shares it
    for number in order:
        centre, members = wanted[number], [number]
        while groups and groups[-1][0] + gap * len(groups[-1][1]) / 2 > centre - gap * len(members) / 2 + 1e-12:
            other, earlier = groups.pop()
            centre = (other * len(earlier) + centre * len(members)) / (len(earlier) + len(members))
            members = earlier + members
            half = gap * (len(members) - 1) / 2
            centre = min(max(centre, half), 1 - half)
        groups.append((centre, members))
    placed = {
        number: centre + gap * (place - (len(members) - 1) / 2)
        for centre, members in groups
        for place, number in enumerate(members)
    }
    return [placed[number] for number in range(len(wanted))]


def log_error(axes: Axes, entries: list[Entry], measure: Measure, facts: Published) -> None:
    """Errors from a fraction of a per cent to chance, or perplexities, on one axis."""
    claimed, shares = measure == facts.measure, measure.endswith("error")
    printed = [entry.row.mean for entry in entries if facts.comparable] if claimed or not shares else []
    stored = [value for curve in facts.curves for value in curve.values] if claimed else []
    taken = [value for value in (*values_of(entries, measure), *stored) if 0 < value < math.inf]
    printed = printed or ([] if taken and not facts.comparable else [10.0])
    shown = taken + printed
    axes.set_yscale("log", nonpositive="clip")
    top = 100.0 if shares else max(shown)
    if claimed or not shares:  # the first epochs matter less than a view of where the curves end
        ends = [end for entry in entries if entry.runs and (end := _means(entry, measure)[-1]) < math.inf]
        top = min(top, 3.5 * max(ends + printed)) if shares else min(1.1 * top, 2.5 * max(ends + printed))
    bottom = max(0.005, (0.8 if shares else 0.9) * min(shown))
    axes.set_ylim(bottom, max(top, 1.5 * bottom))
    axes.xaxis.set_major_locator(MultipleLocator(5 if facts.epochs < 50 else 20 if facts.epochs <= 100 else 50))
    ticks = (1, 2, 5) if top / bottom > 20 else (1, 1.5, 2, 3, 5, 7) if top / bottom > 4 else range(1, 10)
    axes.yaxis.set_major_locator(LogLocator(subs=ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0, 1.02 * facts.epochs)
    if shares:
        per_cent(axes)
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _means(entry: Entry, measure: Measure) -> list[float]:
    """The mean over seeds in each epoch; nothing if there is no run."""
    return [sum(values) / len(values) for values in zip(*(run.curves[measure] for run in entry.runs), strict=True)]


def values_of(entries: list[Entry], measure: Measure) -> list[float]:
    """All that was measured, in every run and epoch."""
    return [value for entry in entries for run in entry.runs for value in run.curves[measure]]


def per_cent(*panels: Axes) -> None:
    """Read the upright axes as shares."""
    for axes in panels:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def dress(axes: Axes, below: str, title: str) -> None:
    """Name a panel and what lies along it, and take away what nobody reads."""
    axes.set_xlabel(below, fontsize=9.5)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_key(
    figure: Figure, entries: list[Entry], facts: Published, *, each: bool = False, diverged: bool = False
) -> None:
    """What the styles mean, in grey above the panels; the names are beside the curves."""
    handles: list[Artist] = []
    runs = [run for entry in entries for run in entry.runs]
    if runs:
        kinds = {"tf32": "TF32", "float32": "float32"}
        told = " and ".join(sorted({kinds.get(run.precision, run.precision) for run in runs}, reverse=True))
        several = any(len(entry.runs) > 1 for entry in entries)
        words = ("ours, mean over seeds" if several else "ours") + (f" ({told})" if told != "float32" else "")
        handles.append(Line2D([], [], color=GREY, linewidth=2, marker="o", label=words))
    if any(len(entry.runs) > 1 for entry in entries):
        seeds = Line2D([], [], color=GREY, alpha=0.5, linewidth=0.9, label="ours, each seed")
        handles.append(seeds if each else Patch(color=GREY, alpha=0.25, linewidth=0, label="ours, range over seeds"))
    if facts.comparable:
        dashes, words = (
            ((0, (DASH, DASH)), "the authors', mean over seeds") if facts.curves else ("", "paper, mean ± spread")
        )
        handles.append(Line2D([], [], color=GREY, linewidth=0.9, ls=dashes, marker="o", mfc="white", label=words))
    if diverged:
        handles.append(Line2D([], [], color="black", linewidth=0, marker="x", markeredgewidth=1.6, label="diverged"))
    columns = len(handles) if figure.get_figwidth() > 9 else 3
    options = {"ncols": columns, "frameon": False, "fontsize": SMALL, "borderaxespad": 1.4}
    figure.legend(handles=handles, loc="outside upper left", **options)
