"""Training of many runs: skip finished ones, resume unfinished ones, and share one GPU among several."""

import gc
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from nero_lab import distributed
from nero_lab.data import Dataset, Game
from nero_lab.loops.supervised import Supervised
from nero_lab.loops.training import Snapshot, StateError, Training
from nero_lab.protocol import Precision, Settings, Task, best_rate
from nero_lab.store import BusyError, Store, misfit

#: Shortest time between two rounds of checkpoints.
CHECKPOINT_EVERY_S = 60.0
#: Time between two tries to start a run that another process makes, and between looks at interrupts meanwhile.
BUSY_RETRY_S, POLL_EVERY_S = 10.0, 0.2
#: Shortest time of training between two rounds of checkpoints, relative to the duration of a round.
MIN_TRAIN_TO_SAVE_RATIO = 20.0


class RunObserver:
    """Observer of training runs. It does nothing, unless a subclass overrides a method."""

    def plan(self, task: Task, runs: Sequence[Settings], done: Sequence[dict[str, Any]]) -> None:
        """Handle the list of all runs, and the records of those that are already done."""

    def begun(self, training: Training | Snapshot) -> None:
        """Handle a run that starts or resumes."""

    def stepped(self, training: Training | Snapshot) -> None:
        """Handle a step. ``training.epochs_known`` is the number of epochs whose numbers are available."""

    def ended(self, training: Training | Snapshot) -> None:
        """Handle a run that is finished and recorded."""

    def blocked(self, reason: str) -> None:
        """Handle a run that waits, because another process makes it."""

    def stopping(self) -> None:
        """Handle the user's request to stop. The runs are saved after the current step."""


def train(
    task: Task,
    runs: Sequence[Settings],
    data: Dataset | Game,
    store: Store,
    observer: RunObserver,
    side_by_side: int = 1,
    *,
    more: bool = False,
    waits: bool = True,
) -> list[dict[str, Any]]:
    """Train all runs that are not done, and return the records of all runs.

    A killed process resumes from its last checkpoints in the next call, an interrupted one from its last step. Runs
    that another process makes come last.

    Args:
        task: the task of the runs.
        runs: the settings of the runs.
        data: the task's data set, on the device to train on.
        store: the folder of records and checkpoints.
        observer: called as the runs proceed.
        side_by_side: how many runs to train at a time.
        more: more runs follow after these, so that an interrupt also counts when these are all done.
        waits: wait until the other processes have made their runs, or have stopped.

    Raises:
        BusyError: if another process makes one of the runs, and ``waits`` is false.
        KeyboardInterrupt: interrupted, with the number of the signal.
    """
    runs = list(dict.fromkeys(runs))
    done = find_done(task, runs, data.device, store, observer)
    waiting = deque(settings for settings in runs if settings not in done)
    runner = _Runner(task, data, store, observer, waits and distributed.world_size() == 1)
    due, is_due = time.monotonic() + CHECKPOINT_EVERY_S, 0
    with deferred_interrupts(observer.stopping) as interrupted, closing(runner):
        while waiting or runner.active:
            try:
                runner.fill(waiting, side_by_side)
                if waiting and not runner.active:  # other processes make them
                    time.sleep(POLL_EVERY_S)
                    if interrupted():
                        raise KeyboardInterrupt(interrupted())
                for training in runner.active.copy():  # a copy: finished runs leave the list
                    runner.advance(training)
                    del training  # a finished run must not be kept alive by this variable
                    # processes that train together stop and save at the same step
                    stop, is_due = distributed.agree(interrupted(), time.monotonic() > due)
                    if stop and (waiting or runner.active or more):
                        runner.save()
                        distributed.barrier()  # torchrun ends the others when the first of them has ended
                        raise KeyboardInterrupt(stop)
            except Exception:
                if not distributed.is_sharded():  # the other processes would have to take part
                    with suppress(Exception):
                        runner.save()
                raise
            if is_due:
                due = time.monotonic() + max(CHECKPOINT_EVERY_S, MIN_TRAIN_TO_SAVE_RATIO * runner.save())
    return [(done | runner.done)[settings] for settings in runs]


def find_done(
    task: Task, runs: Sequence[Settings], device: torch.device, store: Store, observer: RunObserver
) -> dict[Settings, dict[str, Any]]:
    """Return the records of the runs that are done, announce all runs, and check the checkpoints of the others."""
    done = {settings: record for settings in runs if (record := store.record(task, settings)) is not None}
    observer.plan(task, runs, list(done.values()))
    for settings in runs:
        if settings not in done:  # report a bad checkpoint now, not hours later
            store.checkpoint(task, settings, device, mmap=True)
    return done


class _Runner:
    """Runs that take turns, one step each.

    Attributes:
        active: the runs under way.
        done: the records of the finished runs.
    """

    def __init__(self, task: Task, data: Dataset | Game, store: Store, observer: RunObserver, waits: bool) -> None:
        self.task, self.data, self.store, self.observer, self.waits = task, data, store, observer, waits
        self._claimed, self._busy, self._retry_at = list[Settings](), set[Settings](), 0.0
        self.active: list[Training] = []
        self.done: dict[Settings, dict[str, Any]] = {}
        self._has_garbage = False  # a finished run is a reference cycle, and holds GPU memory until collected

    def close(self) -> None:
        """Let other processes make the runs that are not done."""
        for settings in self._claimed:
            self.store.release(self.task, settings)

    def fill(self, waiting: deque[Settings], places: int) -> None:
        """Start runs in the free places. Those that another process makes go to the end, and are tried again later."""
        if time.monotonic() < self._retry_at:
            return
        for _ in range(len(waiting)):
            if len(self.active) >= places:
                return
            settings = waiting.popleft()
            try:
                self.store.claim(self.task, settings)
            except BusyError as error:
                if not self.waits:
                    raise BusyError(f"{error}: wait until it is done, or choose another folder by --out") from None
                if settings not in self._busy:
                    self.observer.blocked(str(error))
                self._busy.add(settings)
                waiting.append(settings)
            else:
                self._claimed.append(settings)
                self._start_claimed(settings)
        self._retry_at = time.monotonic() + BUSY_RETRY_S if waiting else 0.0

    def _start_claimed(self, settings: Settings) -> None:
        record = self.store.record(self.task, settings)
        if record is None:
            self.start(settings)
        else:  # made by another process since this one looked
            self.done[settings] = record
            self.store.release(self.task, settings)

    def start(self, settings: Settings) -> None:
        """Start a run, or resume it from its checkpoint."""
        if self._has_garbage:
            gc.collect()
            self._has_garbage = False
        state = self.store.begin(self.task, settings, self.data.device)
        loop: Callable[..., Training] = self.task.loop or Supervised
        try:
            self.active.append(loop(self.task, settings, self.data, state))
        except StateError as error:
            raise misfit(self.store.path(self.task, settings, ".checkpoint"), str(error)) from error
        self.observer.begun(self.active[-1])

    def advance(self, training: Training) -> None:
        """Make one step of a run, and record the run if that was the last."""
        training.side_by_side = max(training.side_by_side, len(self.active))
        if not training.is_finished:  # a run may have been saved after its last step
            try:
                training.advance()
            except Exception:
                if training.is_mid_step:  # its state is inconsistent, and must not be saved
                    self.active.remove(training)
                raise
        self.observer.stepped(training)
        self.store.write_files(training)
        if training.is_finished:
            self.done[training.settings] = self.store.finish(training)
            distributed.barrier()  # the record must be visible to all processes
            self.active.remove(training)
            self.store.release(self.task, training.settings)
            self._has_garbage = True
            self.observer.ended(training)

    def save(self) -> float:
        """Write the checkpoints of all active runs. Return how many seconds that took."""
        start = time.monotonic()
        for training in self.active:
            self.store.save(training)
        return time.monotonic() - start


@contextmanager
def deferred_interrupts(on_first: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Defer the signals of an interrupt. Yield a function that returns the number of the one that came, or 0.

    They are SIGINT, SIGTERM, and SIGHUP of a closed terminal, unless it is ignored, as under ``nohup``.
    The first signal calls ``on_first`` immediately, because a step may take minutes on a CPU. A second one raises.
    """
    received = 0

    def receive(number: int, _: FrameType | None) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt(number)
        received = number
        with suppress(RuntimeError):  # raised by a stream that the signal interrupted in a write
            on_first()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # only the main thread can handle signals
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        numbers.append(hangup)
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def search(
    task: Task,
    contenders: Sequence[str],
    seeds: int,
    precision: Precision,
    run: Callable[[list[Settings], bool], list[dict[str, Any]]],
    *,
    rates: Sequence[float] | None = None,
    epochs: int | None = None,
) -> dict[str, float]:
    """Follow the paper's protocol: search the grid on seed 0, then run all seeds at each contender's best rate.

    Args:
        task: the task.
        contenders: the names of the contenders.
        seeds: the number of seeds at the best rate.
        precision: the precision of all runs.
        run: trains runs and returns their records; its second argument says whether more runs follow.
        rates: the rates to search instead of the grids of the task. If empty, the paper's best rates are used.
        epochs: a number of epochs below the task's, for a trial.

    Returns:
        the best rate of each contender.
    """

    def settings(contender: str, lr: float, seed: int) -> Settings:
        return task.settings(contender, lr, seed, epochs, precision)

    best = {name: task.contenders[name].best for name in contenders}
    grids = {name: task.grid_of(name) if rates is None else rates for name in contenders}
    if searched := [settings(name, rate, 0) for name, grid in grids.items() for rate in grid]:
        records = run(searched, True)
        best |= {name: best_rate(task, [r for r in records if r["optimiser"] == name]) for name in grids if grids[name]}
    run([settings(name, best[name], seed) for name in contenders for seed in range(seeds)], False)
    return best
