"""Many runs: what is done is skipped, what was broken off goes on, and several share one GPU."""

import gc
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

from nero_lab import distributed
from nero_lab.data import Dataset
from nero_lab.loops.supervised import Supervised
from nero_lab.loops.training import StateError, Training
from nero_lab.protocol import Precision, Settings, Task, best_rate
from nero_lab.store import Store, unfit

#: Seconds between two rounds of checkpoints, or more where a round takes long: at most a twentieth of the time.
PAUSE = 60.0
SHARE = 20.0


class Watch(Protocol):
    """Who wants to know how runs get on."""

    def plan(self, task: Task, runs: Sequence[Settings], done: Sequence[dict[str, Any]]) -> None:
        """These will be run; of some of them, these records are there already."""

    def begun(self, training: Training) -> None:
        """A run starts, or goes on."""

    def stepped(self, training: Training) -> None:
        """It made a step; ``training.epochs_known`` says of how many epochs the numbers are there."""

    def ended(self, training: Training) -> None:
        """It is done and recorded."""

    def stopping(self) -> None:
        """The user wants to stop; runs are kept where they stand when the step under way is done."""


def train(
    task: Task,
    runs: Sequence[Settings],
    data: Dataset,
    store: Store,
    watch: Watch,
    side_by_side: int = 1,
    *,
    more: bool = False,
) -> list[dict[str, Any]]:
    """Train all of the runs that are not done, so many at a time, and give the records of all.

    Killed at any moment, it goes on from the last checkpoints when it is called again; interrupted, from where it was.

    Args:
        task: what to train on what.
        runs: which.
        data: the task's data set, on the device to train on.
        store: where records and checkpoints are.
        watch: told of all.
        side_by_side: how many at a time.
        more: whether other runs are to follow these, so that an interrupt counts even if it comes when all are done.

    Raises:
        KeyboardInterrupt: interrupted, with the number of the signal.
    """
    runs = list(dict.fromkeys(runs))
    done = {settings: record for settings in runs if (record := store.record(task, settings)) is not None}
    watch.plan(task, runs, list(done.values()))
    waiting = deque(settings for settings in runs if settings not in done)
    for settings in waiting:  # a bad one is better met now than hours later
        store.look(task, settings, data.device, whole=False)
    active: list[Training] = []

    def turn(training: Training) -> None:
        training.side_by_side = max(training.side_by_side, len(active))
        if not training.finished:  # or it was kept at its very end
            try:
                training.advance()
            except Exception:
                if training.is_mid_step:  # the others stand between two steps
                    active.remove(training)
                raise
        watch.stepped(training)
        store.keep(training)
        if training.finished:
            done[training.settings] = store.finish(training)
            distributed.wait()  # until the record is there for all to see
            active.remove(training)
            watch.ended(training)

    def begin(settings: Settings) -> None:
        gc.collect()  # runs refer to themselves, and what is done holds a GPU's memory until it is found
        state = store.begin(task, settings, data.device)
        try:
            active.append((task.loop or Supervised)(task, settings, data, state))
        except StateError as error:
            raise unfit(store.path(task, settings, ".checkpoint"), str(error)) from error
        watch.begun(active[-1])

    due = time.monotonic() + PAUSE
    with _interrupts(watch.stopping) as interrupted:
        while waiting or active:
            try:
                while waiting and len(active) < side_by_side:
                    begin(waiting.popleft())
                for training in active.copy():  # a turn may be the last
                    turn(training)
                    del training  # lest it be held
                    # what is kept now is whole
                    if interrupted() and (waiting or active or more) and distributed.rank() == 0:
                        _save(active, store)
                        raise KeyboardInterrupt(interrupted())
            except Exception as error:
                if (
                    interrupted() and distributed.rank() > 0
                ):  # the first, asked too, has kept the run and left amid a step
                    raise KeyboardInterrupt(interrupted()) from error
                with suppress(Exception):
                    _save(active, store)
                raise
            if time.monotonic() > due:
                due = time.monotonic() + max(PAUSE, SHARE * _save(active, store))
    return [done[settings] for settings in runs]


def _save(active: list[Training], store: Store) -> float:
    """Keep where all runs stand. How many seconds that took."""
    start = time.monotonic()
    for training in active:
        store.save(training)
    return time.monotonic() - start


@contextmanager
def _interrupts(answer: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """By which signal the user or the system has asked to stop, 0 if by none.

    It is answered at once, since a step may take minutes on a CPU. The second does not wait for anything.
    """
    asked = 0

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt(number)
        asked = number
        with suppress(RuntimeError):  # of a stream that is just being written to
            answer()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # where signals cannot be caught, a checkpoint has to do
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
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
    """The paper's protocol: the grid on seed 0, then the other seeds at each contender's best rate.

    Args:
        task: whose.
        contenders: by name.
        seeds: how many seeds at the best rate.
        precision: of all runs.
        run: trains what is not done and gives the records; told whether more is to follow.
        rates: searched instead of the task's grid; with none in it, the paper's best rates are taken as found.
        epochs: fewer than the task's, for a try.

    Returns:
        the best rate of each contender.
    """
    grid = task.grid if rates is None else rates

    def settings(contender: str, lr: float, seed: int) -> Settings:
        return task.settings(contender, lr, seed, epochs, precision)

    best = {name: task.contenders[name].best for name in contenders}
    if grid:
        records = run([settings(name, rate, 0) for name in contenders for rate in grid], True)
        best = {name: best_rate(task, [r for r in records if r["optimiser"] == name]) for name in contenders}
    run([settings(name, best[name], seed) for name in contenders for seed in range(seeds)], False)
    return best
