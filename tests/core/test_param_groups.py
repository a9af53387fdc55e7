"""Parameter groups made from the roles of a model."""

import pytest
from role_cases import BIAS, GAIN, ROWS, Model, neuron, tied
from torch import nn

import nero
from nero.groups import param_groups
from nero.roles import Role


def test_param_groups_one_per_role_with_names_and_options():
    model = nn.Sequential(
        nn.Linear(4, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 4),
        nn.Unflatten(1, (4, 1)),
        nn.ConvTranspose1d(4, 6, 3, groups=2),
    )
    groups = param_groups(model, {"2.weight": (0,)}, lr=0.5, beta=0.9)
    roles = [Role(group["role"], group["fan_in_axes"], group["fan_in_groups"]) for group in groups]
    assert roles == [ROWS, BIAS, GAIN, neuron(0), neuron(0, 2, groups=2)]
    assert all(group["lr"] == 0.5 and group["beta"] == 0.9 for group in groups)
    named = [pair for group in groups for pair in group["params"]]
    assert sorted(name for name, _ in named) == sorted(name for name, _ in model.named_parameters())
    assert all(parameter is dict(model.named_parameters())[name] for name, parameter in named)
    assert groups[1]["params"][0][0] == "0.bias"

    optimiser = nero.Nero(groups, lr=0.1)
    assert [group["lr"] for group in optimiser.param_groups] == [0.5] * 5
    assert [name for group in optimiser.param_groups for name in group["param_names"]] == [name for name, _ in named]


@pytest.mark.parametrize("make", [lambda: tied(nn.Embedding(5, 3), nn.Linear(3, 5)), Model, lambda: nn.ReLU()])
def test_param_groups_hold_every_parameter_once(make):
    model = make()
    parameters = [parameter for group in param_groups(model) for _, parameter in group["params"]]
    assert len(parameters) == len({id(each) for each in parameters})
    assert {id(each) for each in parameters} == {id(each) for each in model.parameters()}


def test_param_groups_option_sets_role_of_all_groups():
    assert {group["role"] for group in param_groups(nn.Linear(4, 3), role="bias", fan_in_axes=())} == {"bias"}
