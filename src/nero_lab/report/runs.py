"""Runs parsed from records, and the selection of those that a table or figure shows."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from nero_lab.protocol import perplexity
from nero_lab.report.names import CONTENDERS
from nero_lab.report.published import Measure, PublishedRow, all_published
from nero_lab.store import StoreError

Record: TypeAlias = dict[str, Any]

#: A shorter run, as a share of the task's epochs, is a trial and is never compared.
MIN_SHARE = 0.1


@dataclass(frozen=True)
class Run:
    """A finished run and its curves.

    Attributes:
        curves: one value per epoch, accuracies and errors in per cent. NaN marks an epoch without a measurement.
        nonfinite: True in every epoch where a training loss was not finite. The accuracies of such an epoch are those
            of the network's answers, as in the authors' numbers.
        seconds: the run's duration, if recorded.
        side_by_side: the number of runs that its process trained at the same time.
        bleu: BLEU of the test set, if measured.
        data: the name of the stand-in data set, or None if the run used the task's own data.
    """

    task: str
    optimiser: str
    rate: float
    seed: int
    epochs: int
    precision: str
    curves: dict[Measure, tuple[float, ...]]
    nonfinite: tuple[bool, ...]
    seconds: float | None
    side_by_side: int
    device: str
    finished: str
    bleu: float | None = None
    data: str | None = None

    def final(self, measure: Measure) -> float:
        """Return the last epoch's value."""
        return self.curves[measure][-1]

    @property
    def has_diverged(self) -> bool:
        """True if the training loss was not finite in the last epoch."""
        return self.nonfinite[-1]

    def truncate(self, epoch: int) -> "Run":
        """Return the run as it stood after an epoch."""
        curves = {measure: values[:epoch] for measure, values in self.curves.items()}
        return replace(self, epochs=epoch, curves=curves, nonfinite=self.nonfinite[:epoch])


def parse_record(record: Record) -> Run:
    """Convert a record of a published task.

    Raises:
        StoreError: if a value is missing, or is not one that a run writes.
    """
    try:
        epochs, curve = record["epochs"], record["curve"]
        if short := [name for name, values in curve.items() if len(values) != epochs]:
            raise ValueError(f"{short[0]} has {len(curve[short[0]])} values for {epochs} epochs")
        is_supervised = "train_accuracy" in curve or not {"reward", "test_distance"} & set(curve)
        trained = ["train_loss"] if is_supervised else [name for name in curve if name.endswith("_loss")]
        losses = [curve[name] for name in trained]
        curves = (_supervised_curves if is_supervised else _measured_curves)(curve)
        if (measure := all_published()[record["task"]].measure) not in curves:
            raise ValueError(f"it has no {measure}")
        return Run(
            task=record["task"],
            optimiser=record["optimiser"],
            rate=record["lr"],
            seed=record["seed"],
            epochs=epochs,
            precision=record.get("precision", "float32"),
            curves=curves,
            nonfinite=tuple(None in values for values in zip(*losses, strict=True)) or (False,) * epochs,
            seconds=record.get("seconds"),
            side_by_side=record.get("side_by_side", 1),
            device=record.get("device", "unknown"),
            finished=record.get("finished", ""),
            bleu=record.get("test_bleu"),
            data=record.get("data"),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        fault = f"it lacks {error}" if isinstance(error, KeyError) else error
        where = record.get("path", f"a record of {record.get('task')}")
        raise StoreError(f"{where} is not the record of a whole run ({fault}): make the run again") from error


def _supervised_curves(curve: Record) -> dict[Measure, tuple[float, ...]]:
    curves: dict[Measure, tuple[float, ...]] = {}
    for part in ("train", "test", "valid") if "valid_loss" in curve else ("train", "test"):
        accuracy = tuple(100 * value for value in curve[f"{part}_accuracy"])
        curves[cast(Measure, f"{part}_accuracy")] = accuracy
        curves[cast(Measure, f"{part}_error")] = tuple(100 - value for value in accuracy)
        curves[cast(Measure, f"{part}_perplexity")] = tuple(map(perplexity, curve[f"{part}_loss"]))
    return curves | _measured_curves(curve)


def _measured_curves(curve: Record) -> dict[Measure, tuple[float, ...]]:
    """Read rewards, and distances to both training and test images."""
    names = [f"{part}_{kind}" for kind in ("distance", "fid") if f"test_{kind}" in curve for part in ("train", "test")]
    names += ["reward"] if "reward" in curve else []
    return {
        cast(Measure, name): tuple(math.nan if value is None else float(value) for value in curve[name])
        for name in names
    }


def that_count(records: Iterable[Record]) -> list[Record]:
    """Choose one record for each task, contender, rate and seed.

    All records of a task have the same data: the task's own, or else the stand-in with the most runs. All seeds of a
    rate have one precision: the one with the most seeds, float32 if there is a tie. Of repeated runs the latest counts.
    """
    ordered = sorted(records, key=lambda record: str(record.get("finished", "")))
    names: dict[str, list[str | None]] = {}
    for record in ordered:
        names.setdefault(record["task"], []).append(record.get("data"))
    data = {task: _counted_data(found) for task, found in names.items()}
    by_rate: dict[tuple[Any, ...], dict[str, dict[int, Record]]] = {}
    for record in ordered:
        if record.get("data") == data[record["task"]]:
            by_precision = by_rate.setdefault((record["task"], record["optimiser"], record["lr"]), {})
            by_precision.setdefault(record.get("precision", "float32"), {})[record["seed"]] = record

    def order(found: tuple[str, dict[int, Record]]) -> tuple[int, bool, str]:
        precision, seeds = found
        return len(seeds), precision == "float32", precision

    return [record for found in by_rate.values() for record in max(found.items(), key=order)[1].values()]


class Runs:
    """All runs of a set of records, and those that count, by :func:`that_count`.

    Args:
        records: in any order.

    Attributes:
        tasks: the published tasks that have a record, in the order of the pages.
        unknown_tasks: the number of records of every other task, whose curves may be of any kind.

    Raises:
        StoreError: if a record is not that of a whole run.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        known = all_published()
        every = list(records)
        published = [record for record in every if record["task"] in known]
        self.unknown_tasks = Counter(record["task"] for record in every if record["task"] not in known)
        runs = [parse_record(record) for record in published]
        self.tasks = [task for task in known if any(run.task == task for run in runs)]
        self._all = sorted(runs, key=lambda run: (run.epochs, run.finished))
        self._short = Counter(run.task for run in runs if run.epochs != known[run.task].epochs)
        self._full = sorted((run for run in runs if run.epochs == known[run.task].epochs), key=_table_order)
        whole = (record for record in published if record["epochs"] == known[record["task"]].epochs)
        counted = [parse_record(record) for record in that_count(whole)]
        self._counted = {(run.task, run.optimiser, run.rate, run.seed): run for run in counted}
        self._data = {run.task: run.data for run in counted}  # one for all runs of a task

    def full(self, task: str) -> list[Run]:
        """Return every run that has all epochs of the task."""
        return [run for run in self._full if run.task == task]

    def count_short(self, task: str) -> int:
        """Return the number of runs with fewer epochs than the task."""
        return self._short[task]

    def stand_in(self, task: str) -> str | None:
        """Return the data set that counts, or None if it is the task's own."""
        return self._data.get(task)

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
            if run.task == task and run.epochs >= least and run.data == self._data.get(task):
                groups.setdefault((run.optimiser, run.rate, run.seed), {})[run.precision] = run
        shared = []
        for group in groups.values():
            if len(group) > 1:
                epoch = sorted(run.epochs for run in group.values())[-2]
                truncated = [run.truncate(epoch) for run in group.values() if run.epochs >= epoch]
                shared.append(sorted(truncated, key=_priority, reverse=True))
        return sorted(shared, key=lambda group: _table_order(group[0]))


def _table_order(run: Run) -> tuple[Any, ...]:
    names = list(CONTENDERS)
    place = names.index(run.optimiser) if run.optimiser in names else len(names)
    return run.task, place, run.optimiser, run.rate, run.seed, run.precision, run.finished


def _priority(run: Run) -> tuple[bool, str, str]:
    return run.precision == "float32", run.precision, run.finished


def _counted_data(names: Sequence[str | None]) -> str | None:
    stand_ins = Counter(name for name in names if name is not None)
    if not stand_ins or None in names:
        return None
    return max(sorted(stand_ins), key=lambda name: stand_ins[name])
