"""The figure of docs/studies/claims.md: six claims, a panel each."""

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nero_lab.claims.measurements import ACTIVATION_RATES, ROBUST_RATES
from nero_lab.claims.studies import BATCHES, FACTORS, RATES, REGULARISED, STRENGTHS, USUAL_RATES
from nero_lab.claims.tables import NAMES, Records, per_cent, select
from nero_lab.report.drawing import GREY, STYLES, Style, make_panels

EXTRA_STYLES = {"adam-balanced": Style("#5FA83C", "v"), "kaiming": Style("#004D38", "s")}
#: The largest test error that the panel of strengths shows, %.
MAX_ERROR = 26.0


def draw(records: Records) -> Figure:
    """Draw test errors by initial scale, batch and strength; variances by layer; α and weight norms."""
    figure, (scales, batches, layers, angles, norms, strengths) = make_panels(7.4, 9.6, rows=3, columns=(1, 1))
    for optimiser, (usual, *_) in RATES.items():
        found = [select(records, "initial-scale", optimiser=optimiser, lr=usual, factor=factor) for factor in FACTORS]
        _line(scales, FACTORS, found, optimiser, f"{NAMES[optimiser]} at {usual:g}")
    _dress(scales, "Test error by scale of initial weights", "factor", "log", "log")
    for optimiser, usual in USUAL_RATES.items():
        found = [select(records, "batch-size", optimiser=optimiser, lr=usual, batch=batch) for batch in BATCHES]
        _line(batches, BATCHES, found, optimiser, f"{NAMES[optimiser]} at {usual:g}")
    _dress(batches, "Test error by batch, at one rate", "examples in a batch", "log", "linear")
    batches.set_xticks(BATCHES, [f"{batch}" for batch in BATCHES])
    batches.minorticks_off()
    for optimiser in ACTIVATION_RATES:
        for run in select(records, "activations", optimiser=optimiser, depth=20, seed=0):
            for when, dashes in (("start", ":"), ("end", "-")):
                label = NAMES[optimiser] if when == "end" else None
                values = run[when]["variance"]
                layers.plot(range(1, len(values) + 1), values, dashes, color=_style(optimiser).colour, label=label)
    layers.axhline(1, color=GREY, linewidth=0.8)
    _dress(layers, "Activations' variance: start (dotted), end", "layer of 20", "linear", "log")
    for optimiser in ROBUST_RATES:
        runs = [run for run in select(records, "robustness", optimiser=optimiser) if "alpha_upper" in run]
        colour, marker = _style(optimiser)
        angles.plot([run["alpha_upper"] for run in runs], per_cent(runs), marker, color=colour, label=NAMES[optimiser])
        curves = [run["weight_norms"] for run in select(records, "robustness", optimiser=optimiser)]
        if curves:
            means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            epochs = [10 * place for place in range(len(means))]
            norms.plot(epochs, means, f"{marker}-", color=colour, ms=4, label=NAMES[optimiser])
    _dress(angles, "Test error by α (an upper bound)", "radians", "linear", "linear")
    _dress(norms, "Norm of all weights during training", "epoch", "linear", "linear")
    for optimiser, (_, option, _) in REGULARISED.items():
        found = [select(records, "gains", optimiser=optimiser, strength=strength) for strength in STRENGTHS]
        places = list(range(len(STRENGTHS)))
        _line(strengths, places, found, optimiser, f"{NAMES[optimiser]}, {option}")
    _dress(strengths, f"Test error by strength, up to {MAX_ERROR:g} %", "strength", "linear", "linear")
    strengths.set_ylim(20, MAX_ERROR)
    strengths.set_xticks(
        range(len(STRENGTHS)), [f"{strength:g}".replace("e-0", "e-") for strength in STRENGTHS], fontsize=7
    )
    return figure


def _style(optimiser: str) -> Style:
    return EXTRA_STYLES.get(optimiser) or STYLES[optimiser]


def _line(axes: Axes, places: Sequence[float], found: list[Records], optimiser: str, label: str) -> None:
    """Draw means over seeds, with the seeds' range; settings without a run are left out."""
    drawn = [(place, per_cent(runs)) for place, runs in zip(places, found, strict=True) if runs]
    colour, marker = _style(optimiser)
    xs = [place for place, _ in drawn]
    axes.plot(xs, [statistics.fmean(errors) for _, errors in drawn], f"{marker}-", color=colour, label=label, ms=5)
    low, high = [min(errors) for _, errors in drawn], [max(errors) for _, errors in drawn]
    axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def _dress(axes: Axes, title: str, label: str, x_scale: str, y_scale: str) -> None:
    axes.set(xscale=x_scale, yscale=y_scale, xlabel=label)
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    if x_scale == y_scale == "log":  # lines fall on the left and rise on the right
        axes.legend(frameon=False, fontsize=7.5, loc="lower right", bbox_to_anchor=(1.04, 0.09), handlelength=1)
    else:
        axes.legend(frameon=False, fontsize=7.5)
    if title.startswith("Test error"):
        axes.yaxis.set_major_formatter("{x:g} %")
