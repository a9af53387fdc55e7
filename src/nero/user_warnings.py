"""Warnings that point to the user's line."""

import sys
import warnings
from collections.abc import Sequence

_OWN = ("nero", "torch")


def warn(message: str) -> None:
    """Warn at the first frame outside of this package and torch, whose schedulers and hooks wrap an optimiser."""
    frame, level = sys._getframe(1), 2  # level 2 is the caller of this function
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def and_more(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
