"""The time of a step by the number of parameters, and by the number of tensors."""

from functools import partial

from contenders import REFERENCES, nero_by
from shapes import Shapes, matrices
from step import measure
from timing import Bench, Job, Row

from nero.backends import backends_for

#: Above this many parameters, foreach is not measured beside a faster backend.
MAX_FOREACH_PARAMETERS = 300_000_000


def jobs(bench: Bench) -> list[Job]:
    """Return one job per size."""
    return [partial(_measure, by, shapes, bench) for by, shapes in sizes(bench)]


def _measure(by: str, shapes: Shapes, bench: Bench) -> list[Row]:
    contenders = [*REFERENCES, nero_by("auto", "Nero")]
    is_foreach_fastest = backends_for(bench.device)[-1] == "foreach"
    if not is_foreach_fastest and shapes.total <= MAX_FOREACH_PARAMETERS:
        contenders.append(nero_by("foreach"))
    return [{"by": by, **row} for row in measure(shapes, contenders, bench)]


def sizes(bench: Bench) -> list[tuple[str, Shapes]]:
    """Return matrices of 1024 by 1024, from 1 M to 2 G parameters, then 10 to 10,000 tensors of one total size."""
    if bench.is_quick:
        counts, total, tensors = [1, 2], 10_000, [1, 10]
    elif bench.device.type == "cuda":
        counts, total, tensors = [1, 4, 16, 64, 256, 1024, 2048], 100_000_000, [10, 30, 100, 300, 1000, 3000, 10_000]
    else:
        counts, total, tensors = [1, 4, 16, 64], 16_000_000, [10, 100, 1000, 10_000]
    width = 64 if bench.is_quick else 1024
    growing = [("parameters", matrices(count * width**2, count)) for count in counts]
    return growing + [("tensors", matrices(total, count)) for count in tensors]
