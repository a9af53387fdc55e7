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


def mlp(
    depth: int, width: int = 784, classes: int = 10, *, inputs: int | None = None, bias: bool = True
) -> nn.Sequential:
    """Build a perceptron with ``depth`` linear layers, all but the last followed by :class:`ScaledReLU`.

    Args:
        depth: the number of linear layers.
        width: the number of units of a hidden layer.
        classes: the number of outputs.
        inputs: the number of inputs, such as the pixels of an image; None: the width, as in the paper.
        bias: whether the layers have biases.
    """
    sizes = [width if inputs is None else inputs, *[width] * (depth - 1)]
    hidden = [layer for size in sizes[:-1] for layer in (nn.Linear(size, width, bias=bias), ScaledReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes, bias=bias))


def balanced_mlp(depth: int) -> nn.Sequential:
    """Build the perceptron of :func:`mlp` from balanced weights, as Nero starts it; biases stay as they are."""
    model = mlp(depth)
    if not next(model.parameters()).is_meta:  # only its size counts then
        nero.balance_(model)
    return model


def normed_mlp(depth: int, width: int = 784) -> nn.Sequential:
    """Build a perceptron with batch norm, without gains and biases, behind every hidden linear layer."""
    *hidden, last = mlp(depth, width)
    modules: list[nn.Module] = []
    for module in hidden:
        modules.append(module)
        if isinstance(module, nn.Linear):
            modules.append(nn.BatchNorm1d(module.out_features, affine=False))
    return nn.Sequential(*modules, last)


def reparameterised(depth: int, sigma: float, width: int = 784, classes: int = 10) -> nn.Sequential:
    """Build a perceptron without biases whose N(0, σ²) weights are reparameterised by Eq. (cwn)."""
    model = mlp(depth, width, classes, bias=False)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=sigma)
            nero.centred_weight_norm(layer)
    return model
