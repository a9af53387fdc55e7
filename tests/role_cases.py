"""Helpers of the tests of roles: short names for roles, and models to read them from."""

import math

import pytest
import torch
from torch import nn

from nero.role import Role

GAIN, BIAS = Role("gain", ()), Role("bias", ())
OFFSET_GAIN = Role("gain", (), has_offset=True)


def neuron(*axes, groups=1):
    return Role("neuron", axes, groups)


ROWS = neuron(1)
LINEAR = {"weight": ROWS, "bias": BIAS}
NORM = {"weight": GAIN, "bias": BIAS}


def under(prefix, roles):
    return {f"{prefix}.{name}": role for name, role in roles.items()}


def neurons_under(role, shape):
    """Return each neuron as a set of indices into the flattened weight."""
    indices = role.view(torch.arange(math.prod(shape)).view(shape))
    rows = indices.movedim(role.axes, tuple(range(-len(role.axes), 0))).reshape(-1, role.fan_in(shape))
    return {frozenset(row.tolist()) for row in rows}


def weights_behind(layer, weight, channel_axis, *inputs):
    """Return, for each output channel, the indices of the weights that it depends on."""
    out = layer(*inputs).movedim(channel_axis, 0)
    grads = [torch.autograd.grad(channel.sum(), weight, retain_graph=True)[0] for channel in out]
    return [frozenset(grad.flatten().nonzero()[:, 0].tolist()) for grad in grads]


def hf_conv1d():
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(5, 4)


class Model(nn.Module):
    """A model with parameters of its own beside its layers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 7, 4))
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.nothing = None
        self.register_parameter("absent", None)
        self.block = nn.ModuleDict({"gate": nn.Linear(4, 4), "norm": nn.RMSNorm(4)})
        self.depthwise = nn.Conv2d(4, 4, 1, groups=4)


def tied(first, second):
    second.weight = first.weight
    return nn.ModuleDict({"first": first, "second": second})
