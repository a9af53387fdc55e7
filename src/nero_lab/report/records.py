"""Runs parsed from records, with a check of every value that the report uses."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

from nero_lab.protocol import perplexity
from nero_lab.report.published import Measure
from nero_lab.store import StoreError

Record: TypeAlias = dict[str, Any]
T = TypeVar("T")

#: Keys that every record has.
REQUIRED = ("task", "optimiser", "lr", "seed", "epochs", "curve")
#: Names of the types in error messages.
TYPE_NAMES: dict[type, str] = {float: "a number", int: "an int", str: "a string", dict: "an object", list: "a list"}


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
    """Convert a record to a run.

    Raises:
        StoreError: if a value is missing or has the wrong type, length or range.
    """
    name = _name(record)
    if missing := [key for key in REQUIRED if key not in record]:
        raise StoreError(f"{name}: missing {', '.join(missing)}; this file is not the record of a run, move it away")
    epochs = _take(record, "epochs", int, name)
    if epochs < 1:
        raise StoreError(f"{name}: epochs must be at least 1, got {epochs}; run it again")
    curve = _take(record, "curve", dict, name)
    is_supervised = "train_accuracy" in curve or not {"reward", "test_distance"} & set(curve)
    curves = (_supervised_curves if is_supervised else _measured_curves)(curve, epochs, name)
    trained = ["train_loss"] if is_supervised else [key for key in curve if key.endswith("_loss")]
    losses = [_losses(curve, key, epochs, name) for key in trained]
    return Run(
        task=_take(record, "task", str, name),
        optimiser=_take(record, "optimiser", str, name),
        rate=_take(record, "lr", float, name),
        seed=_take(record, "seed", int, name),
        epochs=epochs,
        precision=_take(record, "precision", str, name, "float32"),
        curves=curves,
        nonfinite=tuple(None in values for values in zip(*losses, strict=True)) if losses else (False,) * epochs,
        seconds=_take(record, "seconds", float, name) if "seconds" in record else None,
        side_by_side=_take(record, "side_by_side", int, name, 1),
        device=_take(record, "device", str, name, "unknown"),
        finished=_take(record, "finished", str, name, ""),
        bleu=_take(record, "test_bleu", float, name) if "test_bleu" in record else None,
        data=_take(record, "data", str, name) if record.get("data") is not None else None,
    )


def _supervised_curves(curve: Record, epochs: int, name: str) -> dict[Measure, tuple[float, ...]]:
    curves: dict[Measure, tuple[float, ...]] = {}
    for part in ("train", "test", "valid") if "valid_loss" in curve else ("train", "test"):
        accuracy = _per_cent(curve, f"{part}_accuracy", epochs, name)
        losses = _losses(curve, f"{part}_loss", epochs, name)
        curves[cast(Measure, f"{part}_accuracy")] = accuracy
        curves[cast(Measure, f"{part}_error")] = tuple(100 - value for value in accuracy)
        curves[cast(Measure, f"{part}_perplexity")] = tuple(perplexity(loss) for loss in losses)
    return curves | _measured_curves(curve, epochs, name)


def _measured_curves(curve: Record, epochs: int, name: str) -> dict[Measure, tuple[float, ...]]:
    """Read rewards, and distances to both training and test images."""
    keys = [f"{part}_{kind}" for kind in ("distance", "fid") if f"test_{kind}" in curve for part in ("train", "test")]
    keys += ["reward"] if "reward" in curve else []
    return {
        cast(Measure, key): tuple(math.nan if value is None else value for value in _losses(curve, key, epochs, name))
        for key in keys
    }


def _name(record: Record) -> str:
    """Identify a record in an error message, although any of its values may be wrong."""
    parts = (("task", "of", str), ("optimiser", "by", str), ("lr", "at", float), ("seed", "with seed", int))
    known = [f"{word} {record[key]}" for key, word, kind in parts if _is_a(record.get(key), kind)]
    path = record.get("path")
    return " ".join(["the record", *known, *([f"({path})"] if path else [])])


def _is_a(value: Any, kind: type) -> bool:
    """Check the type. An int is a float; a bool, NaN or infinity is not a number."""
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and abs(value) < 1e300
    return isinstance(value, kind)


def _take(record: Record, key: str, kind: type[T], name: str, default: T | None = None) -> T:
    value = record.get(key, default)
    if not _is_a(value, kind):
        raise StoreError(f"{name}: {key} must be {TYPE_NAMES[kind]}, got {_shown(value)}; run it again")
    return kind(value)  # type: ignore[call-arg]


def _values(curve: Record, key: str, epochs: int, name: str) -> Sequence[Any]:
    values = _take(curve, key, list, name)
    if len(values) != epochs:
        raise StoreError(f"{name}: {key} must have {epochs} values, one per epoch, got {len(values)}; run it again")
    return values


def _per_cent(curve: Record, key: str, epochs: int, name: str) -> tuple[float, ...]:
    values = _values(curve, key, epochs, name)
    for value in values:
        if not _is_a(value, float) or not 0 <= value <= 1:
            raise StoreError(f"{name}: {key} must be in [0, 1], got {_shown(value)}; run it again")
    return tuple(100 * float(value) for value in values)


def _losses(curve: Record, key: str, epochs: int, name: str) -> list[float | None]:
    """Read numbers, None where they are not finite."""
    values = _values(curve, key, epochs, name)
    for value in values:
        if not (value is None or isinstance(value, float) or _is_a(value, float)):
            raise StoreError(f"{name}: {key} must be a number, or null if not finite, got {_shown(value)}")
    return [float(value) if _is_a(value, float) else None for value in values]


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
