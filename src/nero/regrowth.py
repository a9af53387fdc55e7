"""Neurons that grew from zero in an earlier run: they are shorter than one, and must not be stretched to norm one.

A new optimiser cannot tell such a neuron from one that was never balanced. If another layer of the model is balanced,
Nero has trained the model, and the optimiser keeps short neurons as they are. Otherwise it copies and balances them.
A checkpoint that is loaded later marks the neurons that grew, and the copies of these are written back.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero.backends import has_entered
from nero.groups import Part
from nero.known_layers import ADAPTERS
from nero.messages import and_more, warn
from nero.options import FixNorm
from nero.parameters import can_read
from nero.radius import initial_radius, measure_roughly, wide_neurons
from nero.role import Role
from nero.rule import distance, norm, project, rounding_error, statistics_dtype
from nero.sharding import local_of, sharding_of

#: Copies of more elements are not made: a fresh network would be held twice.
MAX_COPIED_ELEMENTS = 1 << 22
#: Far above the rounding of any dtype; a neuron this far from where a decision turns is not measured exactly.
CLOSE = 0.1
#: Norms whose squares are within float32's range.
SHORTEST, LONGEST = 1e-15, 1e15


class Copy(NamedTuple):
    """The neurons of a parameter that may have grown from zero, before they were balanced.

    Attributes:
        fix_mean: the constraint on means when the neurons were balanced.
        fix_norm: the constraint on norms then.
        mask: selects the neurons.
        elements: their elements; ``None`` if they are too many to copy.
    """

    parameter: Tensor
    role: Role
    fix_mean: bool
    fix_norm: FixNorm
    mask: Tensor
    elements: Tensor | None

    @torch.no_grad()
    def restore(self, radius: Tensor, elements: Tensor) -> None:
        """Write back the neurons of negative radius, unless they have changed since balancing."""
        parameter, axes = self.parameter, self.role.axes
        sharding = sharding_of(parameter, self.role)
        view = sharding.neurons(parameter)
        before = view.masked_scatter(self.mask.to(view.device), elements.to(view))
        wide = before.to(statistics_dtype(view.dtype))
        held_to = norm(wide, axes) if self.fix_norm == "initial" else 1.0
        balanced = project(wide, axes, fix_mean=self.fix_mean, fix_norm=bool(self.fix_norm), radius=held_to).tensor
        # else other values were loaded since
        is_unchanged = norm(balanced - view, axes) <= 4 * rounding_error(view.dtype) * norm(balanced, axes)
        view.copy_(torch.where((radius < 0) & is_unchanged, before, view))
        sharding.write(parameter, view)


class Regrowth:
    """Assumptions of an optimiser about neurons that may have grown from zero, kept until its first step."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._kept: list[str] = []  # names of parameters whose short neurons were kept
        self._stretched: list[tuple[Tensor, int]] = []  # parameters with grown neurons but no copies, and versions

    @torch.no_grad()
    def grown(self, parts: Sequence[Part]) -> dict[Tensor, Tensor]:
        """Find the neurons that have grown from zero, before the parameters are balanced.

        Returns:
            Masks of them by parameter, if Nero has trained the model. If not, copies of the neurons are kept here.
        """
        found, is_trained = find_short(parts)
        if is_trained:
            self._kept += [part.name for part, *_ in found if not any(name in part.name for name in ADAPTERS)]
            return {part.parameter: mask for part, mask, _ in found}
        elements = sum(count * part.role.fan_in(part.parameter.shape) for part, _, count in found)
        for (_, parameter, role, group), mask, _ in found:
            own = None
            if elements <= MAX_COPIED_ELEMENTS:
                own = sharding_of(parameter, role).neurons(parameter).masked_select(mask)
            self._copies.append(Copy(parameter, role, group["fix_mean"], group["fix_norm"], mask, own))
        return {}

    def load(self, loaded: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Undo the balancing of the neurons that grew from zero according to a loaded state."""
        self._kept = []
        for copy in self._copies:
            parameter, radius = copy.parameter, loaded.get(copy.parameter, {}).get("radius")
            if radius is None:
                continue
            if copy.elements is not None:
                copy.restore(local_of(radius), copy.elements)
            elif can_read(parameter) and not parameter.is_inference() and bool((local_of(radius) < 0).any()):
                self._stretched.append((parameter, parameter._version))

    def end(self) -> None:
        """Warn of assumptions that no checkpoint has confirmed, and forget them."""
        if self._kept:
            warn(
                f"neurons of {and_more(self._kept)} are shorter than one, and other layers are balanced, so they are "
                "kept as neurons that have grown from zero under Nero: if they are new, call nero.balance_ on "
                "their layer before you make the optimiser"
            )
        if any(parameter._version == version for parameter, version in self._stretched):
            warn(
                "neurons that have grown from zero were stretched to norm one when the optimiser was made, before its "
                "checkpoint told of them: load the model's state_dict again, after the optimiser's"
            )
        self._copies, self._kept, self._stretched = [], [], []


@torch.no_grad()
def find_short(parts: Iterable[Part]) -> tuple[list[tuple[Part, Tensor, int]], bool]:
    """Find the neurons that may have grown from zero: not balanced, and not longer than one.

    Returns:
        The parameters with such neurons, a mask of these and their number; and whether Nero has trained the model.
    """
    found: list[tuple[Part, Tensor, int]] = []
    is_trained = False
    for part in parts:
        _, parameter, role, group = part
        fix_mean, fix_norm = group["fix_mean"], group["fix_norm"]
        is_held = role.kind == "neuron" and (fix_mean or fix_norm is True)
        if not is_held or not parameter.numel() or not can_read(parameter):
            continue
        tolerance = rounding_error(parameter.dtype)
        size, off, possible = _measure(part, tolerance)
        is_balanced = (off <= tolerance * size) & (size > 0)
        # a constant neuron cannot be balanced, so it says nothing
        mask = ~is_balanced & possible & ((size <= 1 + tolerance) | (fix_norm is False))
        counts = sharding_of(parameter, role).total(torch.stack([mask.sum(), (~is_balanced).sum()]))
        count, unbalanced = map(int, counts.cpu())  # tensor subclasses lack tolist
        # unit norm alone, as of neurons of two elements, is no sign of Nero: orthogonal initialisation has it, too
        has_both = fix_mean and fix_norm is True and role.fan_in(parameter.shape) > 2
        is_trained = is_trained or (has_both and not unbalanced)
        if count:
            found.append((part, mask, count))
    return found, is_trained


def _measure(part: Part, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norms of neurons, their distances from balance, and which can be balanced.

    Two quick passes do, unless a neuron is almost balanced, constant, or about as long as one.
    """
    _, parameter, role, group = part
    fix_mean, fix_norm = group["fix_mean"] and role.fan_in(parameter.shape) != 2, group["fix_norm"] is True
    size, shift, centred = measure_roughly(parameter, role)
    off_norm = ((centred if fix_mean else size) - 1).abs() if fix_norm else torch.zeros_like(size)
    off = torch.hypot(off_norm, shift) if fix_mean else off_norm
    is_clear = (off <= tolerance / 2 * size) | ((off > CLOSE) & ((size - 1).abs() > CLOSE) & (centred > CLOSE * size))
    if bool((is_clear & (size > SHORTEST) & (size < LONGEST)).all()):
        return size, off, centred > 0
    wide, axes = wide_neurons(parameter, role), role.axes
    exact = distance(wide, axes, fix_mean=fix_mean, fix_norm=fix_norm)
    return norm(wide, axes), exact, project(wide, axes, fix_mean=fix_mean, fix_norm=fix_norm).possible


def add_missing_radii(parts: Sequence[Part], loaded: Mapping[Tensor, dict[str, Any]]) -> None:
    """Add the radius to a loaded state that lacks it, though neurons of the loaded model have grown from zero.

    ``torch.distributed.checkpoint`` reads only what the optimiser already holds. One that was made on a model without
    zero neurons has no radius.
    """
    missing = [part for part in parts if has_entered(own := loaded.get(part.parameter, {})) and "radius" not in own]
    masks = grown_neurons(parts) if missing else {}
    for part in missing:
        _, parameter, role, group = part
        if parameter not in masks or _was_cast(part, masks[parameter]):
            continue
        radius = initial_radius(parameter, role, group["fix_norm"], masks[parameter])
        if radius is not None:
            loaded[parameter]["radius"] = sharding_of(parameter, role).as_state(radius)


def _was_cast(part: Part, mask: Tensor) -> bool:
    """Return whether neurons that are not balanced are so to the rounding of bf16, as after a cast."""
    _, parameter, role, group = part
    wide, axes = wide_neurons(parameter, role), role.axes
    off = distance(wide, axes, fix_mean=group["fix_mean"], fix_norm=group["fix_norm"] is True)
    is_far = mask & (off > rounding_error(torch.bfloat16) * norm(wide, axes))
    return not bool(sharding_of(parameter, role).total(is_far.sum()))


def grown_neurons(parts: Iterable[Part]) -> dict[Tensor, Tensor]:
    """Return masks of the neurons that have grown from zero, by parameter, if Nero has trained the model."""
    found, is_trained = find_short(parts)
    return {part.parameter: mask for part, mask, _ in found} if is_trained else {}
