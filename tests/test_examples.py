"""The scripts in examples/."""

import json
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [("watch", ["--epochs", "1"], "test accuracy"), ("gains", ["--quick", "--seeds", "1"], "every run")],
)
def test_example_runs_and_writes_its_figure(
    script: str, options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    threads = torch.get_num_threads()
    done = runpy.run_path(str(ROOT / f"examples/{script}.py"))["main"]([*options, "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    assert done == 0
    assert says in capsys.readouterr().out
    assert (tmp_path / f"{script}.png").stat().st_size > 20_000
    found, committed = (
        json.loads((folder / f"{script}.json").read_text()) for folder in (tmp_path, ROOT / "docs/figures")
    )
    assert found.keys() == committed.keys()
