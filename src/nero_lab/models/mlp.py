"""Multilayer perceptrons of the MNIST experiments."""

import math

import torch
from torch import Tensor, nn

import nero


class ScaledReLU(nn.Module):
    """φ(x) = √2 · max(0, x), in one kernel each for forward and backward pass.

    An ELU with α = 0 is a ReLU, and torch's ELU has a built-in scale.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.ops.aten.elu(inputs, 0.0, math.sqrt(2))  # type: ignore[no-any-return]


def mlp(depth: int, width: int = 784, classes: int = 10, *, bias: bool = True) -> nn.Sequential:
    """Build a perceptron with ``depth`` linear layers, all but the last followed by :class:`ScaledReLU`."""
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(width, width, bias=bias), ScaledReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes, bias=bias))


def reparameterised(depth: int, sigma: float, width: int = 784, classes: int = 10) -> nn.Sequential:
    """Build a perceptron without biases whose N(0, σ²) weights are reparameterised by Eq. (cwn)."""
    model = mlp(depth, width, classes, bias=False)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=sigma)
            nero.centred_weight_norm(layer)
    return model
