"""The measurement of trust: how far neurons may turn before the gradients change."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trust

import nero
from nero_lab.data import ImageDataset, Images
from nero_lab.models.mlp import mlp


def test_main_measures_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    noise = torch.Generator().manual_seed(0)

    def images(count: int) -> Images:
        pixels = torch.randint(256, (count, 1, 8, 8), generator=noise, dtype=torch.uint8)
        return Images(pixels[:1].expand_as(pixels), torch.arange(count) % 10)  # one image of all classes: unlearnable

    monkeypatch.setattr(trust, "load", lambda *_: ImageDataset("mnist", images(40), images(10), (0.5,), (0.25,)))
    task = replace(trust.TASKS["perceptron-5"], model=partial(mlp, 2, width=64))
    networks = (("perceptron of 2 layers", "perceptron-5", 20), ("other", "imagenet", 20))
    monkeypatch.setattr(trust, "NETWORKS", networks)
    monkeypatch.setattr(trust, "TASKS", dict.fromkeys(("perceptron-5", "imagenet"), task))
    record, figure = tmp_path / "trust.json", tmp_path / "trust.png"
    places = ["--out", str(tmp_path), "--figure", str(figure)]
    assert trust.main(places) == 0
    assert [row["network"] for row in json.loads(record.read_text())["rows"]] == ["perceptron of 2 layers"]
    assert trust.main(["--images", str(tmp_path), *places]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [row["network"] for row in rows] == ["perceptron of 2 layers", "other"]
    for row in rows:
        assert (row["layers"], row["depth"]) == (2, 2.0)
        assert all(a <= b <= c for a, b, c in zip(row["least"], row["median"], row["most"], strict=True))
        assert row["median"][0] < 0.1 < 0.5 < row["median"][-1]
        assert trust.ANGLES[0] < row["trusted"] < trust.ANGLES[-1]
    figure.unlink()
    assert trust.main(["--draw", *places]) == 0
    assert figure.stat().st_size > 10_000


def test_first_step_turns_neurons_and_restores_model():
    model = nero.balance_(torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.randn(16, 64)
    change = trust.first_step(model, lambda model: model(inputs).square().mean())(0.01)
    assert set(change) == {"0.weight", "2.weight"}
    assert change["0.weight"].norm(dim=1) == pytest.approx(0.01, rel=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_trusted_angle_is_where_change_passes_one():
    changes = [100 * angle for angle in trust.ANGLES]
    assert trust.trusted_angle(changes) == pytest.approx(0.01)
    assert trust.trusted_angle([angle**0.5 * 20 for angle in trust.ANGLES]) == pytest.approx(0.0025)
    for never in ([0.1] * len(changes), [2.0] * len(changes)):
        assert math.isnan(trust.trusted_angle(never))
