"""The benchmark's command line, on tiny sizes."""

import json
import sys
from pathlib import Path

import bench
import contenders
import figure
import growth
import pytest
import step
import torch

from nero.backends import eager
from nero.backends.plan import BACKENDS


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patch:
        # numba and pytorch_optimizer take seconds to import
        for module in (contenders, growth, step):
            patch.setattr(module, "backends_for", lambda _: ["eager", "foreach", "auto"])
        patch.setitem(sys.modules, "pytorch_optimizer", None)
        assert bench.main(["--quick", "--device", "cpu", "--out", str(out)]) == 0
    return out / "cpu.json"


def test_quick_run_writes_every_section(record: Path):
    found = json.loads(record.read_text())
    assert found["machine"]
    assert found["copy_bytes_per_second"] > 0
    assert found["quick"]
    assert {"Adam (fused)", "SGD (fused)", "Nero (eager)", "Nero (foreach)"} <= {
        row["optimiser"] for row in found["step"]
    }
    for row in found["step"] + found["growth"]:
        assert row["milliseconds"] > 0
        assert row["rounds"] >= 3
        assert row["device_milliseconds"] is None  # only a GPU has a time of its own
        if row["bytes_per_parameter"]:
            moved = row["bytes_per_parameter"] * row["parameters"] / (row["milliseconds"] / 1e3)
            assert row["of_copy_bandwidth"] == pytest.approx(moved / found["copy_bytes_per_second"], rel=0.02, abs=1e-4)
        if row["optimiser"] == "Adam (fused)":
            assert row["of_fused_adam"] == row["state_of_adam"] == 1
    assert {row["by"] for row in found["growth"]} == {"parameters", "tensors"}
    assert {row["optimiser"] for row in found["end-to-end"]} == {"Adam (fused)", "SGD (fused)", "Nero"}
    assert all(row["reduced"] and row["milliseconds"] > 0 for row in found["end-to-end"])
    assert any("pytorch_optimizer" in note for note in found["left_out"]["step"])
    assert figure.draw(found).axes


def test_sections_of_the_same_machine_are_merged(record: Path, tmp_path: Path):
    before = json.loads(record.read_text())
    started = bench.start_record(record, torch.device("cpu"), True)
    assert started["step"] == before["step"]
    assert started["left_out"] == before["left_out"]
    for other in ({"torch": "1.0"}, {"machine": "another"}, {"quick": False}):
        bench.write_record(tmp_path / "cpu.json", {**before, **other})
        assert "step" not in bench.start_record(tmp_path / "cpu.json", torch.device("cpu"), True)


def test_backends_that_disagree_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong(jobs, settings):
        eager.step(jobs, settings)
        jobs[-1].parameter.add_(1e-4)

    monkeypatch.setitem(BACKENDS, "foreach", wrong)
    with pytest.raises(SystemExit, match="the backends disagree: foreach is") as stopped:
        bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert stopped.value.code  # a message, so not zero
    assert not list(tmp_path.iterdir())


def test_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench.main(["--sections", "step,steps"])
    assert "--sections must be among step, growth, end-to-end, got steps" in capsys.readouterr().err
