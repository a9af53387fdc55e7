"""Runs of several tasks in several processes, which share one GPU or the cores of a machine."""

import math
import os
import signal
import threading
import time
from _thread import interrupt_main
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nero_lab.data import DataError, Dataset, Game, load_once
from nero_lab.loops.training import Snapshot, Training
from nero_lab.progress import duration, last_metrics
from nero_lab.protocol import SettingError, Settings, Task
from nero_lab.store import BusyError, Store, StoreError
from nero_lab.sweep import BUSY_RETRY_S, RunObserver, deferred_interrupts, train
from nero_lab.tasks import task_named

#: Finds the task of a run and its data, on a device. Workers import it, so it is a function of a module.
Find: TypeAlias = Callable[[Settings, Path | None, torch.device], tuple[Task, Dataset | Game]]

#: Answer when a run is under way; another one follows.
BEGUN = "begun"
#: Answer for a run that another command makes.
BUSY = "another command makes it, so it comes last"
#: Time between two looks at the clock and at interrupts.
POLL_EVERY_S = 0.5
#: Time between two lines about the runs under way.
STATUS_EVERY_S = 60.0
#: No time left is estimated before this share of the work is done.
MIN_SHARE_TO_ESTIMATE = 0.01


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
    seconds: Mapping[Settings, float | None] | None = None,
    find: Find = find,
) -> int:
    """Train runs, each in one of several processes. A run that fails does not stop the others.

    Runs that another command makes come last.

    Args:
        runs: the runs, in the order in which they start.
        folder: the data folder, or None for the default.
        device: the device of all runs.
        root: the folder of records and checkpoints.
        processes: the number of processes.
        minutes: after this time, the runs under way are saved, to continue in the next call.
        say: prints a line.
        seconds: how long each run takes alone, where that is known; only the ratios count.
        find: finds tasks and data.

    Returns:
        the number of runs that are recorded.

    Raises:
        KeyboardInterrupt: interrupted, with the number of the signal. The runs under way are saved.
        StoreError: if a process has died, or a run has failed.
    """
    context = get_context("spawn")  # a process with a GPU cannot fork
    stop, deadline = context.Event(), time.monotonic() + 60 * minutes
    first, share = context.RawArray("d", len(runs)), context.RawArray("d", len(runs))
    report = _Report(runs, seconds or {}, first, share, say)
    report.begin(processes, device, minutes)
    arguments = stop, folder, device, root, find, processes, first, share
    with (
        deferred_interrupts(lambda: say("stopping to save the runs")) as interrupted,
        _processes(context, arguments) as start,
    ):
        waiting, active, idle = deque(range(len(runs))), dict[Connection, int](), list[Connection]()
        not_before = dict[int, float]()  # when to try runs again that another command makes
        dead = ""  # the task of a process that has died
        while active or (waiting and not stop.is_set()):
            is_over = time.monotonic() >= deadline
            if is_over and not stop.is_set():
                say("the time is over: saving the runs")
            if is_over or interrupted() or dead:
                stop.set()
            # not all at once: runs that wait in a pipe could not be left out after the deadline
            while (
                waiting
                and len(active) < processes
                and not stop.is_set()
                and time.monotonic() >= not_before.get(waiting[0], 0)
            ):
                place, pipe = waiting.popleft(), idle.pop() if idle else start()
                active[pipe] = place
                with suppress(OSError):  # a process that has died answers with an end of file
                    pipe.send((place, runs[place]))
                report.sent(place)
            ready = wait(list(active), POLL_EVERY_S)
            for pipe in [each for each in active if each in ready]:
                place = active[pipe]
                try:
                    result, fault = pipe.recv()
                except (EOFError, OSError):
                    result, fault, dead = None, "", runs[place].task
                else:
                    if fault == BEGUN:
                        report.begun(place)
                        continue
                    idle.append(pipe)
                del active[pipe]
                if fault == BUSY:
                    report.left(place)
                    waiting.append(place)
                    not_before[place] = time.monotonic() + BUSY_RETRY_S
                elif fault:
                    report.failed(place, fault)
                else:
                    report.ended(place, result)
            report.look()
        if interrupted():
            raise KeyboardInterrupt(interrupted())
    if dead:
        hint = "see `dmesg` for lack of memory, and repeat the command to continue"
        raise StoreError(f"a process died while it trained {dead}: {hint}")
    say(f"{report.done} of {len(runs)} runs done; records in {root}")
    if failures := report.failures:
        raise StoreError(f"{failures} of {len(runs)} runs failed: see above, and repeat the command for the others")
    if unfinished := len(runs) - report.done:
        say(f"{_count(unfinished, 'run')} unfinished: repeat the command to continue")
    return report.done


class _Report:
    """Lines about the runs: which start and end, how far the others are, and how long is left at the pace so far.

    Args:
        runs: the runs.
        seconds: how long each run takes alone, where that is known.
        first: for each run, the share of its steps that an earlier command made; written by the workers.
        share: for each run, the share of its steps that are made; written by the workers.
        say: prints a line.
    """

    def __init__(
        self,
        runs: Sequence[Settings],
        seconds: Mapping[Settings, float | None],
        first: MutableSequence[float],
        share: MutableSequence[float],
        say: Callable[[str], None],
    ) -> None:
        self.runs, self.first, self.share, self.say = runs, first, share, say
        known = [value for settings in runs if (value := seconds.get(settings))]
        usual = sum(known) / len(known) if known else 1.0
        self.work = [seconds.get(settings) or usual for settings in runs]
        self.begun_at = self.looked_at = time.monotonic()
        self.done, self.failures, self.active, self.busy = 0, 0, list[int](), set[int]()

    def begin(self, processes: int, device: torch.device, minutes: float) -> None:
        """Say what is to be done."""
        limit = f", for {duration(60 * minutes)}" if minutes < math.inf else ""
        self.say(f"{_count(len(self.runs), 'run')} in {_count(processes, 'process', 'processes')} on {device}{limit}")
        if device.type == "cuda" and processes > 1 and not _has_mps():
            self.say("NVIDIA's MPS is not running, so processes take turns on the GPU: `nvidia-cuda-mps-control -d`")

    def sent(self, place: int) -> None:
        """Count a run that was sent to a process."""
        self.active.append(place)

    def begun(self, place: int) -> None:
        """Say that a run starts, or where it continues."""
        first = self.first[place]
        self.say(f"{_name(self.runs[place])}: {f'continues at {first:.0%}' if first else 'starts'}")

    def ended(self, place: int, result: str | None) -> None:
        """Say that a run has ended with this result, or nothing if it was interrupted."""
        self.active.remove(place)
        if result is not None:
            self.done += 1
            if not self.share[place]:
                self.first[place] = 1.0  # a run that was finished before has made no steps
            self.share[place] = 1.0
            self.say(f"{_name(self.runs[place])}: {result}; {self._so_far()}")

    def failed(self, place: int, fault: str) -> None:
        """Say that a run has failed."""
        self.active.remove(place)
        self.failures += 1
        self.work[place] = 0.0
        self.say(f"{_name(self.runs[place])} failed: {fault}")

    def left(self, place: int) -> None:
        """Say that a run is left to another command for now."""
        self.active.remove(place)
        if place not in self.busy:
            self.say(f"{_name(self.runs[place])}: {BUSY}")
        self.busy.add(place)

    def look(self) -> None:
        """Say how far the runs are, once in a while."""
        if self.active and time.monotonic() - self.looked_at > STATUS_EVERY_S:
            shares = ", ".join(f"{self.share[place]:.0%}" for place in self.active)
            self.say(f"{len(self.active)} under way, at {shares}; {self._so_far()}")

    def _so_far(self) -> str:
        """Return the number of runs done, and the time left."""
        self.looked_at = time.monotonic()
        work, first, share = self.work, self.first, self.share
        made = sum(work[place] * (share[place] - first[place]) for place in range(len(work)))
        left = sum(work[place] * (1 - share[place]) for place in range(len(work)))
        text = f"{self.done} of {len(self.runs)} done"
        if not left or made < MIN_SHARE_TO_ESTIMATE * (made + left):
            return text
        return f"{text}, about {duration(left / made * (self.looked_at - self.begun_at))} left"


def _has_mps() -> bool:
    """Return whether NVIDIA's MPS was started, by which kernels of several processes share a GPU."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108  NVIDIA's default
    return Path(folder, "control").exists()


def _count(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def _name(settings: Settings) -> str:
    return f"{settings.task}, {settings.optimiser} at {settings.lr:g}, seed {settings.seed}"


@contextmanager
def _processes(context: SpawnContext, arguments: tuple[Any, ...]) -> Iterator[Callable[[], Connection]]:
    """Yield a function that starts a process and returns a pipe to it. At the end, all save their runs and end.

    A ProcessPoolExecutor would wait for ever when a process has died: the others survive its signal to end.
    """
    started, (stop, *_) = dict[Connection, Any](), arguments

    def start() -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, *arguments))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: Ctrl-C is for the command alone
        try:
            process.start()
            started[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return ours

    try:
        yield start
    finally:
        stop.set()
        for pipe in started:
            pipe.close()
        for process in started.values():
            process.join()


class _Worker(RunObserver):
    """State that a process keeps from run to run. As an observer, it interrupts a run if the command is interrupted."""

    def __init__(
        self,
        pipe: Connection,
        stop: Event,
        folder: Path | None,
        device: torch.device,
        root: Path,
        find: Find,
        processes: int,
        first: MutableSequence[float],
        share: MutableSequence[float],
    ) -> None:
        self.pipe, self.stop, self.folder, self.device, self.find = pipe, stop, folder, device, find
        self.store, self.processes, self.first, self.share = Store(root), processes, first, share
        self.task, self.place, self.is_stopping, self.busy = "", 0, False, threading.Lock()

    def begun(self, training: Training | Snapshot) -> None:
        if isinstance(training, Training):
            training.side_by_side = self.processes  # they share the device
        self.first[self.place] = self.share[self.place] = _share(training)
        with suppress(OSError):  # the command has died: the run is saved all the same
            self.pipe.send((None, BEGUN))

    def stepped(self, training: Training | Snapshot) -> None:
        self.share[self.place] = _share(training)
        if self.stop.is_set() and not self.is_stopping:
            self.is_stopping = True
            interrupt_main()  # train saves the run after this step


def _work(pipe: Connection, *arguments: Any) -> None:
    """Train the runs that come through a pipe, until it is closed. Send the result of each, or the error as text."""
    os.setsid()  # a closed terminal ends the command alone, which sets ``stop``
    torch.set_num_threads(1)
    worker = _Worker(pipe, *arguments)
    threading.Thread(target=_follow, args=(worker,), daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            place, settings = pipe.recv()
            try:
                answer = _train(worker, place, settings), ""
            except BusyError:
                answer = None, BUSY
            except Exception as error:
                answer = None, str(error) if isinstance(error, StoreError | DataError | SettingError) else repr(error)
            pipe.send(answer)


def _follow(worker: _Worker) -> None:
    """End this process when the command has died, after its run is saved."""
    if command := parent_process():
        command.join()
        worker.stop.set()
        with worker.busy:
            os._exit(1)


def _train(worker: _Worker, place: int, settings: Settings) -> str | None:
    """Train one run in this process. Return its result as text, or None if the command was interrupted."""
    if settings.task != worker.task:
        torch.compiler.reset()  # code compiled for other shapes would count towards torch's limit
        worker.task = settings.task
    worker.place = place
    task, data = worker.find(settings, worker.folder, worker.device)
    with worker.busy:
        try:
            record = train(task, [settings], data, worker.store, worker, waits=False)[0]
        except KeyboardInterrupt:
            return None
    return f"{last_metrics(task, record['curve'])} in {duration(record['seconds'])}"


def _share(training: Training | Snapshot) -> float:
    """Return the share of a run's steps that are made."""
    return training.steps_done / (training.settings.epochs * training.steps_per_epoch)
