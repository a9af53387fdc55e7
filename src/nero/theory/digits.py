"""Bounds as reports tell them: in four digits, and rounded to the side on which they claim no more than is known."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def at_most(value: float | Decimal) -> str:
    """An upper bound, rounded up."""
    return _told(value, ROUND_CEILING)


def at_least(value: float | Decimal) -> str:
    """A lower bound, rounded down."""
    return _told(value, ROUND_FLOOR)


def _told(value: float | Decimal, rounding: str) -> str:
    # by the digits it is written with: 0.95 as a float is a little less, and is not to become 0.9499
    rounded = Context(prec=4, rounding=rounding).create_decimal(str(value))
    return f"{float(rounded):.4g}"
