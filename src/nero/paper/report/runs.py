"""Runs read from records, and which of them count."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nero.paper.record import StoreError
from nero.paper.report.published import Final, Measure, published

Record: TypeAlias = dict[str, Any]

#: How contenders are called where people read.
NAMES = {
    "nero": "Nero",
    "sgd": "SGD",
    "adam": "Adam",
    "lamb": "LAMB",
    "lamb-balanced": "LAMB, balanced",
    "madam": "Madam",
    "madam-balanced": "Madam, balanced",
    "sigma-1": "σ = 1",  # noqa: RUF001
    "sigma-100": "σ = 100",  # noqa: RUF001
    "nero-neither": "Nero, neither constraint",
    "nero-mean": "Nero, mean only",
    "nero-norm": "Nero, norm only",
    "nero-both": "Nero, both constraints",
}


def name_of(optimiser: str) -> str:
    """A contender's name where people read; one that the paper does not have keeps its own."""
    return NAMES.get(optimiser, optimiser)


@dataclass(frozen=True)
class Run:
    """A run, with its curves in per cent; NaN where a value was not finite."""

    task: str
    optimiser: str
    rate: float
    seed: int
    epochs: int
    precision: str
    curves: dict[Measure, tuple[float, ...]]
    seconds: float
    side_by_side: int
    device: str
    finished: str

    def final(self, measure: Measure) -> float:
        """The last epoch's value."""
        return self.curves[measure][-1]


class Runs:
    """The runs of some records, sorted, with the few questions that tables and figures ask of them.

    Args:
        records: in any order; the same ones give the same answers.

    Raises:
        StoreError: if a record is not one, with what is wrong with it.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        known = published()
        read = [_read(record) for record in records]
        self.elsewhere = Counter(run.task for run in read if run.task not in known)
        ours = [run for run in read if run.task in known]
        self._short = Counter(run.task for run in ours if run.epochs != known[run.task].epochs)
        self._full = sorted((run for run in ours if run.epochs == known[run.task].epochs), key=_order)
        self._counted: dict[tuple[str, str, float, int], Run] = {}
        for run in sorted(self._full, key=_worth):  # what counts comes last, and stays
            self._counted[run.task, run.optimiser, run.rate, run.seed] = run

    def of(self, task: str) -> list[Run]:
        """Every run of the task's full number of epochs."""
        return [run for run in self._full if run.task == task]

    def short(self, task: str) -> int:
        """How many runs of fewer epochs are left out."""
        return self._short[task]

    def at(self, row: Final, rate: float | None = None) -> dict[int, Run]:
        """The runs that count for a row, by seed: at its own rate, or at another."""
        wanted = (row.task, row.optimiser, row.rate if rate is None else rate)
        return {run.seed: run for key, run in sorted(self._counted.items()) if key[:3] == wanted}

    def rates(self, row: Final) -> list[float]:
        """The rates at which the row's contender was run."""
        return sorted({rate for task, name, rate, _ in self._counted if (task, name) == (row.task, row.optimiser)})

    def in_several_precisions(self, task: str) -> list[list[Run]]:
        """Runs that differ in nothing but their precision, together; of repeated ones the latest."""
        groups: dict[tuple[str, float, int], dict[str, Run]] = {}
        for run in sorted(self.of(task), key=lambda run: run.finished):
            groups.setdefault((run.optimiser, run.rate, run.seed), {})[run.precision] = run
        found = [sorted(group.values(), key=_worth, reverse=True) for group in groups.values() if len(group) > 1]
        return sorted(found, key=lambda group: _order(group[0]))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; NaN if any value is."""
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.pstdev(values)


def _order(run: Run) -> tuple[Any, ...]:
    names = list(NAMES)
    place = names.index(run.optimiser) if run.optimiser in names else len(names)
    return run.task, place, run.optimiser, run.rate, run.seed, run.precision, run.finished


def _worth(run: Run) -> tuple[bool, str, str]:
    """Float32 counts before all others, and of repeated runs the latest."""
    return run.precision == "float32", run.precision, run.finished


def _read(record: Record) -> Run:
    if missing := [key for key in ("task", "optimiser", "lr", "seed", "epochs", "curve") if key not in record]:
        raise StoreError(f"this is no record of a run, it has no {', '.join(missing)}: {str(record)[:100]}")
    what = f"the record of {record['task']} by {record['optimiser']} at {record['lr']:g}, seed {record['seed']}"
    epochs = int(record["epochs"])
    train, test = (_per_cent(record["curve"], f"{part}_accuracy", epochs, what) for part in ("train", "test"))
    return Run(
        task=record["task"],
        optimiser=record["optimiser"],
        rate=float(record["lr"]),
        seed=int(record["seed"]),
        epochs=epochs,
        precision=record.get("precision", "float32"),
        curves={
            "train_accuracy": train,
            "train_error": tuple(100 - value for value in train),
            "test_accuracy": test,
            "test_error": tuple(100 - value for value in test),
        },
        seconds=float(record.get("seconds", math.nan)),
        side_by_side=int(record.get("side_by_side", 1)),
        device=record.get("device", "unknown"),
        finished=record.get("finished", ""),
    )


def _per_cent(curves: dict[str, list[float | None]], name: str, epochs: int, what: str) -> tuple[float, ...]:
    values = curves.get(name, [])
    if len(values) != epochs:
        raise StoreError(f"{what} has {len(values)} values of {name} for {epochs} epochs: run it again")
    found = tuple(math.nan if value is None else 100 * float(value) for value in values)
    if any(value < 0 or value > 100 for value in found):
        raise StoreError(f"{what} has a {name} that is no fraction: accuracies are from 0 to 1")
    return found
