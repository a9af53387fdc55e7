"""Baselines by name: their settings, the forms of Nero, and invalid options."""

import copy
import math

import oracle
import pytest
import torch
from lab.baseline_cases import assert_close, flat, give_gradients, length, network, run
from torch import nn

import nero
from nero_lab import baselines
from nero_lab.baselines import Lamb, Madam, make


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_sgd_clip_bounds_norm_of_whole_gradient(clip: float):
    models = network(torch.float64), network(torch.float64)
    plain, clipped = make("sgd", models[0], 0.1), make("sgd", models[1], 0.1, clip=clip)
    before = [flat(parameter) for parameter in models[0].parameters()]
    given, _ = (give_gradients(model, 1) for model in models)
    norm = length([x for values in given.values() for x in values or ()])
    share = min(1.0, clip / norm)
    plain.step()
    clipped.step()
    for was, whole, part in zip(before, models[0].parameters(), models[1].parameters(), strict=True):
        wanted = [x + share * (y - x) for x, y in zip(was, flat(whole), strict=True)]
        assert flat(part) == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    with pytest.raises(ValueError, match="clip must be finite and positive"):
        make("sgd", models[0], 0.1, clip=0.0)


def test_make_defaults_are_the_papers():
    layer = nn.Linear(3, 2)
    adam, lamb, sgd, madam, ours = (make(name, layer, 0.1) for name in ("adam", "lamb", "sgd", "madam", "nero"))
    assert isinstance(ours, nero.Nero)
    assert (adam.defaults["betas"], adam.defaults["eps"], adam.defaults["weight_decay"]) == ((0.0, 0.999), 1e-8, 0)
    assert (lamb.defaults["betas"], lamb.defaults["eps"]) == ((0.0, 0.999), 1e-6)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0, 0)
    assert (madam.defaults["beta"], madam.defaults["clip"], madam.defaults["p_scale"]) == (0.999, 10, 3)
    assert (ours.defaults["beta"], ours.defaults["fix_mean"], ours.defaults["fix_norm"]) == (0.999, True, True)


def test_make_nero_steps_like_nero():
    models = network(), network()
    with torch.no_grad():
        for each in models:
            each["norm"].weight.fill_(2)
    optimisers = make("nero", models[0], 0.02), nero.Nero(models[1], lr=0.02)
    assert_close(*(run(*both, range(4)) for both in zip(optimisers, models, strict=True)))


@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("fix_norm", [True, False])
def test_fixed_scale_is_mean_norm_after_projection(fix_mean: bool, fix_norm: bool):
    model = nn.Sequential(nn.Linear(5, 4), nn.Conv2d(2, 3, 2, bias=False), nn.Linear(4, 2)).double()
    nn.init.zeros_(model[2].weight)
    start = copy.deepcopy(model)
    optimiser = make("nero", model, 0.05, fix_mean=fix_mean, fix_norm=fix_norm, fixed_scale=True)
    scales = {
        name: group["scale"] for group in optimiser.param_groups for name in group["param_names"] if "weight" in name
    }
    assert {group["scale"] for group in optimiser.param_groups if group["role"] == "bias"} == {None}
    assert list(optimiser.state) == [each for group in optimiser.param_groups for each in group["params"]]
    neurons = {}
    for name in ("0.weight", "1.weight"):
        rows = [flat(row) for row in start.get_parameter(name)]
        neurons[name] = [oracle.project(row, fix_mean, fix_norm) for row in rows]
        assert scales[name] == pytest.approx(sum(map(length, neurons[name])) / len(rows))
        assert (scales[name] == 1) == fix_norm
    assert scales["2.weight"] == (1.0 if fix_norm else 0.01)

    squares = {name: [0.0] * len(rows) for name, rows in neurons.items()}
    for t in range(1, 5):
        for name, rows in neurons.items():
            grad = torch.randn(model.get_parameter(name).shape, dtype=torch.float64)
            model.get_parameter(name).grad = grad
            for i, (row, g) in enumerate(zip(rows, map(flat, grad), strict=True)):
                rows[i], squares[name][i] = oracle.turn(
                    row, g, squares[name][i], t, 0.05, 0.999, fix_mean, fix_norm, sigma=scales[name]
                )
        optimiser.step()
    for name, rows in neurons.items():
        assert flat(model.get_parameter(name)) == pytest.approx([x for row in rows for x in row], rel=1e-9)


def test_fixed_scale_with_constraints_is_algorithm_1():
    models = network(torch.float64), network(torch.float64)
    for each in models:
        del each["zero"], each["unmoved"]  # the two forms differ at the origin
    found = run(make("nero", models[0], 0.02, fixed_scale=True), models[0], range(6))
    wanted = run(make("nero", models[1], 0.02), models[1], range(6))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_make_unknown_name_raises():
    with pytest.raises(ValueError, match=r"unknown optimiser 'rmsprop': use one of nero, sgd, adam, lamb, madam"):
        make("rmsprop", nn.Linear(3, 2), 0.1)


@pytest.mark.parametrize("name", list(baselines.OPTIONS))
def test_make_unknown_option_raises(name: str):
    known = ", ".join(baselines.OPTIONS[name])
    with pytest.raises(ValueError, match=rf"{name} has no option beta3: it has {known}"):
        make(name, nn.Linear(3, 2), 0.1, beta3=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nero", {"balanced": True}, "nero has no option balanced"),
        ("sgd", {"beta1": 0.9}, "sgd has no option beta1"),
        ("nero", {"fix_norm": "initial"}, "fix_norm must be True or False, got 'initial'"),
        ("adam", {"balanced": 1}, "balanced must be True or False, got 1"),
        ("adam", {"beta1": 1.0}, "beta"),
        ("lamb", {"beta1": 1.0}, r"betas\[0\] must be in \[0, 1\), like 0.999, got 1.0"),
    ],
)
def test_make_invalid_option_raises(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(name, nn.Linear(3, 2), 0.1, **options)


@pytest.mark.parametrize(
    ("make_one", "options", "message"),
    [
        *(
            (make_one, {"lr": lr}, "lr must be finite and not negative")
            for make_one in (Lamb, Madam)
            for lr in (-0.1, math.nan, math.inf, True, "0.1", None, torch.tensor(-1.0))
        ),
        (Lamb, {"lr": torch.ones(2)}, r"lr as a tensor must have one element, got shape \(2,\)"),
        (Lamb, {"betas": 0.9}, r"betas must be two numbers, like \(0.9, 0.999\), got 0.9"),
        (Lamb, {"betas": (0.9,)}, "betas must be two numbers"),
        (Lamb, {"betas": (0.9, 1)}, r"betas\[1\] must be in \[0, 1\)"),
        (Lamb, {"eps": 0}, "eps must be finite and positive"),
        (Madam, {"beta": -0.1}, r"beta must be in \[0, 1\)"),
        (Madam, {"clip": 0}, "clip must be positive, like 10.0, got 0"),
        (Madam, {"p_scale": math.nan}, "p_scale must be positive"),
    ],
)
def test_lamb_and_madam_invalid_option_raises(make_one, options: dict, message: str):
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=message):
        make_one([weight], **options)
    optimiser = make_one([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=message):
        optimiser.add_param_group({"params": [weight], **options})
    assert len(optimiser.param_groups) == 1
    assert weight not in optimiser.state
