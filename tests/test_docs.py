"""The pages: code that runs, commands that parse, links that hold, and blocks that match the code."""

import math
import re
import runpy
import shlex
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import tomllib
import torch

import nero
from nero.options import OPTIONS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GUIDE = sorted((ROOT / "docs/guide").glob("*.md"))
RECIPES = ROOT / "docs/guide/recipes.md"  # run by test_recipes.py, section by section
MAX_README_CHARACTERS = 8000
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: What becomes of the blocks of a language: run, compared with what ran, parsed, or, for trees and drawings, nothing.
LANGUAGES = ("python", "text", "sh", "", "{eval-rst}")
#: A number, or what a table has between numbers: rules and spaces.
NUMBER = r"(?<![\w^])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|-{2,}|\s+"
#: The modules whose names are for users; docs/api has them all.
PUBLIC = ("nero", "nero.integrations", "nero.jax", "nero.theory", "nero.watching")


class Block(NamedTuple):
    """A block of code on a page."""

    line: int
    language: str
    code: str
    is_marked: bool  # as not run, with the reason
    follows: bool  # the block before it, with nothing in between


def blocks_of(text: str) -> list[Block]:
    """Return the blocks between fences, from top to bottom."""
    blocks, end = [], -1
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(3))
        blocks.append(Block(line, found[2], found[3], bool(found[1]), not text[max(end, 0) : found.start()].strip()))
        end = found.end()
    return blocks


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks_of(page.read_text()))]


def run_code(page: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the Python blocks of a page from top to bottom; they share their names. Return what they printed.

    A block of text right after a block of Python shows what that printed, and is compared with it.
    """
    names: dict[str, object] = {"__name__": "page"}
    printed, last = [], ""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks_of(page.read_text()):
            if block.language == "python" and not block.is_marked:
                exec(compile("\n" * block.line + block.code, name_of(page), "exec"), names)
                printed.append(last := capsys.readouterr().out)
            elif block.language == "text" and block.follows and not block.is_marked:
                assert is_same_but_for_rounding(last, block.code), f"line {block.line} shows, and was printed:\n{last}"
    return "".join(printed)


def is_same_but_for_rounding(printed: str, shown: str) -> bool:
    """Return whether two texts have the same words, and numbers within 2 %, ignoring spaces and rules."""
    if re.sub(NUMBER, " ", printed).strip() != re.sub(NUMBER, " ", shown).strip():
        return False
    values = [
        [float(number.replace(",", "")) for number in re.findall(NUMBER, text) if number.strip(" -\n")]
        for text in (printed, shown)
    ]
    return len(values[0]) == len(values[1]) and all(
        math.isclose(first, second, rel_tol=0.02, abs_tol=1e-9) for first, second in zip(*values, strict=True)
    )


def test_text_comparison_tolerates_rounding_only():
    assert is_same_but_for_rounding("of 10 at  1.001e-7, S^2", "of 10 at 1e-7, S^2")
    assert not is_same_but_for_rounding("of 10 at 1.1e-7", "of 10 at 1e-7")
    assert not is_same_but_for_rounding("10 of 3", "10 for 3")
    assert not is_same_but_for_rounding("of 1", "of 1, 2")


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page not in (README, RECIPES)], ids=name_of)
def test_code_of_the_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    run_code(page, capsys)


@pytest.mark.no_cover  # many steps run the lines of one
def test_code_of_the_readme_runs_and_learns(capsys: pytest.CaptureFixture[str]):
    ours, theirs, from_our_start = map(float, run_code(README, capsys).splitlines()[0].split())
    assert ours < 0.3
    assert theirs > 0.6  # the targets have variance one
    assert from_our_start < 0.3


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_the_page_are_run_or_marked(page: Path):
    """Hold every page to fences of known languages: code in another form would not be run."""
    markdown_it = pytest.importorskip("markdown_it", reason="needs markdown-it-py")
    tokens = markdown_it.MarkdownIt("commonmark").parse(page.read_text())
    found = [(token.info, token.content) for token in tokens if token.type in ("fence", "code_block")]
    assert found == [(block.language, block.code) for block in blocks_of(page.read_text())]
    unknown = {block.language for block in blocks_of(page.read_text()) if not block.is_marked} - set(LANGUAGES)
    assert not unknown, "run these blocks by a test, or mark them: <!-- not run: the reason -->"


def test_plain_blocks_hold_no_code():
    plain = [(page, block) for page in PAGES for block in blocks_of(page.read_text()) if block.language == ""]
    code = re.compile(r"^\s*(?:\$ |>>> |import |from \w+ import |(?:nero|make|pip|python|torchrun) )", re.MULTILINE)
    assert not [(name_of(page), block.line) for page, block in plain if not block.is_marked and code.search(block.code)]


@pytest.mark.parametrize("page", pages_with("sh"), ids=name_of)
def test_commands_of_the_page_parse(page: Path):
    for block in blocks_of(page.read_text()):
        if block.language == "sh" and not block.is_marked:
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    check_command(words)


def check_command(words: list[str]) -> None:
    """Raise if a command of a page does not parse."""
    if words[0] == "torchrun" and "nero" in words:
        words = words[words.index("nero") :]
    if words[0] == "nero":
        parse_nero(words[1:])
    elif words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, check=True)
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\w+", words[2].removeprefix("."))) <= set(extras), f"no such extra: {words[2]}"
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2]), f"there is no module {words[2]}"
    elif words[0] == "python":
        assert (ROOT / words[1]).exists(), f"there is no script {words[1]}"
    else:
        pytest.fail(f"nothing checks {shlex.join(words)!r}: mark the block, <!-- not run: the reason -->")


def parse_nero(arguments: list[str]) -> None:
    """Parse a command of `nero` as the command line does, and look up its tasks and contenders."""
    import typer

    from nero_lab import cli
    from nero_lab.tasks import task_named

    command = typer.main.get_command(cli.app).commands[arguments[0]]
    chosen = command.make_context(arguments[0], arguments[1:]).params
    tasks, optimisers = (
        [value] if isinstance(value, str) else list(value or ())
        for value in (chosen.get("task"), chosen.get("optimiser") or ())
    )
    for task in tasks:
        assert set(optimisers) <= set(task_named(task, *optimisers).contenders)


@pytest.mark.parametrize(
    "command",
    ["nero sweep no-such-task", "nero run gpt --optimiser none", "make nothing", "pip install '.[nothing]'", "ls"],
)
def test_command_that_does_not_parse_fails(command: str):
    with pytest.raises((Exception, pytest.fail.Exception)):
        check_command(shlex.split(command))


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


def documented_names() -> list[str]:
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
    return re.findall(r"^\.\. auto(?:class|function):: ([\w.]+)$", text, re.MULTILINE)


def test_api_pages_have_every_public_name_once():
    names = documented_names()
    assert len(names) == len(set(names))
    documented = [getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    for module in map(import_module, PUBLIC):
        for name in module.__all__:
            count = sum(value is getattr(module, name) for value in documented)
            assert count == 1, f"docs/api has {module.__name__}.{name} {count} times"


def test_modules_with_public_names_are_known():
    files = [*(ROOT / "src/nero").glob("*.py"), *(ROOT / "src/nero").glob("*/__init__.py")]
    parts = [path.relative_to(ROOT / "src").with_suffix("").parts for path in files if "__all__ =" in path.read_text()]
    modules = {".".join(part for part in each if part != "__init__") for each in parts}
    assert modules - {"nero.backends"} == set(PUBLIC)
    assert {f"nero.{name}" for name in dir(nero) if name in ("jax", "theory")} <= set(PUBLIC)
