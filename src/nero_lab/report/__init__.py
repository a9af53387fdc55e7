"""Tables and figures that compare the records of runs with the paper."""

import tempfile
from pathlib import Path

from nero_lab.report import figures
from nero_lab.report.markdown import bare_page, fill_page
from nero_lab.report.overview import overview_tables
from nero_lab.report.published import all_published
from nero_lab.report.runs import Record, Runs
from nero_lab.report.tables import task_tables
from nero_lab.store import StoreError, write_bytes

__all__ = ["report"]


def report(records: list[Record], out: Path) -> list[Path]:
    """Draw the figures and fill the tables of the tasks that have records.

    The result depends only on the records, not on their order. Text outside the table blocks stays as it is.

    Args:
        records: the records of runs.
        out: the folder of the pages. A page that does not exist yet is created with its tables and figure.

    Returns:
        The files written: a figure and a page per task with a record, the figure of Table 1, and the index.

    Raises:
        StoreError: if a record or a page is malformed, or the folder cannot be written to.
    """
    runs = Runs(records)
    texts = {}
    for task in runs.tasks:
        tables = task_tables(task, runs)
        figure = f"![The runs of {task} beside the published ones](figures/{task}.png)\n\n"
        texts[out / f"{task}.md"] = fill_page(out / f"{task}.md", tables, bare_page(task, tables, figure))
    index, tables = out / "README.md", overview_tables(runs)
    has_table1 = any(all_published()[task].table1_name for task in runs.tasks)
    figure = "![Learning curves of the tasks of Table 1](figures/table1.png)\n\n" * has_table1
    texts[index] = fill_page(index, tables, bare_page("The tasks", tables, figure))
    _check_writable(out)
    drawn = []
    for task in runs.tasks:
        path = out / "figures" / f"{task}.png"
        figures.save(figures.draw(task, runs), path)
        drawn.append(path)
    if has_table1:
        path = out / "figures" / "table1.png"
        figures.save(figures.draw_table1(runs), path)
        drawn.append(path)
    for path, text in texts.items():
        write_bytes(path, text.encode())
    return [*drawn, *texts]


def _check_writable(folder: Path) -> None:
    """Raise before anything is drawn if the folder cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise StoreError(f"cannot write into {folder}: {error.strerror}; choose another folder by --out") from error
