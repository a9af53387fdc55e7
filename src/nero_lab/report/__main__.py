"""Command that fills the compact Table 1 of a page: ``python -m nero_lab.report RECORDS PAGE``."""

import sys
from pathlib import Path

from nero_lab.report.markdown import update_page
from nero_lab.report.overview import compact_table1
from nero_lab.report.runs import Runs
from nero_lab.store import read_records


def main(records: Path, page: Path) -> None:
    """Fill the page's ``table1`` block from the records in a folder."""
    table = compact_table1(Runs(read_records(records)))
    update_page(page, {"table1": table})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
