"""The surroundings of a training: checks of all that could fail, the device, the data, and interrupts."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.progress import Progress

from nero.messages import how_to_install
from nero_lab import distributed
from nero_lab.data import DataError, Dataset, Game, Photos, load
from nero_lab.progress import Display
from nero_lab.protocol import Precision, SettingError, Settings, Task
from nero_lab.store import ReadOnlyStore, Store, StoreError
from nero_lab.sweep import RunObserver, train

#: Trains runs and returns their records; the second argument says whether more runs follow.
RunAll: TypeAlias = Callable[[list[Settings], bool], list[dict[str, Any]]]


@contextmanager
def training_session(
    console: Console,
    task: Task,
    data: Path | None,
    device_name: str,
    out: Path,
    precision: Precision,
    side_by_side: int | None,
    *,
    weights: bool = False,
    shard: bool = False,
) -> Iterator[RunAll]:
    """Check and load everything that could fail, and yield a function that trains runs."""
    device = find_device(device_name)
    check_precision(precision, device)
    at_a_time = side_by_side or (task.side_by_side if device.type == "cuda" else 1)
    with distributed.process_group(device, shard=shard):
        _check_processes(task, at_a_time, shard)
        is_first = distributed.rank() == 0
        console.quiet = not is_first
        store = (Store if is_first else ReadOnlyStore)(out, weights=weights)
        store.check(task, bytes_needed(task, at_a_time))
        dataset, stand_in = _load_for(console, task, data, device)
        # the display is inside, so that its bars are gone before the last line
        with (
            exit_if_stopped(console),
            Display(console, out, device) if is_first else nullcontext(RunObserver()) as observer,
        ):

            def run_all(asked: list[Settings], more: bool) -> list[dict[str, Any]]:
                runs = [replace(settings, data=stand_in) for settings in asked]
                _check_same_runs(task, runs, store)
                return train(task, runs, dataset, store, observer, at_a_time, more=more)

            yield run_all


@contextmanager
def ray_session(
    console: Console,
    task: Task,
    data: Path | None,
    device_name: str,
    out: Path,
    precision: Precision,
    side_by_side: int | None,
    address: str,
) -> Iterator[RunAll]:
    """Join a Ray cluster, check everything that could fail here, and yield a function that trains runs on the nodes."""
    if distributed.is_launched():
        raise SettingError("Ray starts the processes of --ray: start the command without torchrun")
    try:
        from nero_lab import ray_sweep
    except ModuleNotFoundError as error:
        raise SettingError(f"--ray needs {error.name}: {how_to_install('ray')}") from error
    with ray_sweep.cluster(address):
        device, gpus, at_a_time = ray_sweep.choose_device(device_name, side_by_side)
        check_precision(precision, device)
        store = Store(out)
        store.check(task, bytes_needed(task, at_a_time))
        folder = data or (Path(os.environ["NERO_DATA"]) if os.environ.get("NERO_DATA") else None)
        name = load_data(console, task.dataset, folder).name  # downloads what is missing, before many nodes do
        console.print(f"the Ray cluster has room for {at_a_time} runs at a time")
        with exit_if_stopped(console), Display(console, out, device) as observer:
            sweep = ray_sweep.RaySweep(task, folder and folder.absolute(), device, gpus, store, observer, console.print)

            def run_all(asked: list[Settings], more: bool) -> list[dict[str, Any]]:
                stand_in = name if name != task.dataset else None
                return sweep.train([replace(settings, data=stand_in) for settings in asked], more=more)

            yield run_all


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise if a device has no arithmetic of a precision."""
    if precision == "tf32" and device.type != "cuda":
        raise SettingError(f"tf32 needs an NVIDIA GPU, got --device {device}: take --precision float32")


def _check_processes(task: Task, at_a_time: int, shard: bool) -> None:
    if distributed.world_size() == 1:
        if shard:
            raise SettingError("--shard splits a network over several processes: start them with torchrun")
        return
    if not task.is_distributable:
        raise SettingError(f"{task.name} is trained by one process: start it without torchrun")
    if at_a_time > 1:  # collectives of two runs could be matched with each other
        raise SettingError("several processes make one run at a time: start them without --side-by-side")


def _check_same_runs(task: Task, runs: list[Settings], store: Store) -> None:
    if distributed.world_size() == 1:
        return
    if not distributed.all_equal([(settings, store.record(task, settings) is None) for settings in runs]):
        raise SettingError(
            "the processes do not have the same runs to make: start all by the same command, and let all see the same "
            "--out and --data"
        )


def bytes_needed(task: Task, at_a_time: int) -> int:
    """Estimate the space for checkpoints, old and new: weights and two states per weight, or ten if SOAP trains."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
    states = 10 if any(contender.optimiser == "soap" for contender in task.contenders.values()) else 2
    files, tensors, float32_bytes, other_bytes = 2, 1 + states, 4, 2**26
    return files * tensors * float32_bytes * parameters * at_a_time + other_bytes


def _load_for(
    console: Console, task: Task, folder: Path | None, device: torch.device
) -> tuple[Dataset | Game, str | None]:
    """Return the task's data on the device, and the name of the stand-in if it is not the task's own."""
    dataset = load_data(console, task.dataset, folder).to(device)
    if not isinstance(dataset, Photos):
        return dataset, None
    dataset = dataset.with_measured_rate(task.batch)
    console.print(dataset.description)
    return dataset, dataset.name if dataset.name != task.dataset else None


def load_data(console: Console, name: str, folder: Path | None) -> Dataset | Game:
    """Load a data set or game, and show downloads and other lengthy work on the console."""
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bars: dict[str, Any] = {}

        def show(work: str, done: int, total: int) -> None:
            if work not in bars:
                bars[work] = progress.add_task(work, total=total or None)
                if not console.is_terminal:
                    console.print(work + (f", {total / 1e6:.1f} MB" if total else ""))
            progress.update(bars[work], completed=done)

        return load(name, folder, progress=show)


@contextmanager
def exit_on_error(command: str) -> Iterator[None]:
    """Turn an error that the user can fix into a line and an exit status."""
    try:
        yield
    except (SettingError, DataError, StoreError) as error:
        sys.exit(f"{command}: {error}")


@contextmanager
def exit_if_stopped(console: Console) -> Iterator[None]:
    """Turn an interrupt of the training into a line and the exit status of its signal."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        console.print("stopped: run the same command again to continue from what was saved")
        # the status that shells use for a signal; an interrupt without a number comes from Ctrl-C
        raise SystemExit(128 + next(iter(interrupt.args), signal.SIGINT)) from None


def find_device(name: str) -> torch.device:
    """Return the device of a name such as ``cpu``, ``cuda:1`` or ``auto``."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = distributed.local_gpu() if name == "cuda" else torch.device(name)
    except RuntimeError as error:
        raise SettingError(f"there is no device {name!r}: take cpu, cuda or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingError(f"the tasks run on cpu or cuda, got {name!r}")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise SettingError(f"torch finds no {name}: take --device cpu, or install a torch with CUDA for your driver")
    return device
