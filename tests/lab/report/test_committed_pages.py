"""Committed pages: their tables are those of the committed records, and every table has its place."""

from collections.abc import Callable
from pathlib import Path

import pytest
from report_samples import EPOCHS, ROOT

from nero_lab.report import __main__ as command
from nero_lab.report import figures
from nero_lab.report.depth.tables import TABLES as DEPTH_TABLES
from nero_lab.report.markdown import BLOCK
from nero_lab.report.today.tables import TABLES as TODAY_TABLES

PAPER = tuple(f"docs/paper/{name}.md" for name in ("README", *EPOCHS))
DEPTH = ("docs/guide/auto.md", "docs/studies/depth.md")
TODAY = tuple(f"docs/today/{name}.md" for name in ("README", "gpt", "vit", "airbench"))


@pytest.mark.parametrize(
    ("update", "pages"),
    [
        (command.update_paper, ("README.md", *PAPER)),
        (command.update_depth, DEPTH),
        (command.update_today, TODAY),
        (command.update_starts, ("docs/studies/starts.md",)),
        (command.update_claims, ("docs/studies/claims.md", "docs/paper/claims.md")),
    ],
)
def test_update_fills_pages_as_committed_and_draws_figures(
    update: Callable[[Path], None], pages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Path] = []
    for module in (command, figures):
        monkeypatch.setattr(module, "save", lambda _, path: drawn.append(path.relative_to(tmp_path)))
    for name in ("results", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in pages:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(BLOCK.sub(r"\1\3", (ROOT / name).read_text()))
    update(tmp_path)
    for name in pages:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"{name} is old: run `make paper`"
    assert all((ROOT / path).is_file() for path in drawn)


@pytest.mark.parametrize(("pages", "tables"), [(DEPTH, DEPTH_TABLES), (TODAY, TODAY_TABLES)])
def test_pages_of_a_study_show_every_table_once(pages: tuple[str, ...], tables: dict[str, object]):
    names = [name for page in pages for _, name, _ in BLOCK.findall((ROOT / page).read_text())]
    assert sorted(names) == sorted(tables)


def test_update_without_records_draws_nothing(tmp_path: Path):
    for name in TODAY:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    command.update_today(tmp_path)
    assert not (tmp_path / "docs/today/figures").exists()
    assert "](figures/" not in (tmp_path / TODAY[1]).read_text()
