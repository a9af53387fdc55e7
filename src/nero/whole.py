"""Whole numbers and real ones, whoever made them."""

import math
import operator
from numbers import Real
from typing import Any

from torch import Tensor


def whole(name: str, value: Any, least: int | None = None, what: str = "") -> int:
    """A whole number, such as numpy's, as Python's own; raise if it is none, less than it may be, or beyond 64 bits."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        of = "" if least is None else f" of {least} or more"
        raise ValueError(f"{name} must be a whole number{of}{what}, but it is {value!r}")
    if number >= 2**64:
        raise ValueError(f"{name} must be a whole number of 64 bits at most{what}")
    return number


def real(value: Any) -> float:
    """A real number, such as numpy's or a tensor's only one, as Python's own; what is none is not a number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # of a whole one that no float holds
        return -math.inf if value < 0 else math.inf
