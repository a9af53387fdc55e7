"""The supervised loop: evaluation, the training loss, delayed numbers, and exact resumption."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lab.helpers import CPU, FAST, TINY, finish, make_data
from torch import nn

from nero_lab.data import corpus, pairs
from nero_lab.data import images as data_module
from nero_lab.loops.supervised import READ_DELAY_STEPS, Supervised
from nero_lab.models.mlp import mlp
from nero_lab.models.transformer import Translator, language_model
from nero_lab.models.vgg import vgg11
from nero_lab.protocol import constant
from nero_lab.store import Store
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
            monkeypatch.setattr(module, "METRIC_BATCH", 10**6)
        whole = training._evaluate(part)
        ((*inputs, labels),) = data.batches(part)
        with torch.no_grad():
            logits = training.model(*inputs)
        wanted = [F.cross_entropy(logits.flatten(0, -2).double(), labels.flatten(), reduction="sum").item()]
        wanted += [(logits.argmax(-1) == labels).sum().item(), (labels >= 0).sum().item()]
        assert whole.tolist() == pytest.approx(wanted, rel=1e-5)
        for module in (data_module, corpus, pairs):
            monkeypatch.setattr(module, "METRIC_BATCH", 3)
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
    for name, changes in {"paper": {}, "plain": {"smoothing": 0.0}, "mean": {"summed": False}}.items():
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
    while not prompt.finished:
        prompt.advance()
        delayed.advance()
        assert prompt.epochs_known == prompt.epoch
        if delayed.epochs_known > len(arrivals):
            arrivals.append((delayed.epoch, delayed.step))
            assert delayed.curve == prompt.curve
            assert delayed.epochs_known == delayed.epoch
        if delayed.step == 0:
            assert (delayed.epochs_known == delayed.epoch) == delayed.finished
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
