"""Update of every generated table and figure of the repository from its records: ``python -m nero_lab.report``."""

import sys
from pathlib import Path

from nero_lab.claims.figure import draw as draw_claims
from nero_lab.claims.tables import claims_tables, verdicts_table
from nero_lab.report import report
from nero_lab.report.depth import draw as draw_depth
from nero_lab.report.depth import read_study as read_depth
from nero_lab.report.depth.tables import TABLES as DEPTH_TABLES
from nero_lab.report.figures import save
from nero_lab.report.markdown import update_page
from nero_lab.report.overview import compact_table1
from nero_lab.report.runs import Runs
from nero_lab.report.today import read_study as read_today
from nero_lab.report.today.figures import FIGURES as TODAY_FIGURES
from nero_lab.report.today.tables import TABLES as TODAY_TABLES
from nero_lab.starts.tables import starts_tables
from nero_lab.store import StoreError, pack_records, read_json_lines, read_records


def update_paper(root: Path) -> None:
    """Fill the pages of the paper's tasks and Table 1 of the README, and draw the tasks' figures."""
    records = read_records(root / "results")
    report(records, root / "docs/paper")
    update_page(root / "README.md", {"table1": compact_table1(Runs(records))})


def update_depth(root: Path) -> None:
    """Fill the pages of the study of step size by depth, and draw its figure."""
    study = read_depth(root)
    tables = {name: table(study) for name, table in DEPTH_TABLES.items()}
    for page in ("docs/guide/auto.md", "docs/studies/depth.md"):
        update_page(root / page, tables)
    save(draw_depth(study), root / "docs/figures/auto.png")


def update_today(root: Path) -> None:
    """Fill the pages of the study of today's optimisers, and draw the figures that have runs to show."""
    study, folder = read_today(root), root / "docs/today"
    tables = {name: table(study) for name, table in TODAY_TABLES.items()}
    for page in ("README", "gpt", "vit", "airbench"):
        update_page(folder / f"{page}.md", tables)
    for name, drawing in TODAY_FIGURES.items():
        if drawing.has_runs(study):
            save(drawing.draw(study), folder / f"figures/{name}.png")


def update_starts(root: Path) -> None:
    """Fill the page of the study of parameters that start at zero."""
    update_page(root / "docs/studies/starts.md", starts_tables(read_json_lines(root / "results/studies/starts.jsonl")))


def update_claims(root: Path) -> None:
    """Fill the page of the study of the paper's claims, draw its figure, and count the verdicts on the claims."""
    records = read_json_lines(root / "results/studies/claims.jsonl")
    of_tasks = [record for folder in ("results", "results/claims") for record in read_records(root / folder)]
    tables = claims_tables(records, of_tasks)
    update_page(root / "docs/studies/claims.md", tables)
    page = root / "docs/paper/claims.md"
    update_page(page, {"verdicts": verdicts_table(page.read_text(encoding="utf-8"))})
    save(draw_claims(records), root / "docs/figures/claims.png")


if __name__ == "__main__":
    if not Path("results/runs.jsonl").exists():
        sys.exit("nero_lab.report: run it in the root of a clone of nero-optim")
    try:
        for folder in ("", "claims", "depth", "today"):
            pack_records(Path("results") / folder)
        for update in (update_paper, update_depth, update_today, update_starts, update_claims):
            update(Path())
    except StoreError as error:
        sys.exit(f"nero_lab.report: {error}")
