"""The code blocks of docs/theory.md."""

import math
import re
from pathlib import Path

import pytest

from nero import theory

PAGE = (Path(__file__).parents[2] / "docs/theory.md").read_text()


def test_every_public_name_is_documented():
    for name in theory.__all__:
        assert getattr(theory, name).__doc__, f"{name} has no docstring"
        if name[0].islower():
            assert f"{name}(" in PAGE, f"docs/theory.md does not call {name}"


def is_same_but_for_rounding(printed: str, shown: str) -> bool:
    """Return whether two texts have the same words, and numbers within 2 %, ignoring spaces and rules."""
    number = r"(?<![\w^])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|-{2,}|\s+"
    if re.sub(number, " ", printed) != re.sub(number, " ", shown):
        return False
    pairs = zip(re.findall(number, printed), re.findall(number, shown), strict=False)
    values = [[float(each.replace(",", "")) for each in pair] for pair in pairs if pair[0].strip(" -\n")]
    return all(math.isclose(a, b, rel_tol=0.02, abs_tol=1e-9) for a, b in values)


def test_text_comparison_tolerates_rounding_only():
    assert is_same_but_for_rounding("of 10 at  1.001e-7, S^2", "of 10 at 1e-7, S^2")
    assert not is_same_but_for_rounding("of 10 at 1.1e-7", "of 10 at 1e-7")
    assert not is_same_but_for_rounding("10 of 3", "10 for 3")
    assert not is_same_but_for_rounding("of 1", "of 1, 2")


def test_every_code_block_prints_the_block_after_it(capsys: pytest.CaptureFixture):
    """Run the blocks in order, in one namespace."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    ran = 0
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, "docs/theory.md", "exec"), names)
            ran += 1
        else:
            printed = capsys.readouterr().out
            assert is_same_but_for_rounding(printed, block), printed
    assert not capsys.readouterr().out
    assert ran == PAGE.count("```python") >= 8
