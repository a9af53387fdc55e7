"""Supervised training on photographs: resuming, damaged images, last batches."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")

from lab.photo_cases import SMALL, TASK, damage, decoded, shallow, streamed, write_class_folder, write_image

from nero_lab import distributed
from nero_lab.data import DataError
from nero_lab.loops import supervised
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.supervised import Supervised
from nero_lab.progress import NullObserver
from nero_lab.store import ReadOnlyStore, Store
from nero_lab.sweep import train


@pytest.mark.parametrize("contender", ["nero-tuned", "sgd-decay"])
@pytest.mark.parametrize("which", ["decoded", "streamed"])
def test_resumed_at_any_step_equals_undisturbed(tmp_path: Path, monkeypatch, contender: str, which: str):
    folder = write_class_folder(tmp_path, test=1)
    data = decoded(folder) if which == "decoded" else streamed(folder, monkeypatch)
    task = replace(TASK, model=shallow, batch=5)
    settings = task.settings(contender, epochs=2)
    whole = Supervised(task, settings, data)
    states = []
    while not whole.finished:
        states.append(whole.state())
        whole.advance()
    assert len(states) == 6
    for state in states[1:]:
        torch.save(state, tmp_path / "state")
        again = Supervised(task, settings, data, torch.load(tmp_path / "state", weights_only=True))
        while not again.finished:
            again.advance()
        assert again.curve == whole.curve
        for name, value in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], value), name


@pytest.mark.parametrize("part", ["train/a/1.JPEG", "val/a/1.JPEG"])
def test_image_damaged_in_mid_run_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str):
    folder, begun = write_class_folder(tmp_path / "made", names="ab", train=6), []
    task, data = replace(SMALL, model=shallow), streamed(folder, monkeypatch)
    settings = task.settings("sgd-decay", epochs=2)
    intact = (folder / part).read_bytes()

    class Damaging(NullObserver):
        def begun(self, training: Supervised) -> None:
            begun.append(training.steps_done)

        def stepped(self, training: Supervised) -> None:
            if training.epoch == 1 and training.step == 0:
                damage(folder, part)

    (whole,) = train(task, [settings], data, Store(tmp_path / "whole"), NullObserver())
    with pytest.raises(DataError, match=r"does not decode .* the same command resumes"):
        train(task, [settings], data, Store(tmp_path / "broken"), Damaging())
    (folder / part).write_bytes(intact)
    (again,) = train(task, [settings], data, Store(tmp_path / "broken"), Damaging())
    assert begun[0] == 0
    assert begun[1] == 6 if part.startswith("val") else 3 <= begun[1] < 6
    assert again["curve"] == whole["curve"]


@pytest.mark.parametrize(
    ("images", "batch", "processes", "steps"),
    [(13, 4, 1, 3), (14, 4, 1, 4), (12, 4, 1, 3), (15, 4, 2, 3), (16, 4, 2, 4), (11, 8, 2, 1), (12, 8, 2, 2)],
)
def test_last_batch_with_a_share_of_one_is_dropped(monkeypatch, images, batch, processes, steps):
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    assert supervised._count_steps(replace(TASK, batch=batch), images) == steps
    assert supervised._count_steps(replace(TASK, batch=batch, several=False), images) == math.ceil(images / batch)


def test_batch_norm_never_sees_a_single_image(tmp_path: Path):
    folder = write_class_folder(tmp_path)
    write_image(folder / "train" / "a" / "9.JPEG")  # the 13th, in batches of four
    training = Supervised(SMALL, SMALL.settings("sgd", epochs=1), decoded(folder))
    while not training.finished:
        training.advance()
    assert training.steps_done == 3


def test_onlooker_writes_nothing(tmp_path: Path):
    data = decoded(write_class_folder(tmp_path / "made"))
    training = Supervised(SMALL, SMALL.settings("nero", epochs=1), data)
    while not training.finished:
        training.advance()
    store = ReadOnlyStore(tmp_path / "out")
    training.files["-a.png"] = b"picture"
    store.check(SMALL, 2**62)
    store.save(training)
    store.write_files(training)
    assert store.finish(training)["curve"] == Store(tmp_path / "other").finish(training)["curve"]
    assert not training.files
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("contender", TASK.contenders)
@pytest.mark.parametrize("which", ["decoded", "streamed"])
def test_captured_photo_steps_match_plain_ones(tmp_path: Path, monkeypatch, contender: str, which: str):
    flags = partial(torch.backends.cudnn.flags, deterministic=True)
    monkeypatch.setattr(torch.backends.cudnn, "flags", lambda **asked: flags(**{**asked, "benchmark": False}))
    folder = write_class_folder(tmp_path, size=(64, 64))
    data = (decoded(folder) if which == "decoded" else streamed(folder, monkeypatch)).to("cuda")
    task = replace(SMALL, batch=8)
    runs = []
    for call in (CapturedStep.__call__, lambda self, *inputs, **_: self.function(*inputs)):
        monkeypatch.setattr(CapturedStep, "__call__", call)
        runs.append(Supervised(task, task.settings(contender, epochs=2), data))
        while not runs[-1].finished:
            runs[-1].advance()
    captured, plain = runs
    assert len(captured._learn.graphs) == 2
    for name, values in plain.curve.items():
        assert captured.curve[name] == pytest.approx(values, rel=1e-2, abs=1e-3), name
