"""The cost tables of the pages."""

import json

import pytest
import tables


@pytest.mark.parametrize("name", tables.PAGES)
def test_cost_tables_match_the_records(name: str):
    text = (tables.ROOT / name).read_text()
    assert tables.BLOCK.search(text)
    assert tables.filled(text) == text, "run python benchmarks/tables.py"


def test_every_cost_table_is_on_a_page():
    text = "".join((tables.ROOT / name).read_text() for name in tables.PAGES)
    assert {name for _, name, _ in tables.BLOCK.findall(text)} == set(tables.TABLES)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_committed_records_are_of_whole_runs(device: str):
    record = tables.record(device)
    assert not record["quick"]
    assert {"step", "growth", "end-to-end"} <= set(record)
    page = (tables.ROOT / "docs/speed.md").read_text()
    assert record["machine"] in page
    assert record["torch"] in page


def test_state_is_a_small_share_of_adams():
    """README says at most 0.2 %."""
    for device, backend in (("cpu", "numba"), ("cuda", "triton")):
        rows = [row for row in tables.record(device)["step"] if row["optimiser"] == f"Nero ({backend})"]
        assert max(row["state_of_adam"] for row in rows) <= 0.002


def test_distances_grow_as_images_get_worse():
    record = json.loads((tables.ROOT / "benchmarks/results/distances.json").read_text())
    (found,) = record["from training images to"].values()
    assert found["themselves"] < 1e-6 < found["test"] < found["test, upside down"] < found["noise"]
    page = (tables.ROOT / "docs/paper/cgan.md").read_text()
    assert all(f"| {name} | {distance:.3g} |" in page for name, distance in found.items())
