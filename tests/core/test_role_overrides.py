"""Overrides of roles, tied weights whose layers may disagree, and parameter groups made from roles."""

import re
from fnmatch import fnmatchcase

import pytest
import torch
from role_cases import BIAS, GAIN, LINEAR, ROWS, Model, neuron, tied, under
from torch import nn

import nero
from nero.groups import param_groups
from nero.role import Role
from nero.roles import roles_of


def test_tied_weight_has_one_role():
    roles = roles_of(tied(nn.Embedding(5, 3), nn.Linear(3, 5)))
    assert roles == {"first.weight": ROWS, "second.bias": BIAS}
    assert roles["first.weight"].why == "Embedding.weight, tied to second.weight"


def test_layer_used_twice_counts_once():
    layer = nn.Linear(4, 4)
    assert roles_of(nn.Sequential(layer, nn.ReLU(), layer)) == under("0", LINEAR)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: tied(nn.Conv2d(3, 8, 2), nn.ConvTranspose2d(8, 3, 2)),
            [
                "'first.weight' (neurons along axes (1, 2, 3), from Conv2d.weight)",
                "(0, 2, 3), from ConvTranspose2d.weight",
            ],
        ),
        (
            lambda: tied(nn.LayerNorm((3, 4)), nn.Linear(4, 3)),
            ["'first.weight' (gains, from LayerNorm.weight)", "'second.weight' (neurons along axes (1,)"],
        ),
        (
            lambda: tied(nn.ConvTranspose1d(4, 2, 3), nn.ConvTranspose1d(4, 4, 3, groups=2)),
            ["'first.weight'", "'second.weight'", "(0, 2) in 2 groups"],
        ),
    ],
)
def test_tied_weight_with_two_roles_raises_and_names_both(make, words):
    model = make()
    with pytest.raises(ValueError, match="are one tensor with two roles") as caught:
        roles_of(model)
    assert all(word in str(caught.value) for word in words)
    fix = re.search(r"nero\.Nero\((nero\.param_groups\(.*?\}\))\)", str(caught.value))[1]
    nero.Nero(eval(fix))  # the message shows code that works
    with pytest.raises(ValueError, match="two roles"):
        nero.Nero(model)
    for name in ("first.weight", "second.weight", "*.weight"):  # either name resolves it
        role = roles_of(model, {name: (0, 1)})["first.weight"]
        assert role == neuron(0, 1)
        assert role.why == "given"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ROWS),
        (None, ROWS),
        ({"block.gate.weight": "gain"}, GAIN),
        ({"block.gate.weight": "bias"}, BIAS),
        ({"block.gate.weight": "neuron"}, ROWS),
        ({"block.gate.weight": (0,)}, neuron(0)),
        ({"block.gate.weight": (-2,)}, neuron(0)),
        ({"block.gate.weight": (1, 0)}, neuron(0, 1)),
        ({"block.gate.weight": Role("neuron", (0,), 2)}, neuron(0, groups=2)),
        ({"block.gate.weight": Role("gain")}, GAIN),
        ({"*.gate.weight": "gain"}, GAIN),
        ({"block.*": "bias"}, BIAS),
        ({"block.gat?.[vw]eight": "bias"}, BIAS),
        ({"block.gate.weight": "gain", "*": "bias"}, BIAS),  # the last match counts
        ({"*": "bias", "block.gate.weight": (0,)}, neuron(0)),
        ({"*.weight": "gain", "block.norm.*": "bias"}, GAIN),
    ],
)
def test_override_last_match_by_name_or_pattern_counts(overrides, expected):
    model = Model()
    roles = roles_of(model, overrides)
    assert roles["block.gate.weight"] == expected
    matched = {name for name in roles if any(fnmatchcase(name, pattern) for pattern in overrides or {})}
    assert {name for name, role in roles.items() if role != roles_of(model)[name]} <= matched
    assert roles["block.gate.weight"].why == ("given" if overrides else "Linear.weight")


def test_override_keeps_its_own_why():
    assert roles_of(nn.Linear(4, 3), {"weight": Role("gain", why="because")})["weight"].why == "because"


def test_override_of_vector_makes_a_neuron():
    assert roles_of(nn.LayerNorm(4), {"weight": (0,)})["weight"] == neuron(0)


def test_override_name_with_brackets_matches_itself():
    model = nn.ParameterDict({"a[0]": torch.randn(3, 4), "a0": torch.randn(3, 4)})
    assert roles_of(model, {"a[0]": "gain"}) == {"a[0]": GAIN, "a0": GAIN}


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (
            {"block.gaet.weight": "gain"},
            ValueError,
            r"\['block\.gaet\.weight'\] match no parameter; .* token, positions",
        ),
        ({"*": "gain", "no*": "gain", "nil": "bias"}, ValueError, r"\['nil', 'no\*'\] match no parameter"),
        ({"block.gate.weight": (2,)}, ValueError, r"'block\.gate\.weight' does not fit: .*\(2,\).*\(4, 4\).* 0 to 1"),
        ({"block.gate.weight": (-3,)}, ValueError, r"does not fit: .*\(-3,\)"),
        ({"block.gate.weight": ()}, ValueError, "does not fit"),
        ({"block.gate.weight": (0.0,)}, ValueError, "does not fit"),
        ({"block.gate.weight": (True,)}, ValueError, "does not fit"),
        ({"block.gate.weight": (1, 1)}, ValueError, r"'block\.gate\.weight' .* at most once, got \(1, 1\)"),
        ({"block.gate.weight": (1, -1)}, ValueError, r"at most once"),
        ({"block.gate.weight": "neurons"}, ValueError, "role must be one of neuron, gain, bias, got 'neurons'"),
        ({"block.gate.weight": Role("gain", (1,))}, ValueError, r"a gain has no fan_in_axes, got \(1,\)"),
        ({"block.gate.weight": Role("neuron", (0,), 3)}, ValueError, "fan_in_groups=3 does not fit"),
        ({"block.gate.weight": Role("neuron", (1,), 2)}, ValueError, "fan_in_groups=2 does not fit"),
        ({"block.gate.weight": Role("neuron", (0,), 0)}, ValueError, "fan_in_groups=0 does not fit"),
        ({"block.gate.weight": Role("neuron", (0,), 2.0)}, ValueError, r"fan_in_groups=2\.0 does not fit"),
        ({"block.gate.weight": Role("neuron", 1)}, ValueError, "fan_in_axes 1 do not fit"),
        ({"temperature": "neuron"}, ValueError, "'temperature' does not fit: .* a scalar is a gain or a bias"),
        ({"temperature": (0,)}, ValueError, "a scalar is a gain or a bias"),
        ({"block.norm.weight": "neuron"}, ValueError, r"'block\.norm\.weight' does not fit: .*\(4,\)"),
        ({"block.gate.weight": [1]}, TypeError, r"'block\.gate\.weight' must be a Role, a kind or a tuple"),
        ({"block.gate.weight": None}, TypeError, "got None"),
        ({"block.gate.weight": 1}, TypeError, "got 1"),
    ],
)
def test_override_that_does_not_fit_raises(overrides, error, words):
    for read in (roles_of, param_groups, nero.describe):
        with pytest.raises(error, match=words):
            read(Model(), overrides)


def test_override_with_fan_in_one_is_a_gain():
    role = roles_of(nn.Conv1d(4, 4, 1, groups=4), {"weight": Role("neuron", why="mine")})["weight"]
    assert role == GAIN
    assert role.why == "mine, fan-in 1"


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
