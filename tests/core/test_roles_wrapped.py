"""Roles of weights behind weight_norm, spectral_norm, pruning and parametrizations."""

import copy

import pytest
import torch
from role_cases import BIAS, GAIN, ROWS, hf_conv1d, neuron, under
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import nero
from nero.roles import roles_of


def old_weight_norm(layer, name="weight", **options):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer, name, **options)


def pruned(layer, name="weight"):
    return prune.l1_unstructured(layer, name, 0.5)


class Doubled(nn.Module):
    """A parametrization that keeps the shape."""

    def forward(self, raw):
        return 2 * raw

    def right_inverse(self, weight):
        return weight / 2


class LowRank(nn.Module):
    """A parametrization of two tensors, neither shaped as the weight."""

    def forward(self, left, right):
        return left @ right

    def right_inverse(self, weight):
        return weight[:, :1].clone(), weight[:1].clone()


class Adapter(nn.Module):
    """A parametrization with parameters of its own."""

    def __init__(self, rows, columns):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, columns)), nn.Parameter(torch.zeros(rows, 2))

    def forward(self, raw):
        return raw + self.up @ self.down


def parametrized(layer, parametrization, name="weight"):
    parametrize.register_parametrization(layer, name, parametrization)
    return layer


ORIGINAL = "parametrizations.weight.original"
TRANSPOSED = neuron(0, 2, groups=2)
WRAPPED = [
    ("old weight_norm", lambda: old_weight_norm(nn.Linear(4, 3)), {"weight_g": GAIN, "weight_v": ROWS}),
    ("old weight_norm, all", lambda: old_weight_norm(nn.Linear(4, 3), dim=None), {"weight_g": GAIN, "weight_v": ROWS}),
    (
        "old weight_norm, transposed",
        lambda: old_weight_norm(nn.ConvTranspose1d(4, 6, 3, groups=2), dim=1),
        {"weight_g": GAIN, "weight_v": TRANSPOSED},
    ),
    (
        "old weight_norm, recurrent",
        lambda: old_weight_norm(nn.LSTM(4, 3), "weight_hh_l0"),
        {"weight_hh_l0_g": GAIN, "weight_hh_l0_v": ROWS, "weight_ih_l0": ROWS},
    ),
    ("old spectral_norm", lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), {"weight_orig": ROWS}),
    (
        "old spectral_norm, transposed",
        lambda: nn.utils.spectral_norm(nn.ConvTranspose1d(4, 6, 3, groups=2)),
        {"weight_orig": TRANSPOSED},
    ),
    (
        "weight_norm",
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        {f"{ORIGINAL}0": GAIN, f"{ORIGINAL}1": ROWS},
    ),
    (
        "weight_norm, transposed",
        lambda: parametrizations.weight_norm(nn.ConvTranspose1d(4, 6, 3, groups=2), dim=1),
        {f"{ORIGINAL}0": GAIN, f"{ORIGINAL}1": TRANSPOSED},
    ),
    (
        "weight_norm and more",
        lambda: parametrized(parametrizations.weight_norm(nn.Linear(4, 3)), Doubled()),
        {f"{ORIGINAL}0": GAIN, f"{ORIGINAL}1": ROWS},
    ),
    ("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), {ORIGINAL: ROWS}),
    (
        "spectral_norm, transposed",
        lambda: parametrizations.spectral_norm(nn.ConvTranspose1d(4, 6, 3, groups=2)),
        {ORIGINAL: TRANSPOSED},
    ),
    ("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 3)), {ORIGINAL: BIAS}),
    (
        "orthogonal, tall",
        lambda: parametrizations.orthogonal(nn.Linear(3, 4), orthogonal_map="cayley"),
        {ORIGINAL: BIAS},
    ),
    ("pruned", lambda: pruned(nn.Linear(4, 3)), {"weight_orig": ROWS}),
    ("pruned bias", lambda: pruned(nn.Linear(4, 3), "bias"), {"bias_orig": BIAS, "weight": ROWS}),
    ("pruned norm", lambda: pruned(nn.LayerNorm((3, 4))), {"weight_orig": GAIN}),
    ("pruned Conv1D", lambda: pruned(hf_conv1d()), {"weight_orig": neuron(0), "bias": BIAS}),
    ("custom", lambda: parametrized(nn.Linear(4, 3), Doubled()), {ORIGINAL: ROWS}),
    ("custom Conv1D", lambda: parametrized(hf_conv1d(), Doubled()), {ORIGINAL: neuron(0), "bias": BIAS}),
    ("custom norm", lambda: parametrized(nn.LayerNorm((3, 4)), Doubled()), {ORIGINAL: GAIN}),
    ("custom bias", lambda: parametrized(nn.Linear(4, 3), Doubled(), "bias"), {"weight": ROWS}),
    ("low rank", lambda: parametrized(nn.Linear(4, 3), LowRank()), {f"{ORIGINAL}0": GAIN, f"{ORIGINAL}1": ROWS}),
    (
        "adapter",
        lambda: parametrized(nn.Linear(4, 3), Adapter(3, 4)),
        {ORIGINAL: ROWS, "parametrizations.weight.0.down": ROWS, "parametrizations.weight.0.up": ROWS},
    ),
    ("centred_weight_norm", lambda: nero.centred_weight_norm(nn.Linear(4, 3)), {ORIGINAL: ROWS}),
    (
        "centred_weight_norm, transposed",
        lambda: nero.centred_weight_norm(nn.ConvTranspose1d(4, 6, 3, groups=2)),
        {ORIGINAL: TRANSPOSED},
    ),
    ("centred_weight_norm, Conv1D", lambda: nero.centred_weight_norm(hf_conv1d()), {ORIGINAL: neuron(0)}),
]


@pytest.mark.parametrize(("make", "expected"), [each[1:] for each in WRAPPED], ids=[each[0] for each in WRAPPED])
def test_wrapped_weight_has_role_of_its_layer(make, expected):
    layer = make()
    roles = roles_of(layer)
    assert {name: roles[name] for name in expected} == expected
    assert not any("Parametrized" in role.why for role in roles.values())
    assert roles_of(nn.Sequential(layer)) == under("0", roles)


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (lambda: parametrized(nn.Linear(4, 3), Doubled()), ORIGINAL, "Linear.weight, parametrized"),
        (lambda: parametrized(nn.Linear(4, 3), LowRank()), f"{ORIGINAL}1", "shape; behind Linear.weight"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), f"{ORIGINAL}0", "weight_norm's length"),
        (lambda: old_weight_norm(nn.Linear(4, 3)), "weight_g", "weight_norm's length"),
        (lambda: old_weight_norm(nn.Linear(4, 3)), "weight_v", "Linear.weight"),
        (lambda: pruned(nn.Linear(4, 3)), "weight_orig", "Linear.weight"),
    ],
)
def test_why_of_wrapped_weight_names_its_layer(make, name, why):
    assert roles_of(make())[name].why == why


class DropConnect(nn.Module):
    """A parametrization that draws random numbers."""

    def forward(self, raw):
        return raw * torch.bernoulli(torch.full_like(raw, 0.5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: parametrizations.spectral_norm(nn.Linear(48, 32)),
        lambda: nn.utils.spectral_norm(nn.Linear(48, 32)),
        lambda: parametrized(nn.Linear(4, 3), DropConnect()),
        lambda: nn.BatchNorm1d(4),
    ],
)
def test_roles_of_changes_no_buffer_and_no_random_state(make):
    layer = make()
    before, seed = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    roles_of(layer)
    nero.describe(layer)
    assert torch.equal(seed, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (8, 8)])
def test_orthogonal_layer_trains_and_stays_orthogonal(shape):
    layer = parametrizations.orthogonal(nn.Linear(*shape, bias=False))
    before = layer.weight.detach().clone()
    optimiser = nero.Nero(layer)
    assert torch.equal(layer.weight, before)
    for _ in range(3):
        optimiser.zero_grad()
        (layer(torch.randn(4, shape[0])) - 1).square().sum().backward()
        optimiser.step()
    assert (layer.weight - before).norm() > 1e-3
    assert torch.linalg.svdvals(layer.weight.detach()).tolist() == pytest.approx([1.0] * min(shape), abs=1e-5)
