"""Numbers, tables and pages as Markdown."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from nero_lab.store import StoreError, write_bytes

#: The number of seeds in the paper; another number is written in the cell.
PAPER_SEEDS = 3
DIVERGED = "†"
DIVERGED_NOTE = f"{DIVERGED} diverged: the training loss was not finite in the last epoch"
#: A block of a page: ``<!-- table: NAME -->``, the table, ``<!-- end -->``.
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
OPENING = "<!-- table: "


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


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the population standard deviation."""
    if math.inf in values:
        return math.inf, math.nan
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.pstdev(values)


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


def fill_page(path: Path, tables: dict[str, str], new_page: str = "") -> str:
    """Return a page's text with its blocks replaced by the tables.

    Args:
        path: the page.
        tables: the tables by name.
        new_page: the text to fill if there is no page yet.

    Raises:
        StoreError: if the page cannot be read, or a block is not closed or has an unknown name.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        text = new_page
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"cannot read the page {path}: {error}; repair it or choose another folder by --out"
        ) from error
    blocks = [name for _, name, _ in BLOCK.findall(text)]
    if len(blocks) != text.count(OPENING):
        raise StoreError(f"{path.name}: a table block is not closed; end each block with <!-- end -->")
    if unknown := [name for name in blocks if name not in tables]:
        raise StoreError(f"{path.name}: unknown table {unknown[0]!r}; choose one of {', '.join(tables)}")
    return BLOCK.sub(lambda block: f"{block[1]}\n{tables[block[2]]}\n\n{block[3]}", text)


def update_page(path: Path, tables: dict[str, str]) -> None:
    """Replace the blocks of a page by the tables, in the file."""
    write_bytes(path, fill_page(path, tables).encode())


def bare_page(title: str, tables: dict[str, str], figure: str) -> str:
    """Return a page with a title, a figure and one empty block per table."""
    blocks = "\n".join(f"{OPENING}{name} -->\n<!-- end -->\n" for name in tables)
    return f"# {title}\n\n{figure}{blocks}"
