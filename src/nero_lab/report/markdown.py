"""Numbers and tables as Markdown."""

import math
import re
from collections.abc import Iterable, Sequence

from nero_lab.report.runs import mean_and_spread

#: The number of seeds in the paper; another number is written in the cell.
PAPER_SEEDS = 3
DIVERGED = "†"
DIVERGED_NOTE = f"{DIVERGED} diverged: the training loss was not finite in the last epoch"


def render_table(header: Sequence[object], rows: Iterable[Sequence[object]], left: int | None = 1) -> str:
    """Render a table, and a note if a cell has the mark of divergence.

    Args:
        header: the column names.
        rows: the cells of each row.
        left: the number of columns aligned to the left; the others are aligned to the right. None: columns with a word
            are aligned to the left.
    """
    lines = [[str(cell) for cell in row] for row in rows]
    words = [any(re.match(r"[^\W\d]|`", line[column]) for line in lines) for column in range(len(header))]
    is_left = words if left is None else [column < left for column in range(len(header))]
    rules = ["---" if is_word else "---:" for is_word in is_left]
    table = "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (header, rules, *lines))
    return f"{table}\n\n{DIVERGED_NOTE}" if DIVERGED in table else table


def number(value: float) -> str:
    """Format a value with two decimals, a large one in scientific notation, NaN as a dash."""
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 1e5 else f"{value:.3g}"


def signed(value: float, digits: int) -> str:
    """Format a difference with its sign; zero has none."""
    if math.isnan(value):
        return "-"
    if value == math.inf:
        return "inf"
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def with_spread(mean: float, spread: float) -> str:
    """Format "mean ± spread"."""
    if math.isnan(mean):
        return "-"
    return f"{number(mean)} ± {number(spread)}" if mean < math.inf else "inf"


def over_seeds(values: Sequence[float], *, has_diverged: bool = False) -> str:
    """Format mean ± spread over seeds, and the number of seeds unless it is the paper's.

    Example:
        >>> over_seeds([1.0, 2.0, 3.0]), over_seeds([1.0])
        ('2.00 ± 0.82', '1.00 (1 seed)')
    """
    mean, spread = mean_and_spread(values)
    text = number(mean) if len(values) == 1 else with_spread(mean, spread)
    return text + (DIVERGED if has_diverged else "") + seeds_note(len(values))


def seeds_note(count: int) -> str:
    """Return " (1 seed)" and the like, or nothing for the paper's number of seeds."""
    return "" if count == PAPER_SEEDS else f" ({plural(count, 'seed')})"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun in the right number."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
