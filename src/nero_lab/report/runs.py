"""Selection of the runs that a table or figure shows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from nero_lab.report.names import CONTENDERS
from nero_lab.report.published import PublishedRow, all_published
from nero_lab.report.records import Record, Run, parse_record
from nero_lab.store import StoreError

#: A shorter run, as a share of the task's epochs, is a trial and is never compared.
MIN_SHARE = 0.1


class Runs:
    """All runs of a set of records, and those that count.

    Of several runs of one contender, rate and seed, float32 counts before other precisions, then the latest run. Only
    runs on one data set count: the task's own, or else the stand-in with the most runs.

    Args:
        records: in any order.

    Attributes:
        tasks: the published tasks that have a record, in the order of the pages.
        unknown_tasks: the number of records of every other task, whose curves may be of any kind.

    Raises:
        StoreError: if a record is malformed or lacks its task's measure.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        known = all_published()
        self.unknown_tasks = Counter[str]()
        runs = []
        for record in records:
            task = record.get("task")
            if isinstance(task, str) and task not in known:
                self.unknown_tasks[task] += 1
            else:
                runs.append(parse_record(record))
        for run in runs:
            _check_measure(run)
        self.tasks = [task for task in known if any(run.task == task for run in runs)]
        self._all = sorted(runs, key=lambda run: (run.epochs, run.finished))
        self._short = Counter(run.task for run in runs if run.epochs != known[run.task].epochs)
        self._full = sorted((run for run in runs if run.epochs == known[run.task].epochs), key=_table_order)
        self._data = {task: _counted_data([run for run in self._full if run.task == task]) for task in known}
        self._counted: dict[tuple[str, str, float, int], Run] = {}
        for run in sorted(self._full, key=_priority):  # later runs replace earlier ones
            if run.data == self._data[run.task]:
                self._counted[run.task, run.optimiser, run.rate, run.seed] = run

    def full(self, task: str) -> list[Run]:
        """Return every run that has all epochs of the task."""
        return [run for run in self._full if run.task == task]

    def count_short(self, task: str) -> int:
        """Return the number of runs with fewer epochs than the task."""
        return self._short[task]

    def stand_in(self, task: str) -> str | None:
        """Return the data set that counts, or None if it is the task's own."""
        return self._data[task]

    def counted(self, row: PublishedRow, rate: float | None = None) -> dict[int, Run]:
        """Return the runs that count for a row, by seed, at the row's rate or at another one."""
        wanted = (row.task, row.optimiser, row.rate if rate is None else rate)
        return {run.seed: run for key, run in sorted(self._counted.items()) if key[:3] == wanted}

    def rates(self, row: PublishedRow) -> list[float]:
        """Return the learning rates at which the row's contender was run."""
        return sorted({rate for task, name, rate, _ in self._counted if (task, name) == (row.task, row.optimiser)})

    def precision_groups(self, task: str) -> list[list[Run]]:
        """Return runs that differ only in precision, truncated to the last epoch that two of them share.

        Short runs take part. Of repeated runs the longest counts, then the latest.
        """
        least = MIN_SHARE * all_published()[task].epochs
        groups: dict[tuple[str, float, int], dict[str, Run]] = {}
        for run in self._all:
            if run.task == task and run.epochs >= least and run.data == self._data[task]:
                groups.setdefault((run.optimiser, run.rate, run.seed), {})[run.precision] = run
        shared = []
        for group in groups.values():
            if len(group) > 1:
                epoch = sorted(run.epochs for run in group.values())[-2]
                truncated = [run.truncate(epoch) for run in group.values() if run.epochs >= epoch]
                shared.append(sorted(truncated, key=_priority, reverse=True))
        return sorted(shared, key=lambda group: _table_order(group[0]))


def _check_measure(run: Run) -> None:
    measure = all_published()[run.task].measure
    if measure not in run.curves:
        key = f"{measure.partition('_')[0]}_loss" if measure.endswith("perplexity") else measure
        name = f"{run.optimiser} at {run.rate:g} with seed {run.seed}"
        raise StoreError(f"the record of {run.task} by {name}: missing {key}; run it again")


def _table_order(run: Run) -> tuple[Any, ...]:
    names = list(CONTENDERS)
    place = names.index(run.optimiser) if run.optimiser in names else len(names)
    return run.task, place, run.optimiser, run.rate, run.seed, run.precision, run.finished


def _priority(run: Run) -> tuple[bool, str, str]:
    return run.precision == "float32", run.precision, run.finished


def _counted_data(runs: Sequence[Run]) -> str | None:
    names = Counter(run.data for run in runs if run.data is not None)
    if not names or any(run.data is None for run in runs):
        return None
    return max(sorted(names), key=lambda name: names[name])
