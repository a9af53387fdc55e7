"""The rule by which one contender is called better than another: three standard errors of the difference."""

import math
import statistics
from collections.abc import Iterable, Sequence

#: Standard errors by which two means must differ.
STANDARD_ERRORS = 3.0


def pooled_deviation(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation between seeds, pooled over contenders, and its degrees of freedom.

    A group with a single value, or with a value that is not finite, has no part in it. Without any group left, the
    deviation is NaN.

    Example:
        >>> pooled_deviation([[1.0, 3.0], [5.0, 5.0], [7.0]])
        (1.0, 2)
    """
    groups = [values for values in groups if len(values) > 1 and all(map(math.isfinite, values))]
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum((value - statistics.fmean(values)) ** 2 for values in groups for value in values)
    return (math.sqrt(squares / freedom), freedom) if freedom else (math.nan, 0)


def margin(deviation: float, ours: int, theirs: int) -> float:
    """Return the least difference between the means of two contenders that counts, by their numbers of seeds."""
    return STANDARD_ERRORS * deviation * math.sqrt(1 / ours + 1 / theirs)


def is_better(ours: Sequence[float], theirs: Sequence[float], deviation: float) -> bool:
    """Tell whether our mean is below theirs by at least the margin.

    Args:
        ours: one value a seed, lower is better; infinity for a diverged run.
        theirs: the same of the other contender.
        deviation: between seeds, as of :func:`pooled_deviation`. NaN decides nothing.
    """
    if not ours or not theirs:
        return False
    difference = statistics.fmean(theirs) - statistics.fmean(ours)
    return difference > 0 and difference >= margin(deviation, len(ours), len(theirs))
