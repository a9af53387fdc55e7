"""Per-neuron relative steps against hand computation."""

import copy
import math

import pytest
import torch
from theory_networks import weights_of
from torch import nn

import nero
from nero import theory


def test_relative_step_matches_hand_computation():
    """Move neurons of norm 5 and 13 by 0.5 and 0.13, in a matrix of norm √194."""
    model = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0], [5.0, 12.0]]))
        model.bias.copy_(torch.tensor([2.0, -4.0]))
    step = {
        "weight": torch.tensor([[0.3, 0.4], [0.13, 0.0]], dtype=torch.float64),
        "bias": torch.tensor([-0.1, 0.1], dtype=torch.float64),
    }
    found = theory.relative_step(model, step)
    weight, bias = found.layers
    assert (weight.neuron, weight.layer) == (pytest.approx(0.1), pytest.approx(math.hypot(0.5, 0.13) / math.sqrt(194)))
    assert (bias.neuron, bias.layer) == (pytest.approx(0.05), pytest.approx(math.sqrt(0.02 / 20)))
    assert found.neuron == pytest.approx(0.1)
    assert found.layer == weight.layer
    assert theory.is_per_neuron_relative(model, step, 0.1)
    assert not theory.is_per_neuron_relative(model, step, 0.0999)
    assert theory.is_per_neuron_relative(model, step, 0.0999, tolerance=0.001)
    assert theory.relative_step(model, {"bias": step["bias"]}).layers[0] == theory.LayerStep("weight", "neuron", 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_step_per_layer_is_at_most_step_per_neuron(seed: int):
    """Check Eq. (pnpl) on neurons of every layout."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(5, 3), nn.BatchNorm2d(6))
    with torch.no_grad():
        model[3].bias.add_(1)
    step = {name: torch.rand(()) * torch.randn_like(weight) for name, weight in weights_of(model).items()}
    found = theory.relative_step(model, step)
    assert all(0 < row.layer <= row.neuron for row in found.layers)
    assert theory.is_per_neuron_relative(model, step, found.neuron)
    grouped = step["1.weight"].unflatten(0, (2, 2)).transpose(1, 2).flatten(2).norm(dim=2)
    sizes = model[1].weight.detach().unflatten(0, (2, 2)).transpose(1, 2).flatten(2).norm(dim=2)
    (row,) = [row for row in found.layers if row.name == "1.weight"]
    assert row.neuron == pytest.approx(float((grouped / sizes).max()), rel=1e-5)


def test_first_step_of_nero_is_per_neuron_relative():
    """At the first step ḡ is |g|, so a neuron moves by η before its projection, and by at most η after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 5, bias=False))
    optimiser = nero.Nero(model, lr=0.01)
    before = copy.deepcopy(model)
    model(torch.randn(8, 20)).square().sum().backward()
    optimiser.step()
    step = {name: weight - weights_of(before)[name] for name, weight in weights_of(model).items()}
    assert theory.is_per_neuron_relative(before, step, 0.0101)
    assert not theory.is_per_neuron_relative(before, step, 0.008)


def test_moving_zero_bias_is_infinitely_far():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    assert theory.is_per_neuron_relative(model, {"weight": 1e-3 * model.weight.detach()}, 0.01)
    step = {"bias": torch.tensor([0.0, 1e-9])}
    assert theory.relative_step(model, step).neuron == math.inf
    assert not theory.is_per_neuron_relative(model, step, 1e6)


@pytest.mark.parametrize("eta", [0, -1, math.nan, True, "0.1"])
def test_eta_that_is_not_positive_raises(eta):
    with pytest.raises(ValueError, match="eta must be a positive number"):
        theory.is_per_neuron_relative(nn.Linear(3, 2), {"bias": torch.ones(2)}, eta)


def test_frozen_integer_parameter_is_ignored():
    model = nn.Linear(3, 2)
    model.table = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)
    assert theory.is_per_neuron_relative(model, {"weight": 0.1 * model.weight.detach()}, 0.1)
