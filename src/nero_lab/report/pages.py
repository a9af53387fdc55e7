"""Markdown pages whose marked blocks hold generated tables."""

import re
from collections.abc import Callable
from pathlib import Path

from nero_lab.store import StoreError

#: A block of a page: ``<!-- table: NAME -->``, the table, ``<!-- end -->``.
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
OPENING = "<!-- table: "


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
    return fill_blocks(text, tables.__getitem__)


def fill_blocks(text: str, table: Callable[[str], str]) -> str:
    """Return a text with each block replaced by the table of its name."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{table(block[2])}\n\n{block[3]}", text)


def bare_page(title: str, tables: dict[str, str], figure: str = "") -> str:
    """Return a page with a title, a figure and one empty block per table."""
    blocks = "\n".join(f"{OPENING}{name} -->\n<!-- end -->\n" for name in tables)
    return f"# {title}\n\n{figure}{blocks}"
