"""Readings as tables and as scalars of TensorBoard."""

from pathlib import Path

import pytest
from watched_networks import (
    ScalarLog,
    network,
    watched_run,
)

import nero


def test_write_gives_every_number_its_tag():
    watched = watched_run()
    one, everything = ScalarLog(), ScalarLog()
    watched.readings[-1].write(one)
    watched.write(everything)
    layer = watched.readings[-1]["0.weight"]
    assert one.written["turned/0.weight", 6] == layer.turned.middle
    assert one.written["grad_norm/0.weight", 6] == layer.grad_norm.middle
    assert one.written["skipped/1.weight", 6] == 0
    assert ("near_limit/0.weight", 6) in one.written
    assert ("near_limit/1.weight", 6) not in one.written, "a gain has no limit"
    assert one.written.items() <= everything.written.items()
    assert {step for _, step in everything.written} == {2, 4, 6}
    with pytest.raises(TypeError, match=r"must have add_scalar\(tag, value, step\), got list"):
        watched.write([])


def test_tensorboard_reads_what_is_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watched = watched_run()
    watched.write(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = events.Scalars("from_start/3.weight")
    assert [each.step for each in found] == [2, 4, 6]
    wanted = [reading["3.weight"].from_start.middle for reading in watched.readings]
    assert [each.value for each in found] == pytest.approx(wanted)


def test_reading_prints_as_table_with_given_step():
    model = network()
    watched = nero.watch(nero.Nero(model))
    reading = watched.read(step=700)
    assert reading.step == 700
    lines = str(reading).splitlines()
    assert lines[0] == "step 700"
    assert lines[3].split() == ["0.weight", "neuron", "0", "0", "0", "-", "8%", "0%", "0"]
    assert repr(reading) == str(reading)
    with pytest.raises(KeyError, match=r"no layer 'x'; there are 0\.weight, "):
        reading["x"]
