"""Neurons that grew from zero in an earlier run, and the copies that keep them.

Making an optimiser on a loaded model balances its neurons. Neurons that grew from zero must stay short, but only the
optimiser's checkpoint tells which those are, and it is loaded later. So candidates are copied before they are balanced.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero.groups import Part
from nero.options import FixNorm
from nero.parameters import can_read
from nero.roles import Role
from nero.rule import distance, norm, project, rounding_error, statistics_dtype

#: Copies of more elements are kept only if other neurons are balanced: the model was then trained by Nero.
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
def copy_candidates(parts: Iterable[Part]) -> list[Copy]:
    """Copy the neurons that may have grown from zero: not balanced, and not longer than one."""
    found: list[tuple[Tensor, Role, bool, FixNorm, Tensor]] = []
    is_trained, elements = False, 0
    for _, parameter, role, group in parts:
        is_held = role.kind == "neuron" and (group["fix_mean"] or group["fix_norm"] is True)
        # a sharded tensor has no masked_select
        if not is_held or not parameter.numel() or not can_read(parameter) or hasattr(parameter, "full_tensor"):
            continue
        wide, tolerance = role.view(parameter).to(statistics_dtype(parameter.dtype)), rounding_error(parameter.dtype)
        size = norm(wide, role.axes)
        off = distance(wide, role.axes, fix_mean=group["fix_mean"], fix_norm=group["fix_norm"] is True)
        is_balanced = (off <= tolerance * size) & (size > 0)
        mask = ~is_balanced & (size > 0) & (size <= 1 + tolerance)
        count, balanced = torch.stack([mask.sum(), is_balanced.sum()]).tolist()
        is_trained = is_trained or balanced == size.numel()
        if count:
            elements += count * role.fan_in(parameter.shape)
            found.append((parameter, role, group["fix_mean"], group["fix_norm"], mask))
    if elements > MAX_COPIED_ELEMENTS and not is_trained:
        return []
    return [Copy(*each, role.view(tensor).masked_select(mask)) for each in found for tensor, role, *_, mask in [each]]


@torch.no_grad()
def restore(copies: Iterable[Copy], loaded: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Write back the neurons whose loaded radius is negative, if they still are what balancing has made of them."""
    for parameter, role, fix_mean, fix_norm, mask, elements in copies:
        radius = loaded.get(parameter, {}).get("radius")
        if radius is None:
            continue
        view = role.view(parameter)
        before = view.masked_scatter(mask.to(view.device), elements.to(view))
        wide, axes = before.to(statistics_dtype(view.dtype)), role.axes
        held_to = norm(wide, axes) if fix_norm == "initial" else 1.0
        balanced = project(wide, axes, fix_mean=fix_mean, fix_norm=bool(fix_norm), radius=held_to).tensor
        # if the neurons are not what balancing made of them, the model was loaded since
        is_balanced = norm(balanced - view, axes) <= 4 * rounding_error(view.dtype) * norm(balanced, axes)
        view.copy_(torch.where((radius < 0) & is_balanced, before, view))
