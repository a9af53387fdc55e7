"""Effects of options: gain_penalty (Sections 5.6 and 6.3), and the recipes that docs/guide advises."""

import copy
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from training import network

import nero


def network_with_gains():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.PReLU(),
        nn.Linear(16, 12, bias=False),
        nn.LayerNorm(12),
        nn.Linear(12, 4),
    )


def gains(model):
    return [model[1].weight, model[4].weight]


def train_classifier(model, optimiser, steps, penalty=0.0):
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(inputs.to(model[0].weight.dtype)), labels)
        loss = loss + sum(penalty / 2 * (gain - 1).square().sum() for gain in gains(model))
        loss.backward()
        optimiser.step()


def test_gain_penalty_equals_quadratic_term_in_the_loss(backend: str):
    runs = []
    for option, by_hand in ((0.05, 0.0), (0.0, 0.05), (0.0, 0.0)):
        model = network_with_gains()
        with torch.no_grad():
            for gain in gains(model):
                gain.uniform_(0.5, 2.0)
        train_classifier(model, nero.Nero(model, gain_penalty=option, backend=backend), 4, by_hand)
        runs.append(model)
    for (name, pulled), wanted in zip(runs[0].named_parameters(), runs[1].parameters(), strict=True):
        if name != "0.bias":  # batch norm removes it, so its gradient is rounding noise
            torch.testing.assert_close(pulled, wanted, rtol=1e-4, atol=1e-5)
    for pulled, free in zip(gains(runs[0]), gains(runs[2]), strict=True):
        assert (pulled - free).abs().max() > 0.01


@pytest.mark.parametrize("layer", [nn.Linear(1, 8), nn.Conv2d(4, 4, 1, groups=4)], ids=["linear", "depthwise"])
def test_gain_penalty_leaves_weights_of_fan_in_one(layer: nn.Module):
    model = nn.Sequential(layer, nn.LayerNorm(8))
    before = layer.weight.detach().clone()
    optimiser = nero.Nero(model, gain_penalty=1.0)
    model[1].weight.data.fill_(2.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    assert torch.equal(layer.weight, before)
    assert (model[1].weight < 2).all()


def test_gain_penalty_pulls_gains_alone():
    """Without a gradient of the loss, gains converge to one, and all else stays exactly."""
    model = network_with_gains()
    optimiser = nero.Nero(model, beta=0.9, gain_penalty=0.1)
    with torch.no_grad():
        for gain in gains(model):
            gain.uniform_(0.3, 2.0)
    before = copy.deepcopy(model)
    assert all(((gain - 1).abs() > 0).all() for gain in gains(model))
    for step in range(200):
        for group in optimiser.param_groups:
            group["lr"] = 0.04 * (1 - step / 200)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimiser.step()
    for (name, parameter), was in zip(model.named_parameters(), before.parameters(), strict=True):
        if name in ("1.weight", "4.weight"):
            assert (parameter - 1).abs().max() < 2e-3 < (was - 1).abs().max()
        else:
            assert torch.equal(parameter, was), name


@pytest.mark.parametrize("penalty", [0.0, 0.1, 1.0, 10.0])
def test_gains_converge_between_one_and_the_optimum(penalty: float):
    """The minimum of 1/2 (γ - c)² + λ/2 (γ - 1)² is at (c + λ) / (1 + λ)."""
    wanted = torch.tensor([0.2, 0.9, 1.0, 1.8])
    norm = nn.LayerNorm(4, bias=False)
    optimiser = nero.Nero(norm, gain_penalty=penalty)
    for step in range(300):
        optimiser.param_groups[0]["lr"] = 0.02 * (1 - step / 300)
        optimiser.zero_grad()
        (0.5 * (norm.weight - wanted).square().sum()).backward()
        optimiser.step()
    torch.testing.assert_close(norm.weight.detach(), (wanted + penalty) / (1 + penalty), rtol=0, atol=5e-3)


def test_larger_penalty_gives_smaller_gains_and_larger_loss():
    """Train a batch-normalised network that can grow its gains to fit better (a small version of Figure 9)."""
    apart, losses = [], []
    for penalty in (0.0, 0.02, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 4),
        )
        inputs, labels = torch.randn(64, 8), torch.randint(4, (64,))
        groups = nero.param_groups(model)
        for group in groups:
            group["scale"] = None if group["role"] == "neuron" else 1.0
        optimiser = nero.Nero(groups, lr=0.02, gain_penalty=penalty)
        for _ in range(80):
            optimiser.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimiser.step()
        apart.append(max((model[layer].weight.detach() - 1).abs().mean().item() for layer in (1, 4)))
        losses.append(loss.item())
    assert apart[0] > 2 * apart[1] > 10 * apart[2]
    assert losses[0] < losses[1] < losses[2]


def test_groups_have_their_own_penalties():
    model = network_with_gains()
    optimiser = nero.Nero(
        [
            {"params": [model[1].weight], "role": "gain", "gain_penalty": 0.5},
            {"params": [model[4].weight], "role": "gain"},
        ]
    )
    with torch.no_grad():
        for gain in gains(model):
            gain.fill_(1.5)
    for gain in gains(model):
        gain.grad = torch.zeros_like(gain)
    optimiser.step()
    assert (model[1].weight < 1.5).all()
    assert (model[4].weight == 1.5).all()
    other = nero.Nero([{"params": [gain], "role": "gain"} for gain in gains(network_with_gains())])
    other.load_state_dict(optimiser.state_dict())
    assert [group["gain_penalty"] for group in other.param_groups] == [0.5, 0.0]


def test_penalty_without_gains_warns():
    """From shapes alone, a gain of a norm layer counts as a bias, as in the paper's code."""
    with pytest.warns(UserWarning, match=r"gain_penalty=0\.1 has no effect: .*nero\.Nero\(model\)"):
        nero.Nero(network_with_gains().parameters(), gain_penalty=0.1)


def test_table_of_the_page_has_the_numbers_of_the_record():
    docs = Path(__file__).parents[2] / "docs"
    runs = json.loads((docs / "figures/gains.json").read_text())["runs"]
    free, pulled = ([run for run in runs if run["penalty"] == penalty] for penalty in (0.0, 0.01))
    assert [run["seed"] for run in free] == [run["seed"] for run in pulled] == list(range(10))

    def row(runs: list[dict[str, Any]]) -> str:
        columns = [(run["gains"][0], run["gains"][-1], run["train_loss"], 100 * run["test_error"]) for run in runs]
        least, largest, loss, error = map(statistics.fmean, zip(*columns, strict=True))
        return f"| {runs[0]['penalty']:g} | {least:.2f} to {largest:.2f} | {loss:.4f} | {error:.2f} % |"

    page = (docs / "theory.md").read_text()
    assert row(free) in page
    assert row(pulled) in page
    differences = [100 * (a["test_error"] - b["test_error"]) for a, b in zip(free, pulled, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    assert f"{statistics.fmean(differences):.2f} ± {error:.2f} points" in page
    assert sum(difference > 0 for difference in differences) == 9


PRETRAINED = {"fix_norm": "initial", "fix_mean": False}
FREE_LAYER = {"fix_norm": False, "fix_mean": False}


def test_pretrained_network_with_advised_options_is_unchanged():
    inputs = torch.randn(16, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    trained = network().eval()
    with torch.no_grad():
        said = trained(inputs)
        for options, stays in ((PRETRAINED, True), ({"fix_norm": "initial"}, False), ({}, False)):
            model = copy.deepcopy(trained)
            nero.Nero(model, **options)
            assert torch.allclose(model(inputs), said, atol=1e-5) is stays


@pytest.mark.no_cover  # many steps run the lines of one
def test_large_targets_are_reached_by_a_free_last_layer():
    """Targets of variance one are learnt sooner. Errors are relative to the variance of the targets."""
    found = []
    for size, options in ((100.0, {}), (100.0, FREE_LAYER), (1.0, {})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        inputs = torch.randn(256, 10)
        targets = (inputs @ torch.randn(10, 1)).tanh()
        targets = size * (targets - targets.mean()) / targets.std()
        optimiser = nero.Nero([{"params": model[:-1].parameters()}, {"params": model[-1].parameters(), **options}])
        for _ in range(250):
            optimiser.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimiser.step()
        found.append(loss.item() / size**2)
    held, free, plain = found
    assert held > 0.4
    assert free < 0.15
    assert plain < 0.02
