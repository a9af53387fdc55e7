"""Turning neurons within caps: at random, and to where a linear function is least."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nero.rule import norm
from nero.theory.layers import Layer


@dataclass(frozen=True)
class Caps:
    """The neurons of one layer, each at the pole of a cap of the sphere on which it can turn.

    Attributes:
        layer: whose neurons.
        poles: the neurons at length one and, if centred, of mean zero; zero for those at the origin.
        lengths: the neurons' norms, which a turn keeps.
        centred: whether a turn keeps the neurons' mean at zero, too.
    """

    layer: Layer
    poles: Tensor
    lengths: Tensor
    centred: bool

    @classmethod
    def around(cls, layer: Layer, centred: bool) -> "Caps":
        """Caps around the neurons as they are; a neuron of two entries turns freely, as the optimiser lets it."""
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
        """The dimension of the sphere that a neuron can turn on."""
        return self.layer.fan_in - (2 if self.centred else 1)

    @property
    def off_centre(self) -> float:
        """How far neurons lie off their poles, at most, of their length."""
        axes, weights = self.layer.role.axes, self.layer.role.view(self.layer.parameter.detach())
        away = norm(weights - self.poles * self.lengths, axes) / self.lengths
        return float(torch.where(self.lengths > 0, away, 0.0).max())

    def centre(self, tensor: Tensor) -> Tensor:
        """What of a vector lies in the space of the sphere."""
        return tensor - tensor.mean(self.layer.role.axes, keepdim=True) if self.centred else tensor

    def random(self, angle: float, generator: torch.Generator) -> Tensor:
        """The weights with every neuron drawn uniformly from its cap."""
        draw = torch.randn(self.poles.shape, generator=generator, dtype=self.poles.dtype, device=self.poles.device)
        angles = cap_angles(self.sphere, angle, self.lengths, generator)
        return self._turned(self._tangent(self.centre(draw)), angles).reshape(self.layer.parameter.shape)

    def least(self, gradient: Tensor, angle: float, near: Tensor) -> Tensor:
        """The weights with every neuron where, in its cap, the linear function of that gradient is least.

        That is straight down the gradient along the sphere, to the rim of the cap or to where the function is
        least on all of the sphere, whichever comes first. Where all ways down are as good, it is the one towards
        the weights given as near; a neuron without a gradient stays there.
        """
        axes = self.layer.role.axes
        near = self.layer.role.view(near)
        down = -self.centre(self.layer.role.view(gradient))
        steepness, tangent = norm(down, axes), self._tangent(down)
        slope = norm(tangent, axes)
        reach = torch.atan2(slope, (down * self.poles).sum(axes, keepdim=True)).clamp(max=angle)
        even = slope <= 16 * torch.finfo(slope.dtype).eps * steepness  # the pole is the best point, or the worst
        turned = self._turned(torch.where(even, self._tangent(near), tangent), reach)
        return torch.where(steepness > 0, turned, near).reshape(self.layer.parameter.shape)

    def slope(self, gradient: Tensor) -> float:
        """How fast a linear function of that gradient can fall as all neurons turn at one pace."""
        tangent = self._tangent(self.centre(self.layer.role.view(gradient)))
        return float((norm(tangent, self.layer.role.axes) * self.lengths).sum())

    def _tangent(self, vectors: Tensor) -> Tensor:
        return vectors - (vectors * self.poles).sum(self.layer.role.axes, keepdim=True) * self.poles

    def _turned(self, tangent: Tensor, angles: Tensor) -> Tensor:
        can = (norm(tangent, self.layer.role.axes) > 0) & (self.lengths > 0)
        direction = torch.where(can, tangent, 0.0)
        for _ in range(2):  # once more, for where rounding left a part along the pole
            direction = self._tangent(direction)
            direction = direction / torch.where(can, norm(direction, self.layer.role.axes), 1.0)
        turned = (self.poles * angles.cos() + direction * angles.sin()) * self.lengths
        return torch.where(can, turned, self.poles * self.lengths)


def cap_angles(dim: int, angle: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """The angles from the pole of points drawn uniformly from caps of S^dim, one for each entry of a tensor."""
    y, mass = _grid(dim, angle, like.device)
    uniform = torch.rand(like.shape, generator=generator, dtype=torch.float64, device=like.device) * mass[-1]
    after = torch.searchsorted(mass, uniform).clamp(1, len(mass) - 1)
    before = mass[after - 1]
    drawn = y[after - 1] + (uniform - before) / (mass[after] - before) * (y[1] - y[0])
    return torch.asin(math.sin(angle) * (-(drawn**2) / dim).exp()).clamp(max=angle).to(like.dtype)


@lru_cache(maxsize=64)
def _grid(dim: int, angle: float, device: torch.device) -> tuple[Tensor, Tensor]:
    r"""Points y, and the integral up to each of the density of a cap's angles in them.

    That density is as :math:`\sin^{k-1}\theta`. With :math:`\sin\theta = \sin\alpha \, e^{-y^2/k}` it becomes
    smooth in y and all but gone beyond 7, in any dimension, so that its integral on a fixed grid can be inverted.
    """
    y = torch.linspace(0, 7, 4001, dtype=torch.float64, device=device)
    sine, cosine = math.sin(angle), math.cos(angle)
    below = cosine**2 - sine**2 * torch.expm1(-2 * y**2 / dim)  # cos²θ, without cancellation near the rim
    density = torch.where(below > 0, y * (-(y**2)).exp() / below.sqrt(), 0.0)
    if cosine**2 < 1e-20:  # the hemisphere: y / cos θ has a limit at y = 0
        density[0] = math.sqrt(dim / 2)
    mass = torch.cumulative_trapezoid(density, y)
    return y, torch.cat([mass.new_zeros(1), mass])
