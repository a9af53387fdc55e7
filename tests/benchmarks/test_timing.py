"""Contenders, their shapes and steps, and how they are timed and compared."""

import io
import json
import sys
from types import SimpleNamespace

import compare
import contenders
import pytest
import shapes
import step
import timing
import torch

import nero


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
