"""Invalid options: errors that name the option, what it got and what it accepts."""

import copy
import math

import pytest
import torch
from torch import nn

import nero


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be finite and not negative"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": math.inf}, "lr must be"),
        ({"lr": "fast"}, "lr must be"),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr as a tensor must have one element"),
        ({"lr": torch.tensor(-1.0)}, "lr must be"),
        ({"beta": 1.0}, r"beta must be in \[0, 1\)"),
        ({"beta": -0.1}, "beta must be"),
        ({"beta": math.nan}, "beta must be"),
        ({"beta": (0.9, 0.99)}, "beta must be"),
        ({"scale": 10**400}, "scale must be finite and positive"),
        ({"longest_step": 0.5}, "longest_step must be at least 1, like 3, or math.inf, got 0.5"),
        ({"longest_step": math.nan}, "longest_step must be"),
        ({"longest_step": "3"}, "longest_step must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"scale": math.inf}, "scale must be"),
        ({"gain_penalty": -1.0}, "gain_penalty must be"),
        ({"fix_mean": "yes"}, "fix_mean must be one of"),
        ({"fix_norm": "final"}, "fix_norm must be one of"),
        ({"maximize": 2}, "maximize must be one of"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
@pytest.mark.parametrize("where", ["constructor", "group", "added"])
def test_invalid_option_raises_and_adds_no_group(options: dict, message: str, where: str):
    layer, optimiser = nn.Linear(3, 2), nero.Nero(nn.Linear(3, 2))
    calls = {
        "constructor": lambda: nero.Nero(layer, **options),
        "group": lambda: nero.Nero([{"params": layer.parameters(), **options}]),
        "added": lambda: optimiser.add_param_group({"params": layer.parameters(), **options}),
    }
    with pytest.raises(ValueError, match=message):
        calls[where]()
    assert len(optimiser.param_groups) == 2, "nothing half-added"


def test_lr_auto_of_one_group_raises_and_names_remedy():
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"lr=0\.1, longest_step=3.*count_depth"):
        nero.Nero(nero.param_groups(layer, lr="auto"))
    optimiser = nero.Nero(nero.param_groups(layer, lr=0.1))
    optimiser.count_depth(layer)
    layer(torch.randn(4, 3)).square().mean().backward()
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {1.0}
    optimiser.param_groups[0]["lr"] = "auto"
    with pytest.raises(ValueError, match="lr='auto' is for all groups at once"):
        optimiser.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "weight"}, "role must be one of"),
        ({"role": "neuron", "fan_in_axes": (2,)}, r"parameter 0 of group 0.*fan_in_axes \(2,\) do not fit"),
        ({"role": "neuron", "fan_in_axes": ()}, "do not fit"),
        ({"role": "neuron", "fan_in_axes": (1, -1)}, "at most once"),
        ({"role": "bias", "fan_in_axes": (1,)}, r"a bias has no fan_in_axes, got \(1,\)"),
        ({"role": "neuron", "fan_in_axes": (0,), "fan_in_groups": 3}, "fan_in_groups=3 does not fit"),
        ({"fan_in_axes": (5,)}, "do not fit"),
    ],
)
def test_invalid_role_of_group_raises(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        nero.Nero([{"params": [nn.Parameter(torch.randn(4, 3))], **options}])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", math.nan),
        ("lr", torch.tensor(-0.1)),
        ("lr", "fast"),
        ("beta", 1.5),
        ("longest_step", 0),
        ("backend", "x"),
        ("scale", -1.0),
        ("fix_norm", "intial"),
        ("on_nonfinite", "rais"),
    ],
)
def test_option_made_invalid_later_raises_before_the_step(option: str, value: object):
    layer = nn.Linear(3, 2)
    optimiser = nero.Nero(layer)
    optimiser.param_groups[1][option] = value
    layer(torch.randn(1, 3)).sum().backward()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=f"{option} must be"):
        optimiser.step()
    assert torch.equal(layer.weight, before["weight"])
    assert optimiser.state[layer.weight]["step"] == 0


@pytest.mark.parametrize("group", [{}, {"params": [("name",)]}, {"params": nn.Linear(2, 2).to(torch.float8_e4m3fn)}])
def test_group_that_fails_leaves_no_trace(group: dict):
    optimiser, late = nero.Nero(nn.Linear(3, 2)), nn.Linear(3, 2)
    with pytest.raises((ValueError, TypeError, IndexError)):
        optimiser.add_param_group(group)
    assert len(optimiser.param_groups) == 2
    optimiser.add_param_group({"params": late})
    assert nero.is_balanced(late)
