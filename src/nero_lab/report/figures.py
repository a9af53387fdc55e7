"""Figures of the pages: our curves beside the published ones.

Ours are solid, the published ones dashed or hollow. Every optimiser has one colour and marker in all figures.
"""

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from nero_lab.report.axes import (
    PEAK_MARKER,
    draw_key,
    label_ends,
    mark_above_frame,
    note_if_empty,
    set_distance_scale,
    set_log_scale,
    show_per_cent,
    style_axes,
)
from nero_lab.report.drawing import (
    DASH_PT,
    DEFAULT_STYLE,
    GREY,
    SMALL_PT,
    STYLES,
    Entry,
    all_values,
    draw_curve,
    draw_paper_strip,
    draw_stored,
    have_outliers,
    make_entry,
    make_panels,
)
from nero_lab.report.names import dataset_name, display_name
from nero_lab.report.overview import TABLE1_COLUMNS, table1_rows
from nero_lab.report.published import Measure, Published, all_published
from nero_lab.report.runs import Runs
from nero_lab.report.tables import measure_name
from nero_lab.store import write_bytes

DPI = 200
#: Inches, so narrow that a telephone shows readable letters.
WIDTH = 7.4
TABLE1_WIDTH = 6.4
#: Characters of a name beside a curve; with longer ones, the panels stand above each other.
MAX_LABEL_LENGTH = 15
#: The share of ones, the most frequent digit in MNIST's training set.
CHANCE_PER_CENT = 100 * 6742 / 60000
CONSTRAINT_LABELS = {"nero-both": "both", "nero-norm": "norm only", "nero-mean": "mean only", "nero-neither": "neither"}


def draw(task: str, runs: Runs) -> Figure:
    """Draw the figure of a task; a contender without runs is marked as not run."""
    facts = all_published()[task]
    drawings: dict[str, Callable[[Published, Runs], Figure]] = {
        "mnist-deep": _draw_deep,
        "mnist-reparameterised": _draw_reparameterised,
        "cifar10-granularity": _draw_granularity,
        "cgan": _draw_distances,
        "pong": _draw_rewards,
    }
    return drawings.get(task, _draw_errors)(facts, runs)


def draw_table1(runs: Runs) -> Figure:
    """Draw the curves of Table 1's tasks, a panel per task, with the paper's last values at the right edge."""
    tasks = [replace(facts, stored_curves=()) for facts in all_published().values() if facts.table1_name]
    figure, panels = make_panels(TABLE1_WIDTH, 2.5 * len(tasks) / 2 + 0.6, rows=(len(tasks) + 1) // 2, columns=(1, 1))
    is_marked = False
    for axes, facts in zip(panels, tasks, strict=False):
        entries = [make_entry(row, runs) for row in table1_rows(facts)]
        show_seeds = facts.measure != "reward" and have_outliers(entries, facts.measure)
        for place, entry in enumerate(entries):
            draw_curve(axes, entry, facts.measure, place, len(entries), show_seeds=show_seeds)
        is_marked |= _set_table1_scale(axes, entries, facts)
        if facts.is_comparable:
            draw_paper_strip(axes, entries, facts)
        note_if_empty(axes, entries)
        counts = [len(entry.runs) for entry in entries]
        names = ", ".join(f"{entry.label} {count}" for entry, count in zip(entries, counts, strict=True))
        seeds = f"{counts[0]} each" if len(set(counts)) == 1 else names
        unit = "steps" if facts.measure == "reward" else "epoch"
        style_axes(axes, f"{unit}\nseeds: {seeds}", "")
        axes.set_title(
            str(facts.table1_name).partition(", transformer")[0], fontsize=10, weight="bold", loc="left", pad=21
        )
        options: dict[str, Any] = {"transform": axes.transAxes, "color": GREY, "fontsize": SMALL_PT, "in_layout": False}
        axes.text(0, 1.035, measure_name(facts), **options)
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    handles: list[Artist] = [
        Line2D([], [], color=colour, marker=marker, label=display_name(name), lw=1.5 + 0.9 * (name == "nero"))
        for name, (colour, marker) in ((name, STYLES[name]) for name in TABLE1_COLUMNS)
    ]
    handles += [
        Patch(color=GREY, alpha=0.25, linewidth=0, label="range over seeds, or each"),
        Line2D([], [], color=GREY, linewidth=0, marker="o", mfc="white", label="paper, mean ± spread"),
    ]
    if is_marked:
        handles.append(_peak_mark())
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    return figure


def _set_table1_scale(axes: Axes, entries: list[Entry], facts: Published) -> bool:
    """Set the axes of a panel of Table 1; return True if a curve leaves the frame."""
    if facts.measure == "reward":
        _set_return_scale(axes, facts)
        return False
    if facts.measure == "test_distance":
        set_distance_scale([axes], all_values(entries, facts.measure), facts.epochs)
        return False
    set_log_scale(axes, entries, facts.measure, facts)
    return mark_above_frame(axes, entries, facts.measure, facts)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG on white; the same figure gives the same bytes."""
    options: dict[str, Any] = {"format": "png", "dpi": DPI, "facecolor": "white", "metadata": {"Software": None}}
    png = io.BytesIO()
    figure.savefig(png, **options)
    write_bytes(path, png.getvalue())


def _draw_deep(facts: Published, runs: Runs) -> Figure:
    figure, (curves, rates) = make_panels(WIDTH, 4.2, columns=(5, 3.2))
    entries = [make_entry(row, runs) for row in facts.rows]
    for axes in (curves, rates):
        axes.axhline(CHANCE_PER_CENT, color=GREY, linestyle=(0, (1, 2)), linewidth=1, zorder=1)
        axes.set_ylim(0, 102)
    for place, entry in enumerate(entries):
        draw_curve(curves, entry, "train_accuracy", place, len(entries), show_seeds=True)
        draw_stored(curves, entry, facts, phase=DASH_PT * (place % 2))
    curves.text(0.5, CHANCE_PER_CENT - 3, "chance", color=GREY, va="top", fontsize=SMALL_PT)
    curves.set_xlim(0, 1.01 * facts.epochs)
    label_ends(curves, entries, facts)
    style_axes(curves, "epoch", "Train accuracy at the authors' best rate")
    has_diverged = _draw_search(rates, entries, facts, runs)
    show_per_cent(curves, rates)
    mark = Line2D([], [], color="black", linewidth=0, marker="x", markeredgewidth=1.6, label="diverged")
    draw_key(figure, entries, facts, show_seeds=True, marks=[mark] if has_diverged else [])
    return figure


def _draw_search(axes: Axes, entries: list[Entry], facts: Published, runs: Runs) -> bool:
    """Draw seed 0 at every rate beside the authors' search; return True if a run diverged."""
    tried, has_diverged = sorted({cell.rate for cell in facts.search}), False
    for place, entry in enumerate(entries):
        # shifted, because most points lie at chance
        shift = 10 ** (0.14 * (place - (len(entries) - 1) / 2))
        colour, marker = entry.style
        cells = [cell for cell in facts.search if cell.optimiser == entry.row.optimiser]
        axes.plot(
            [shift * cell.rate for cell in cells], [cell.ends["train_accuracy"] for cell in cells],
            linestyle="", marker=marker, markersize=9, markerfacecolor="none", color=colour,
        )  # fmt: skip
        ours = {rate: run for rate in tried if (run := runs.counted(entry.row, rate).get(0))}
        axes.plot(
            [shift * rate for rate in ours], [run.final("train_accuracy") for run in ours.values()],
            linewidth=0.7, marker=marker, markersize=5, color=colour, zorder=3 + entry.is_highlighted,
        )  # fmt: skip
        diverged = {rate: run for rate, run in ours.items() if run.has_diverged}
        has_diverged |= bool(diverged)
        axes.plot(
            [shift * rate for rate in diverged], [run.final("train_accuracy") for run in diverged.values()],
            linestyle="", marker="x", markersize=9, markeredgewidth=1.6, color="black", zorder=5,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(tried, [f"{rate:g}" for rate in tried])
    axes.xaxis.set_minor_locator(NullLocator())
    style_axes(axes, "learning rate (shifted)", "Seed 0, last epoch")
    return has_diverged


def _draw_reparameterised(facts: Published, runs: Runs) -> Figure:
    figure, (axes,) = make_panels(6.6, 4.4)
    entries = [make_entry(row, runs) for row in facts.rows]
    for place, entry in enumerate(entries):
        draw_curve(axes, entry, "train_accuracy", place, facts.epochs)
        draw_stored(axes, entry, facts, has_markers=True)
    axes.set_xticks(range(1, facts.epochs + 1))
    axes.set_xlim(0.85, facts.epochs + 0.06)
    stored = [value for curve in facts.stored_curves for value in curve.values]
    lowest = min(*all_values(entries, "train_accuracy"), *stored)
    axes.set_ylim(max(0, 10 * math.floor(lowest / 10 - 0.2)), 101.5)
    label_ends(axes, entries, facts)
    style_axes(axes, "epoch", "Train accuracy under reparameterisation, Adam at 0.01")
    show_per_cent(axes)
    draw_key(figure, entries, facts)
    return figure


def _draw_errors(facts: Published, runs: Runs) -> Figure:
    """Draw errors or perplexities: training on the left or above, the claim on the right or below."""
    entries = [make_entry(row, runs, CONSTRAINT_LABELS.get(row.optimiser)) for row in facts.rows]
    is_wide = max(len(entry.label) for entry in entries) > MAX_LABEL_LENGTH
    figure, panels = make_panels(WIDTH, 7.4, rows=2) if is_wide else make_panels(WIDTH, 4.2, columns=(1, 1.12))
    measures: dict[Measure, str] = {"train_error": "Train error", "test_error": "Test error"}
    if facts.measure == "valid_perplexity":
        measures = {"train_perplexity": "Train perplexity", "valid_perplexity": "Validation perplexity"}
    is_marked, show_seeds = False, have_outliers(entries, facts.measure)
    for axes, (measure, title) in zip(panels, measures.items(), strict=True):
        for place, entry in enumerate(entries):
            draw_curve(axes, entry, measure, place, len(entries), show_seeds=show_seeds)
            if facts.stored_curves and measure == facts.measure:
                draw_stored(axes, entry, facts)
        set_log_scale(axes, entries, measure, facts)
        is_marked |= mark_above_frame(axes, entries, measure, facts)
        stand_in = runs.stand_in(facts.task)
        title += ", by Nero's constraints" if facts.task == "cifar10-ablation" else ""
        title += f" on {dataset_name(stand_in).partition(' (')[0]}" if stand_in else ""
        style_axes(axes, "epoch", title)
    note_if_empty(panels[0], entries)
    if not facts.stored_curves and facts.is_comparable:
        draw_paper_strip(panels[1], entries, facts)
    label_ends(panels[1], entries, facts)
    draw_key(figure, entries, facts, show_seeds=show_seeds, marks=[_peak_mark()] if is_marked else [])
    return figure


def _peak_mark() -> Line2D:
    return Line2D([], [], color=GREY, linewidth=0, marker=PEAK_MARKER, markersize=4.5, label="peak above the frame")


def _draw_distances(facts: Published, runs: Runs) -> Figure:
    figure, panels = make_panels(WIDTH, 4.2, columns=(1, 1))
    entries = [make_entry(row, runs) for row in facts.rows]
    measures: dict[Measure, str] = {"train_distance": "training", "test_distance": "test"}
    for axes, (measure, images) in zip(panels, measures.items(), strict=True):
        for place, entry in enumerate(entries):
            draw_curve(axes, entry, measure, place, len(entries))
        style_axes(axes, "epoch", f"Fréchet distance, {images} images")
    values = [value for measure in measures for value in all_values(entries, measure)]
    set_distance_scale(panels, values, facts.epochs)
    note_if_empty(panels[0], entries)
    label_ends(panels[1], entries, facts)
    draw_key(figure, entries, facts, marks=[Line2D([], [], linewidth=0, label="these distances are not FID")])
    return figure


def _draw_rewards(facts: Published, runs: Runs) -> Figure:
    figure, (axes,) = make_panels(WIDTH, 4.4)
    entries = [make_entry(row, runs) for row in facts.rows]
    for place, entry in enumerate(entries):
        draw_curve(axes, entry, "reward", place, len(entries), show_seeds=True)
    _set_return_scale(axes, facts)
    note_if_empty(axes, entries)
    draw_paper_strip(axes, entries, facts)
    label_ends(axes, entries, facts)
    style_axes(axes, "steps of the game", "Mean return of the last 100 episodes")
    draw_key(figure, entries, facts, show_seeds=True)
    return figure


def _set_return_scale(axes: Axes, facts: Published) -> None:
    axes.set_ylim(-22, 25)
    axes.set_yticks([-21, -10, 0, 10, 21])
    millions = range(6)  # a run has 5 million steps
    axes.set_xticks([facts.epochs * step / 5 for step in millions], [f"{step} M" for step in millions])


def _unit_label(optimiser: str) -> str:
    """Name an optimiser and the unit whose updates are relative."""
    unit = {"madam": "synapse", "nero": "neuron", "lamb": "layer"}.get(optimiser)
    return display_name(optimiser) + (f", per {unit}" if unit else "")


def _draw_granularity(facts: Published, runs: Runs) -> Figure:
    figure, panels = make_panels(WIDTH, 7.4, rows=2)
    free = [row for row in facts.rows if not row.optimiser.endswith(("-balanced", "-both"))]
    balanced = [row for row in facts.rows if row not in free]
    by_panel: list[list[Entry]] = []
    for axes, rows, title in zip(panels, (free, balanced), ("without", "with"), strict=True):
        names = [row.optimiser.partition("-")[0] for row in rows]
        entries = [
            Entry(row, STYLES.get(name, DEFAULT_STYLE), _unit_label(name), list(runs.counted(row).values()))
            for row, name in zip(rows, names, strict=True)
        ]
        for place, entry in enumerate(entries):
            draw_curve(axes, entry, "test_error", place, len(entries))
        set_log_scale(axes, entries, "test_error", facts)
        style_axes(axes, "epoch", f"Test error, {title} the constraints")
        by_panel.append(entries)
    low, high = min(axes.get_ylim()[0] for axes in panels), max(axes.get_ylim()[1] for axes in panels)
    for axes, entries in zip(panels, by_panel, strict=True):
        axes.set_ylim(low, high)
        note_if_empty(axes, entries)
        draw_paper_strip(axes, entries, facts)
        label_ends(axes, entries, facts)
    draw_key(figure, [entry for entries in by_panel for entry in entries], facts)
    return figure
