"""Tables and figures of the paper's tasks, from records of runs alone."""

import re
import tempfile
from pathlib import Path

from nero_lab.report import figures, tables
from nero_lab.report.published import all_published
from nero_lab.report.runs import Record, Runs
from nero_lab.store import StoreError, write_bytes

__all__ = ["report"]

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
OPENING = "<!-- table: "


def report(records: list[Record], out: Path) -> list[Path]:
    """Draw the figures and bring the tables of the pages up to date.

    Nothing but the records decides what is written, in whatever order they come; a second call changes nothing.

    Args:
        records: what runs left, one object each.
        out: the folder of the pages. One that has no page yet gets a bare one.

    Returns:
        the files written: a figure and a page a task, and the index.

    Raises:
        StoreError: if a record is not one, a page's markers are not whole, or the folder cannot be written into.
    """
    runs = Runs(records)
    pages = {task: tables.of_task(task, runs) for task in all_published()}
    texts = {out / f"{task}.md": _page(out / f"{task}.md", task, made) for task, made in pages.items()}
    texts[out / "README.md"] = _page(
        out / "README.md", "", {"index": tables.index(runs), "table-1": tables.table_1(runs)}
    )
    _check(out)
    written = []
    for task in pages:
        figure = out / "figures" / f"{task}.png"
        figures.save(figures.draw(task, runs), figure)
        written.append(figure)
    for path, text in texts.items():
        write_bytes(path, text.encode())
    return [*written, *texts]


def _check(out: Path) -> None:
    """Raise before anything is drawn if the folder cannot be written into."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise StoreError(f"cannot write into {out}: {error.strerror}; name another folder by --out") from error


def _page(path: Path, task: str, made: dict[str, str]) -> str:
    """The page's text with its tables anew."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        text = _bare(task, made)
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read the page {path}: {error}; mend it, or name another folder by --out") from error
    blocks = [name for _, name, _ in BLOCK.findall(text)]
    if len(blocks) != text.count(OPENING):
        raise StoreError(f"{path.name} has a table that does not end: close each with <!-- end -->")
    if unknown := [name for name in blocks if name not in made]:
        raise StoreError(f"{path.name} asks for a table {unknown[0]!r}: take one of {', '.join(made)}")
    return BLOCK.sub(lambda block: f"{block[1]}\n{made[block[2]]}\n\n{block[3]}", text)


def _bare(task: str, made: dict[str, str]) -> str:
    """A page of nothing but its tables, and its figure."""
    figure = f"![{all_published()[task].shows}](figures/{task}.png)\n\n" if task else ""
    blocks = "\n".join(f"{OPENING}{name} -->\n<!-- end -->\n" for name in made)
    return f"# {task or 'The tasks'}\n\n{figure}{blocks}"
