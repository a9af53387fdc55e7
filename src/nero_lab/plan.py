"""The protocol of a study beside its records: which runs are missing, and how long they take."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from nero_lab.progress import duration
from nero_lab.protocol import Precision, Settings, Task, best_rate
from nero_lab.report.names import dataset_name
from nero_lab.report.runs import that_count


class Cell(NamedTuple):
    """The runs of one contender that belong together: a search of rates, or seeds at the best rate.

    Attributes:
        wanted: the number of runs of the protocol; 0 for seeds whose rate a search has yet to find.
        missing: the runs that are not on record.
        stand_ins: the missing runs that are on record with a stand-in for the task's data, and its name.
    """

    task: Task
    contender: str
    part: Literal["search", "seeds"]
    wanted: int
    missing: list[Settings]
    stand_ins: dict[Settings, str]

    def seconds(self, precision: Precision) -> float | None:
        """Return how long the missing runs take on an H200, one after another; ``None`` if the task was not timed."""
        one = self.task.seconds.on("cuda", precision)
        return None if one is None else one * len(self.missing)


def cells_of(tasks: Iterable[Task], records: Sequence[dict[str, Any]], precision: Precision | None) -> list[Cell]:
    """Return all cells in the order in which to run them.

    Nero's searches come first, then seeds, then the searches of others; of these, the shortest first.

    Args:
        tasks: the tasks of a study.
        records: the runs on record, in any precision.
        precision: the precision of missing runs; ``None`` for that of each task.
    """
    cells = [
        cell
        for task in tasks
        for contender in task.contenders
        for cell in _cells(task, contender, records, precision or task.precision)
    ]

    def order(cell: Cell) -> tuple[int, float]:
        rank = 1 if cell.part == "seeds" else 0 if cell.contender == "nero" else 2
        return rank, cell.seconds(precision or cell.task.precision) or 0.0

    return sorted(cells, key=order)


def lines_of(cells: Sequence[Cell], precision: Precision | None) -> Iterator[str]:
    """Format the cells as a table, a line for each contender of a task, and sum up what is missing."""
    line = "{:23}{:24}{:>6}{:>9}{:>8}{:>10}"
    yield line.format("TASK", "OPTIMISER", "RATES", "SEEDS", "MISSING", "ON A GPU")
    by_task: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        by_task.setdefault(cell.task.name, {}).setdefault(cell.contender, []).append(cell)
    total, seconds, not_timed = 0, 0.0, 0
    stand_ins: dict[tuple[str, str], None] = {}
    for task, contenders in by_task.items():
        for contender, own in contenders.items():
            counts = {cell.part: f"{cell.wanted - len(cell.missing)} of {cell.wanted or '?'}" for cell in own}
            missing = len({settings for cell in own for settings in cell.missing})  # a rate of seed 0 is also a seed
            one = own[0].task.seconds.on("cuda", precision or own[0].task.precision)
            time = "" if not missing else "not timed" if one is None else duration(missing * one)
            total += missing
            seconds += missing * (one or 0.0)
            not_timed += missing if one is None else 0
            on_stand_in = {settings: data for cell in own for settings, data in cell.stand_ins.items()}
            stand_ins |= dict.fromkeys((task, data) for data in on_stand_in.values())
            note = f"  {len(on_stand_in)} on a stand-in" if on_stand_in else ""
            yield line.format(task, contender, counts.get("search", "-"), counts["seeds"], missing or "", time) + note
    times = [f"about {duration(seconds)} on an NVIDIA H200, one by one"] if seconds else []
    if not_timed:
        times.append(f"{not_timed} not timed" if seconds else "their times are not known")
    yield f"{total} runs are missing" + (f": {'; '.join(times)}" if times else "")
    for task, data in stand_ins:
        yield f"a stand-in: {task} was run on {dataset_name(data)}; runs on a stand-in count as missing"
    if any(cell.part == "seeds" and not cell.wanted for cell in cells):
        yield "0 of ?: seeds follow at the best rate of the search: repeat the command then"


def _cells(task: Task, contender: str, records: Sequence[dict[str, Any]], precision: Precision) -> list[Cell]:
    """Return the search of a contender, unless its rates are known, and its seeds at the best rate."""
    options = dict(task.contenders[contender].options)
    whole = {"task": task.name, "optimiser": contender, "epochs": task.epochs, "batch": task.batch, "options": options}
    found = [record for record in records if all(record.get(key) == value for key, value in whole.items())]
    own = that_count(record for record in found if record.get("data") is None)
    # a run that does not count, since other seeds have another precision, need not be made again in its own
    in_precision = [each for each in found if each.get("data") is None and each.get("precision") == precision]
    done = {(record["lr"], record["seed"]) for record in [*own, *in_precision]}
    on_stand_in = {(record["lr"], record["seed"]): record["data"] for record in found if record.get("data") is not None}

    def cell(part: Literal["search", "seeds"], runs: Sequence[tuple[float, int]]) -> Cell:
        missing = {run: task.settings(contender, *run, precision=precision) for run in runs if run not in done}
        stand_ins = {settings: on_stand_in[run] for run, settings in missing.items() if run in on_stand_in}
        return Cell(task, contender, part, len(runs), list(missing.values()), stand_ins)

    grid = task.grid_of(contender)
    search = cell("search", [(rate, 0) for rate in grid])
    rate: float | None = task.contenders[contender].best
    if task.study != "paper" and grid:  # the paper has found its rates
        searched = [record for record in own if record["lr"] in grid and record["seed"] == 0]
        if not search.missing:
            rate = best_rate(task, searched)
        elif task.seeds > 1:  # with one seed, the search is all there is
            rate = None
    seeds = cell("seeds", [] if rate is None else [(rate, seed) for seed in range(task.seeds)])
    return [search, seeds] if grid else [seeds]
