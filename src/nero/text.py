"""Text of reports: tables, and numbers of four significant digits, with bounds rounded to the safe side."""

import sys
from collections.abc import Iterable, Sequence
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: bool = True) -> str:
    """Align cells in columns under a header.

    Args:
        header: the column names.
        rows: the cells of each row.
        numeric: align all columns but the first to the right; else all to the left.

    Example:
        >>> print(text_table(("layer", "angle"), [("0.weight", "0.1"), ("1.weight", "0.25")]))
        layer     angle
        --------  -----
        0.weight    0.1
        1.weight   0.25
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column and numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def format_upper(value: float | Decimal) -> str:
    """Format an upper bound, rounded up."""
    return _format(value, ROUND_CEILING)


def format_lower(value: float | Decimal) -> str:
    """Format a lower bound, rounded down."""
    return _format(value, ROUND_FLOOR)


def format_complement(share: float) -> str:
    """Format ``1 - share``, rounded down."""
    return format_lower(Context(rounding=ROUND_FLOOR).subtract(Decimal(1), Decimal(str(share))))


def format_nearest(value: float | Decimal) -> str:
    """Format a number that is not a bound, rounded to nearest."""
    return _format(value, ROUND_HALF_EVEN)


def exp_decimal(log: float) -> Decimal:
    """Return ``exp(log)``, also where a float would underflow."""
    return Context(prec=20, Emin=MIN_EMIN, Emax=MAX_EMAX).exp(Decimal(log))


def _format(value: float | Decimal, rounding: str) -> str:
    # round the digits that repr shows: the float 0.95 is slightly less, and must not become 0.9499
    context = Context(prec=4, rounding=rounding, Emin=MIN_EMIN, Emax=MAX_EMAX)
    rounded = context.create_decimal(str(value))
    number = float(rounded)
    if rounded and abs(number) < sys.float_info.min:  # a subnormal float has fewer than four digits
        return f"{context.normalize(rounded):g}"
    return f"{number:.4g}"
