"""Runs read from records, and which of them count."""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

from nero_lab.report.published import Final, Measure, all_published
from nero_lab.store import StoreError

Record: TypeAlias = dict[str, Any]
T = TypeVar("T")

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
    "lamb-momentum": "LAMB, momentum 0.9",
    "adam-momentum": "Adam, momentum 0.9",
    "nero-scaled": "Nero, words scaled",
    "sgd-decay": "SGD with weight decay",
    "nero-tuned": "Nero tuned",
    "nero-free-gains": "Nero tuned, gains free",
}


def name_of(optimiser: str) -> str:
    """A contender's name where people read; one that the paper does not have keeps its own."""
    return NAMES.get(optimiser, optimiser)


@dataclass(frozen=True)
class Run:
    """A run, with its curves: shares in per cent, perplexities, distances and rewards.

    A value that is not a number was not taken in that epoch. The accuracies of a run that diverged are those of its
    answers, as the authors' are; ``lost`` says in which epochs a loss of its training was not finite.
    """

    task: str
    optimiser: str
    rate: float
    seed: int
    epochs: int
    precision: str
    curves: dict[Measure, tuple[float, ...]]
    lost: tuple[bool, ...]
    seconds: float | None
    side_by_side: int
    device: str
    finished: str
    bleu: float | None = None
    data: str | None = None  # the stand-in, where there was one

    def final(self, measure: Measure) -> float:
        """The last epoch's value."""
        return self.curves[measure][-1]

    @property
    def diverged(self) -> bool:
        """Whether the loss was not finite in the end."""
        return self.lost[-1]

    def until(self, epoch: int) -> "Run":
        """The run as it stood after that epoch."""
        curves = {measure: values[:epoch] for measure, values in self.curves.items()}
        return replace(self, epochs=epoch, curves=curves, lost=self.lost[:epoch])


class Runs:
    """The runs of some records, sorted, with the few questions that tables and figures ask of them.

    Args:
        records: in any order; the same ones give the same answers.

    Raises:
        StoreError: if a record is not one, with what is wrong with it.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        known = all_published()
        read = [_read(record) for record in records]
        self.elsewhere = Counter(run.task for run in read if run.task not in known)
        ours = [run for run in read if run.task in known]
        for run in ours:
            if (measure := known[run.task].measure) not in run.curves:
                name = f"{run.optimiser} at {run.rate:g} with seed {run.seed}"
                wanting = f"{measure.partition('_')[0]}_loss" if measure.endswith("perplexity") else measure
                raise StoreError(f"the record of {run.task} by {name} has no {wanting}: run it again")
        self._ours = sorted(ours, key=lambda run: (run.epochs, run.finished))
        self._short = Counter(run.task for run in ours if run.epochs != known[run.task].epochs)
        self._full = sorted((run for run in ours if run.epochs == known[run.task].epochs), key=_order)
        self._on = {task: _data_of([run for run in self._full if run.task == task]) for task in known}
        self._counted: dict[tuple[str, str, float, int], Run] = {}
        for run in sorted(self._full, key=_worth):  # what counts comes last, and stays
            if run.data == self._on[run.task]:
                self._counted[run.task, run.optimiser, run.rate, run.seed] = run

    def of(self, task: str) -> list[Run]:
        """Every run of the task's full number of epochs."""
        return [run for run in self._full if run.task == task]

    def stand_in(self, task: str) -> str | None:
        """The data set that counts, where it is not the task's own."""
        return self._on[task]

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
        """Runs of one contender, rate and seed in several precisions, after the last epoch that two of them have.

        Short ones are among them, unless they are tries of less than a tenth; of repeated ones the longest counts, and
        of those the latest.
        """
        least = all_published()[task].epochs / 10
        groups: dict[tuple[str, float, int], dict[str, Run]] = {}
        for run in self._ours:
            if run.task == task and run.epochs >= least and run.data == self._on[task]:
                groups.setdefault((run.optimiser, run.rate, run.seed), {})[run.precision] = run
        found = []
        for group in groups.values():
            if len(group) > 1:
                epoch = sorted(run.epochs for run in group.values())[-2]
                long = [run.until(epoch) for run in group.values() if run.epochs >= epoch]
                found.append(sorted(long, key=_worth, reverse=True))
        return sorted(found, key=lambda group: _order(group[0]))


def called(data: str) -> str:
    """A data set as people would call it, without what tells its files from others'."""
    found = re.fullmatch(r"(.+)-(\d+)-classes-(\d+)-images-of-\d+-[0-9a-f]{8}", data)
    return f"{found[1]} ({int(found[2]):,} classes, {int(found[3]):,} images)" if found else data


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation."""
    if math.inf in values:
        return math.inf, math.nan
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.pstdev(values)


def _order(run: Run) -> tuple[Any, ...]:
    names = list(NAMES)
    place = names.index(run.optimiser) if run.optimiser in names else len(names)
    return run.task, place, run.optimiser, run.rate, run.seed, run.precision, run.finished


def _data_of(runs: Sequence[Run]) -> str | None:
    """The one data set that counts: the task's own, or else the stand-in that most runs were made on."""
    names = Counter(run.data for run in runs if run.data is not None)
    if not names or any(run.data is None for run in runs):
        return None
    return max(sorted(names), key=lambda name: names[name])


def _worth(run: Run) -> tuple[bool, str, str]:
    """Float32 counts before all others, and of repeated runs the latest."""
    return run.precision == "float32", run.precision, run.finished


#: What JSON calls the kinds of values that a record has.
KINDS: dict[type, str] = {float: "a number", int: "a whole number", str: "a word", dict: "an object", list: "a list"}


def _read(record: Record) -> Run:
    what = _name(record)
    if missing := [key for key in ("task", "optimiser", "lr", "seed", "epochs", "curve") if key not in record]:
        raise StoreError(f"{what} has no {', '.join(missing)}: it is not that of a run, so take it away")
    epochs = _take(record, "epochs", int, what)
    if epochs < 1:
        raise StoreError(f"{what} has {epochs} epochs: run it again")
    curve = _take(record, "curve", dict, what)
    curves: dict[Measure, tuple[float, ...]] = {}
    supervised = "train_accuracy" in curve or not {"reward", "test_distance"} & set(curve)
    for part in ("train", "test", *(["valid"] if "valid_loss" in curve else [])) if supervised else ():
        shares = _per_cent(curve, f"{part}_accuracy", epochs, what)
        known = {
            "accuracy": shares,
            "error": tuple(100 - value for value in shares),
            "perplexity": tuple(_perplexity(loss) for loss in _losses(curve, f"{part}_loss", epochs, what)),
        }
        curves |= {cast(Measure, f"{part}_{name}"): values for name, values in known.items()}
    judged = [f"{part}_{what}" for what in ("distance", "fid") if f"test_{what}" in curve for part in ("train", "test")]
    for name in [*judged, *(["reward"] if "reward" in curve else [])]:
        found = (math.nan if value is None else value for value in _losses(curve, name, epochs, what))
        curves[cast(Measure, name)] = tuple(found)
    trained = ["train_loss"] if supervised else [name for name in curve if name.endswith("_loss")]
    losses = [_losses(curve, name, epochs, what) for name in trained]
    return Run(
        task=_take(record, "task", str, what),
        optimiser=_take(record, "optimiser", str, what),
        rate=_take(record, "lr", float, what),
        seed=_take(record, "seed", int, what),
        epochs=epochs,
        precision=_take(record, "precision", str, what, "float32"),
        curves=curves,
        lost=tuple(None in found for found in zip(*losses, strict=True)) if losses else (False,) * epochs,
        seconds=_take(record, "seconds", float, what) if "seconds" in record else None,
        side_by_side=_take(record, "side_by_side", int, what, 1),
        device=_take(record, "device", str, what, "unknown"),
        finished=_take(record, "finished", str, what, ""),
        bleu=_take(record, "test_bleu", float, what) if "test_bleu" in record else None,
        data=_take(record, "data", str, what) if record.get("data") is not None else None,
    )


def _name(record: Record) -> str:
    """What to call a record of which any part may be wrong, for whoever has to find it."""
    parts = (("task", "of", str), ("optimiser", "by", str), ("lr", "at", float), ("seed", "with seed", int))
    known = [f"{word} {record[key]}" for key, word, kind in parts if _is(record.get(key), kind)]
    path = record.get("path")
    return " ".join(["the record", *known, *([f"({path})"] if path else [])])


def _is(value: Any, kind: type) -> bool:
    """Whether it is of the kind; a whole number is a number, true and what is not finite are none."""
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and abs(value) < 1e300
    return isinstance(value, kind)


def _take(record: Record, key: str, kind: type[T], what: str, default: T | None = None) -> T:
    value = record.get(key, default)
    if not _is(value, kind):
        raise StoreError(f"{what} has {_shown(value)} for {key}, which is not {KINDS[kind]}: run it again")
    return kind(value)  # type: ignore[call-arg]


def _values(curve: Record, name: str, epochs: int, what: str) -> list[Any]:
    values = _take(curve, name, list, what)
    if len(values) != epochs:
        raise StoreError(f"{what} has {len(values)} values of {name} for {epochs} epochs: run it again")
    return values


def _per_cent(curve: Record, name: str, epochs: int, what: str) -> tuple[float, ...]:
    values = _values(curve, name, epochs, what)
    for value in values:
        if not _is(value, float) or not 0 <= value <= 1:
            raise StoreError(f"{what} has {_shown(value)} in {name}, which is no fraction: accuracies are from 0 to 1")
    return tuple(100 * float(value) for value in values)


def _losses(curve: Record, name: str, epochs: int, what: str) -> list[float | None]:
    """The losses, None where they are not finite."""
    values = _values(curve, name, epochs, what)
    for value in values:
        if not (value is None or isinstance(value, float) or _is(value, float)):
            raise StoreError(f"{what} has {_shown(value)} in {name}: losses are numbers, or null if not finite")
    return [float(value) if _is(value, float) else None for value in values]


def _perplexity(loss: float | None) -> float:
    """How many words the network is torn between; without end where the loss is."""
    return math.inf if loss is None or loss > 700 else math.exp(loss)


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
