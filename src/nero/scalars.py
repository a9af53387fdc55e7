"""Python numbers from values of any numeric type."""

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

#: The types of numbers that cannot change in place, as tensors can.
IMMUTABLE = frozenset({bool, int, float})


def as_int(name: str, value: Any, least: int | None = None, what: str = "") -> int:
    """Convert an integer of any type; raise if it is not one, below ``least``, or beyond 64 bits."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{at_least}{what}, got {value!r}")
    if number >= 2**64:
        raise ValueError(f"{name} must be an integer of at most 64 bits{what}")
    return number


def is_scalar_array(value: Any) -> bool:
    """Return whether a value is an array without axes, such as ``numpy.array(0.01)``, or a tensor without axes."""
    return getattr(value, "shape", None) == () and hasattr(value, "item")


def as_float(value: Any) -> float:
    """Convert to a Python float; NaN if the value is not a real number."""
    if is_scalar_array(value) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of a float
        return -math.inf if value < 0 else math.inf


def checked_tolerance(tolerance: float) -> float:
    """Convert a tolerance to a Python float; raise unless it is a number of at least 0."""
    if not as_float(tolerance) >= 0:
        raise ValueError(f"tolerance must be a number of at least 0, like 1e-6, or None, got {tolerance!r}")
    return as_float(tolerance)


def are_same(values: Sequence[object], others: Sequence[object]) -> bool:
    """Compare two lists by the identity of their elements: 1 equals True, but is not the same option."""
    return len(values) == len(others) and all(map(operator.is_, values, others))
