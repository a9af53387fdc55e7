"""The benchmark's command line, figure and tables, and how contenders are timed, on tiny sizes."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import balance_cost
import bench
import compare
import contenders
import figure
import pytest
import sections
import shapes
import step
import tables
import timing
import torch
import tune
import watch_cost

import nero
from nero.backends import eager


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patch:
        # numba and pytorch_optimizer take seconds to import
        for module in (contenders, sections, step):
            patch.setattr(module, "backends_for", lambda _: ["eager", "foreach", "auto"])
        patch.setitem(sys.modules, "pytorch_optimizer", None)
        assert bench.main(["--quick", "--device", "cpu", "--out", str(out)]) == 0
    return out / f"{bench.record_name(torch.device('cpu'))}.json"


def test_quick_run_writes_every_section(record: Path):
    found = json.loads(record.read_text())
    assert found["machine"]
    assert found["copy_bytes_per_second"] > 0
    assert found["quick"]
    assert {"Adam (fused)", "SGD (fused)", "Nero (eager)", "Nero (foreach)"} <= {
        row["optimiser"] for row in found["step"]
    }
    for row in found["step"] + found["growth"] + found["limits"] + found["momentum"]:
        assert row["milliseconds"] > 0
        assert row["rounds"] >= 3
        assert row["device_milliseconds"] is None  # only a GPU has a time of its own
        if row["bytes_per_parameter"]:
            moved = row["bytes_per_parameter"] * row["parameters"] / (row["milliseconds"] / 1e3)
            assert row["of_copy_bandwidth"] == pytest.approx(moved / found["copy_bytes_per_second"], rel=0.02, abs=1e-4)
        if row["optimiser"] == "Adam (fused)":
            assert row["of_fused_adam"] == row["state_of_adam"] == 1
    assert {row["by"] for row in found["growth"]} == {"parameters", "tensors"}
    in_half = {row["optimiser"]: row["bytes_per_parameter"] for row in found["limits"] if row["shapes"] == "odd shapes"}
    assert in_half["Nero"] == in_half["SGD (fused)"] == in_half["Nero, stochastic"] == 6
    assert in_half["Nero with momentum, stochastic"] == 10
    beside = {row["optimiser"]: row for row in found["momentum"]}
    bytes_of = {name: row["bytes_per_parameter"] for name, row in beside.items()}
    assert bytes_of["Nero with momentum"] == bytes_of["SGD with momentum (fused)"] == 20
    assert (bytes_of["Nero"], bytes_of["AdamW (fused)"]) == (12, 28)
    buffer_bytes = beside["Nero with momentum"]["state_bytes"] - beside["Nero"]["state_bytes"]
    assert buffer_bytes == 4 * beside["Nero"]["parameters"]
    assert {row["optimiser"] for row in found["end-to-end"]} == {"Adam (fused)", "SGD (fused)", "Nero"}
    assert all(row["reduced"] and row["milliseconds"] > 0 for row in found["end-to-end"])
    assert any("pytorch_optimizer" in note for note in found["left_out"]["step"])
    assert figure.draw(found).axes


def test_tuning_leaves_the_tables_as_they_were(capsys: pytest.CaptureFixture[str]):
    trials = {trial.name: trial for trial in tune.trials(is_quick=True)}
    before = {name: dict(trial.table) for name, trial in trials.items()}
    assert tune.main(["--quick", "rows of 511"]) == 0
    assert {name: trial.table for name, trial in trials.items()} == before
    name, *lines = capsys.readouterr().out.splitlines()[1:]
    assert name == "rows of 511"
    assert [line.partition(" us, ")[0].rpartition(":")[0] for line in lines] == ["  as in the table", "  512: none"]


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

    monkeypatch.setattr("nero.backends.foreach.step", wrong)
    with pytest.raises(SystemExit, match="the backends disagree: foreach is") as stopped:
        bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert stopped.value.code  # a message, so not zero
    assert not list(tmp_path.iterdir())


def test_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench.main(["--sections", "step,steps"])
    assert "--sections must be among step, limits, growth, momentum, end-to-end, got steps" in capsys.readouterr().err


def test_committed_record_is_drawn(tmp_path: Path):
    shutil.copy(figure.ROOT / "benchmarks/results/cuda.json", tmp_path)
    assert figure.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "step-cuda.png").stat().st_size > 20_000


@pytest.mark.parametrize("name", tables.PAGES)
def test_cost_tables_match_the_records(name: str):
    text = (tables.ROOT / name).read_text()
    assert tables.BLOCK.search(text)
    assert tables.filled(text) == text, "run python benchmarks/tables.py"


def test_every_cost_table_is_on_a_page():
    text = "".join((tables.ROOT / name).read_text() for name in tables.PAGES)
    assert {name for _, name, _ in tables.BLOCK.findall(text)} == set(tables.TABLES)


@pytest.mark.parametrize("name", [*tables.cpu_records(), "cuda"])
def test_committed_records_are_of_whole_runs(name: str):
    record = tables.record(name)
    assert not record["quick"]
    assert {"step", "growth", "end-to-end"} <= set(record)
    page = (tables.ROOT / "docs/speed.md").read_text()
    assert record["machine"] in page
    assert record["torch"] in page


def test_state_is_a_small_share_of_adams():
    """README says at most 0.2 %."""
    for name, backend in (*((name, "numba") for name in tables.cpu_records()), ("cuda", "triton")):
        rows = [row for row in tables.record(name)["step"] if row["optimiser"] == f"Nero ({backend})"]
        assert max(row["state_of_adam"] for row in rows) <= 0.002


def test_distances_grow_as_images_get_worse():
    record = json.loads((tables.ROOT / "benchmarks/results/distances.json").read_text())
    (found,) = record["from training images to"].values()
    assert found["themselves"] < 1e-6 < found["test"] < found["test, upside down"] < found["noise"]


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


def test_cost_of_balance_is_recorded(tmp_path: Path):
    assert balance_cost.main(["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "balance-cpu.json").read_text())
    assert record["rows"][0]["optimiser"].startswith("AdamW")
    for row in record["rows"]:
        share = 100 * row["milliseconds_added"] / row["milliseconds_a_step"]
        assert row["per_cent_slower"] == pytest.approx(share, rel=0.01, abs=0.1)
        assert row["tensors"] == 16


class StubClock(timing.Clock):
    """A clock whose steps return how long they take."""

    def __init__(self) -> None:
        self.is_gpu = True

    def burst(self, step, count=1) -> float:  # noqa: ARG002
        return float(step())

    def device_seconds(self, step, count, lead) -> float | None:  # noqa: ARG002
        return None if count > 1 and step() is None else 1.5


def test_slow_contenders_get_fewer_turns_than_references():
    budget = timing.Budget(rounds=10, seconds=4.0, min_rounds=2)
    steps = {"reference": lambda: 3.0, "slow": lambda: 5.0, "fast": lambda: 0.5}
    times = timing.take_turns(steps, dict.fromkeys(steps, 1), StubClock(), budget, always=["reference"])
    assert {name: len(rounds) for name, rounds in times.items()} == {"reference": 8, "slow": 2, "fast": 8}
    assert timing.ratio(times["slow"], times["reference"]) == 5 / 3
    assert timing.difference(times["slow"], times["reference"]) == 2


def test_turns_of_the_same_round_are_compared():
    assert timing.ratio({0: 2.0, 1: 9.0, 4: 8.0}, {0: 1.0, 1: 3.0, 2: 5.0, 4: 1.0}) == 3
    assert timing.difference({0: 2.0, 2: 9.0}, {0: 1.0, 2: 5.0}) == 2.5


@pytest.mark.parametrize(("seconds", "length"), [(0.01, 1), (0.001, 5)])
def test_burst_is_as_long_as_the_budget(seconds: float, length: int):
    assert timing.burst_length(lambda: seconds, StubClock(), timing.Budget(burst_s=0.005)) == length


def test_device_time_is_of_steps_queued_in_time():
    assert timing.device_time(lambda: 1, 4, 0.1, StubClock()) == 1.5
    assert timing.device_time(lambda: None, 4, 0.1, StubClock()) == 1.5  # one at a time
    assert timing.device_time(lambda: 1, 4, 0.1, timing.Clock(torch.device("cpu"))) is None


def test_cuda_events_are_converted_to_seconds(monkeypatch: pytest.MonkeyPatch):
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
    assert clock.device_seconds(lambda: None, 4, 0.1) == pytest.approx(0.003)
    Event.passed = True  # the device woke before all steps were queued
    assert clock.device_seconds(lambda: None, 4, 0.1) is None


CPU = torch.device("cpu")


def test_profile_names_the_functions_of_a_step(capsys: pytest.CaptureFixture[str]):
    assert compare.main(["--profile", "--quick", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rehearsal: ")
    assert text.count(" calls  ") == 20


@pytest.mark.parametrize("kind", compare.KINDS)
def test_measure_takes_the_steps_asked_for(kind: str):
    parameter = torch.nn.Parameter(torch.randn(4, 5))
    parameter.grad = torch.randn(4, 5)
    optimiser, grad = nero.Nero([parameter]), parameter.grad
    assert compare.measure(optimiser, kind, 3, CPU) > 0
    assert optimiser.state[parameter]["step"] == 3
    assert (parameter.grad is grad) == (kind == "in place")


def test_serve_answers_each_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    request = json.dumps({"name": "rehearsal", "kind": "fresh", "steps": 2})
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{request}\n{request}\n"))
    compare.serve(CPU, quick=True)
    assert [float(line) > 0 for line in capsys.readouterr().out.splitlines()] == [True, True]


def test_folder_without_nero_is_an_error(tmp_path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path)])
    assert "holds the package nero" in capsys.readouterr().err


def test_contenders_include_torch_nero_and_other_libraries(monkeypatch: pytest.MonkeyPatch):
    library = SimpleNamespace(Nero=torch.optim.SGD, LAMB=torch.optim.Adam)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", library)
    found, notes = contenders.find_contenders(torch.device("cpu"), with_compiled=True)
    names = [contender.name for contender in found]
    assert len(set(names)) == len(names)
    assert {"Adam (fused)", "SGD (compiled)", "Nero (pytorch_optimizer)", "Lamb (pytorch_optimizer)"} <= set(names)
    assert {"Nero (eager)", "Nero (foreach)"} <= set(names)
    assert [note.partition(":")[0] for note in notes] == ["Muon"]


def test_contenders_that_cannot_run_are_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    found, notes = contenders.find_contenders(torch.device("cpu"), with_compiled=False)
    assert not any("compiled" in contender.name or "pytorch_optimizer" in contender.name for contender in found)
    assert len(notes) == 3


@pytest.mark.parametrize(("total", "tensors"), [(100_000_000, 10_000), (16_000_000, 10), (2**31, 2048)])
def test_matrices_add_up_to_the_total(total: int, tensors: int):
    made = shapes.matrices(total, tensors)
    assert made.total == pytest.approx(total, rel=0.01)
    assert sum(map(len, made.by_axes.values())) == tensors


def test_gpt2_xl_has_the_published_size():
    assert shapes.gpt2_xl().total == pytest.approx(1.5576e9, rel=1e-3)
    assert shapes.gpt2_xl().distinct.total < 2e8


@pytest.mark.parametrize(
    ("network", "tensors", "total"),
    [
        ("vit", 296, 304_326_632),
        ("llama", 147, 1_498_482_688),
        ("efficientnet", 213, 5_288_548),
        ("convnext", 344, 88_591_464),
    ],
)
def test_networks_have_the_published_sizes(network: str, tensors: int, total: int):
    made = getattr(shapes, network)()
    assert sum(map(len, made.by_axes.values())) == tensors
    assert made.total == total


def test_contender_that_fails_is_left_out():
    def refuse(_: object) -> torch.optim.Optimizer:
        raise RuntimeError("not today")

    bench = timing.Bench(torch.device("cpu"), timing.Budget(2, 0.0, 2, 0.0), 1e9, True, 0.0)
    bad = contenders.Contender("Bad", refuse)
    rows = step.measure(shapes.matrices(64, 1), [*contenders.REFERENCES, bad], bench)
    assert [row["optimiser"] for row in rows] == ["Adam (fused)", "SGD (fused)"]
    assert bench.notes == ["Bad, 1 matrices: RuntimeError: not today"]
