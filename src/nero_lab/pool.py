"""Runs of several tasks in several processes, which share one GPU or the cores of a machine."""

import os
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nero_lab.data import Dataset, Game, load_once
from nero_lab.loops.training import Snapshot, Training
from nero_lab.progress import duration
from nero_lab.protocol import Settings, Task
from nero_lab.store import Store, StoreError
from nero_lab.sweep import RunObserver, deferred_interrupts, train
from nero_lab.tasks import task_named

#: Finds the task of a run and its data, on a device. Workers import it, so it is a function of a module.
Find: TypeAlias = Callable[[Settings, Path | None, torch.device], tuple[Task, Dataset | Game]]

#: Time between two looks at the clock and at interrupts.
POLL_EVERY_S = 0.5


def find(settings: Settings, folder: Path | None, device: torch.device) -> tuple[Task, Dataset | Game]:
    """Find the task of a run, and load its data once per process."""
    task = task_named(settings.task, settings.optimiser)
    return task, load_once(task.dataset, folder, device)


def train_in_processes(
    runs: Sequence[Settings],
    folder: Path | None,
    device: torch.device,
    root: Path,
    processes: int,
    *,
    minutes: float,
    say: Callable[[str], None],
    find: Find = find,
) -> int:
    """Train runs, each in one of several processes. A run that fails does not stop the others.

    Args:
        runs: the runs, first come, first served.
        folder: the data folder, or None for the default.
        device: the device of all runs.
        root: the folder of records and checkpoints.
        processes: the number of processes.
        minutes: no run starts after this time.
        say: prints a line.
        find: finds tasks and data.

    Returns:
        the number of runs that are recorded.

    Raises:
        KeyboardInterrupt: interrupted, with the number of the signal. The runs under way are saved.
        StoreError: if a process has died, or a run has failed.
    """
    context = get_context("spawn")  # a process with a GPU cannot fork
    stop, deadline, done, failed = context.Event(), time.monotonic() + 60 * minutes, 0, 0
    with (
        deferred_interrupts(lambda: say("stopping to save the runs")) as interrupted,
        ProcessPoolExecutor(processes, context, _begin, (stop, folder, device, root, find, processes)) as pool,
    ):
        waiting, active = list(reversed(runs)), dict[Future[dict[str, Any] | None], Settings]()
        while active or (waiting and time.monotonic() < deadline and not interrupted()):
            # not all at once: runs that wait in the pool could not be left out after the deadline
            while waiting and len(active) < processes and time.monotonic() < deadline and not interrupted():
                settings = waiting.pop()
                active[pool.submit(_train, settings)] = settings
            if interrupted():
                stop.set()
            for future in wait(active, POLL_EVERY_S, FIRST_COMPLETED).done:
                settings = active.pop(future)
                try:
                    record = future.result()
                except BrokenProcessPool as error:
                    hint = "see `dmesg` for lack of memory, and repeat the command to continue"
                    raise StoreError(f"a process died while it trained {settings.task}: {hint}") from error
                except Exception as error:
                    failed += 1
                    say(f"{_name(settings)} failed: {error!r}")
                else:
                    if record is not None:
                        done += 1
                        say(f"{_name(settings)}: done in {duration(record['seconds'])}, {done} of {len(runs)}")
        if interrupted():
            raise KeyboardInterrupt(interrupted())
    say(f"{done} of {len(runs)} runs done; records in {root}")
    if failed:
        raise StoreError(f"{failed} of {len(runs)} runs failed: see above, and repeat the command for the others")
    return done


def _name(settings: Settings) -> str:
    return f"{settings.task}, {settings.optimiser} at {settings.lr:g}, seed {settings.seed}"


class _Worker(RunObserver):
    """State that a process keeps from run to run. As an observer, it interrupts a run if the command is interrupted."""

    def __init__(
        self, stop: Event, folder: Path | None, device: torch.device, root: Path, find: Find, processes: int
    ) -> None:
        self.stop, self.folder, self.device, self.store, self.find = stop, folder, device, Store(root), find
        self.processes, self.busy = processes, threading.Lock()
        self.task, self.is_stopping = "", False

    def begun(self, training: Training | Snapshot) -> None:
        if isinstance(training, Training):
            training.side_by_side = self.processes  # they share the device

    def stepped(self, training: Training | Snapshot) -> None:  # noqa: ARG002
        if self.stop.is_set() and not self.is_stopping:
            self.is_stopping = True
            interrupt_main()  # train saves the run after this step


_worker: _Worker


def _begin(*arguments: Any) -> None:
    """Prepare a process."""
    global _worker
    os.setsid()  # an interrupt from the keyboard reaches the command alone, which sets ``stop``
    torch.set_num_threads(1)
    _worker = _Worker(*arguments)
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    """End this process when the command has died, after its run is saved."""
    if command := parent_process():
        command.join()
        _worker.stop.set()
        with _worker.busy:
            os._exit(1)


def _train(settings: Settings) -> dict[str, Any] | None:
    """Train one run in this process. Return its record, or None if the command was interrupted."""
    if settings.task != _worker.task:
        torch.compiler.reset()  # code compiled for other shapes would count towards torch's limit
        _worker.task = settings.task
    task, data = _worker.find(settings, _worker.folder, _worker.device)
    with _worker.busy:
        try:
            return train(task, [settings], data, _worker.store, _worker)[0]
        except KeyboardInterrupt:
            return None
