"""The radius of neurons: the norms that they have, and those that they are held to."""

import math

import torch
from torch import Tensor

from nero.options import FixNorm
from nero.parameters import can_read
from nero.role import Role
from nero.rule import norm, project, statistics_dtype
from nero.sharding import sharding_of

#: The relative change of weights from which balancing is worth a warning; rounding stays far below it.
MIN_CHANGE = 0.01


def wide_neurons(parameter: Tensor, role: Role) -> Tensor:
    """Return the neurons that have elements on this process, in at least float32: sums in half lose too much."""
    return sharding_of(parameter, role).neurons(parameter).to(statistics_dtype(parameter.dtype))


def measure_roughly(parameter: Tensor, role: Role) -> tuple[Tensor, Tensor, Tensor]:
    """Measure neurons in two quick passes: their norms, the norms of their means, and those of what is left."""
    wide = wide_neurons(parameter, role)
    size: Tensor = torch.linalg.vector_norm(wide, dim=role.axes, keepdim=True)
    shift = wide.mean(role.axes, keepdim=True).abs() * math.sqrt(role.fan_in(parameter.shape))
    return size, shift, (size.square() - shift.square()).sqrt()


@torch.no_grad()
def initial_radius(parameter: Tensor, role: Role, fix_norm: FixNorm, grown: Tensor | None) -> Tensor | None:
    """Return the norm that each neuron is held to; ``None`` if that is one for all.

    A neuron that is zero, or has grown from zero, has -1: its norm is held to at most one. With ``fix_norm="initial"``
    every other neuron has its own norm, at most half of the largest float; with ``False`` it has infinity.
    Of a sharded parameter, these are the neurons on this process, and ``grown`` masks those.
    """
    if fix_norm == "initial":
        own = own_radius(parameter, role)
        return own if grown is None else torch.where(grown, -1.0, own)
    wide = wide_neurons(parameter, role)
    is_zero = (wide.amax(role.axes, keepdim=True) == 0) & (wide.amin(role.axes, keepdim=True) == 0)
    if grown is not None:
        is_zero |= grown
    if can_read(parameter) and not bool(sharding_of(parameter, role).total(is_zero.sum())):
        return None
    return torch.where(is_zero, -1.0, 1.0 if fix_norm else torch.inf).to(wide.dtype)


@torch.no_grad()
def own_radius(parameter: Tensor, role: Role) -> Tensor:
    """Return the norm of each neuron, at most half of the largest float; -1 for neurons that are zero."""
    size = norm(wide_neurons(parameter, role), role.axes)
    largest = torch.finfo(size.dtype).max / 2
    return torch.where(size == 0, -1.0, torch.where(size < largest, size, largest))


@torch.no_grad()
def balance_change(
    parameter: Tensor, role: Role, fix_mean: bool = True, fix_norm: FixNorm = True, radius: Tensor | None = None
) -> tuple[float, float]:
    """Return the norm of the change that balancing would make to a parameter, and the norm of the parameter.

    ``radius`` is the norm that each neuron is held to, if known.
    """
    wide = wide_neurons(parameter, role)
    if radius is None:
        radius = own_radius(parameter, role) if fix_norm == "initial" else wide.new_ones(())
    projected = project(wide, role.axes, fix_mean=fix_mean, fix_norm=bool(fix_norm), radius=radius).tensor
    norms = torch.stack([torch.linalg.vector_norm(each) for each in (projected - wide, wide)])
    change, size = sharding_of(parameter, role).total(norms.double().square()).sqrt().tolist()
    return change, size
