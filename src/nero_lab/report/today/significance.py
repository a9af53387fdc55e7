"""The rule by which one contender is called better than another: Welch's t-test."""

import math
import statistics
from collections.abc import Sequence

#: Two-sided p-value below which a difference counts.
MAX_P = 0.01
#: Points of the integral of Student's density.
POINTS = 2_000


def welch_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the two-sided p-value of Welch's t-test, which lets the spreads of two groups differ.

    With ν degrees of freedom, the density of φ = atan(t / √ν) is proportional to cos^(ν-1) φ.

    Args:
        ours: at least two finite values.
        theirs: the same of the other group.

    Example:
        >>> round(welch_p([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]), 4)
        0.0213
    """
    errors = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    difference = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    if not sum(errors):
        return 0.0 if difference else 1.0
    freedom = sum(errors) ** 2 / sum(
        error**2 / (len(values) - 1) for error, values in zip(errors, (ours, theirs), strict=True)
    )
    bound = math.atan(difference / math.sqrt(sum(errors)) / math.sqrt(freedom))
    return _integral(bound, math.pi / 2, freedom) / _integral(0.0, math.pi / 2, freedom)


def is_better(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Tell whether our mean is below theirs, at a p-value below :data:`MAX_P`.

    Fewer than two seeds decide nothing. A contender that diverged on every seed is worse than one that never did.

    Args:
        ours: one value a seed, lower is better; infinity for a diverged run.
        theirs: the same of the other contender.
    """
    if min(len(ours), len(theirs)) < 2 or not all(map(math.isfinite, ours)):
        return False
    if not all(map(math.isfinite, theirs)):
        return not any(map(math.isfinite, theirs))
    return statistics.fmean(ours) < statistics.fmean(theirs) and welch_p(ours, theirs) < MAX_P


def _integral(start: float, stop: float, freedom: float) -> float:
    """Integrate cos^(ν-1) by the midpoint rule."""
    width = (stop - start) / POINTS
    return width * math.fsum(math.cos(start + (i + 0.5) * width) ** (freedom - 1) for i in range(POINTS))
