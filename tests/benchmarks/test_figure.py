"""The figure of a benchmark record."""

import shutil
from pathlib import Path

import figure


def test_committed_record_is_drawn(tmp_path: Path):
    shutil.copy(figure.ROOT / "benchmarks/results/cuda.json", tmp_path)
    assert figure.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "step-cuda.png").stat().st_size > 20_000
