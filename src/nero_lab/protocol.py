"""The words of an experiment: a task, its contenders, and the settings of one run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

Precision: TypeAlias = Literal["float32", "tf32"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32")
#: The factor of the learning rate at a step, of so many an epoch.
Schedule: TypeAlias = Callable[[int, int], float]
#: New pixels for an epoch, from pixels and the run's own generator.
Augment: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]


class SettingError(ValueError):
    """A setting that cannot be; the text says what can."""


@dataclass(frozen=True)
class Contender:
    """An optimiser as a task runs it.

    Args:
        optimiser: its name in :mod:`nero_lab.baselines`.
        best: the best learning rate that the paper reports.
        options: what it is made with besides the learning rate.
        model: the network, where it is not the task's.
    """

    optimiser: str
    best: float
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[..., nn.Module] | None = None


@dataclass(frozen=True)
class Task:
    """One experiment of the paper.

    Args:
        name: as typed on the command line.
        shows: the figure or table of the paper; empty if the task is not the paper's.
        title: the claim, in a line.
        dataset: the name of the data set.
        model: makes the network, on the CPU, from torch's generator; told what the data's ``sizes`` say, if anything.
        contenders: by name.
        grid: the learning rates searched.
        epochs, batch: how long, and how many examples a step.
        schedule: the factor of the learning rate at each step.
        metric: what decides which rate is best, of the last epoch: the highest accuracy or reward, or the lowest loss
            or distance.
        augment: what is done to the training images in each epoch.
        seconds: what a run alone takes, in float32, on an NVIDIA H200 and on two cores of a Neoverse-N1; None: not
            timed yet.
        side_by_side: how many runs one such GPU does well at a time.
        smoothing: how much of each label is shared out among all, to train on.
        summed: train on the sum of a batch's losses, and not on their mean.
        verdict: what else there is to say of a trained network, from it and its data.
        tools: packages that a run can do without, each with what is then missing from its record.
        several: whether several processes may train one network together, each on its share of every batch.
        loop: what trains, a :class:`nero_lab.loops.training.Training` made with task, settings, data and the state
            of a checkpoint or None; without, the one of all supervised tasks.
    """

    name: str
    shows: str
    title: str
    dataset: str
    model: Callable[..., nn.Module]
    contenders: Mapping[str, Contender]
    grid: tuple[float, ...]
    epochs: int
    batch: int
    schedule: Schedule
    metric: Literal["train_accuracy", "test_accuracy", "valid_loss", "reward", "test_distance"]
    seconds: tuple[float | None, float | None]
    augment: Augment | None = None
    side_by_side: int = 4
    smoothing: float = 0.0
    summed: bool = False
    verdict: Callable[[nn.Module, Any], dict[str, float]] | None = None
    tools: Mapping[str, str] = field(default_factory=dict)
    several: bool = False
    loop: Callable[["Task", "Settings", Any, dict[str, Any] | None], Any] | None = None

    def settings(
        self,
        contender: str,
        lr: float | None = None,
        seed: int = 0,
        epochs: int | None = None,
        precision: str = "float32",
    ) -> "Settings":
        """The settings of a run, checked; what is not given is the paper's."""
        if contender not in self.contenders:
            raise SettingError(f"{self.name} has no optimiser {contender!r}: take one of {', '.join(self.contenders)}")
        lr = self.contenders[contender].best if lr is None else lr
        epochs = self.epochs if epochs is None else epochs
        if not 0 <= lr <= torch.finfo(torch.float32).max:
            raise SettingError(f"the learning rate must be finite and not negative, like 0.01, but it is {lr}")
        if not 0 <= seed < 2**31:
            raise SettingError(f"the seed must be from 0 to 2^31 - 1, but it is {seed}")
        if not 1 <= epochs <= self.epochs:
            raise SettingError(
                f"{self.name} runs for 1 to {self.epochs} epochs (its schedule ends there), not {epochs}"
            )
        for known in PRECISIONS:
            if precision == known:
                return Settings(self.name, contender, lr, seed, epochs, known)
        raise SettingError(f"the precision must be one of {', '.join(PRECISIONS)}, but it is {precision!r}")

    def name_of(self, settings: "Settings") -> str:
        """A name for a run's files: what the paper ran is short, what departs from it is said."""
        name = f"{settings.optimiser}-lr{settings.lr}-seed{settings.seed}"
        name += f"-epochs{settings.epochs}" if settings.epochs != self.epochs else ""
        name += f"-{settings.data}" if settings.data is not None else ""
        return name + (f"-{settings.precision}" if settings.precision != "float32" else "")


@dataclass(frozen=True)
class Settings:
    """All that a run's result depends on, but for the machine.

    Attributes:
        data: the name of the stand-in, where a run is not on the task's own data set.
    """

    task: str
    optimiser: str
    lr: float
    seed: int
    epochs: int
    precision: Precision
    data: str | None = None


def best_rate(task: Task, records: list[dict[str, Any]]) -> float:
    """The rate whose run ended best, among runs of one contender; of equals the paper's, or else the smallest."""

    def worth(record: dict[str, Any]) -> tuple[float, bool, float]:
        last = record["curve"][task.metric][-1]
        last = -last if last is not None and task.metric.endswith(("loss", "distance")) else last
        papers = record["lr"] == task.contenders[record["optimiser"]].best
        return (-math.inf if last is None else last, papers, -record["lr"])

    return float(max(records, key=worth)["lr"])


def decay_each_epoch(factor: float) -> Schedule:
    """The rate times the factor after each epoch."""
    return lambda step, steps_an_epoch: factor ** (step // steps_an_epoch)


def constant(step: int, steps_an_epoch: int) -> float:  # noqa: ARG001
    """The rate as it is."""
    return 1.0


def warm_up_then_drop(warm_up: int, factor: float, at: tuple[int, ...]) -> Schedule:
    """A rate that rises linearly, step by step, over the first epochs, and is multiplied by the factor at others."""

    def schedule(step: int, steps_an_epoch: int) -> float:
        rising = (step + 1) / (warm_up * steps_an_epoch)
        return min(1.0, rising) * drop(factor, at)(step, steps_an_epoch)

    return schedule


def drop(factor: float, at: tuple[int, ...]) -> Schedule:
    """A rate that is multiplied by the factor at some epochs."""
    return lambda step, steps_an_epoch: factor ** sum(step >= epoch * steps_an_epoch for epoch in at)


def rise_and_fall(top: int, end: int) -> Schedule:
    """A rate that changes once an epoch: it rises linearly to its peak in the top-th, and falls to zero in the last."""

    def schedule(step: int, steps_an_epoch: int) -> float:
        epoch = 1 + step // steps_an_epoch
        return epoch / top if epoch <= top else (end - epoch) / (end - top)

    return schedule


def warm_up_then_cosine(warm_up: int, end: int) -> Schedule:
    """A rate that rises linearly, step by step, over the first epochs, and falls to zero at the end as a cosine."""

    def schedule(step: int, steps_an_epoch: int) -> float:
        rising = warm_up * steps_an_epoch
        if step < rising:
            return (step + 1) / rising
        return (1 + math.cos(math.pi * (step - rising) / (end * steps_an_epoch - rising))) / 2

    return schedule
