"""The figure of the study: train error by rate, and what each trust loses, with a bound on steps and without."""

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nero_lab.report.depth import CHANCE, SEEDS, Study
from nero_lab.tasks.depth import LAYERS, RATES, TRUST, TRUSTS

#: Smaller trusts, and 0.11, were tried without a bound.
UNBOUNDED_TRUSTS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.11, 0.16)
TICKS = (0.01, 0.02, 0.04, 0.08, 0.16)
#: The greatest loss, in points of train accuracy, that the figure shows.
MAX_LOSS = 8.0


def draw(study: Study) -> Figure:
    """Draw perceptrons' error by rate, with a star where ``lr="auto"`` stands, and their loss by trust."""
    figure = Figure(figsize=(7, 7.6), layout="constrained")
    panels = figure.subplot_mosaic([["rates", "rates"], ["bounded", "unbounded"]])
    rates, bounded, unbounded = panels.values()
    for place, layers in enumerate(LAYERS):
        task, colour = f"perceptron-{layers}", colormaps["viridis"](place / (len(LAYERS) - 1) * 0.9)
        accuracies = [study.mean(task, "nero", rate) for rate in RATES]
        has_begun = max(accuracies) > CHANCE
        name = f"{layers} layers" + ("" if has_begun else ", which have hardly begun to learn")
        rates.plot(RATES, [100 - accuracy for accuracy in accuracies], "o-", color=colour, label=name)
        error = 100 - study.mean(task, "auto", TRUST)
        rates.plot(TRUST / layers, error, "*", color=colour, markersize=16, markeredgecolor="black")
        if has_begun:
            for axes, contender, trusts in ((bounded, "auto", TRUSTS), (unbounded, "unbounded", UNBOUNDED_TRUSTS)):
                run = [trust for trust in trusts if study.ends(task, contender, trust, seeds=SEEDS)]
                losses = [max(accuracies) - study.mean(task, contender, trust) for trust in run]
                axes.plot(run, losses, "o-", color=colour)
    rates.set(xscale="log", yscale="log", xlabel="learning rate")
    rates.set_title('Train error, mean of three seeds; a star is "auto"')
    rates.yaxis.set_major_formatter("{x:g} %")
    _dress(bounded, "Points below the best of the grid")
    _dress(unbounded, "... without a bound on a step")
    for axes in (rates, bounded, unbounded):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9.5)
    return figure


def _dress(axes: Axes, title: str) -> None:
    axes.set(xscale="log", xlim=(0.009, 0.18), ylim=(-1.2, MAX_LOSS), title=title)
    axes.title.set_fontsize(10.5)
    axes.set_xlabel("trust: the rate times the depth")
    axes.set_xticks(TICKS, [f"{trust:g}" for trust in TICKS])
    axes.minorticks_off()
    axes.axvline(TRUST, color="grey", linestyle="--")
    axes.axhline(1, color="grey", linestyle=":")
