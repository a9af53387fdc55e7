"""Rotations of neurons within caps: at random, and towards the minimum of a linear function."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nero.rule import norm
from nero.theory.layers import Layer


@dataclass(frozen=True)
class LayerCaps:
    """The neurons of one layer, each at the pole of a cap of its sphere.

    Attributes:
        layer: the layer.
        poles: the neurons at norm one and, if centred, mean zero; zero for neurons at the origin.
        lengths: the norms of the neurons, which a rotation keeps.
        centred: whether a rotation keeps the mean of a neuron at zero, too.
    """

    layer: Layer
    poles: Tensor
    lengths: Tensor
    centred: bool

    @classmethod
    def around(cls, layer: Layer, centred: bool) -> "LayerCaps":
        """Return caps around the current neurons. A neuron of two elements is never centred, as in the optimiser."""
        weights = layer.role.view(layer.parameter.detach())
        axes, centred = layer.role.axes, centred and layer.fan_in > 2
        lengths = norm(weights, axes)
        poles = torch.where(lengths > 0, weights / lengths, 0.0)
        if centred:
            poles = poles - poles.mean(axes, keepdim=True)
            poles = torch.where(norm(poles, axes) > 0, poles / norm(poles, axes), 0.0)
        return cls(layer, poles, lengths, centred)

    @property
    def weights(self) -> Tensor:
        """The weights with every neuron at its pole."""
        if not self.centred:
            return self.layer.parameter.detach().clone()
        return (self.poles * self.lengths).reshape(self.layer.parameter.shape)

    @property
    def sphere(self) -> int:
        """The dimension of the sphere on which a neuron turns."""
        return self.layer.fan_in - (2 if self.centred else 1)

    @property
    def off_centre(self) -> float:
        """The largest distance of a neuron from its pole, relative to its norm."""
        axes, weights = self.layer.role.axes, self.layer.role.view(self.layer.parameter.detach())
        away = norm(weights - self.poles * self.lengths, axes) / self.lengths
        return float(torch.where(self.lengths > 0, away, 0.0).max())

    def centre(self, tensor: Tensor) -> Tensor:
        """Project vectors onto the linear space of the sphere."""
        return tensor - tensor.mean(self.layer.role.axes, keepdim=True) if self.centred else tensor

    def random(self, angle: float, generator: torch.Generator) -> Tensor:
        """Return weights with every neuron drawn uniformly from its cap."""
        draw = torch.randn(self.poles.shape, generator=generator, dtype=self.poles.dtype, device=self.poles.device)
        angles = cap_angles(self.sphere, angle, self.lengths, generator)
        return self._turned(self._tangent(self.centre(draw)), angles).reshape(self.layer.parameter.shape)

    def minimum(self, gradient: Tensor, angle: float, near: Tensor) -> Tensor:
        """Return weights with every neuron at the minimum over its cap of the linear function with this gradient.

        From the pole the neuron moves down the gradient along the sphere, to the rim of the cap or to the minimum
        over the whole sphere, whichever comes first. If all ways down are equal, it moves towards ``near``. A neuron
        without a gradient stays at ``near``.
        """
        axes = self.layer.role.axes
        near = self.layer.role.view(near)
        down = -self.centre(self.layer.role.view(gradient))
        steepness, tangent = norm(down, axes), self._tangent(down)
        slope = norm(tangent, axes)
        reach = torch.atan2(slope, (down * self.poles).sum(axes, keepdim=True)).clamp(max=angle)
        even = slope <= 16 * torch.finfo(slope.dtype).eps * steepness  # the pole is the minimum or the maximum
        turned = self._turned(torch.where(even, self._tangent(near), tangent), reach)
        return torch.where(steepness > 0, turned, near).reshape(self.layer.parameter.shape)

    def slope(self, gradient: Tensor) -> float:
        """Return the fastest descent, per radian, of the linear function with this gradient as all neurons turn."""
        tangent = self._tangent(self.centre(self.layer.role.view(gradient)))
        return float((norm(tangent, self.layer.role.axes) * self.lengths).sum())

    def _tangent(self, vectors: Tensor) -> Tensor:
        return vectors - (vectors * self.poles).sum(self.layer.role.axes, keepdim=True) * self.poles

    def _turned(self, tangent: Tensor, angles: Tensor) -> Tensor:
        can_turn = (norm(tangent, self.layer.role.axes) > 0) & (self.lengths > 0)
        direction = torch.where(can_turn, tangent, 0.0)
        for _ in range(2):  # twice, since rounding may leave a component along the pole
            direction = self._tangent(direction)
            direction = direction / torch.where(can_turn, norm(direction, self.layer.role.axes), 1.0)
        turned = (self.poles * angles.cos() + direction * angles.sin()) * self.lengths
        return torch.where(can_turn, turned, self.poles * self.lengths)


def cap_angles(dim: int, angle: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw points uniformly from a cap of S^dim, one for each element of ``like``; return their angles to the pole."""
    y, mass = _cumulative_density(dim, angle, like.device)
    uniform = torch.rand(like.shape, generator=generator, dtype=torch.float64, device=like.device) * mass[-1]
    after = torch.searchsorted(mass, uniform).clamp(1, len(mass) - 1)
    before = mass[after - 1]
    drawn = y[after - 1] + (uniform - before) / (mass[after] - before) * (y[1] - y[0])
    return torch.asin(math.sin(angle) * (-(drawn**2) / dim).exp()).clamp(max=angle).to(like.dtype)


@lru_cache(maxsize=64)
def _cumulative_density(dim: int, angle: float, device: torch.device) -> tuple[Tensor, Tensor]:
    r"""Tabulate the integral of the density of a cap's angles over a grid of y.

    The density of the angle is proportional to :math:`\sin^{k-1}\theta`. With
    :math:`\sin\theta = \sin\alpha \, e^{-y^2/k}` it is smooth in y and negligible beyond 7, in any dimension. So its
    integral on a fixed grid can be inverted.
    """
    y = torch.linspace(0, 7, 4001, dtype=torch.float64, device=device)
    sine, cosine = math.sin(angle), math.cos(angle)
    cosine_squared = cosine**2 - sine**2 * torch.expm1(-2 * y**2 / dim)  # of θ, without cancellation near the rim
    density = torch.where(cosine_squared > 0, y * (-(y**2)).exp() / cosine_squared.sqrt(), 0.0)
    if cosine**2 < 1e-20:  # the hemisphere: the limit of y / cos θ at y = 0
        density[0] = math.sqrt(dim / 2)
    mass = torch.cumulative_trapezoid(density, y)
    return y, torch.cat([mass.new_zeros(1), mass])
