"""What is measured of layers that are alike, all of them at once and without waiting for the device."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero.groups import Part
from nero.options import FixNorm
from nero.roles import Role
from nero.rule import bias_correction, statistics_dtype

#: The share of a layer's neurons below each number of a spread.
QUANTILES = (0.1, 0.5, 0.9)
#: A neuron is near the limit if its largest weight is this much of what the constraints let it be.
NEAR = 0.9
#: How many numbers are measured at once: few enough for a cache, or for a GPU's memory.
AT_ONCE = {"cpu": 1 << 20}
ELSEWHERE = 1 << 24


class Followed(NamedTuple):
    """The neurons, gains or biases of a parameter that are followed, as rows, and what goes with them."""

    name: str
    part: Part
    state: dict[str, Tensor]
    rows: Tensor

    @property
    def kind(self) -> tuple[Any, ...]:
        """What layers must share to be measured together."""
        group, dtype = self.part.group, self.part.parameter.dtype
        held = (group["fix_mean"], self.fix_norm) if self.part.role.axes else (group["scale"],)
        return (self.part.role.kind, self.rows.shape, self.rows.device, dtype, group["beta"], *held)

    @property
    def fix_norm(self) -> FixNorm:
        """How norms are held; not yet, where the norm that a neuron came with is first asked for at the next step."""
        asked: FixNorm = self.part.group["fix_norm"]
        return asked if asked != "initial" or "radius" in self.state else False


class Kept:
    """Rows that are remembered, by layer, in the stacks in which they were measured."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}
        self._stacks: dict[tuple[str, ...], Tensor] = {}

    def put(self, stacks: dict[tuple[str, ...], Tensor]) -> None:
        """Remember these instead of whatever was kept of the same layers."""
        self._stacks = stacks
        for names, stack in stacks.items():
            self.rows.update(zip(names, stack, strict=True))

    def get(self, names: tuple[str, ...], now: Tensor) -> Tensor:
        """The rows that were kept of layers; those of now for what is new, or another by now."""
        stack = self._stacks.get(names)
        if stack is not None and (stack.shape, stack.dtype, stack.device) == (now.shape, now.dtype, now.device):
            return stack
        found = [(self.rows.get(name), own) for name, own in zip(names, now, strict=True)]
        return torch.stack([own if one is None or one.shape != own.shape else one.to(own) for one, own in found])


class Measured(NamedTuple):
    """A line of numbers a layer, on the device, and the rows to be kept."""

    table: Tensor
    start: Tensor
    now: Tensor


def follow(name: str, part: Part, state: dict[str, Tensor], most: int | None) -> Followed | None:
    """A parameter's followed rows, evenly spaced and at most so many; ``None`` if it has none here."""
    parameter = _here(part.parameter, part.role)
    if not parameter.numel():
        return None
    return Followed(name, part, state, _picked(part.role.view(parameter), part.role.axes, most))


def bundles(followed: list[Followed]) -> list[list[Followed]]:
    """Layers that are alike together, as many as are measured at once."""
    alike: dict[tuple[Any, ...], list[list[Followed]]] = {}
    for each in followed:
        made = alike.setdefault(each.kind, [[]])
        room = AT_ONCE.get(each.rows.device.type, ELSEWHERE) // each.rows.numel()
        if len(made[-1]) >= max(1, room):
            made.append([])
        made[-1].append(each)
    return [bundle for made in alike.values() for bundle in made]


def measure(bundle: list[Followed], start: Kept, last: Kept, most: int | None) -> Measured:
    """Measure a bundle beside its rows at the start and at the last reading."""
    first, names = bundle[0].part, tuple(each.name for each in bundle)
    rows = torch.stack([each.rows for each in bundle]).to(statistics_dtype(first.parameter.dtype))
    if first.role.axes:
        # a neuron is kept at unit norm, and one at the origin, which has no direction, as what is not a number
        peak = torch.linalg.vector_norm(rows, math.inf, 2, keepdim=True)
        now = rows.div_(peak)
        length = torch.linalg.vector_norm(now, dim=2, keepdim=True)
        now = now.div_(length)
        begun = start.get(names, now)
        begun = torch.where(begun[:, :, :1].isnan(), now, begun)  # where it first has a direction, there it starts
        moved = [_angle(now, last.get(names, now)), _angle(now, begun)]
        near, off = _limits(bundle, now, peak, length, most)
    else:
        now = rows
        begun = start.get(names, now)
        scale = first.group["scale"] or _one_a_layer(bundle, "scale")
        moved = [(now - other).abs() / scale for other in (last.get(names, now), begun)]
        near = off = torch.full((len(bundle),), math.nan, device=now.device)
    grad_norm, silent = _gradients(bundle, most)
    spreads = _spreads(torch.stack([*moved, grad_norm]).squeeze(3))
    return Measured(torch.cat([spreads, torch.stack([silent, near, off], 1)], 1), begun, now)


def _here(tensor: Tensor, role: Role) -> Tensor:
    """What this process has of a tensor: of one that is sharded between neurons its own, else all of it."""
    if not hasattr(tensor, "to_local"):
        return tensor
    cut = {place.dim for place in tensor.placements if place.is_shard()}  # type: ignore[attr-defined]
    whole = cut & set(role.fan_in_axes or ()) or role.fan_in_groups > 1
    whole = whole or any(place.is_partial() for place in tensor.placements)  # type: ignore[attr-defined]
    local: Tensor = tensor.full_tensor() if whole else tensor.to_local()  # type: ignore[attr-defined]
    return local


def _picked(tensor: Tensor, axes: tuple[int, ...], most: int | None) -> Tensor:
    """Neurons as rows: every one, or every second, or every third, until there are no more than wanted."""
    others = [axis for axis in range(tensor.dim()) if axis not in axes]
    if axes and others != [0]:
        tensor = tensor.permute(*others, *axes)
    rows = tensor.flatten(0, len(others) - 1) if others else tensor.unsqueeze(0)
    count = rows.shape[0]
    if most is not None and count > most:
        rows = rows[:: math.ceil(count / most)]
    return rows.flatten(1) if axes else rows.unsqueeze(1)


def _angle(one: Tensor, other: Tensor) -> Tensor:
    """Between rows of unit norm; from their distance, since the cosine tells no small angles apart.

    What it gives up is the last digits of a half turn.
    """
    distance = torch.linalg.vector_norm(one - other, dim=2, keepdim=True)
    angle: Tensor = 2 * (distance / 2).clamp_max(1).asin()
    return angle


def _spreads(values: Tensor) -> Tensor:
    """The quantiles, over the neurons that have a number, of kinds x layers x neurons: layers x (kinds x quantiles)."""
    ordered = values.sort(2).values  # what is not a number comes last
    last = (~ordered.isnan()).sum(2, keepdim=True, dtype=values.dtype) - 1
    places = torch.cat([last * quantile for quantile in QUANTILES], 2).clamp_min(0)
    below = places.floor()
    low, high = (ordered.gather(2, each.long()) for each in (below, places.ceil()))
    found = torch.lerp(low, high, places - below)
    return found.transpose(0, 1).flatten(1)


def _one_a_neuron(bundle: list[Followed], key: str, most: int | None) -> Tensor:
    """A state of the followed neurons, by layer."""
    return torch.stack([_picked(_here(each.state[key], each.part.role), each.part.role.axes, most) for each in bundle])


def _one_a_layer(bundle: list[Followed], key: str) -> Tensor:
    return torch.stack([_here(each.state[key], each.part.role) for each in bundle]).reshape(-1, 1, 1)


def _gradients(bundle: list[Followed], most: int | None) -> tuple[Tensor, Tensor]:
    """The root mean square of gradients' norms, and the share of those that never had any; none before a step."""
    average, steps = _one_a_neuron(bundle, "grad_norm", most), _one_a_layer(bundle, "step")
    corrected = average / bias_correction(steps, bundle[0].part.group["beta"], average.dtype)
    silent = average == 0
    return torch.where(silent, 0.0, corrected), torch.where(steps.flatten() > 0, _share(silent), math.nan)


def _limits(
    bundle: list[Followed], unit: Tensor, peak: Tensor, length: Tensor, most: int | None
) -> tuple[Tensor, Tensor]:
    """The shares of neurons near the limit of what the constraints allow, and of those that they do not hold."""
    dtype, fan_in, fix_norm = bundle[0].part.parameter.dtype, unit.shape[2], bundle[0].fix_norm
    fix_mean = bundle[0].part.group["fix_mean"] and fan_in > 2
    # of the neuron that has all its weight on one input; peak / (peak * length) is the largest weight's share
    limit = math.sqrt(1 - 1 / fan_in) if fix_mean else 1.0
    near = 1 / length >= NEAR * limit
    # how far from its projection a neuron is, relative to its norm: by its mean, and by what the norm then lacks
    shift = unit.mean(2, keepdim=True) * math.sqrt(fan_in) if fix_mean else torch.zeros_like(peak)
    distance = shift.abs()
    if fix_norm:
        radius = _one_a_neuron(bundle, "radius", most) if fix_norm == "initial" else 1.0
        centred = (1 - shift.square()).clamp_min(0).sqrt()
        distance = torch.hypot(distance, centred - radius / (peak * length))
    rounding = torch.finfo(dtype).eps + 16 * torch.finfo(unit.dtype).eps
    free = not (fix_mean or fix_norm)
    return _share(near), _share(~(distance <= rounding) & ~((peak == 0) & free))


def _share(which: Tensor) -> Tensor:
    """Of each layer's neurons."""
    return which.float().mean((1, 2))
