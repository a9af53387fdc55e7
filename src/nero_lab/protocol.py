"""Definition of an experiment: a task, its contenders, and the settings of one run."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from nero_lab import baselines
from nero_lab.data.dataset import Augment

#: Of matrix products: float32, TF32, or bfloat16 by autocast, with parameters in float32.
Precision: TypeAlias = Literal["float32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
#: Factor of the learning rate, from the index of the step and the number of steps per epoch.
Schedule: TypeAlias = Callable[[int, int], float]
#: exp() of a larger loss overflows a float.
MAX_LOSS = 700.0


class SettingError(ValueError):
    """An impossible setting; the message names the possible ones."""


@dataclass(frozen=True)
class Contender:
    """An optimiser as a task runs it.

    Args:
        optimiser: its name in :mod:`nero_lab.baselines`.
        best: the best learning rate that the paper reports, or the default of a study.
        options: the optimiser's arguments besides the learning rate.
        model: a factory for the network, if it differs from the task's.
        grid: the learning rates to search, if they differ from the task's.
    """

    optimiser: str
    best: float
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[..., nn.Module] | None = None
    grid: tuple[float, ...] | None = None


class Seconds(NamedTuple):
    """The duration of a single run by machine and precision; None where it was not measured.

    Attributes:
        gpu: on an NVIDIA H200 in float32.
        tf32: on an NVIDIA H200 in tf32.
        cpu: on two cores of a Neoverse-N1, in float32.
        bf16: on an NVIDIA H200 in bf16; the median of the runs on record that were made one at a time.
    """

    gpu: float | None = None
    tf32: float | None = None
    cpu: float | None = None
    bf16: float | None = None

    def on(self, device: str, precision: Precision) -> float | None:
        """Return the duration on a type of device, "cuda" or "cpu", in a precision."""
        if device == "cpu":
            return self.cpu
        return {"float32": self.gpu, "tf32": self.tf32, "bf16": self.bf16}[precision]


@dataclass(frozen=True)
class Task:
    """One experiment, of the paper or of another study.

    Args:
        name: the name on the command line.
        shows: the figure or table of the paper; may be empty in other studies.
        title: the claim, in one line.
        dataset: the name of the data set.
        model: a factory for the network, on the CPU and from torch's global generator. It gets the data set's
            ``sizes`` as keyword arguments.
        contenders: the optimisers, by name.
        grid: the learning rates to search.
        epochs: the number of epochs of the schedule.
        batch: the number of examples per step.
        schedule: the factor of the learning rate at each step.
        metric: the curve whose last value selects the best learning rate. Accuracy and reward count as better when
            higher, loss and distance when lower.
        augment: the augmentation of the training images, applied once per epoch.
        seconds: the duration of a single run.
        side_by_side: the number of runs that an H200 trains at a time.
        smoothing: the label smoothing of the training loss.
        is_loss_summed: train on the sum of a batch's losses instead of their mean.
        verdict: computes further numbers of the record, from the trained network and its data.
        tools: optional packages, each with the part of the record that is missing without it.
        is_distributable: allow several processes to train one network, each on its part of every batch.
        loop: makes the :class:`nero_lab.loops.training.Training` of a run from the task, the settings, the data, and
            the state of a checkpoint or None. Without it, the supervised loop trains.
        study: the study that the task belongs to, which groups the tasks of ``nero list``.
        seeds: the number of seeds at each contender's best rate.
        precision: the precision of a run, unless the user names one.
        is_compiled: compile the network on a GPU: the items of its module lists, such as the blocks of a transformer,
            or the whole if it has no such list (of an ``nn.Sequential``, only the items that are not torch's own);
            of a GAN, both networks. Steps are CUDA graphs in either case.
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
    seconds: Seconds
    augment: Augment | None = None
    side_by_side: int = 4
    smoothing: float = 0.0
    is_loss_summed: bool = False
    verdict: Callable[[nn.Module, Any], dict[str, float]] | None = None
    tools: Mapping[str, str] = field(default_factory=dict)
    is_distributable: bool = False
    loop: Callable[["Task", "Settings", Any, dict[str, Any] | None], Any] | None = None
    study: str = "paper"
    seeds: int = 3
    precision: Precision = "float32"
    is_compiled: bool = False

    def settings(
        self,
        contender: str,
        lr: float | None = None,
        seed: int = 0,
        epochs: int | None = None,
        precision: str | None = None,
    ) -> "Settings":
        """Return the checked settings of a run. Omitted values are those of the task.

        Raises:
            SettingError: if a value is impossible for this task.
        """
        if contender not in self.contenders:
            raise SettingError(f"{self.name} has no optimiser {contender!r}: take one of {', '.join(self.contenders)}")
        lr = self.contenders[contender].best if lr is None else lr
        epochs = self.epochs if epochs is None else epochs
        chosen = self.precision if precision is None else precision_named(precision)
        if not 0 <= lr <= torch.finfo(torch.float32).max:
            raise SettingError(f"the learning rate must be finite and not negative, such as 0.01, got {lr}")
        if not 0 <= seed < 2**31:
            raise SettingError(f"the seed must be in [0, 2^31), got {seed}")
        if not 1 <= epochs <= self.epochs:
            raise SettingError(f"{self.name} has a schedule of 1 to {self.epochs} epochs, got {epochs}")
        if chosen == "bf16" and self.precision != "bf16" and self.loop is not None:
            raise SettingError(f"{self.name} trains in float32 or tf32, got {chosen}: take either")
        return Settings(self.name, contender, lr, seed, epochs, chosen)

    def check_installed(self, contender: str) -> None:
        """Raise if the optimiser of a contender is not installed."""
        if fault := baselines.missing(self.contenders[contender].optimiser):
            raise SettingError(fault)

    def grid_of(self, contender: str) -> tuple[float, ...]:
        """Return the learning rates to search for a contender."""
        own = self.contenders[contender].grid
        return self.grid if own is None else own

    def run_name(self, settings: "Settings") -> str:
        """Return the file name of a run. It is short for the paper's settings, and names every departure from them."""
        name = f"{settings.optimiser}-lr{settings.lr}-seed{settings.seed}"
        name += f"-epochs{settings.epochs}" if settings.epochs != self.epochs else ""
        name += f"-{settings.data}" if settings.data is not None else ""
        return name + (f"-{settings.precision}" if settings.precision != "float32" else "")


@dataclass(frozen=True)
class Settings:
    """The settings that determine a run's result, apart from the machine.

    Attributes:
        optimiser: the name of a contender of the task.
        data: the name of the stand-in data set, or None for the task's own.
    """

    task: str
    optimiser: str
    lr: float
    seed: int
    epochs: int
    precision: Precision
    data: str | None = None


def precision_named(name: str) -> Precision:
    """Return the precision of that name.

    Raises:
        SettingError: if there is none.
    """
    for precision in PRECISIONS:
        if name == precision:
            return precision
    raise SettingError(f"the precision must be one of {', '.join(PRECISIONS)}, got {name!r}")


def has_diverged(curve: Mapping[str, Sequence[float | None]]) -> bool:
    """Tell whether a loss of training was not finite in the last epoch. Accuracies and rewards stay numbers then."""
    trained = ["train_loss"] if "train_loss" in curve else [name for name in curve if name.endswith("_loss")]
    ends = [curve[name][-1] for name in trained]
    return any(end is None or not math.isfinite(end) for end in ends)


def best_rate(task: Task, records: Iterable[Mapping[str, Any]]) -> float:
    """Return the learning rate with the best last epoch among the records of one contender.

    A tie goes to the contender's usual rate, or else to the smallest. A diverged run is the worst.
    """
    sign = -1 if task.metric.endswith(("loss", "distance")) else 1
    usual = {name: contender.best for name, contender in task.contenders.items()}

    def rank(record: Mapping[str, Any]) -> tuple[float, bool, float]:
        last = record["curve"][task.metric][-1]
        value = -math.inf if last is None or has_diverged(record["curve"]) else sign * last
        return value, record["lr"] == usual.get(record["optimiser"]), -record["lr"]

    return float(max(records, key=rank)["lr"])


def perplexity(loss: float | None) -> float:
    """Return exp(loss), or infinity for a diverged run."""
    return math.exp(loss) if loss is not None and loss <= MAX_LOSS else math.inf


def decay_each_epoch(factor: float) -> Schedule:
    """Multiply the learning rate by the factor after each epoch."""
    return lambda step, steps_an_epoch: factor ** (step // steps_an_epoch)


def linear_decay(epochs: int) -> Schedule:
    """Lower the learning rate linearly to zero at the end of the given epochs, step by step."""
    return lambda step, steps_an_epoch: 1 - step / (epochs * steps_an_epoch)


def constant(step: int, steps_an_epoch: int) -> float:  # noqa: ARG001
    """Keep the learning rate constant."""
    return 1.0


def warm_up_then_drop(warm_up: int, factor: float, at: tuple[int, ...]) -> Schedule:
    """Raise the learning rate linearly over the first epochs, and multiply it by the factor at the epochs in ``at``."""

    def schedule(step: int, steps_an_epoch: int) -> float:
        rising = (step + 1) / (warm_up * steps_an_epoch)
        return min(1.0, rising) * drop(factor, at)(step, steps_an_epoch)

    return schedule


def drop(factor: float, at: tuple[int, ...]) -> Schedule:
    """Multiply the learning rate by the factor at the epochs in ``at``."""
    return lambda step, steps_an_epoch: factor ** sum(step >= epoch * steps_an_epoch for epoch in at)


def rise_and_fall(top: int, end: int) -> Schedule:
    """Raise the learning rate linearly up to epoch ``top``, and lower it to zero in epoch ``end``, once per epoch."""

    def schedule(step: int, steps_an_epoch: int) -> float:
        epoch = 1 + step // steps_an_epoch
        return epoch / top if epoch <= top else (end - epoch) / (end - top)

    return schedule


def warm_up_then_cosine(warm_up: int, end: int) -> Schedule:
    """Raise the learning rate linearly over the first epochs, and lower it to zero at epoch ``end`` along a cosine."""

    def schedule(step: int, steps_an_epoch: int) -> float:
        rising = warm_up * steps_an_epoch
        if step < rising:
            return (step + 1) / rising
        return (1 + math.cos(math.pi * (step - rising) / (end * steps_an_epoch - rising))) / 2

    return schedule


def warm_up_then_linear(share: float, end: int) -> Schedule:
    """Raise the learning rate linearly over a share of all steps, and lower it linearly to zero at epoch ``end``."""

    def schedule(step: int, steps_an_epoch: int) -> float:
        total = end * steps_an_epoch
        rising = share * total
        return min(1.0, (step + 1) / rising, (total - step) / (total - rising))

    return schedule
