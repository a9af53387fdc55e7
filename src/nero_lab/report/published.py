"""Numbers that the paper prints or that its authors stored, read from ``published.json``."""

import json
import math
import statistics
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias, cast

Measure: TypeAlias = Literal[
    "train_accuracy", "train_error", "train_perplexity", "valid_accuracy", "valid_error", "valid_perplexity",
    "test_accuracy", "test_error", "test_perplexity", "train_distance", "test_distance", "train_fid", "test_fid",
    "reward",
]  # fmt: skip


class PublishedRow(NamedTuple):
    """A contender at its best learning rate, in the last epoch.

    Attributes:
        task: the task whose runs belong to the row. Nero's rows of cifar10-granularity are runs of cifar10-ablation.
        optimiser: the contender's name.
        rate: the learning rate.
        mean: over seeds, accuracies and errors in per cent; NaN if nothing is published.
        spread: the population standard deviation over seeds; NaN if nothing is published.
    """

    task: str
    optimiser: str
    rate: float
    mean: float
    spread: float


class SearchCell(NamedTuple):
    """A run of the authors' learning-rate search on seed 0.

    Attributes:
        optimiser: the contender's name.
        rate: the learning rate.
        ends: the last known value of each measure, accuracies in per cent.
        epochs: the epoch where the authors' log ends, if that is before the last one.
    """

    optimiser: str
    rate: float
    ends: dict[Measure, float]
    epochs: int | None = None


class StoredCurve(NamedTuple):
    """A stored run of the authors: the task's measure in every epoch, accuracies in per cent."""

    optimiser: str
    rate: float
    seed: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Published:
    """Everything published about a task.

    Attributes:
        task: the task's name.
        reference: the section, table and figure of the paper.
        claim: the paper's claim in one line.
        origin: "paper" if the rows are printed there, "authors" if they come from the authors' stored runs.
        epochs: the number of epochs that the authors trained.
        measure: the measure that decides the claim.
        rows: one row per contender.
        stored_curves: the authors' stored runs, if any.
        search: the authors' learning-rate search, if stored.
        table1_name: the task's name in Table 1, or None if it is not in Table 1.
        table1_values: mean and spread in Table 1 by contender, where they differ from the rows.
        paper_measure: the measure of the published numbers if it differs from ours, else empty.
    """

    task: str
    reference: str
    claim: str
    origin: Literal["paper", "authors"]
    epochs: int
    measure: Measure
    rows: tuple[PublishedRow, ...]
    stored_curves: tuple[StoredCurve, ...]
    search: tuple[SearchCell, ...]
    table1_name: str | None = None
    table1_values: dict[str, tuple[float, float]] = field(default_factory=dict)
    paper_measure: str = ""

    @property
    def is_comparable(self) -> bool:
        """True if the published numbers measure the same quantity as ours."""
        return not self.paper_measure

    def stored_values(self, optimiser: str) -> list[tuple[float, ...]]:
        """Return a contender's stored curves, one per seed."""
        return [curve.values for curve in self.stored_curves if curve.optimiser == optimiser]


@cache
def all_published() -> dict[str, Published]:
    """Return what is published about every task, in the order of the pages."""
    text = resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    return {task: _parse(task, facts) for task, facts in json.loads(text).items()}


def _parse(task: str, facts: dict[str, Any]) -> Published:
    measure = cast(Measure, facts["measure"])
    curves = tuple(
        StoredCurve(run["optimiser"], run["lr"], run["seed"], tuple(_value(measure, value) for value in run[measure]))
        for run in facts.get("runs", ())
    )
    rows = tuple(_parse_row(task, row) for row in facts.get("rows", ()))
    named = {row.optimiser for row in rows}
    rows = (*(row for row in _rows_from_curves(task, curves) if row.optimiser not in named), *rows)
    return Published(
        task=task,
        reference=facts["reference"],
        claim=facts["claim"],
        origin=facts["origin"],
        epochs=facts["epochs"],
        measure=measure,
        rows=rows,
        stored_curves=curves,
        search=tuple(_parse_cell(cell) for cell in facts.get("search", ())),
        table1_name=facts.get("table1_name"),
        table1_values={name: (mean, spread) for name, (mean, spread) in facts.get("table1_values", {}).items()},
        paper_measure=facts.get("paper_measure", ""),
    )


def _parse_row(task: str, row: dict[str, Any]) -> PublishedRow:
    mean, spread = row.get("mean", math.nan), row.get("spread", math.nan)
    return PublishedRow(row.get("task", task), row["optimiser"], row["lr"], mean, spread)


def _parse_cell(cell: dict[str, Any]) -> SearchCell:
    measures = [cast(Measure, name) for name in cell if name not in ("optimiser", "lr", "epochs")]
    ends = {measure: _value(measure, cell[measure]) for measure in measures}
    return SearchCell(cell["optimiser"], cell["lr"], ends, cell.get("epochs"))


def _value(measure: Measure, value: float | None) -> float:
    """Convert a fraction to per cent and null to infinity."""
    if measure.endswith(("accuracy", "error")):
        return 100 * cast(float, value)
    return math.inf if value is None else value


def _rows_from_curves(task: str, curves: tuple[StoredCurve, ...]) -> tuple[PublishedRow, ...]:
    """Compute mean and population standard deviation over seeds, as the paper does."""
    ends: dict[tuple[str, float], list[float]] = {}
    for curve in curves:
        ends.setdefault((curve.optimiser, curve.rate), []).append(curve.values[-1])
    return tuple(
        PublishedRow(task, name, rate, statistics.fmean(values), statistics.pstdev(values))
        for (name, rate), values in ends.items()
    )
