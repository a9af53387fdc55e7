"""How runs get on: bars in a terminal, lines in a log, TensorBoard's files beside the records."""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from nero_lab.loops.training import Training
from nero_lab.protocol import Settings, Task

#: Seconds between two lines, where the output is a file or a pipe.
QUIET = 15.0
#: Seconds between two looks at the epoch under way.
GLANCE = 0.5


class Display:
    """Shows training as it goes and writes TensorBoard's files.

    Args:
        console: where to.
        out: the folder of the records; TensorBoard has one of its own in it.
        device: on which there will be training.
    """

    def __init__(self, console: Console, out: Path, device: torch.device) -> None:
        self.console, self.out, self.device = console, out, device
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metric]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bars: dict[Settings, TaskID] = {}
        self._writers: dict[Settings, SummaryWriter] = {}
        self._written: dict[Settings, int] = {}  # of how many epochs
        self._said = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        for settings in list(self._writers):
            self._tensorboard(settings, None)

    def plan(self, task: Task, runs: Sequence[Settings], done: Sequence[dict[str, Any]]) -> None:
        left = len(runs) - len(done)
        text = f"{task.name}: {left} {'run' if left == 1 else 'runs'} to do on {self.device}"
        if done:
            made = sorted({f"{record.get('device')}, {str(record.get('finished'))[:10]}" for record in done})
            text += f", {len(done)} done before ({'; '.join(made)})"
        self.console.print(text)
        seconds = task.seconds[0 if self.device.type == "cuda" else 1]
        if left and seconds is not None and all(settings.epochs == task.epochs for settings in runs):
            which = "an NVIDIA H200" if self.device.type == "cuda" else "two cores"
            self.console.print(f"one alone takes about {duration(seconds)} on {which}")
        for tool, what in task.tools.items():
            if left and find_spec(tool) is None:
                self.console.print(f"without {tool} there will be no {what}: for it, pip install 'nero-optim[paper]'")

    def begun(self, training: Training) -> None:
        task, settings = training.task, training.settings
        name = task.name_of(settings)
        self._tensorboard(settings, self.out / "tensorboard" / task.name / name, again=training.steps_done > 0)
        self._written[settings] = 0
        self._write_epochs(training)  # again, if it goes on: it may have been broken off before they were all told
        self._bars[settings] = self.progress.add_task(
            name, total=settings.epochs * training.steps_per_epoch, completed=training.steps_done, metric=""
        )
        training.on_activity = partial(self._tell, self._bars[settings], name)
        if training.steps_done:
            self.console.print(f"{name}: goes on from epoch {training.epoch}, step {training.step}")

    def stepped(self, training: Training) -> None:
        now = time.monotonic()
        fresh = training.epochs_known > self._written[training.settings]
        if fresh:
            if not self._written[training.settings] and (remark := training.throughput_note()):
                self.console.print(f"{training.task.name_of(training.settings)}: {remark}")
            self._write_epochs(training)
        elif now - self._shown < GLANCE:
            return
        self._shown = now
        if fresh or training.device.type != "cpu":  # to look into an epoch under way, a GPU would have to be waited for
            metric = _last(training) if training.epochs_known else ""
        else:
            so_far = _told(training.task, training.running_metrics())
            metric = f"{so_far} so far" if so_far else ""
        metric = ", ".join(filter(None, (metric, training.speed())))
        self.progress.update(self._bars[training.settings], completed=training.steps_done, metric=metric)
        if not self.console.is_terminal and now - self._said > QUIET:
            self._said = now
            share = training.steps_done / (training.settings.epochs * training.steps_per_epoch)
            took, left = duration(training.seconds), duration(training.seconds * (1 / share - 1))
            told = filter(None, (f"epoch {training.epoch}", f"{share:.0%}", metric, took, f"{left} left"))
            self.console.print(f"{training.task.name_of(training.settings)}: {', '.join(told)}")

    def ended(self, training: Training) -> None:
        name = training.task.name_of(training.settings)
        self.progress.remove_task(self._bars.pop(training.settings))
        self._tensorboard(training.settings, None)
        self.console.print(
            f"{name}: {_last(training)} after {training.epoch} {'epoch' if training.epoch == 1 else 'epochs'}, "
            f"{duration(training.seconds)}; "
            f"record in {self.out / training.task.name / name}.json"
        )

    def stopping(self) -> None:
        self.console.print("stopping after this step, to keep what is done; interrupt again to stop at once")

    def _tell(self, bar: TaskID, name: str, what: str, share: float = 0.0) -> None:
        what += f", {share:.0%}" if share else ""
        self.progress.update(bar, metric=what)
        if self.console.is_terminal or self.device.type != "cpu":  # a GPU is done before the line is read
            return
        if not share or time.monotonic() - self._said > QUIET:
            self._said = time.monotonic()
            self.console.print(f"{name}: {what}")

    def _write_epochs(self, training: Training) -> None:
        """Those that are known and not yet told."""
        writer, told = self._writers.get(training.settings), self._written[training.settings]
        self._written[training.settings] = training.epochs_known
        try:
            for epoch in range(told, training.epochs_known):
                for name, values in training.curve.items():
                    if writer is not None and (value := values[epoch]) is not None:
                        writer.add_scalar(name.replace("_", "/"), value, epoch + 1)
        except OSError as error:
            self._without_tensorboard(training.settings, error)

    def _tensorboard(self, settings: Settings, folder: Path | None, *, again: bool = False) -> None:
        """Open a run's file in a folder, or close it. A run does not end for want of it."""
        try:
            if folder is not None:
                self._writers[settings] = SummaryWriter(str(folder), purge_step=1 if again else None)
            elif settings in self._writers:
                self._writers.pop(settings).close()
        except OSError as error:
            self._without_tensorboard(settings, error)

    def _without_tensorboard(self, settings: Settings, error: OSError) -> None:
        self._writers.pop(settings, None)
        self.console.print(f"TensorBoard's file cannot be written ({error.strerror}): going on without it")


class Silence:
    """Shows and writes nothing: for all but the first of the processes that train one network together."""

    def plan(self, *_: object) -> None:
        """Nothing."""

    begun = stepped = ended = stopping = plan


def duration(seconds: float) -> str:
    """For people."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.95 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _last(training: Training) -> str:
    """The numbers of the last epoch."""
    return _told(training.task, {name: values[-1] for name, values in training.curve.items()})


def _told(task: Task, numbers: Mapping[str, float | None]) -> str:
    """As people speak of them: perplexity where the loss counts, else accuracy, else all that there are."""
    if task.metric.endswith("loss"):
        return _joined({name: _perplexity(value) for name, value in numbers.items() if name.endswith("_loss")})
    if task.metric.endswith("accuracy"):
        return _joined({name: f"{value:.2%}" for name, value in numbers.items() if name.endswith("_accuracy")})
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items() if value is not None)


def _joined(told: dict[str, str]) -> str:
    """The values with the parts of the data that they are of."""
    return ", ".join(f"{name.rpartition('_')[0]} {value}" for name, value in told.items())


def _perplexity(loss: float | None) -> str:
    if loss is None or not loss < 700:
        return "diverged"
    perplexity = math.exp(loss)
    return f"perplexity {perplexity:.2f}" if perplexity < 1e5 else f"perplexity {perplexity:.3g}"
