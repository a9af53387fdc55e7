"""The runs of the study of today's optimisers, and the questions that its tables and figures ask."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nero_lab.protocol import best_rate, has_diverged
from nero_lab.report.names import CONTENDERS as NAMES
from nero_lab.report.runs import Record, that_count
from nero_lab.report.today.significance import is_better
from nero_lab.store import StoreError, read_records
from nero_lab.tasks import TASKS

#: Contenders of this library; all others are other people's.
OURS = (
    "nero",
    "nero-momentum",
    "nero-momentum-free",
    "nero-auto",
    "nero-momentum-auto",
    "muon-balanced",
    "adamw-balanced",
)
#: The record of ``benchmarks/suite.py``, which times contenders alone.
TIMES = "benchmarks/results/suite-cuda.json"
#: The tasks of each series, by size. The smallest network has a place in both.
SERIES = {
    "width": {256: "gpt-w256", 512: "gpt-w512", 1024: "gpt-w1024"},
    "depth": {4: "gpt-w256", 8: "gpt-d8", 16: "gpt-d16"},
}


@dataclass(frozen=True)
class Goal:
    """The measure that decides a task; lower is better.

    Attributes:
        name: its name on the pages.
        curve: the curve of the record that is drawn.
        result: the number of the record that decides, or None for the curve's last value.
        digits: the decimals of a table.
        unit: of an interval of the curve.
        interval: the number of units between two values of the curve.
        is_accuracy: the record holds accuracies, from which errors in per cent are made.
    """

    name: str
    curve: str
    result: str | None
    digits: int
    unit: str
    interval: int = 1
    is_accuracy: bool = False

    @property
    def tolerance(self) -> str:
        """The distance from a contender's own best that counts as near it."""
        return "one point" if self.is_accuracy else "1 %"

    def limit(self, best: float) -> float:
        """Return the highest value that counts as near the best: a point of accuracy, or 1 % of another measure."""
        return best + 1 if self.is_accuracy else 1.01 * best

    def convert(self, value: float | None) -> float:
        """Return the measure; infinity if the run has diverged."""
        if value is None or not math.isfinite(value):
            return math.inf
        return 100 * (1 - value) if self.is_accuracy else value


GOALS = {
    "gpt": Goal("bits per byte", "valid_loss", "valid_bits_per_byte", digits=4, unit="steps", interval=100),
    "vit": Goal("test error, %", "test_accuracy", None, digits=2, unit="epochs", is_accuracy=True),
    "airbench": Goal("test error, %", "test_accuracy", "tta_accuracy", digits=3, unit="epochs", is_accuracy=True),
}


def goal_of(task: str) -> Goal:
    """Return the measure of a task; variants of a task, such as ``gpt-w256``, share it."""
    return GOALS[task.partition("-")[0]]


class Run(NamedTuple):
    """A run of the study.

    Attributes:
        value: the measure that decides; infinity if the run has diverged.
        record: what it was parsed from.
        curve: one value an interval; infinity where it is not finite.
        seconds: the duration of the run, which other processes on the device make longer.
        state: the optimiser's bytes a parameter, if recorded.
    """

    task: str
    contender: str
    rate: float
    seed: int
    value: float
    record: Record
    curve: tuple[float, ...]
    seconds: float
    state: float | None
    precision: str
    device: str


class Width(NamedTuple):
    """The factor between the highest and the lowest rate that is near the best.

    Attributes:
        factor: interpolated in the logarithm of the rate.
        is_open: the grid ends first, so that the factor is a lower bound.
    """

    factor: float
    is_open: bool


class Study:
    """Runs by task, contender, rate and seed.

    Args:
        records: in any order; :func:`nero_lab.report.runs.that_count` chooses. Runs with fewer epochs than the longest
            of their task are left out.
        seconds: the seconds of all steps of a run, with the device for itself, by task and contender.

    Attributes:
        short: the number of runs left out, by task.
    """

    def __init__(self, records: Iterable[Record], seconds: Mapping[tuple[str, str], float] | None = None) -> None:
        self.seconds = seconds or {}
        known, epochs = list(records), Counter[str]()
        for record in known:
            epochs[record["task"]] = max(epochs[record["task"]], record["epochs"])
        whole = [record for record in known if record["epochs"] == epochs[record["task"]]]
        self.short = Counter(record["task"] for record in known) - Counter(record["task"] for record in whole)
        self._runs: dict[str, dict[str, dict[float, dict[int, Run]]]] = {}
        for run in map(parse, that_count(whole)):
            rates = self._runs.setdefault(run.task, {}).setdefault(run.contender, {})
            rates.setdefault(run.rate, {})[run.seed] = run

    def runs(self, task: str) -> list[Run]:
        """Return all runs of a task that count."""
        rates = [seeds for found in self._runs.get(task, {}).values() for seeds in found.values()]
        return [run for seeds in rates for run in seeds.values()]

    def has_times(self, task: str) -> bool:
        """Tell whether every contender that was run has been timed alone."""
        return all((task, name) in self.seconds for name in self.ranking(task))

    def contenders(self, task: str) -> list[str]:
        """Return the contenders of a task, with runs or without, in the order of the tables."""
        known = TASKS[task].contenders if task in TASKS else {}
        names = list(NAMES)
        return sorted({*known, *self._runs.get(task, {})}, key=lambda name: names.index(name) if name in names else 99)

    def search(self, task: str, contender: str) -> dict[float, Run]:
        """Return the run of the lowest seed at each rate, in the order of the rates."""
        rates = self._runs.get(task, {}).get(contender, {})
        return {rate: rates[rate][min(rates[rate])] for rate in sorted(rates)}

    def best_rate(self, task: str, contender: str) -> float | None:
        """Return the rate that the search chooses, or the rate with the most runs if the task has no search."""
        found = self.search(task, contender)
        if not found:
            return None
        if task == "airbench":
            return max(found, key=lambda rate: (len(self.at_rate(task, contender, rate)), -found[rate].value))
        return best_rate(TASKS[task], [run.record for run in found.values()])

    def at_rate(self, task: str, contender: str, rate: float) -> list[Run]:
        """Return the runs at a rate, in the order of their seeds."""
        return [run for _, run in sorted(self._runs[task][contender][rate].items())]

    def best_runs(self, task: str, contender: str) -> list[Run]:
        """Return the runs at the best rate, in the order of their seeds."""
        rate = self.best_rate(task, contender)
        return [] if rate is None else self.at_rate(task, contender, rate)

    def values(self, task: str, contender: str) -> list[float]:
        """Return the measure of each seed at the best rate."""
        return [run.value for run in self.best_runs(task, contender)]

    def ranking(self, task: str) -> list[str]:
        """Return the contenders that were run, by their means; diverged ones come last."""
        run = [contender for contender in self.contenders(task) if self.values(task, contender)]
        return sorted(run, key=lambda contender: statistics.fmean(self.values(task, contender)))

    def is_better(self, task: str, ours: str, theirs: str) -> bool:
        """Tell whether one contender is better than another by the study's rule."""
        return is_better(self.values(task, ours), self.values(task, theirs))

    def width(self, task: str, contender: str) -> Width | None:
        """Return the width of the range of rates near the contender's best; None with a single rate."""
        found = {rate: run.value for rate, run in self.search(task, contender).items()}
        best = min(found, key=lambda rate: found[rate], default=math.nan)
        if len(found) < 2 or not math.isfinite(found[best]):
            return None
        return width_near(found, best, goal_of(task).limit(found[best]))


def width_near(values: Mapping[float, float], best: float, limit: float) -> Width:
    """Return the width of the rates around the best one whose values are at most ``limit``.

    Where a value exceeds the limit, the end lies between its rate and the last one below, by linear interpolation in
    the logarithm of the rate. A diverged run has an infinite value, so the end is the last rate below the limit.

    Example:
        >>> width_near({0.1: 3.0, 1.0: 1.0, 10.0: 1.5}, best=1.0, limit=2.0)
        Width(factor=31.62..., is_open=True)
    """
    rates = sorted(values)
    place = rates.index(best)
    ends, is_open = [], False
    for side in (rates[place::-1], rates[place:]):
        inside = side[0]
        for outside in side[1:]:
            if values[outside] > limit:
                share = (limit - values[inside]) / (values[outside] - values[inside])
                ends.append(math.log(inside) + share * (math.log(outside) - math.log(inside)))
                break
            inside = outside
        else:
            is_open = True
            ends.append(math.log(inside))
    return Width(math.exp(ends[1] - ends[0]), is_open)


def parse(record: Record) -> Run:
    """Convert a record.

    Raises:
        StoreError: if the record lacks the measure of its task.
    """
    goal = goal_of(record["task"])
    curve, path = record["curve"], record.get("path", f"a record of {record['task']}")
    if goal.curve not in curve:
        raise StoreError(f"{path} lacks the curve {goal.curve}; run it again")
    last = curve[goal.curve][-1]
    # an accuracy stays a number after a divergence
    is_lost = last is None or has_diverged(curve)
    if goal.result and goal.result not in record and not is_lost:
        raise StoreError(f"{path} lacks {goal.result}; run it again")
    value = last if goal.result is None else record.get(goal.result)
    state, parameters = record.get("state_bytes"), record.get("parameters")
    return Run(
        task=record["task"],
        contender=record["optimiser"],
        rate=record["lr"],
        seed=record["seed"],
        value=math.inf if is_lost else goal.convert(value),
        record=record,
        curve=tuple(map(goal.convert, curve[goal.curve])),
        seconds=record.get("seconds", math.nan),
        state=state / parameters if state is not None and parameters else None,
        precision=record.get("precision", "float32"),
        device=record.get("device", "unknown"),
    )


def read_study(root: Path) -> Study:
    """Read the committed records and times under the root of the repository; without any, the study is empty."""
    folder, timed = root / "results/today", root / TIMES
    rows = json.loads(timed.read_text())["rows"] if timed.is_file() else []
    seconds = {(row["task"], row["optimiser"]): row["seconds_of_steps"] for row in rows if "seconds_of_steps" in row}
    return Study(read_records(folder) if folder.is_dir() else [], seconds)
