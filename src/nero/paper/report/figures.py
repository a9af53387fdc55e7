"""The figures of the pages: ours in full, the paper's beside it, one colour an optimiser throughout.

Ours is solid, with its seeds as thin lines or their range as a band, and a marker for those who print in grey; what is
published is dashed or hollow. Names stand at the ends of the curves, and no legend covers data.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullLocator

from nero.paper.record import write_whole
from nero.paper.report.published import Final, Measure, Published, all_published
from nero.paper.report.runs import Run, Runs, called, name_of

GREY = "#555555"
CHANCE = 100 * 6742 / 60000  # ones, the commonest digit that MNIST trains on
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


def draw(task: str, runs: Runs) -> Figure:
    """The figure of a task; a contender that was not run shows what is published of it, and says so."""
    facts = all_published()[task]
    drawings: dict[str, Callable[[Published, Runs], Figure]] = {
        "mnist-deep": _deep,
        "mnist-reparameterised": _reparameterised,
        "cifar10-granularity": _granularity,
        "cgan": _distances,
        "pong": _rewards,
    }
    return drawings.get(task, _errors)(facts, runs)


def save(figure: Figure, path: Path) -> None:
    """Write it as a PNG that is the same for the same figure, on white whatever it is looked at on."""
    options: dict[str, Any] = {"format": "png", "dpi": 200, "facecolor": "white", "metadata": {"Software": None}}
    write_whole(path, lambda file: figure.savefig(file, **options))


def _deep(facts: Published, runs: Runs) -> Figure:
    figure, (curves, rates) = _canvas(10, 4.6, columns=(5, 3.4))
    entries = [_entry(row, runs) for row in facts.finals]
    for axes in (curves, rates):
        axes.axhline(CHANCE, color=GREY, linestyle=(0, (1, 2)), linewidth=1, zorder=1)
        axes.set_ylim(0, 102)
    for place, entry in enumerate(entries):
        _curve(curves, entry, "train_accuracy", place, len(entries), each=True)
        _stored(curves, entry, facts, phase=DASH * (place % 2))
    curves.text(0.5, CHANCE - 3, "chance", color=GREY, va="top", fontsize=SMALL)
    curves.set_xlim(0, 1.01 * facts.epochs)
    _label(curves, entries, facts)
    _dress(curves, "epoch", "Train accuracy, each at the authors' best rate")

    tried, diverged = sorted({cell.rate for cell in facts.search}), False
    for place, entry in enumerate(entries):
        # side by side, since most of them meet at chance
        aside = 10 ** (0.14 * (place - (len(entries) - 1) / 2))
        cells = [cell for cell in facts.search if cell.optimiser == entry.row.optimiser]
        rates.plot(
            [aside * cell.rate for cell in cells], [cell.ends["train_accuracy"] for cell in cells],
            linestyle="", marker=entry.look.marker, markersize=9, markerfacecolor="none", color=entry.look.colour,
        )  # fmt: skip
        ours = {rate: run for rate in tried if (run := runs.at(entry.row, rate).get(0))}
        rates.plot(
            [aside * rate for rate in ours], [run.final("train_accuracy") for run in ours.values()],
            linestyle="-", linewidth=0.7, marker=entry.look.marker, markersize=5, color=entry.look.colour,
            zorder=4 if entry.bold else 3,
        )  # fmt: skip
        lost = {rate: run for rate, run in ours.items() if run.diverged}
        diverged |= bool(lost)
        rates.plot(
            [aside * rate for rate in lost], [run.final("train_accuracy") for run in lost.values()],
            linestyle="", marker="x", markersize=9, markeredgewidth=1.6, color="black", zorder=5,
        )  # fmt: skip
    rates.set_xscale("log")
    rates.set_xticks(tried, [f"{rate:g}" for rate in tried])
    rates.xaxis.set_minor_locator(NullLocator())
    _dress(rates, "learning rate (points set apart)", "In the last epoch, at every rate")
    _per_cent(curves, rates)
    _key(figure, entries, facts, each=True, diverged=diverged)
    return figure


def _reparameterised(facts: Published, runs: Runs) -> Figure:
    figure, (axes,) = _canvas(6.6, 4.4)
    entries = [_entry(row, runs) for row in facts.finals]
    for place, entry in enumerate(entries):
        _curve(axes, entry, "train_accuracy", place, facts.epochs)
        _stored(axes, entry, facts, marked=True)
    axes.set_xticks(range(1, facts.epochs + 1))
    axes.set_xlim(0.85, facts.epochs + 0.06)
    lowest = min(*_values(entries, "train_accuracy"), *(value for curve in facts.curves for value in curve.values))
    axes.set_ylim(max(0, 10 * math.floor(lowest / 10 - 0.2)), 101.5)
    _label(axes, entries, facts)
    _dress(axes, "epoch", "Train accuracy under reparameterisation, Adam at 0.01")
    _per_cent(axes)
    _key(figure, entries, facts)
    return figure


def _errors(facts: Published, runs: Runs) -> Figure:
    figure, panels = _canvas(10, 4.6, columns=(1, 1.12))
    short = {"nero-both": "both", "nero-norm": "norm only", "nero-mean": "mean only", "nero-neither": "neither"}
    entries = [_entry(row, runs, short.get(row.optimiser)) for row in facts.finals]
    measures: dict[Measure, str] = {"train_error": "Train error", "test_error": "Test error"}
    if facts.measure == "valid_perplexity":
        measures = {"train_perplexity": "Train perplexity", "valid_perplexity": "Validation perplexity"}
    for axes, (measure, words) in zip(panels, measures.items(), strict=True):
        for place, entry in enumerate(entries):
            _curve(axes, entry, measure, place, len(entries))
            if facts.curves and measure == facts.measure:
                _stored(axes, entry, facts)
        _log_error(axes, entries, measure, facts)
        name = runs.stand_in(facts.task)
        words += ", by Nero's constraints" if entries[0].name in short.values() else ""
        words += f" on {called(name).partition(' (')[0]}" if name else ""
        _dress(axes, "epoch", words)
    _say_if_empty(panels[0], entries)
    if not facts.curves and facts.comparable:
        _gutter(panels[1], entries, facts)
    _label(panels[1], entries, facts)
    _key(figure, entries, facts)
    return figure


def _distances(facts: Published, runs: Runs) -> Figure:
    figure, (axes,) = _canvas(7.2, 4.6)
    entries = [_entry(row, runs) for row in facts.finals]
    for place, entry in enumerate(entries):
        _curve(axes, entry, "test_distance", place, len(entries))
    axes.set_xlim(0, 1.02 * facts.epochs)
    taken = [value for value in _values(entries, "test_distance") if value > 0]
    if taken:
        axes.set_yscale("log")
        axes.set_ylim(0.9 * min(taken), 1.1 * max(taken))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_yticks([])
    _say_if_empty(axes, entries)
    _label(axes, entries, facts)
    _dress(axes, "epoch", "Fréchet distance of made images to test images, by EfficientNet-Lite0")
    _key(figure, entries, facts)
    return figure


def _rewards(facts: Published, runs: Runs) -> Figure:
    figure, (axes,) = _canvas(9, 4.6)
    entries = [_entry(row, runs) for row in facts.finals]
    for place, entry in enumerate(entries):
        _curve(axes, entry, "reward", place, len(entries), each=True)
    axes.set_ylim(-22, 25)
    axes.set_yticks([-21, -10, 0, 10, 21])
    _say_if_empty(axes, entries)
    _gutter(axes, entries, facts)
    steps = range(6)  # in millions, of the 5 that an experiment has
    axes.set_xticks([facts.epochs * step / 5 for step in steps], [f"{step} M" for step in steps])
    _label(axes, entries, facts)
    _dress(axes, "steps of the game", "Mean return of the last 100 episodes")
    _key(figure, entries, facts, each=True)
    return figure


def _granularity(facts: Published, runs: Runs) -> Figure:
    figure, panels = _canvas(7.4, 7.4, rows=2)
    free = [row for row in facts.finals if not row.optimiser.endswith(("-balanced", "-both"))]
    held = [row for row in facts.finals if row not in free]
    both: list[list[Entry]] = []
    for axes, rows, title in zip(panels, (free, held), ("without", "with"), strict=True):
        names = [row.optimiser.partition("-")[0] for row in rows]
        kinds = {"madam": "synapse", "nero": "neuron", "lamb": "layer"}
        entries = [
            Entry(row, LOOKS[name], f"{name_of(name)}, per {kinds[name]}", list(runs.at(row).values()))
            for row, name in zip(rows, names, strict=True)
        ]
        for place, entry in enumerate(entries):
            _curve(axes, entry, "test_error", place, len(entries))
        _log_error(axes, entries, "test_error", facts)
        _dress(axes, "epoch", f"Test error, {title} the constraints")
        both.append(entries)
    low, high = min(axes.get_ylim()[0] for axes in panels), max(axes.get_ylim()[1] for axes in panels)
    for axes, entries in zip(panels, both, strict=True):
        axes.set_ylim(low, high)
        _say_if_empty(axes, entries)
        _gutter(axes, entries, facts)
        _label(axes, entries, facts)
    _key(figure, [entry for entries in both for entry in entries], facts)
    return figure


def _say_if_empty(axes: Axes, entries: list[Entry]) -> None:
    if not any(entry.runs for entry in entries):
        axes.text(
            0.4, 0.5, "not run",
            transform=axes.transAxes, ha="center", va="center", color=GREY, backgroundcolor="white",
        )  # fmt: skip


def _entry(row: Final, runs: Runs, name: str | None = None) -> Entry:
    return Entry(row, LOOKS[row.optimiser], name or name_of(row.optimiser), list(runs.at(row).values()))


def _canvas(width: float, height: float, rows: int = 1, columns: Sequence[float] = (1,)) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12, wspace=0.02, hspace=0.01)
    panels = figure.subplots(rows, len(columns), width_ratios=columns, squeeze=False)
    return figure, list(panels.flat)


def _curve(axes: Axes, entry: Entry, measure: Measure, place: int, of: int, *, each: bool = False) -> None:
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


def _stored(axes: Axes, entry: Entry, facts: Published, *, marked: bool = False, phase: float = 0) -> None:
    """The mean of the authors' stored curves; of two on top of each other, one fills the other's gaps."""
    means = [sum(values) / len(values) for values in zip(*facts.curves_of(entry.row.optimiser), strict=True)]
    colour, marker = entry.look
    axes.plot(
        range(1, len(means) + 1), means, color=colour, linewidth=0.9, linestyle=(phase, (DASH, DASH)), zorder=3,
        marker=marker if marked else "", markersize=9, markerfacecolor="none",
    )  # fmt: skip


def _gutter(axes: Axes, entries: list[Entry], facts: Published) -> None:
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


def _label(axes: Axes, entries: list[Entry], facts: Published) -> None:
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
    for entry, end, height, pointed in zip(entries, heights, _apart(heights, 0.062), known, strict=True):
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


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights as near to the wanted ones as a gap between them allows, within zero and one.

    Example:
        >>> [round(height, 2) for height in _apart([0.5, 0.1, 0.5], 0.1)]
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


def _log_error(axes: Axes, entries: list[Entry], measure: Measure, facts: Published) -> None:
    """Errors from a fraction of a per cent to chance, or perplexities, on one axis."""
    claimed, shares = measure == facts.measure, measure.endswith("error")
    printed = [entry.row.mean for entry in entries if facts.comparable] if claimed or not shares else []
    stored = [value for curve in facts.curves for value in curve.values] if claimed else []
    taken = [value for value in (*_values(entries, measure), *stored) if 0 < value < math.inf]
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
        _per_cent(axes)
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _means(entry: Entry, measure: Measure) -> list[float]:
    """The mean over seeds in each epoch; nothing if there is no run."""
    return [sum(values) / len(values) for values in zip(*(run.curves[measure] for run in entry.runs), strict=True)]


def _values(entries: list[Entry], measure: Measure) -> list[float]:
    return [value for entry in entries for run in entry.runs for value in run.curves[measure]]


def _per_cent(*panels: Axes) -> None:
    for axes in panels:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def _dress(axes: Axes, below: str, title: str) -> None:
    axes.set_xlabel(below, fontsize=9.5)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _key(figure: Figure, entries: list[Entry], facts: Published, *, each: bool = False, diverged: bool = False) -> None:
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
