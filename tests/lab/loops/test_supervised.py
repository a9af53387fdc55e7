"""The supervised loop, on made images and on photographs: evaluation, the training loss, damaged images, resumption."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

pytest.importorskip("PIL")

from lab.helpers import CPU, FAST, TINY, finish, make_data
from lab.photo_cases import SMALL, TASK, damage, decoded, shallow, streamed, write_class_folder, write_image

from nero_lab import distributed
from nero_lab.data import DataError, corpus, pairs
from nero_lab.data import images as data_module
from nero_lab.loops import supervised
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.supervised import READ_DELAY_STEPS, Supervised
from nero_lab.models.mlp import mlp
from nero_lab.models.transformer import Translator, language_model
from nero_lab.models.vgg import vgg11
from nero_lab.protocol import constant
from nero_lab.store import ReadOnlyStore, Store
from nero_lab.sweep import RunObserver, train
from nero_lab.tasks import TASKS


@pytest.mark.parametrize("dataset", ["cifar10", "wikitext2", "multi30k"])
def test_evaluation_any_batch_size_matches_one_batch(dataset, monkeypatch):
    data = make_data(dataset, examples=40, tests=10)
    models = {
        "cifar10": partial(vgg11, width=1 / 32),
        "wikitext2": partial(language_model, 7, width=8, hidden=8),
        "multi30k": partial(Translator, 14, width=16, hidden=16, layers=1),
    }
    training = Supervised(replace(TINY, model=models[dataset], dataset=dataset), TINY.settings("nero"), data)
    for part in data.parts:
        for module in (data_module, corpus, pairs):
            monkeypatch.setattr(module, "EVAL_BATCH", 10**6)
        whole = training._evaluate(part)
        ((*inputs, labels),) = data.batches(part)
        with torch.no_grad():
            logits = training.model(*inputs)
        wanted = [F.cross_entropy(logits.flatten(0, -2).double(), labels.flatten(), reduction="sum").item()]
        wanted += [(logits.argmax(-1) == labels).sum().item(), (labels >= 0).sum().item()]
        assert whole.tolist() == pytest.approx(wanted, rel=1e-5)
        for module in (data_module, corpus, pairs):
            monkeypatch.setattr(module, "EVAL_BATCH", 3)
        assert len(list(data.batches(part))) > 2
        assert training._evaluate(part).tolist() == pytest.approx(wanted, rel=1e-5)


def test_supervised_training_learns():
    task = replace(TINY, schedule=constant, augment=None, epochs=8)
    task = replace(task, model=lambda: nn.Sequential(nn.AvgPool2d(4), mlp(3, 3 * 8 * 8)))
    training = finish(Supervised(task, task.settings("nero"), make_data(examples=40)))
    assert training.curve["train_accuracy"][-1] > 0.8
    assert training.curve["train_loss"][-1] < training.curve["train_loss"][0]


def test_smoothed_summed_loss_trains_but_is_not_reported():
    data = make_data("multi30k", examples=30)
    model = partial(Translator, len(data.vocabulary), width=16, hidden=16, layers=1, dropout=0.0)
    task = replace(TASKS["translation"], model=model, schedule=constant, batch=30)
    steps, losses = {}, {}
    for name, changes in {"paper": {}, "plain": {"smoothing": 0.0}, "mean": {"is_loss_summed": False}}.items():
        training = Supervised(replace(task, **changes), task.settings("sgd", 1e-4), data)
        before = [weight.detach().clone() for weight in training.model.parameters()]
        training.advance()
        steps[name] = [now.detach() - was for now, was in zip(training.model.parameters(), before, strict=True)]
        losses[name] = training.curve["train_loss"]
    assert losses["plain"] == pytest.approx(losses["paper"])
    assert losses["mean"] == pytest.approx(losses["paper"])
    count = int((data.train.labels >= 0).sum())
    for summed, mean in zip(steps["paper"], steps["mean"], strict=True):
        torch.testing.assert_close(summed, count * mean, rtol=0.05, atol=1e-5)
    assert not all(torch.allclose(*both, atol=1e-7) for both in zip(steps["paper"], steps["plain"], strict=True))


@pytest.mark.parametrize("lag", [1, 2, 99])
def test_delayed_epoch_numbers_are_the_same(lag, monkeypatch):
    """On a GPU an epoch's numbers are read some steps later. They come once each, and checkpoints include them."""
    data, settings = make_data(), FAST.settings("nero")
    prompt = Supervised(FAST, settings, data)
    monkeypatch.setitem(READ_DELAY_STEPS, "cpu", lag)
    delayed = Supervised(FAST, settings, data)
    arrivals = []
    while not prompt.is_finished:
        prompt.advance()
        delayed.advance()
        assert prompt.epochs_known == prompt.epoch
        if delayed.epochs_known > len(arrivals):
            arrivals.append((delayed.epoch, delayed.step))
            assert delayed.curve == prompt.curve
            assert delayed.epochs_known == delayed.epoch
        if delayed.step == 0:
            assert (delayed.epochs_known == delayed.epoch) == delayed.is_finished
    steps = min(lag, delayed.steps_per_epoch - 1)
    assert arrivals == [*((epoch, steps) for epoch in range(1, settings.epochs)), (settings.epochs, 0)]
    unfinished = Supervised(FAST, settings, data)
    while unfinished.epoch == 0:
        unfinished.advance()
    assert not unfinished.curve["train_loss"]
    state = unfinished.state()
    assert state["curve"]["train_loss"] == prompt.curve["train_loss"][:1]
    assert finish(Supervised(FAST, settings, data, state)).curve == prompt.curve


def test_resumed_weights_at_any_step_are_bit_equal(tmp_path):
    data, settings, store = make_data(), TINY.settings("adam"), Store(tmp_path)
    whole = Supervised(TINY, settings, data)
    states = []
    for _ in range(5):  # past the end of the first epoch
        store.save(whole)
        states.append(store.begin(TINY, settings, CPU))
        whole.advance()
    for start, state in enumerate(states):
        resumed = Supervised(TINY, settings, data, state)
        for _ in range(start, 5):
            resumed.advance()
        for name, value in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], value), (start, name)


@pytest.mark.parametrize("contender", ["nero-tuned", "sgd-decay"])
@pytest.mark.parametrize("which", ["decoded", "streamed"])
def test_resumed_at_any_step_equals_undisturbed(tmp_path: Path, monkeypatch, contender: str, which: str):
    folder = write_class_folder(tmp_path, test=1)
    data = decoded(folder) if which == "decoded" else streamed(folder, monkeypatch)
    task = replace(TASK, model=shallow, batch=5)
    settings = task.settings(contender, epochs=2)
    whole = Supervised(task, settings, data)
    states = []
    while not whole.is_finished:
        states.append(whole.state())
        whole.advance()
    assert len(states) == 6
    for state in states[1:]:
        torch.save(state, tmp_path / "state")
        again = Supervised(task, settings, data, torch.load(tmp_path / "state", weights_only=True))
        while not again.is_finished:
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

    class Damaging(RunObserver):
        def begun(self, training: Supervised) -> None:
            begun.append(training.steps_done)

        def stepped(self, training: Supervised) -> None:
            if training.epoch == 1 and training.step == 0:
                damage(folder, part)

    (whole,) = train(task, [settings], data, Store(tmp_path / "whole"), RunObserver())
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
    assert supervised._count_steps(replace(TASK, batch=batch, is_distributable=False), images) == math.ceil(
        images / batch
    )


def test_batch_norm_never_sees_a_single_image(tmp_path: Path):
    folder = write_class_folder(tmp_path)
    write_image(folder / "train" / "a" / "9.JPEG")  # the 13th, in batches of four
    training = Supervised(SMALL, SMALL.settings("sgd", epochs=1), decoded(folder))
    while not training.is_finished:
        training.advance()
    assert training.steps_done == 3


def test_onlooker_writes_nothing(tmp_path: Path):
    data = decoded(write_class_folder(tmp_path / "made"))
    training = Supervised(SMALL, SMALL.settings("nero", epochs=1), data)
    while not training.is_finished:
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
        while not runs[-1].is_finished:
            runs[-1].advance()
    captured, plain = runs
    assert len(captured._learn.graphs) == 2
    for name, values in plain.curve.items():
        assert captured.curve[name] == pytest.approx(values, rel=1e-2, abs=1e-3), name
