"""Bounds as reports tell them: in four digits, and rounded to the side on which they claim no more than is known."""

import sys
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal


def at_most(value: float | Decimal) -> str:
    """An upper bound, rounded up."""
    return _told(value, ROUND_CEILING)


def at_least(value: float | Decimal) -> str:
    """A lower bound, rounded down."""
    return _told(value, ROUND_FLOOR)


def rest(share: float) -> str:
    """What a share leaves of all, which is a lower bound, too."""
    return at_least(Context(rounding=ROUND_FLOOR).subtract(Decimal(1), Decimal(str(share))))


def nearest(value: float | Decimal) -> str:
    """A number that is no bound."""
    return _told(value, ROUND_HALF_EVEN)


def power(log: float) -> Decimal:
    """The number with that logarithm, however small."""
    return Context(prec=20, Emin=MIN_EMIN, Emax=MAX_EMAX).exp(Decimal(log))


def _told(value: float | Decimal, rounding: str) -> str:
    # by the digits it is written with: 0.95 as a float is a little less, and is not to become 0.9499
    digits = Context(prec=4, rounding=rounding, Emin=MIN_EMIN, Emax=MAX_EMAX)
    rounded = digits.create_decimal(str(value))
    told = float(rounded)
    if rounded and abs(told) < sys.float_info.min:  # too small for a float, or for four digits of one
        return f"{digits.normalize(rounded):g}"
    return f"{told:.4g}"
