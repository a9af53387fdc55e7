"""The ImageNet task: its numbers, its contenders, and its command."""

import json
import math
import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("PIL")
from lab.photo_cases import SMALL, TASK, decoded, write_class_folder
from rich.console import Console

import nero
from nero_lab import baselines, cli
from nero_lab.data import decoder_pool
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import warm_up_then_cosine
from nero_lab.store import Store
from nero_lab.tasks import TASKS


def test_schedule_warms_up_then_follows_a_cosine():
    schedule = warm_up_then_cosine(1, 90)
    rates = [schedule(step, 10) for step in range(900)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10 + 445] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx((1 + math.cos(math.pi * 889 / 890)) / 2)
    assert schedule(900, 10) == pytest.approx(0)


def test_task_matches_the_paper():
    """Numbers are from the paper's appendix and the authors' settings."""
    assert (TASK.batch, TASK.epochs, TASK.metric, TASK.grid) == (400, 90, "test_accuracy", ())
    assert "about matches SGD" in TASK.title
    assert {name: (each.optimiser, each.best, dict(each.options)) for name, each in TASK.contenders.items()} == {
        "nero": ("nero", 0.01, {}),
        "nero-tuned": (
            "nero",
            0.02,
            {"scale": 1.0, "gain_penalty": TASK.contenders["nero-tuned"].options["gain_penalty"]},
        ),
        "nero-free-gains": ("nero", 0.02, {"scale": 1.0}),
        "sgd-decay": ("sgd", 0.1, {"momentum": 0.9, "weight_decay": 0.0001}),
        "sgd": ("sgd", 0.1, {"momentum": 0.9}),
    }
    assert TASK.contenders["nero-tuned"].options["gain_penalty"] > 0


def test_sgd_momentum_and_decay_match_reference():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimiser = baselines.make("sgd", model, 0.1, momentum=0.9, weight_decay=0.01)
    baselines.prime(optimiser)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    velocities = [torch.zeros_like(parameter) for parameter in expected]
    for step in range(3):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, step + index - 1.5)
            velocities[index] = 0.9 * velocities[index] + parameter.grad + 0.01 * expected[index]
            expected[index] = expected[index] - 0.1 * velocities[index]
        optimiser.step()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)
    for options, message in (({"momentum": 1.0}, "momentum must be"), ({"weight_decay": -1.0}, "weight_decay must be")):
        with pytest.raises(ValueError, match=message):
            baselines.make("sgd", model, 0.1, **options)


def test_nero_tuned_steps_biases_and_pulls_gains_to_one():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    nn.init.constant_(model[1].weight, 1.5)
    optimiser = baselines.make("nero", model, 0.02, scale=1.0, gain_penalty=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model[1].bias.grad.fill_(3.0)
    optimiser.step()
    assert model[1].bias.tolist() == pytest.approx([-0.02, -0.02])
    assert model[1].weight.tolist() == pytest.approx([1.48, 1.48])
    assert model[0].bias.grad.abs().max() == 0


@pytest.mark.parametrize("contender", TASK.contenders)
def test_every_contender_trains_and_records_its_data(tmp_path: Path, contender: str):
    data = decoded(write_class_folder(tmp_path / "made", names="ab", train=3, size=(64, 64)))
    settings = replace(SMALL.settings(contender, epochs=1), data=data.name)
    training = Supervised(SMALL, settings, data)
    before = [value.detach().clone() for value in training.model.parameters()]
    while not training.finished:
        training.advance()
    for value, was in zip(training.model.parameters(), before, strict=True):
        assert value.isfinite().all()
        assert not torch.equal(value, was)
    assert nero.is_balanced(training.model) == contender.startswith("nero")
    found = Store(tmp_path).finish(training)
    assert (found["data"], found["classes"], found["crop"]) == (data.name, 2, 56)
    assert found["processes"] == 1
    assert (found["options"], found["batch"]) == (dict(TASK.contenders[contender].options), 4)
    assert found["curve"]["test_accuracy"][0] in [index / 4 for index in range(5)]
    name = f"{contender}-lr{settings.lr}-seed0-epochs1-{data.name}.json"
    assert json.loads((tmp_path / "imagenet" / name).read_text()) == found


def test_command_prints_the_loading_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_class_folder(tmp_path / "made", names="ab", train=3, test=1, size=(64, 64))
    monkeypatch.setitem(TASKS, "imagenet", SMALL)
    monkeypatch.setattr(decoder_pool, "default_count", lambda _: 0)
    output = StringIO()
    monkeypatch.setattr(cli, "console", Console(file=output, width=160, markup=False, highlight=False))
    arguments = ["run", "imagenet", "--data", tmp_path / "made", "--out", tmp_path / "out", "--epochs", 1]
    monkeypatch.setattr(sys, "argv", ["nero", *map(str, arguments), "--device", "cpu"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    text = " ".join(output.getvalue().split())
    assert "in squares of 56, decoded by one process in" in text
    assert re.search(r"trains on [\d,]+ images a second, start included; [\d,]+ can be loaded", text)
