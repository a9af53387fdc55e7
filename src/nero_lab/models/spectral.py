"""Spectral normalisation: division of a weight by its largest singular value."""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import register_parametrization

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear, nn.Embedding)
#: Standard deviation of initial biases.
BIAS_STD = 0.01


class SpectralNorm(nn.Module):
    """Parametrization that divides a weight by its largest singular value.

    The weight counts as a matrix whose rows are the slices along axis 0. Power iteration finds the singular value: one
    step per forward pass, which starts from the buffer :attr:`u` and updates it in training. Unlike this class, torch's
    own keeps a second vector, makes 15 steps at construction, and none in evaluation.

    Args:
        rows: rows of the matrix.
    """

    u: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("u", F.normalize(torch.randn(rows), dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            # a view in channels-last layout; u does not depend on the column order
            matrix = weight.movedim(1, -1).flatten(1)
            v = matrix.mT @ self.u
            v /= torch.linalg.vector_norm(v)
            stretched = matrix @ v
            # equals u @ matrix @ v, since stretched is parallel to the new u
            largest = torch.linalg.vector_norm(stretched)
            if self.training:
                torch.div(stretched, largest, out=self.u)
        divided: Tensor = _Divided.apply(weight, largest, stretched, v)  # type: ignore[no-untyped-call]
        return divided


class _Divided(torch.autograd.Function):
    """W / (u W v), with u and v constant in the gradient.

    Autograd would compute the same in twice as many kernels, whose number dominates because they are small. The weight
    has no second derivative.
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
        correction = stretched * ((grad * divided).sum() / largest)
        moved = grad.movedim(1, -1)
        matrix = torch.addr(moved.flatten(1), correction, v, alpha=-1).div_(largest)
        return matrix.view(moved.shape).movedim(-1, 1), None, None, None


def with_spectral_norm(layer: Layer) -> Layer:
    """Initialise a layer with orthogonal weights and small random biases, and add :class:`SpectralNorm` to it."""
    nn.init.orthogonal_(layer.weight)
    bias = getattr(layer, "bias", None)
    if bias is not None:
        nn.init.normal_(bias, std=BIAS_STD)
    register_parametrization(layer, "weight", SpectralNorm(len(layer.weight)))
    return layer
