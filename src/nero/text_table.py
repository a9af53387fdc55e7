"""Plain-text tables."""

from collections.abc import Iterable, Sequence


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
