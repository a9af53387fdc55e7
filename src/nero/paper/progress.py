"""How runs get on: bars in a terminal, lines in a log, TensorBoard's files beside the records."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

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

from nero.paper.protocol import Settings, Task
from nero.paper.training import Training

#: Seconds between two lines, where the output is a file or a pipe.
QUIET = 15.0


class Display:
    """Shows training as it goes and writes TensorBoard's files.

    Args:
        console: where to.
        tensorboard: the folder for TensorBoard.
    """

    def __init__(self, console: Console, tensorboard: Path) -> None:
        self.console, self.tensorboard = console, tensorboard
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
        self._said = time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        for writer in self._writers.values():
            writer.close()

    def plan(self, task: Task, settings: Sequence[Settings], done: Sequence[Settings]) -> None:
        left = len(settings) - len(done)
        skipped = f" ({len(done)} done before)" if done else ""
        self.console.print(f"{task.name}: {left} {'run' if left == 1 else 'runs'} to do{skipped}")

    def begun(self, training: Training) -> None:
        task, settings = training.task, training.settings
        name = task.name_of(settings)
        folder = self.tensorboard / task.name / name
        self._writers[settings] = SummaryWriter(str(folder), purge_step=training.epoch + 1)
        self._bars[settings] = self.progress.add_task(
            name, total=settings.epochs * training.steps_an_epoch, completed=training.steps_done, metric=""
        )
        if training.steps_done:
            self.console.print(f"{name}: goes on from epoch {training.epoch}, step {training.step}")

    def stepped(self, training: Training) -> None:
        bar, now = self._bars[training.settings], time.monotonic()
        if training.step == 0:
            for name, values in training.curve.items():
                if values[-1] is not None:
                    self._writers[training.settings].add_scalar(name.replace("_", "/"), values[-1], training.epoch)
            self.progress.update(bar, completed=training.steps_done, metric=_last(training))
            if not self.console.is_terminal and (now - self._said > QUIET):
                self._say(training, now)
        elif training.device.type == "cpu" and now - self._shown > 0.5:
            self._shown = now
            accuracy = training.so_far()["train_accuracy"]
            self.progress.update(bar, completed=training.steps_done, metric=f"train {accuracy:.2%} so far")
            if not self.console.is_terminal and now - self._said > QUIET:
                self._say(training, now)

    def ended(self, training: Training) -> None:
        name = training.task.name_of(training.settings)
        self.progress.remove_task(self._bars.pop(training.settings))
        self._writers.pop(training.settings).close()
        self.console.print(f"{name}: {_last(training)} after {training.epoch} epochs, {training.seconds:.0f} s")

    def _say(self, training: Training, now: float) -> None:
        self._said = now
        total = training.settings.epochs * training.steps_an_epoch
        metric = _last(training) if training.step == 0 else f"train {training.so_far()['train_accuracy']:.2%} so far"
        self.console.print(
            f"{training.task.name_of(training.settings)}: epoch {training.epoch}, "
            f"{training.steps_done / total:.0%}, {metric}, {training.seconds:.0f} s"
        )


def _last(training: Training) -> str:
    train, test = (training.curve[f"{part}_accuracy"][-1] for part in ("train", "test"))
    return f"train {train:.2%}, test {test:.2%}"
