"""The cost of readings, on tiny sizes."""

import json
from pathlib import Path

import pytest
import watch_cost


def measured(out: Path, *options: str) -> dict:
    assert watch_cost.main(["--quick", "--device", "cpu", "--rounds", "1", "--out", str(out), *options]) == 0
    return json.loads((out / "watch-cpu.json").read_text())


def test_cost_of_readings_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch_cost, "STEPS_PER_READING", 2)
    found = measured(tmp_path)
    assert (found["quick"], found["every"]) == (True, 2)
    kinds = [row["workload"].rpartition(", ")[2] for row in found["rows"]]
    assert kinds == ["the optimiser alone"] * 2 + ["training"] * 2
    for row in found["rows"]:
        slower = 100 * row["milliseconds_a_reading"] / (2 * row["milliseconds_a_step"])
        assert row["per_cent_slower"] == pytest.approx(slower, rel=0.01)
        assert row["kept_bytes"] <= 2 * row["weights_bytes"]
        low, middle, high = row["per_cent_slower_in_blocks"]
        assert low <= middle <= high


def test_long_blocks_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch_cost, "STEPS_PER_READING", 2)
    monkeypatch.setattr(watch_cost, "shape_sets", lambda _: [])
    rows = measured(tmp_path, "--longest", "0")["rows"]
    assert {row["per_cent_slower_in_blocks"] for row in rows} == {None}
