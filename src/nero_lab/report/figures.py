"""The figures of the pages: ours in full, the paper's beside it, one colour an optimiser throughout.

Ours is solid, with its seeds as thin lines or their range as a band, and a marker for those who print in grey; what is
published is dashed or hollow. Names stand at the ends of the curves, and no legend covers data.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from nero_lab.report.drawing import (
    DASH,
    GREY,
    LOOKS,
    SMALL,
    Entry,
    canvas,
    draw_curve,
    draw_gutter,
    draw_key,
    draw_stored,
    dress,
    entry_of,
    label_ends,
    log_error,
    per_cent,
    say_if_empty,
    values_of,
)
from nero_lab.report.published import Measure, Published, all_published
from nero_lab.report.runs import Runs, called, name_of
from nero_lab.store import write_atomically

#: Ones, the commonest digit that MNIST trains on.
CHANCE = 100 * 6742 / 60000


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
    write_atomically(path, lambda file: figure.savefig(file, **options))


def _deep(facts: Published, runs: Runs) -> Figure:
    figure, (curves, rates) = canvas(10, 4.6, columns=(5, 3.4))
    entries = [entry_of(row, runs) for row in facts.finals]
    for axes in (curves, rates):
        axes.axhline(CHANCE, color=GREY, linestyle=(0, (1, 2)), linewidth=1, zorder=1)
        axes.set_ylim(0, 102)
    for place, entry in enumerate(entries):
        draw_curve(curves, entry, "train_accuracy", place, len(entries), each=True)
        draw_stored(curves, entry, facts, phase=DASH * (place % 2))
    curves.text(0.5, CHANCE - 3, "chance", color=GREY, va="top", fontsize=SMALL)
    curves.set_xlim(0, 1.01 * facts.epochs)
    label_ends(curves, entries, facts)
    dress(curves, "epoch", "Train accuracy, each at the authors' best rate")

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
    dress(rates, "learning rate (points set apart)", "Seed 0 at every rate, last epoch")
    per_cent(curves, rates)
    draw_key(figure, entries, facts, each=True, diverged=diverged)
    return figure


def _reparameterised(facts: Published, runs: Runs) -> Figure:
    figure, (axes,) = canvas(6.6, 4.4)
    entries = [entry_of(row, runs) for row in facts.finals]
    for place, entry in enumerate(entries):
        draw_curve(axes, entry, "train_accuracy", place, facts.epochs)
        draw_stored(axes, entry, facts, marked=True)
    axes.set_xticks(range(1, facts.epochs + 1))
    axes.set_xlim(0.85, facts.epochs + 0.06)
    lowest = min(*values_of(entries, "train_accuracy"), *(value for curve in facts.curves for value in curve.values))
    axes.set_ylim(max(0, 10 * math.floor(lowest / 10 - 0.2)), 101.5)
    label_ends(axes, entries, facts)
    dress(axes, "epoch", "Train accuracy under reparameterisation, Adam at 0.01")
    per_cent(axes)
    draw_key(figure, entries, facts)
    return figure


def _errors(facts: Published, runs: Runs) -> Figure:
    figure, panels = canvas(10, 4.6, columns=(1, 1.12))
    short = {"nero-both": "both", "nero-norm": "norm only", "nero-mean": "mean only", "nero-neither": "neither"}
    entries = [entry_of(row, runs, short.get(row.optimiser)) for row in facts.finals]
    measures: dict[Measure, str] = {"train_error": "Train error", "test_error": "Test error"}
    if facts.measure == "valid_perplexity":
        measures = {"train_perplexity": "Train perplexity", "valid_perplexity": "Validation perplexity"}
    for axes, (measure, words) in zip(panels, measures.items(), strict=True):
        for place, entry in enumerate(entries):
            draw_curve(axes, entry, measure, place, len(entries))
            if facts.curves and measure == facts.measure:
                draw_stored(axes, entry, facts)
        log_error(axes, entries, measure, facts)
        name = runs.stand_in(facts.task)
        words += ", by Nero's constraints" if entries[0].name in short.values() else ""
        words += f" on {called(name).partition(' (')[0]}" if name else ""
        dress(axes, "epoch", words)
    say_if_empty(panels[0], entries)
    if not facts.curves and facts.comparable:
        draw_gutter(panels[1], entries, facts)
    label_ends(panels[1], entries, facts)
    draw_key(figure, entries, facts)
    return figure


def _distances(facts: Published, runs: Runs) -> Figure:
    figure, (axes,) = canvas(7.2, 4.6)
    entries = [entry_of(row, runs) for row in facts.finals]
    for place, entry in enumerate(entries):
        draw_curve(axes, entry, "test_distance", place, len(entries))
    axes.set_xlim(0, 1.02 * facts.epochs)
    taken = [value for value in values_of(entries, "test_distance") if value > 0]
    if taken:
        axes.set_yscale("log")
        axes.set_ylim(0.9 * min(taken), 1.1 * max(taken))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_yticks([])
    say_if_empty(axes, entries)
    label_ends(axes, entries, facts)
    dress(axes, "epoch", "Fréchet distance of made images to test images, by EfficientNet-Lite0")
    draw_key(figure, entries, facts)
    return figure


def _rewards(facts: Published, runs: Runs) -> Figure:
    figure, (axes,) = canvas(9, 4.6)
    entries = [entry_of(row, runs) for row in facts.finals]
    for place, entry in enumerate(entries):
        draw_curve(axes, entry, "reward", place, len(entries), each=True)
    axes.set_ylim(-22, 25)
    axes.set_yticks([-21, -10, 0, 10, 21])
    say_if_empty(axes, entries)
    draw_gutter(axes, entries, facts)
    steps = range(6)  # in millions, of the 5 that an experiment has
    axes.set_xticks([facts.epochs * step / 5 for step in steps], [f"{step} M" for step in steps])
    label_ends(axes, entries, facts)
    dress(axes, "steps of the game", "Mean return of the last 100 episodes")
    draw_key(figure, entries, facts, each=True)
    return figure


def _granularity(facts: Published, runs: Runs) -> Figure:
    figure, panels = canvas(7.4, 7.4, rows=2)
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
            draw_curve(axes, entry, "test_error", place, len(entries))
        log_error(axes, entries, "test_error", facts)
        dress(axes, "epoch", f"Test error, {title} the constraints")
        both.append(entries)
    low, high = min(axes.get_ylim()[0] for axes in panels), max(axes.get_ylim()[1] for axes in panels)
    for axes, entries in zip(panels, both, strict=True):
        axes.set_ylim(low, high)
        say_if_empty(axes, entries)
        draw_gutter(axes, entries, facts)
        label_ends(axes, entries, facts)
    draw_key(figure, [entry for entries in both for entry in entries], facts)
    return figure
