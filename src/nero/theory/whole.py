"""Whole numbers, whoever made them."""

import operator
from typing import Any


def whole(name: str, value: Any, least: int, what: str = "") -> int:
    """A whole number, such as numpy's, as Python's own; raise if it is none, or less than it may be."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} must be a whole number of {least} or more{what}, but it is {value!r}")
    return number
