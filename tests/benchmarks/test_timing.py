"""Turns, ratios and the clock."""

import pytest
import timing
import torch


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
