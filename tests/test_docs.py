"""The pages: code that runs, links that hold, and blocks that match the code."""

import json
import math
import re
import runpy
from pathlib import Path

import pytest
import torch

from nero.options import OPTIONS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GUIDE = sorted((ROOT / "docs/guide").glob("*.md"))
RECIPES = ROOT / "docs/guide/recipes.md"  # run by test_recipes.py, section by section
MAX_README_CHARACTERS = 8000
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_code(page: Path) -> None:
    """Run the Python blocks of a page from top to bottom; they share their names."""
    names: dict[str, object] = {"__name__": "page"}
    text = page.read_text()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in CODE.finditer(text):
            if block[1] is None:
                line = text.count("\n", 0, block.start(2))
                exec(compile("\n" * line + block[2], name_of(page), "exec"), names)


@pytest.mark.parametrize("page", [page for page in GUIDE if page != RECIPES], ids=name_of)
def test_code_of_the_guide_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_code(page)


@pytest.mark.no_cover  # many steps run the lines of one
def test_code_of_the_readme_runs_and_learns(capsys: pytest.CaptureFixture[str]):
    run_code(README)
    ours, theirs = map(float, re.search(r"Nero ([\d.]+), AdamW ([\d.]+)", capsys.readouterr().out).groups())
    assert ours < 0.3
    assert theirs > 0.6  # the targets have variance one


def test_readme_is_short():
    assert len(README.read_text()) <= MAX_README_CHARACTERS


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings: without punctuation, a hyphen for a space."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_the_page_hold(page: Path):
    text = FENCE.sub("", page.read_text())
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors_of(target), f"{name}#{anchor}"


def test_index_links_every_guide_page():
    text = (ROOT / "docs/index.md").read_text()
    assert [page.name for page in GUIDE if f"(guide/{page.name})" not in text] == []


def test_options_table_matches_the_options():
    page = (ROOT / "docs/guide/options.md").read_text()
    table = page.partition("<!-- options -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE)
    found = {name: eval(default, {"inf": math.inf}) for name, default in rows}
    assert found == {name: option.default for name, option in OPTIONS.items()}
    assert list(found) == list(OPTIONS)


def test_trees_match_the_code():
    tree = runpy.run_path(str(ROOT / "docs/tree.py"))
    text = tree["PAGE"].read_text()
    assert {name for _, name, _ in tree["BLOCK"].findall(text)} == set(tree["PACKAGES"])
    assert tree["filled"](text) == text, "run make docs"


def test_speed_page_gives_the_range_of_the_comparison():
    records = [json.loads((ROOT / f"benchmarks/results/compare-{name}.json").read_text()) for name in ("cpu", "cuda")]
    ratios = [row["ratio"] for record in records for row in record["rows"]]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in " ".join((ROOT / "docs/speed.md").read_text().split())
