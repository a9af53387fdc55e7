"""Neurons that grew from zero in an earlier run: they are shorter than one, and must not be stretched to norm one.

A new optimiser cannot tell such a neuron from one that was never balanced. If another layer of the model is balanced,
Nero has trained the model, and the optimiser keeps short neurons as they are. Otherwise it copies and balances them.
A checkpoint that is loaded later marks the neurons that grew, and the copies of these are written back.

Sizes that the state holds (scales, and norms to be kept) are read again if values change before the first step.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero.backends import has_entered
from nero.balance import initial_radius, own_radius, wide_neurons
from nero.groups import Part
from nero.known_layers import ADAPTERS
from nero.options import FixNorm
from nero.parameters import can_read
from nero.roles import Role
from nero.rule import distance, norm, project, rounding_error, statistics_dtype
from nero.sharding import is_sharded, local_of, sharding_of
from nero.state import initial_scale
from nero.user_warnings import and_more, warn

#: Copies of more elements are not made: a fresh network would be held twice.
MAX_COPIED_ELEMENTS = 1 << 22


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


class Entrance:
    """What an optimiser has read from its parameters, and may have to read again before its first step.

    This is about neurons that may have grown from zero, the scales of gains and biases, and norms to be kept.
    """

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._kept: list[str] = []  # names of parameters whose short neurons were kept
        self._stretched: list[tuple[Tensor, int]] = []  # parameters with grown neurons but no copies, and versions
        self._read: list[tuple[Part, int]] = []  # parameters whose size the state holds, and their versions then

    def note_sizes(self, parts: Iterable[Part]) -> None:
        """Note when scales and norms were read. Those of shards are not read again: all processes would have to."""
        sized = (part for part in parts if part.role.kind != "neuron" or part.group["fix_norm"] == "initial")
        self._read += [(part, part.parameter._version) for part in sized if not is_sharded(part.parameter)]

    def grown(self, parts: Sequence[Part]) -> dict[Tensor, Tensor]:
        """Find the neurons that have grown from zero, before the parameters are balanced. Return masks of them."""
        found, copies = find_grown(parts)
        self._copies += copies
        self._kept += [
            part.name for part in parts if part.parameter in found and not any(name in part.name for name in ADAPTERS)
        ]
        return found

    def load(self, loaded: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Undo the balancing of the neurons that grew from zero according to a loaded state."""
        restore(self._copies, loaded)
        self._kept = []
        # Accelerate loads the optimiser's own state, before the first step
        self._read = [
            (part, version) for part, version in self._read if float(loaded.get(part.parameter, {}).get("step", 0)) == 0
        ]
        for parameter in (copy.parameter for copy in self._copies if copy.elements is None):
            radius = loaded.get(parameter, {}).get("radius")
            is_readable = can_read(parameter) and not parameter.is_inference()
            if radius is not None and is_readable and bool((local_of(radius) < 0).any()):
                self._stretched.append((parameter, parameter._version))

    @torch.no_grad()
    def end(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Read sizes again if values have changed, warn of assumptions that no checkpoint has confirmed, forget both.

        DistributedDataParallel changes values: it sends those of one process to the others. Their state must be equal.
        """
        for (_, parameter, role, _), version in self._read:
            own = state.get(parameter, {})
            if parameter._version == version or not can_read(parameter):
                continue
            if "scale" in own:
                own["scale"].copy_(initial_scale(parameter, role))  # in place: captured graphs hold the address
            elif "radius" in own:
                own["radius"].copy_(own_radius(parameter, role))
        if self._kept:
            warn(
                f"neurons of {and_more(self._kept)} are shorter than one, and other layers are balanced, so they are "
                "kept as neurons that have grown from zero under Nero: if they are new, call nero.balance_(model) "
                "before you make the optimiser"
            )
        if any(parameter._version == version for parameter, version in self._stretched):
            warn(
                "neurons that have grown from zero were stretched to norm one when the optimiser was made, before its "
                "checkpoint told of them: load the model's state_dict again, after the optimiser's"
            )
        self._copies, self._kept, self._stretched, self._read = [], [], [], []


@torch.no_grad()
def read_norms(parts: Iterable[Part], state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Update the norms that pretrained neurons are held to, since weights may be loaded after the optimiser is made.

    Neurons that have made a step keep their norms.
    """
    for _, parameter, role, group in parts:
        own = state.get(parameter, {})
        if (group["fix_norm"], group["fix_mean"]) != ("initial", False) or "radius" not in own:
            continue
        if can_read(parameter) and float(own["step"]) == 0:
            local_of(own["radius"]).copy_(own_radius(parameter, role))  # in place: captured graphs hold the address


@torch.no_grad()
def find_grown(parts: Iterable[Part], narrowest: torch.dtype | None = None) -> tuple[dict[Tensor, Tensor], list[Copy]]:
    """Find the neurons that may have grown from zero: not balanced, and not longer than one.

    Args:
        parts: the parameters.
        narrowest: neurons that are balanced to the rounding of this dtype have not grown; by default the parameter's.

    Returns:
        Masks of these neurons by parameter, if Nero has trained the model; otherwise copies of the neurons.
    """
    found: list[tuple[Part, Tensor]] = []
    is_trained, elements = False, 0
    for part in parts:
        _, parameter, role, group = part
        fix_mean, fix_norm = group["fix_mean"], group["fix_norm"]
        is_held = role.kind == "neuron" and (fix_mean or fix_norm is True)
        if not is_held or not parameter.numel() or not can_read(parameter):
            continue
        tolerance = max(rounding_error(dtype) for dtype in (parameter.dtype, narrowest or parameter.dtype))
        wide = wide_neurons(parameter, role)
        size = norm(wide, role.axes)
        off = distance(wide, role.axes, fix_mean=fix_mean, fix_norm=fix_norm is True)
        is_balanced = (off <= tolerance * size) & (size > 0)
        # a constant neuron cannot be balanced, so it says nothing
        possible = project(wide, role.axes, fix_mean=fix_mean, fix_norm=fix_norm is True).possible
        mask = ~is_balanced & possible & ((size <= 1 + tolerance) | (fix_norm is False))
        counts = sharding_of(parameter, role).total(torch.stack([mask.sum(), (~is_balanced).sum()]))
        count, unbalanced = map(int, counts.cpu())  # tensor subclasses lack tolist
        # unit norm alone, as of neurons of two elements, is no sign of Nero: orthogonal initialisation has it, too
        has_both = fix_mean and fix_norm is True and role.fan_in(parameter.shape) > 2
        is_trained = is_trained or (has_both and not unbalanced)
        if count:
            elements += count * role.fan_in(parameter.shape)
            found.append((part, mask))
    if is_trained:
        return {part.parameter: mask for part, mask in found}, []
    copies = []
    for (_, parameter, role, group), mask in found:
        elements_of = None
        if elements <= MAX_COPIED_ELEMENTS:
            elements_of = sharding_of(parameter, role).neurons(parameter).masked_select(mask)
        copies.append(Copy(parameter, role, group["fix_mean"], group["fix_norm"], mask, elements_of))
    return {}, copies


def add_missing_radii(parts: Sequence[Part], loaded: Mapping[Tensor, dict[str, Any]]) -> None:
    """Add the radius to a loaded state that lacks it, though neurons of the loaded model have grown from zero.

    ``torch.distributed.checkpoint`` reads only what the optimiser already holds. One that was made on a model without
    zero neurons has no radius. A tensor that is balanced to the rounding of bf16 was cast, and lacks none.
    """
    missing = [part for part in parts if has_entered(own := loaded.get(part.parameter, {})) and "radius" not in own]
    grown = find_grown(parts)[0] if missing else {}
    not_cast = find_grown(parts, torch.bfloat16)[0] if grown else {}
    for _, parameter, role, group in missing:
        if parameter in grown and parameter in not_cast:
            radius = initial_radius(parameter, role, group["fix_norm"], grown[parameter])
            if radius is not None:
                loaded[parameter]["radius"] = sharding_of(parameter, role).as_state(radius)


@torch.no_grad()
def restore(copies: Iterable[Copy], loaded: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Write back the copied neurons whose loaded radius is negative, unless they have changed since balancing."""
    for parameter, role, fix_mean, fix_norm, mask, elements in copies:
        radius = loaded.get(parameter, {}).get("radius")
        if radius is None or elements is None:
            continue
        sharding = sharding_of(parameter, role)
        view, radius = sharding.neurons(parameter), local_of(radius)
        before = view.masked_scatter(mask.to(view.device), elements.to(view))
        wide, axes = before.to(statistics_dtype(view.dtype)), role.axes
        held_to = norm(wide, axes) if fix_norm == "initial" else 1.0
        balanced = project(wide, axes, fix_mean=fix_mean, fix_norm=bool(fix_norm), radius=held_to).tensor
        # else other values were loaded since
        is_unchanged = norm(balanced - view, axes) <= 4 * rounding_error(view.dtype) * norm(balanced, axes)
        view.copy_(torch.where((radius < 0) & is_unchanged, before, view))
        sharding.write(parameter, view)
