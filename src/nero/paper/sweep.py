"""Many runs: what is done is skipped, what was broken off goes on, and several share one GPU."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nero.paper.data import Dataset
from nero.paper.protocol import Precision, Settings, Task, best_rate
from nero.paper.record import Store
from nero.paper.training import Training

#: Seconds between two checkpoints of a run, or more where writing one takes long: at most a twentieth of the time.
PAUSE = 30.0
SHARE = 20.0


class Watch(Protocol):
    """Who wants to know how runs get on."""

    def plan(self, task: Task, settings: Sequence[Settings], done: Sequence[Settings]) -> None:
        """These will be run; of them, these are done already."""

    def begun(self, training: Training) -> None:
        """A run starts, or goes on."""

    def stepped(self, training: Training) -> None:
        """It made a step; if that was the last of an epoch, ``training.step`` is 0."""

    def ended(self, training: Training) -> None:
        """It is done and recorded."""


def train(
    task: Task, runs: Sequence[Settings], data: Dataset, store: Store, watch: Watch, side_by_side: int = 1
) -> list[dict[str, Any]]:
    """Train all of the runs that are not done, so many at a time, and give the records of all.

    Killed at any moment, it goes on from the last checkpoints when it is called again.
    """
    done = [settings for settings in runs if store.record(task, settings) is not None]
    watch.plan(task, runs, done)
    waiting = deque(settings for settings in runs if settings not in done)
    active: list[_Active] = []
    try:
        while waiting or active:
            while waiting and len(active) < side_by_side:
                settings = waiting.popleft()
                training = Training(task, settings, data, store.checkpoint(task, settings))
                active.append(_Active(training))
                watch.begun(training)
            for each in list(active):
                each.training.advance()
                watch.stepped(each.training)
                if each.training.finished:
                    store.finish(each.training, side_by_side)
                    active.remove(each)
                    watch.ended(each.training)
                elif time.monotonic() > each.due:
                    each.save(store)
    except KeyboardInterrupt:
        for each in active:
            each.save(store)
        raise
    records = [store.record(task, settings) for settings in runs]
    return [record for record in records if record is not None]


def search(
    task: Task,
    contenders: Sequence[str],
    seeds: int,
    precision: Precision,
    run: Callable[[list[Settings]], list[dict[str, Any]]],
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
        run: trains what is not done and gives the records.
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
        records = run([settings(name, rate, 0) for name in contenders for rate in grid])
        best = {name: best_rate(task, [r for r in records if r["optimiser"] == name]) for name in contenders}
    run([settings(name, best[name], seed) for name in contenders for seed in range(seeds)])
    return best


class _Active:
    """A run and when its next checkpoint is due."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.due = time.monotonic() + PAUSE

    def save(self, store: Store) -> None:
        start = time.monotonic()
        store.save(self.training)
        now = time.monotonic()
        self.due = now + max(PAUSE, SHARE * (now - start))
