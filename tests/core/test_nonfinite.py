"""NaN and infinite gradients and weights: skipped and counted, or raised (ruling 6)."""

import copy
import math

import pytest
import torch
from torch import nn

import nero


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradient_element_skips_one_gain(backend: str, bad: float):
    norm = nn.LayerNorm(6)
    clean = copy.deepcopy(norm)
    optimisers = [nero.Nero(each, backend=backend) for each in (norm, clean)]
    grad = torch.randn(6)
    for each in (norm, clean):
        each.weight.grad, each.bias.grad = grad.clone(), grad.clone()
    norm.weight.grad[4] = bad
    for optimiser in optimisers:
        optimiser.step()
    assert norm.weight[4] == 1
    others = [0, 1, 2, 3, 5]
    torch.testing.assert_close(norm.weight[others], clean.weight[others], rtol=0, atol=1e-6)
    torch.testing.assert_close(norm.bias, clean.bias, rtol=0, atol=1e-6)
    assert optimisers[0].skipped == {"weight": 1}
    assert optimisers[1].skipped == {}
    norm.weight.grad = grad
    optimisers[0].step()
    assert norm.weight[4] != 1
    assert optimisers[0].skipped == {"weight": 1}


def test_on_nonfinite_raise_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimiser = nero.Nero(model, on_nonfinite="raise")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    model[1].weight.grad[0, 0] = math.nan
    late = nn.ConvTranspose2d(4, 2, 2, groups=2)
    for parameter in late.parameters():
        parameter.requires_grad_(False)
    optimiser.add_param_group({"params": late})
    for parameter in late.requires_grad_(True).parameters():
        parameter.grad = torch.ones_like(parameter)
    entering = late.weight.detach().clone()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimiser.state_dict())
    with pytest.raises(FloatingPointError, match=r"1\.weight.*on_nonfinite='skip'"):
        optimiser.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for key, entry in optimiser.state_dict()["state"].items():
        assert all(torch.equal(entry[name], state["state"][key][name]) for name in entry)
    assert torch.equal(late.weight, entering), "not even balanced"
    model[1].weight.grad[0, 0] = 1.0
    late.weight.grad[0, 0, 0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="weight is not finite"):
        optimiser.step()


def test_nan_weight_does_not_spread(backend: str):
    weight = nn.Parameter(torch.randn(4, 8))
    optimiser = nero.Nero([weight], backend=backend)
    with torch.no_grad():
        weight[1, 2] = math.nan
    weight.grad = torch.randn(4, 8)
    optimiser.step()
    assert weight.isnan().sum() == 1
