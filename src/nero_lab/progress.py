"""Progress of runs: bars in a terminal, lines in a log, and TensorBoard files beside the records."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

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
from typing_extensions import Self

from nero.messages import how_to_install
from nero_lab.loops.training import Snapshot, Training
from nero_lab.protocol import Settings, Task, has_diverged, perplexity
from nero_lab.sweep import RunObserver

#: Time between two lines, if the output is a file or a pipe.
LOG_EVERY_S = 15.0
#: Time between two updates of the bars within an epoch.
REFRESH_EVERY_S = 0.5


class Display(RunObserver):
    """Observer that shows the progress of runs and writes TensorBoard files.

    Args:
        console: the console to print to.
        out: the folder of the records; TensorBoard files go to its subfolder ``tensorboard``.
        device: the device of the training.
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
            transient=True,  # an interrupted run leaves no bar behind
        )
        self._bars: dict[Settings, TaskID] = {}
        self._writers: dict[Settings, SummaryWriter] = {}
        self._epochs_written: dict[Settings, int] = {}
        self._logged_at = self._refreshed_at = time.monotonic()

    def __enter__(self) -> Self:
        self._hook, threading.excepthook = threading.excepthook, self._handle_thread_error
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        for settings in list(self._writers):
            self._close_writer(settings)
        threading.excepthook = self._hook

    def plan(self, task: Task, runs: Sequence[Settings], done: Sequence[dict[str, Any]]) -> None:
        left = len(runs) - len(done)
        text = f"{task.name}: {left} {'run' if left == 1 else 'runs'} to do on {self.device}"
        if done:
            origins = sorted({f"{record.get('device')}, {str(record.get('finished'))[:10]}" for record in done})
            text += f", {len(done)} done before ({'; '.join(origins)})"
        self.console.print(text)
        if len(runs) == len(done) == 1:
            path = done[0].get("path") or self._record_path(task, runs[0])
            self.console.print(f"{task.run_name(runs[0])}: {last_metrics(task, done[0]['curve'])}; record in {path}")
        precision = runs[0].precision
        seconds = task.seconds.on(self.device.type, precision)
        if left and seconds is not None and all(settings.epochs == task.epochs for settings in runs):
            machine = "an NVIDIA H200" if self.device.type == "cuda" else "two cores"
            self.console.print(f"one run alone takes about {duration(seconds)} in {precision} on {machine}")
        for tool, result in task.tools.items():
            if left and find_spec(tool) is None:
                self.console.print(f"no {result} without {tool}: {how_to_install('lab')}")

    def begun(self, training: Training | Snapshot) -> None:
        task, settings = training.task, training.settings
        name = task.run_name(settings)
        self._forget(settings)  # the run was begun before, by a worker that died
        self._open_writer(settings, self.out / "tensorboard" / task.name / name, purge=training.steps_done > 0)
        self._epochs_written[settings] = 0
        self._write_epochs(training)  # a resumed run may have ended before all its epochs were written
        self._bars[settings] = self.progress.add_task(
            name, total=settings.epochs * training.steps_per_epoch, completed=training.steps_done, metric=""
        )
        training.on_activity = partial(self._show_work, self._bars[settings], name)
        if training.steps_done:
            self.console.print(f"{name}: continues from epoch {training.epoch}, step {training.step}")

    def stepped(self, training: Training | Snapshot) -> None:
        now = time.monotonic()
        is_new_epoch = training.epochs_known > self._epochs_written[training.settings]
        if is_new_epoch:
            if not self._epochs_written[training.settings] and (remark := training.throughput_note()):
                self.console.print(f"{training.task.run_name(training.settings)}: {remark}")
            self._write_epochs(training)
        elif now - self._refreshed_at < REFRESH_EVERY_S:
            return
        self._refreshed_at = now
        metric = ", ".join(filter(None, (self._current_metrics(training, is_new_epoch), training.speed())))
        self.progress.update(self._bars[training.settings], completed=training.steps_done, metric=metric)
        if not self.console.is_terminal and now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            share = training.steps_done / (training.settings.epochs * training.steps_per_epoch)
            took, left = duration(training.seconds), duration(training.seconds * (1 / share - 1))
            epochs = f"epoch {training.epoch} of {training.settings.epochs}"
            parts = filter(None, (epochs, f"{share:.0%}", metric, took, f"{left} left"))
            self.console.print(f"{training.task.run_name(training.settings)}: {', '.join(parts)}")

    def ended(self, training: Training | Snapshot) -> None:
        name = training.task.run_name(training.settings)
        self._forget(training.settings)
        epochs = "1 epoch" if training.epoch == 1 else f"{training.epoch} epochs"
        self.console.print(
            f"{name}: {last_metrics(training.task, training.curve)} after {epochs}, "
            f"{duration(training.seconds)}; record in {self._record_path(training.task, training.settings)}"
        )

    def blocked(self, reason: str) -> None:
        self.console.print(f"{reason}: waiting until it is done")

    def stopping(self) -> None:
        self.console.print("stopping after this step to save the runs; interrupt again to stop at once")

    def _record_path(self, task: Task, settings: Settings) -> Path:
        return self.out / task.name / f"{task.run_name(settings)}.json"

    def _forget(self, settings: Settings) -> None:
        if settings in self._bars:
            self.progress.remove_task(self._bars.pop(settings))
        self._close_writer(settings)

    def _current_metrics(self, training: Training | Snapshot, is_new_epoch: bool) -> str:
        # reading the epoch under way would make the host wait for a GPU
        if is_new_epoch or training.device.type != "cpu":
            return last_metrics(training.task, training.curve) if training.epochs_known else ""
        so_far = format_metrics(training.task, training.running_metrics())
        return f"{so_far} so far" if so_far else ""

    def _show_work(self, bar: TaskID, name: str, work: str, share: float = 0.0) -> None:
        """Show lengthy work other than steps, such as an evaluation."""
        work += f", {share:.0%}" if share else ""
        self.progress.update(bar, metric=work)
        if self.console.is_terminal or self.device.type != "cpu":  # too short for a log line on a GPU
            return
        if not share or time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            self.console.print(f"{name}: {work}")

    def _write_epochs(self, training: Training | Snapshot) -> None:
        """Write the numbers of new epochs to TensorBoard's file."""
        writer, written = self._writers.get(training.settings), self._epochs_written[training.settings]
        self._epochs_written[training.settings] = training.epochs_known
        try:
            for epoch in range(written, training.epochs_known):
                for name, values in training.curve.items():
                    if writer is not None and (value := values[epoch]) is not None:
                        writer.add_scalar(name.replace("_", "/"), value, epoch + 1)
        except OSError as error:
            self._drop_writer(training.settings, error)

    def _open_writer(self, settings: Settings, folder: Path, *, purge: bool) -> None:
        try:
            self._writers[settings] = SummaryWriter(str(folder), purge_step=1 if purge else None)
        except OSError as error:
            self._drop_writer(settings, error)

    def _close_writer(self, settings: Settings) -> None:
        try:
            if settings in self._writers:
                self._writers.pop(settings).close()
        except OSError as error:
            self._drop_writer(settings, error)

    def _handle_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Print the traceback of a thread, but not of TensorBoard's on a full disk: the next write raises it again."""
        if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard")):
            self._hook(error)

    def _drop_writer(self, settings: Settings, error: OSError) -> None:
        """Continue a run without TensorBoard."""
        self._writers.pop(settings, None)
        self.console.print(f"cannot write TensorBoard's file ({error.strerror}): the run continues without it")


def duration(seconds: float) -> str:
    """Format a duration for people, such as "3 min"."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.95 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_metrics(task: Task, numbers: Mapping[str, float | None]) -> str:
    """Format the numbers of an epoch: perplexities, accuracies, or all of them, according to the task's metric."""
    if task.metric.endswith("loss"):
        return _by_part({name: _format_perplexity(value) for name, value in numbers.items() if name.endswith("_loss")})
    if task.metric.endswith("accuracy"):
        return _by_part({name: f"{value:.2%}" for name, value in numbers.items() if name.endswith("_accuracy")})
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items() if value is not None)


def last_metrics(task: Task, curve: Mapping[str, Sequence[float | None]]) -> str:
    """Format the numbers of the last epoch, and say if training has diverged."""
    text = format_metrics(task, {name: values[-1] for name, values in curve.items()})
    return ", ".join(filter(None, ["diverged" * (has_diverged(curve) and "diverged" not in text), text]))


def _by_part(texts: dict[str, str]) -> str:
    """Join texts such as {"train_loss": "perplexity 9"} to "train perplexity 9"."""
    return ", ".join(f"{name.rpartition('_')[0]} {text}" for name, text in texts.items())


def _format_perplexity(loss: float | None) -> str:
    value = perplexity(loss)
    if value == math.inf:
        return "diverged"
    return f"perplexity {value:.2f}" if value < 1e5 else f"perplexity {value:.3g}"
