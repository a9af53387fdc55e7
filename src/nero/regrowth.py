"""Neurons that grew from zero in an earlier run, and how an optimiser made on a loaded model keeps them.

Such neurons are shorter than one, and must stay so. If other neurons of the model are balanced, Nero has trained it,
and short neurons are taken for grown ones. Otherwise only the optimiser's checkpoint tells, which is loaded later: they
are copied, balanced, and written back then.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero.backends import has_entered
from nero.balance import initial_radius
from nero.groups import Part
from nero.options import FixNorm
from nero.parameters import can_read
from nero.roles import Role
from nero.rule import distance, norm, project, rounding_error, statistics_dtype
from nero.sharding import local_of, sharding_of

#: Copies of more elements are not made: a fresh network would be held twice.
MAX_COPIED_ELEMENTS = 1 << 22


class Copy(NamedTuple):
    """A mask of the neurons that were copied from a parameter, their elements, and the constraints on them."""

    parameter: Tensor
    role: Role
    fix_mean: bool
    fix_norm: FixNorm
    mask: Tensor
    elements: Tensor


@torch.no_grad()
def find_grown(parts: Iterable[Part]) -> tuple[dict[Tensor, Tensor], list[Copy]]:
    """Find the neurons that may have grown from zero: not balanced, and not longer than one.

    Returns:
        By parameter a mask of the neurons that have; or copies of those that may have.
    """
    found: list[tuple[Part, Tensor]] = []
    is_trained, elements = False, 0
    for part in parts:
        _, parameter, role, group = part
        fix_mean, fix_norm = group["fix_mean"], group["fix_norm"]
        is_held = role.kind == "neuron" and (fix_mean or fix_norm is True)
        if not is_held or not parameter.numel() or not can_read(parameter):
            continue
        tolerance = rounding_error(parameter.dtype)
        sharding = sharding_of(parameter, role)
        wide = sharding.neurons(parameter).to(statistics_dtype(parameter.dtype))
        size = norm(wide, role.axes)
        off = distance(wide, role.axes, fix_mean=fix_mean, fix_norm=fix_norm is True)
        is_balanced = (off <= tolerance * size) & (size > 0)
        mask = ~is_balanced & (size > 0) & ((size <= 1 + tolerance) | (fix_norm is False))
        count, unbalanced = sharding.total(torch.stack([mask.sum(), (~is_balanced).sum()])).tolist()
        # unit norm alone, as of neurons of two elements, is no sign of Nero: orthogonal initialisation has it, too
        has_both = fix_mean and fix_norm is True and role.fan_in(parameter.shape) > 2
        is_trained = is_trained or (has_both and not unbalanced)
        if count:
            elements += count * role.fan_in(parameter.shape)
            found.append((part, mask))
    if is_trained:
        return {part.parameter: mask for part, mask in found}, []
    if elements > MAX_COPIED_ELEMENTS:
        return {}, []
    copies = []
    for (_, parameter, role, group), mask in found:
        elements_of = sharding_of(parameter, role).neurons(parameter).masked_select(mask)
        copies.append(Copy(parameter, role, group["fix_mean"], group["fix_norm"], mask, elements_of))
    return {}, copies


def add_missing_radii(parts: Sequence[Part], loaded: Mapping[Tensor, dict[str, Any]]) -> None:
    """Add the radius to a loaded state that lacks it, though neurons of the loaded model have grown from zero.

    ``torch.distributed.checkpoint`` reads only what the optimiser already holds. One that was made on a model without
    zero neurons has no radius.
    """
    missing = [part for part in parts if has_entered(own := loaded.get(part.parameter, {})) and "radius" not in own]
    grown = find_grown(parts)[0] if missing else {}
    for _, parameter, role, group in missing:
        if parameter in grown:
            radius = initial_radius(parameter, role, group["fix_norm"], grown[parameter])
            if radius is not None:
                loaded[parameter]["radius"] = sharding_of(parameter, role).as_state(radius)


@torch.no_grad()
def restore(copies: Iterable[Copy], loaded: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Write back the neurons whose loaded radius is negative, if they still are what balancing has made of them."""
    for parameter, role, fix_mean, fix_norm, mask, elements in copies:
        radius = loaded.get(parameter, {}).get("radius")
        if radius is None:
            continue
        sharding = sharding_of(parameter, role)
        view, radius = sharding.neurons(parameter), local_of(radius)
        before = view.masked_scatter(mask.to(view.device), elements.to(view))
        wide, axes = before.to(statistics_dtype(view.dtype)), role.axes
        held_to = norm(wide, axes) if fix_norm == "initial" else 1.0
        balanced = project(wide, axes, fix_mean=fix_mean, fix_norm=bool(fix_norm), radius=held_to).tensor
        # if the neurons are not what balancing made of them, the model was loaded since
        is_balanced = norm(balanced - view, axes) <= 4 * rounding_error(view.dtype) * norm(balanced, axes)
        view.copy_(torch.where((radius < 0) & is_balanced, before, view))
        sharding.write(parameter, view)
