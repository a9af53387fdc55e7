"""The runs of the study of step size by depth, and the questions that its tables and its figure ask."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from nero_lab.store import read_records
from nero_lab.tasks import TASKS
from nero_lab.tasks.depth import RATES

#: The seeds that the trust of ``lr="auto"`` was chosen on.
SEEDS = (0, 1, 2)
#: Depths whose perceptrons learn within five epochs.
LEARNING_LAYERS = (5, 10, 20, 50)
#: Train accuracy, in per cent, below which a perceptron has not begun to learn.
CHANCE = 25.0


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
        records: records of both; runs with fewer epochs than their task are left out.
        trust: the content of benchmarks/results/trust.json.
    """

    def __init__(self, records: Iterable[dict[str, Any]], trust: Mapping[str, Any]) -> None:
        whole = [record for record in records if record["epochs"] == TASKS[record["task"]].epochs]
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
