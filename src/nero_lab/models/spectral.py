"""Spectral norm: a weight divided by its largest singular value."""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
        with torch.no_grad():
            matrix = weight.movedim(1, -1).flatten(1)  # in channels last, a view; the order of columns is nothing to u
            v = matrix.mT @ self.u
            v /= torch.linalg.vector_norm(v)
            stretched = matrix @ v
            largest = torch.linalg.vector_norm(stretched)  # u @ matrix @ v, since this is along u
            if self.training:
                torch.div(stretched, largest, out=self.u)
        divided: Tensor = _Divided.apply(weight, largest, stretched, v)  # type: ignore[no-untyped-call]
        return divided


class _Divided(torch.autograd.Function):
    """A weight W over u W v, whose gradient takes u and v for constants.

    It is what torch would find by itself, in half as many kernels: they are small, and their number is what counts. The
    gradient of a weight has none of its own; that of what a layer is given has.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, largest: Tensor, stretched: Tensor, v: Tensor) -> Tensor:
        divided = weight / largest
        ctx.save_for_backward(divided, largest, stretched, v)
        return divided

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        divided, largest, stretched, v = ctx.saved_tensors
        less = stretched * ((grad * divided).sum() / largest)
        moved = grad.movedim(1, -1)
        matrix = torch.addr(moved.flatten(1), less, v, alpha=-1).div_(largest)
        return matrix.view(moved.shape).movedim(-1, 1), None, None, None


def spectral(layer: Layer) -> Layer:
    """The layer, orthogonal at the start, its biases small and random, its weight seen through spectral norm."""
    nn.init.orthogonal_(layer.weight)
    bias = getattr(layer, "bias", None)
    if bias is not None:
        nn.init.normal_(bias, std=BIAS)
    register_parametrization(layer, "weight", SpectralNorm(len(layer.weight)))
    return layer
