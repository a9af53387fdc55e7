"""What the paper printed and its authors stored, to set our runs beside; published.json has it, with its sources."""

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


class Final(NamedTuple):
    """A row of the paper's: a contender at its best rate, in the last epoch, in per cent where it is a share.

    Where the paper prints no number, its mean and spread are not numbers either. ``task`` is the one whose runs the row
    is of: Nero's rows of cifar10-granularity are runs of cifar10-ablation.
    """

    task: str
    optimiser: str
    rate: float
    mean: float
    spread: float


class Cell(NamedTuple):
    """A cell of the authors' search on seed 0: what is known of its last epoch, shares in per cent.

    ``epochs`` is where its log ends, if that is before the last.
    """

    optimiser: str
    rate: float
    ends: dict[Measure, float]
    epochs: int | None = None


class Curve(NamedTuple):
    """A stored run: the task's measure by epoch, in per cent where it is a share."""

    optimiser: str
    rate: float
    seed: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Published:
    """All there is to compare a task with.

    Attributes:
        task: its name.
        where: the place in the paper.
        shows: the claim, in a line.
        whose: "paper" where its tables are all there is, "authors" where their stored runs are compared with.
        source: where the numbers come from.
        epochs: how long the authors trained.
        measure: what the claim is measured by.
        finals: the rows of the claim.
        headline: the contenders of the rows that tell the claim in short.
        curves: stored runs, if any.
        search: the search for the best rate, if stored.
        row: what the task is called in Table 1, if it is there.
        printed: the mean and spread in Table 1, by contender, where the rows have others.
        other: what the paper's numbers are of, where that is not what ours are of.
    """

    task: str
    where: str
    shows: str
    whose: Literal["paper", "authors"]
    source: str
    epochs: int
    measure: Measure
    finals: tuple[Final, ...]
    headline: tuple[Final, ...]
    curves: tuple[Curve, ...]
    search: tuple[Cell, ...]
    row: str | None = None
    printed: dict[str, tuple[float, float]] = field(default_factory=dict)
    other: str = ""

    @property
    def comparable(self) -> bool:
        """Whether the paper's numbers are of the same thing as ours."""
        return not self.other

    def curves_of(self, optimiser: str) -> list[tuple[float, ...]]:
        """The stored curves of a contender, one a seed."""
        return [curve.values for curve in self.curves if curve.optimiser == optimiser]


@cache
def all_published() -> dict[str, Published]:
    """Every task with what is published of it, in the order of the pages."""
    text = resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    return {task: _read(task, facts) for task, facts in json.loads(text).items()}


def _read(task: str, facts: dict[str, Any]) -> Published:
    measure = cast(Measure, facts["measure"])
    curves = tuple(
        Curve(run["optimiser"], run["lr"], run["seed"], tuple(_value(measure, value) for value in run[measure]))
        for run in facts.get("runs", ())
    )
    search = tuple(
        Cell(
            cell["optimiser"], cell["lr"], {name: _value(name, cell[name]) for name in _known(cell)}, cell.get("epochs")
        )
        for cell in facts.get("search", ())
    )
    finals = tuple(
        Final(
            row.get("task", task), row["optimiser"], row["lr"], row.get("mean", math.nan), row.get("spread", math.nan)
        )
        for row in facts.get("finals", ())
    )
    named = {row.optimiser for row in finals}
    finals = (*(row for row in _finals(task, curves) if row.optimiser not in named), *finals)
    return Published(
        task=task,
        where=facts["where"],
        shows=facts["shows"],
        whose=facts["whose"],
        source=facts["source"],
        epochs=facts["epochs"],
        measure=measure,
        finals=finals,
        headline=tuple(row for name in facts["headline"] for row in finals if row.optimiser == name),
        curves=curves,
        search=search,
        row=facts.get("row"),
        printed={name: (mean, spread) for name, (mean, spread) in facts.get("printed", {}).items()},
        other=facts.get("other", ""),
    )


def _known(cell: dict[str, Any]) -> list[Measure]:
    return [cast(Measure, name) for name in cell if name not in ("optimiser", "lr", "epochs")]


def _value(measure: Measure, value: float | None) -> float:
    """A share in per cent; anything else as it is, null for a perplexity without end."""
    if measure.endswith(("accuracy", "error")):
        return 100 * cast(float, value)
    return math.inf if value is None else value


def _finals(task: str, curves: tuple[Curve, ...]) -> tuple[Final, ...]:
    """Mean and population standard deviation over seeds, as the paper's ± is."""
    ends: dict[tuple[str, float], list[float]] = {}
    for curve in curves:
        ends.setdefault((curve.optimiser, curve.rate), []).append(curve.values[-1])
    return tuple(
        Final(task, name, rate, statistics.fmean(values), statistics.pstdev(values))
        for (name, rate), values in ends.items()
    )
