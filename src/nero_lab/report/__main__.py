"""Command that fills the compact Table 1 of a page: ``python -m nero_lab.report RECORDS PAGE``."""

import sys
from pathlib import Path

from nero_lab.report.overview import compact_table1
from nero_lab.report.pages import fill_page
from nero_lab.report.runs import Runs
from nero_lab.store import read_records, write_bytes


def main(records: Path, page: Path) -> None:
    """Fill the page's ``table1`` block from the records in a folder."""
    table = compact_table1(Runs(read_records(records)))
    write_bytes(page, fill_page(page, {"table1": table}).encode())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
