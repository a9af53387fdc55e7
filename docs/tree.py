"""The file tree of docs/architecture.md, one line per file, from the modules' docstrings.

Run ``python docs/tree.py`` after adding, moving or renaming a module.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
PACKAGES = ("src/nero", "src/nero_lab")
#: A longer sentence ends at its colon or semicolon, if what stands before that says enough.
MAX_LINE = 100
MIN_HEAD = 25
#: A full stop ends a sentence, except after these abbreviations.
SENTENCE_END = re.compile(r"(?<!\bEq)(?<!\bFig)(?<!\be\.g)(?<!\bi\.e)\.(?:\s|$)")
BLOCK = re.compile(r"(<!-- tree: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write all trees."""
    PAGE.write_text(filled(PAGE.read_text()))
    return 0


def filled(text: str) -> str:
    """Return the page with its trees filled."""
    return BLOCK.sub(lambda block: f"{block[1]}\n```\n{tree(ROOT / block[2])}\n```\n\n{block[3]}", text)


def tree(package: Path) -> str:
    """Return the files below a package, indented, with the first line of each docstring."""
    rows = [(f"{package.name}/", summary(package / "__init__.py")), *_rows(package, 1)]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{line}".rstrip() for name, line in rows)


def _rows(folder: Path, level: int) -> list[tuple[str, str]]:
    rows = []
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    rows += [("  " * level + path.name, summary(path)) for path in modules]
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        rows += [("  " * level + f"{inner.name}/", summary(inner / "__init__.py")), *_rows(inner, level + 1)]
    return rows


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, without a long list after its colon."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = SENTENCE_END.split(docstring.partition("\n\n")[0], maxsplit=1)[0].replace("\n", " ")
    line = re.sub(r":\w+:(?=`)|`", "", line)
    head = re.split(r"[:;] ", line, maxsplit=1)[0]
    return head if len(line) > MAX_LINE and len(head) >= MIN_HEAD else line


if __name__ == "__main__":
    raise SystemExit(main())
