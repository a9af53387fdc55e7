"""The benchmark runs, records what it says it records, and refuses to report what cannot be compared."""

import json
from pathlib import Path

import bench
import figure
import pytest
import shapes
import step
import timing
import torch

from nero.backends import BACKENDS, eager


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("record")
    assert bench.main(["--quick", "--device", "cpu", "--out", str(out)]) == 0
    return out / "cpu.json"


def test_a_rehearsal_writes_every_section(record: Path):
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
        assert row["device_milliseconds"] is None  # there is no device but the host
        if row["bytes_per_parameter"]:
            moved = row["bytes_per_parameter"] * row["parameters"] / (row["milliseconds"] / 1e3)
            assert row["of_copy_bandwidth"] == pytest.approx(moved / found["copy_bytes_per_second"], rel=0.02, abs=1e-4)
        if row["optimiser"] == "Adam (fused)":
            assert row["of_fused_adam"] == row["state_of_adam"] == 1
    assert {row["by"] for row in found["growth"]} == {"parameters", "tensors"}
    assert {row["optimiser"] for row in found["end-to-end"]} == {"Adam (fused)", "SGD (fused)", "Nero"}
    assert all(row["reduced"] and row["milliseconds"] > 0 for row in found["end-to-end"])


def test_sections_are_merged_with_those_of_the_same_machine(record: Path, tmp_path: Path):
    before = json.loads(record.read_text())
    begun = bench.begin(record, torch.device("cpu"), True)
    assert begun["step"] == before["step"]
    assert begun["left_out"] == before["left_out"]
    for other in ({"torch": "1.0"}, {"machine": "another"}, {"quick": False}):
        bench.write(tmp_path / "cpu.json", {**before, **other})
        assert "step" not in bench.begin(tmp_path / "cpu.json", torch.device("cpu"), True)


def test_the_figure_is_drawn_from_the_record(record: Path, tmp_path: Path):
    assert figure.main(["--results", str(record.parent), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "step-cpu.png").stat().st_size > 20_000


def test_backends_that_disagree_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong(jobs, settings):
        eager.step(jobs, settings)
        jobs[-1].parameter.add_(1e-4)

    monkeypatch.setitem(BACKENDS, "foreach", wrong)
    with pytest.raises(SystemExit, match=r"the backends disagree: foreach is .* no report") as stopped:
        bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert stopped.value.code  # a message, so not zero
    assert not list(tmp_path.iterdir())


def test_a_contender_that_fails_is_left_out():
    def refuse(_: object) -> torch.optim.Optimizer:
        raise RuntimeError("not today")

    bad = step.Contender("Bad", refuse)
    tiny = timing.Bench(torch.device("cpu"), timing.Plan(2, 0.0, 2, 0.0), 1e9, quick=True, compiling=0.0)
    rows = step.measure(shapes.matrices(64, 1), [*step.everyone(tiny.device, False)[0][:2], bad], tiny)
    assert [row["optimiser"] for row in rows] == ["Adam (fused)", "SGD (fused)"]
    assert tiny.notes == ["Bad, 1 matrices: RuntimeError: not today"]


class StubClock(timing.Clock):
    """A clock whose steps return how long they take."""

    def __init__(self) -> None:
        self.gpu = True

    def burst(self, step, count=1) -> float:  # noqa: ARG002
        return float(step())

    def on_device(self, step, count, lead) -> float | None:  # noqa: ARG002
        return None if count > 1 and step() is None else 1.5


def test_slow_contenders_have_fewer_turns_and_references_have_all():
    plan = timing.Plan(rounds=10, seconds=4.0, least=2)
    steps = {"reference": lambda: 3.0, "slow": lambda: 5.0, "fast": lambda: 0.5}
    times = timing.take_turns(steps, dict.fromkeys(steps, 1), StubClock(), plan, always=["reference"])
    assert {name: len(rounds) for name, rounds in times.items()} == {"reference": 8, "slow": 2, "fast": 8}
    assert timing.ratio(times["slow"], times["reference"]) == 5 / 3
    assert timing.difference(times["slow"], times["reference"]) == 2


def test_neighbours_are_compared():
    assert timing.ratio({0: 2.0, 1: 9.0, 4: 8.0}, {0: 1.0, 1: 3.0, 2: 5.0, 4: 1.0}) == 3
    assert timing.difference({0: 2.0, 2: 9.0}, {0: 1.0, 2: 5.0}) == 2.5


def test_a_burst_is_as_long_as_planned():
    assert timing.burst_length(lambda: 0.01, StubClock(), timing.Plan(burst=0.005)) == 1
    assert timing.burst_length(lambda: 0.001, StubClock(), timing.Plan(burst=0.005)) == 5


def test_device_time_is_that_of_steps_queued_in_time():
    assert timing.device_time(lambda: 1, 4, 0.1, StubClock()) == 1.5
    assert timing.device_time(lambda: None, 4, 0.1, StubClock()) == 1.5  # one by one
    assert timing.device_time(lambda: 1, 4, 0.1, timing.Clock(torch.device("cpu"))) is None


def test_events_are_turned_into_seconds(monkeypatch: pytest.MonkeyPatch):
    class Event:
        passed = False

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.passed

        def elapsed_time(self, _: object) -> float:
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    clock = timing.Clock(torch.device("cuda"))
    assert clock.on_device(lambda: None, 4, 0.1) == pytest.approx(0.003)
    Event.passed = True  # the device was through with its wait before all was queued
    assert clock.on_device(lambda: None, 4, 0.1) is None


def test_synthetic_shapes_add_up():
    for total, tensors in ((100_000_000, 10_000), (16_000_000, 10), (2**31, 2048)):
        made = shapes.matrices(total, tensors)
        assert made.total == pytest.approx(total, rel=0.01)
        assert sum(map(len, made.by_axes.values())) == tensors
    assert shapes.gpt2_xl().total == pytest.approx(1.5576e9, rel=1e-3)
    assert shapes.gpt2_xl().one_of_each.total < 2e8
