"""How a step's time grows with the parameters, and with the tensors they are in."""

from functools import partial

from contenders import REFERENCES, ours
from shapes import Shapes, matrices
from step import measure
from timing import Bench, Job, Row

import nero

#: Beyond so many parameters, only the fastest backend is measured.
FOREACH = 300_000_000


def jobs(bench: Bench) -> list[Job]:
    """A job for each size."""
    return [partial(_measure, by, shapes, bench) for by, shapes in sizes(bench)]


def _measure(by: str, shapes: Shapes, bench: Bench) -> list[Row]:
    those = [*REFERENCES, ours("auto", "Nero")]
    if (
        len(nero.backends.backends_for(bench.device)) > 2 and shapes.total <= FOREACH
    ):  # of two backends, foreach is the fastest
        those.append(ours("foreach"))
    return [{"by": by, **row} for row in measure(shapes, those, bench)]


def sizes(bench: Bench) -> list[tuple[str, Shapes]]:
    """From 1 M to 2 G parameters in matrices of 1024 by 1024; then 10 to 10,000 tensors, of as much in all."""
    if bench.quick:
        counts, total, tensors = [1, 2], 10_000, [1, 10]
    elif bench.device.type == "cuda":
        counts, total, tensors = [1, 4, 16, 64, 256, 1024, 2048], 100_000_000, [10, 30, 100, 300, 1000, 3000, 10_000]
    else:
        counts, total, tensors = [1, 4, 16, 64], 16_000_000, [10, 100, 1000, 10_000]
    width = 64 if bench.quick else 1024
    growing = [("parameters", matrices(count * width**2, count)) for count in counts]
    return growing + [("tensors", matrices(total, count)) for count in tensors]
