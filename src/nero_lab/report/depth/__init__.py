"""The runs of the study of step size by depth, the questions that its tables ask, and its figure."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nero_lab.store import read_records
from nero_lab.tasks import TASKS
from nero_lab.tasks.depth import LAYERS, RATES, TRUST, TRUSTS

#: The seeds that the trust of ``lr="auto"`` was chosen on.
SEEDS = (0, 1, 2)
#: Depths whose perceptrons learn within five epochs.
LEARNING_LAYERS = (5, 10, 20, 50)
#: Train accuracy, in per cent, below which a perceptron has not begun to learn.
CHANCE = 25.0
#: Smaller trusts, and 0.11, were tried without a bound.
UNBOUNDED_TRUSTS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.11, 0.16)
TICKS = (0.01, 0.02, 0.04, 0.08, 0.16)
#: The greatest loss, in points of train accuracy, that the figure shows.
MAX_LOSS = 8.0


class Network(NamedTuple):
    """A network of the paper, or a part of one.

    Attributes:
        name: its name on the pages.
        task: the task that trains it.
        part: the submodule of the task's model; empty for all of it.
        tensors: the number of its tensors of neurons.
        depth: as counted on seed 0.
    """

    name: str
    task: str
    part: str
    tensors: int
    depth: float


NETWORKS = (
    Network("perceptron of 100 layers", "mnist-deep", "", 100, 100.0),
    Network("VGG-11", "cifar10-vgg11", "", 11, 11.0),
    Network("ResNet-18", "cifar10-resnet18", "", 21, 12.3),
    Network("language model, 2 blocks without norms", "wikitext2", "", 10, 5.8),
    Network("translator, 6 + 6 blocks, norms behind", "translation", "", 97, 23.6),
    Network("Pong's actor and critic", "pong", "", 6, 5.0),
    Network("GAN, generator", "cgan", "generator", 27, 8.3),
    Network("GAN, discriminator", "cgan", "discriminator", 17, 5.7),
    Network("ResNet-50", "imagenet", "", 54, 24.9),
)


class Study:
    """Runs of the study and of the paper's suite, by task, contender, rate (or trust) and seed.

    Args:
        records: records of both; runs with fewer epochs than their task are left out. Of repeated runs the last counts.
        trust: the content of benchmarks/results/trust.json.
    """

    def __init__(self, records: Iterable[dict[str, Any]], trust: Mapping[str, Any]) -> None:
        ordered = sorted(records, key=lambda record: str(record.get("finished", "")))
        whole = [record for record in ordered if record["epochs"] == TASKS[record["task"]].epochs]
        self.runs = {(run["task"], run["optimiser"], run["lr"], run["seed"]): run for run in whole}
        self.trust = trust

    def curves(
        self, task: str, contender: str, rate: float, measure: str = "train_accuracy", seeds: Iterable[int] = range(99)
    ) -> list[list[float]]:
        """Return the curves of a contender at a rate, in the order of their seeds."""
        found = [self.runs.get((task, contender, rate, seed)) for seed in seeds]
        return [run["curve"][measure] for run in found if run is not None]

    def ends(self, *cell: Any, **where: Any) -> list[float]:
        """Return the last accuracies of :meth:`curves`, in per cent."""
        return [100 * curve[-1] for curve in self.curves(*cell, **where)]

    def mean(self, task: str, contender: str, rate: float, part: str = "train") -> float:
        """Return the mean of the last accuracies on :data:`SEEDS`, in per cent."""
        return statistics.fmean(self.ends(task, contender, rate, f"{part}_accuracy", SEEDS))

    def best_rate(self, layers: int) -> float:
        """Return the rate of the grid with the highest mean train accuracy for perceptrons of that depth."""
        return max(RATES, key=lambda rate: self.mean(f"perceptron-{layers}", "nero", rate))


def read_study(root: Path) -> Study:
    """Read the committed records under the root of the repository."""
    records = [*read_records(root / "results"), *read_records(root / "results/depth")]
    return Study(records, json.loads((root / "benchmarks/results/trust.json").read_text()))


def breaks_down(curve: Sequence[float]) -> bool:
    """Tell whether train accuracy falls by more than a point from one epoch to the next."""
    return any(after < before - 0.01 for before, after in pairwise(curve))


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
