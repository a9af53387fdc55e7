"""Spectral norm: a weight divided by its largest singular value."""

from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear, nn.Embedding)
#: The standard deviation of biases at the start.
BIAS = 0.01


class SpectralNorm(nn.Module):
    """A parametrization by which a layer sees its weight divided by the largest singular value.

    The weight is taken as a matrix with a row for each entry along axis 0. The singular value is found by power
    iteration, one step a pass from where the last pass in training left it: :attr:`u` is all there is to keep, and is
    a buffer. torch's own keeps a second vector, makes 15 steps when it is made, and none in evaluation.

    Args:
        rows: of the matrix.
    """

    u: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("u", F.normalize(torch.randn(rows), dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        matrix = weight.movedim(1, -1).flatten(1)  # of a weight in channels last, a view; the columns' order is nothing
        with torch.no_grad():
            v = matrix.mT @ self.u
            v /= torch.linalg.vector_norm(v)
        stretched = matrix @ v
        largest = torch.linalg.vector_norm(stretched)  # u @ matrix @ v, since this is along u, as is the gradient
        if self.training:
            with torch.no_grad():
                torch.div(stretched, largest, out=self.u)
        return weight / largest


def spectral(layer: Layer) -> Layer:
    """The layer, orthogonal at the start, its biases small and random, its weight seen through spectral norm."""
    nn.init.orthogonal_(layer.weight)
    bias = getattr(layer, "bias", None)
    if bias is not None:
        nn.init.normal_(bias, std=BIAS)
    register_parametrization(layer, "weight", SpectralNorm(len(layer.weight)))
    return layer
