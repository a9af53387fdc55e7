"""Measurements of layers in batches of equal shape, without synchronising with the device.

Of sharded parameters each process measures its own part; :func:`pooled` joins the measurements.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nero.groups import Part
from nero.options import FixNorm
from nero.rule import bias_correction, rounding_error, statistics_dtype
from nero.sharding import is_sharded, local_of, sharding_of, totals
from nero.watching.reading import BatchResult, LayerHead

#: The quantiles of a spread over the neurons of a layer.
QUANTILES = (0.1, 0.5, 0.9)
#: A neuron is near the limit if its largest weight is at least this share of the largest that the constraints allow.
NEAR_LIMIT = 0.9
#: The number of elements measured at once, by device type: few enough for a CPU's cache, or for a GPU's memory.
MAX_ELEMENTS = {"cpu": 1 << 20}
MAX_ELEMENTS_ELSEWHERE = 1 << 24
#: The numbers of a row of :attr:`nero.watching.reading.BatchResult.table`.
ROW_LENGTH = 12
#: Rows of earlier weights, by layer name.
Snapshot: TypeAlias = dict[str, Tensor]


class Sample(NamedTuple):
    """The followed neurons, gains or biases of a parameter, as rows."""

    part: Part
    state: dict[str, Tensor]
    rows: Tensor

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """The properties that samples must share to be measured together."""
        group, dtype = self.part.group, self.part.parameter.dtype
        constraints = (group["fix_mean"], self.fix_norm) if self.part.role.axes else (group["scale"],)
        has_radius = "radius" in self.state
        return (self.part.role.kind, self.rows.shape, self.rows.device, dtype, group["beta"], has_radius, *constraints)

    @property
    def fix_norm(self) -> FixNorm:
        """The constraint on norms now; "initial" holds only after the next step has stored the radius."""
        fix_norm: FixNorm = self.part.group["fix_norm"]
        return fix_norm if fix_norm != "initial" or "radius" in self.state else False


class Measurement(NamedTuple):
    """A row of numbers per layer, on the device, and the rows for the snapshots."""

    table: Tensor
    start: Tensor
    now: Tensor


def take_sample(part: Part, state: dict[str, Tensor], neurons: int | None) -> Sample | None:
    """Return at most ``neurons`` evenly spaced neurons of a parameter; ``None`` if this process holds none."""
    found = sharding_of(part.parameter, part.role).neurons(part.parameter)
    return Sample(part, state, _rows(found, part.role.axes, neurons)) if found.numel() else None


def make_batches(samples: list[Sample]) -> list[list[Sample]]:
    """Group samples that can be measured together, up to the limit of elements."""
    by_key: dict[tuple[Any, ...], list[list[Sample]]] = {}
    for sample in samples:
        batches = by_key.setdefault(sample.batch_key, [[]])
        room = MAX_ELEMENTS.get(sample.rows.device.type, MAX_ELEMENTS_ELSEWHERE) // sample.rows.numel()
        if len(batches[-1]) >= max(1, room):
            batches.append([])
        batches[-1].append(sample)
    return [batch for batches in by_key.values() for batch in batches]


def measure(batch: list[Sample], start: Snapshot, last: Snapshot, neurons: int | None) -> Measurement:
    """Measure a batch against its rows at the start and at the last reading."""
    first, names = batch[0].part, [sample.part.name for sample in batch]
    rows = torch.stack([sample.rows for sample in batch]).to(statistics_dtype(first.parameter.dtype))
    if first.role.axes:
        # unit rows; a neuron at the origin, which has no direction, becomes NaN
        peak = torch.linalg.vector_norm(rows, math.inf, 2, keepdim=True)
        now = rows.div_(peak)
        length = torch.linalg.vector_norm(now, dim=2, keepdim=True)
        now = now.div_(length)
        begun = _earlier(start, names, now)
        begun = torch.where(begun[:, :, :1].isnan(), now, begun)  # a neuron starts at its first direction
        moved = [_angle(now, _earlier(last, names, now)), _angle(now, begun)]
        near, off = _limits(batch, now, peak, length, neurons)
    else:
        now = rows
        begun = _earlier(start, names, now)
        scale = first.group["scale"] or _state_by_layer(batch, "scale")
        moved = [(now - other).abs() / scale for other in (_earlier(last, names, now), begun)]
        near = off = torch.full((len(batch),), math.nan, device=now.device)
    grad_norm, silent = _gradients(batch, neurons)
    spreads = _spreads(torch.stack([*moved, grad_norm]).squeeze(3))
    return Measurement(torch.cat([spreads, torch.stack([silent, near, off], 1)], 1), begun, now)


def _earlier(snapshot: Snapshot, names: list[str], now: Tensor) -> Tensor:
    """Return the stored rows of layers; the current ones for layers that are new or have another shape."""
    pairs = [(snapshot.get(name), new) for name, new in zip(names, now, strict=True)]
    return torch.stack([new if old is None or old.shape != new.shape else old.to(new) for old, new in pairs])


def _rows(tensor: Tensor, axes: tuple[int, ...], limit: int | None) -> Tensor:
    """Return neurons as rows: every n-th, with the smallest n that gives at most ``limit``."""
    others = [axis for axis in range(tensor.dim()) if axis not in axes]
    if axes and others != [0]:
        tensor = tensor.permute(*others, *axes)
    rows = tensor.flatten(0, len(others) - 1) if others else tensor.unsqueeze(0)
    count = rows.shape[0]
    if limit is not None and count > limit:
        rows = rows[:: math.ceil(count / limit)]
    return rows.flatten(1) if axes else rows.unsqueeze(1)


def _angle(one: Tensor, other: Tensor) -> Tensor:
    """Return the angles between unit rows, from their distance.

    The cosine would lose small angles to rounding. The distance loses the last digits of angles near π instead.
    """
    distance = torch.linalg.vector_norm(one - other, dim=2, keepdim=True)
    angle: Tensor = 2 * (distance / 2).clamp_max(1).asin()
    return angle


def _spreads(values: Tensor) -> Tensor:
    """Return quantiles over neurons, without NaN: (quantities, layers, neurons) to (layers, quantities * quantiles)."""
    ordered = values.sort(2).values  # NaN comes last
    last = (~ordered.isnan()).sum(2, keepdim=True, dtype=values.dtype) - 1
    places = torch.cat([last * quantile for quantile in QUANTILES], 2).clamp_min(0)
    below = places.floor()
    low, high = (ordered.gather(2, each.long()) for each in (below, places.ceil()))
    found = torch.lerp(low, high, places - below)
    return found.transpose(0, 1).flatten(1)


def _state_by_neuron(batch: list[Sample], key: str, neurons: int | None) -> Tensor:
    roles = [sample.part.role for sample in batch]
    states = [local_of(sample.state[key]) for sample in batch]
    return torch.stack([_rows(state, role.axes, neurons) for state, role in zip(states, roles, strict=True)])


def _state_by_layer(batch: list[Sample], key: str) -> Tensor:
    return torch.stack([sample.state[key] for sample in batch]).reshape(-1, 1, 1)


def _gradients(batch: list[Sample], neurons: int | None) -> tuple[Tensor, Tensor]:
    """Return the root mean square of gradient norms, and the share of silent neurons (NaN before the first step)."""
    average, steps = _state_by_neuron(batch, "grad_norm", neurons), _state_by_layer(batch, "step")
    corrected = average / bias_correction(steps, batch[0].part.group["beta"], average.dtype)
    silent = average == 0
    return torch.where(silent, 0.0, corrected), torch.where(steps.flatten() > 0, _share(silent), math.nan)


def _limits(
    batch: list[Sample], unit: Tensor, peak: Tensor, length: Tensor, neurons: int | None
) -> tuple[Tensor, Tensor]:
    """Return the shares of neurons near the limit of the constraints, and of neurons that violate the constraints."""
    dtype, fan_in, fix_norm = batch[0].part.parameter.dtype, unit.shape[2], batch[0].fix_norm
    fix_mean = batch[0].part.group["fix_mean"] and fan_in > 2
    # the limit is a neuron with all its weight on one input; peak / (peak * length) is the largest weight's share
    limit = math.sqrt(1 - 1 / fan_in) if fix_mean else 1.0
    near = 1 / length >= NEAR_LIMIT * limit
    # the distance to the neuron's projection, relative to its norm: first the mean, then the norm of the rest
    shift = unit.mean(2, keepdim=True) * math.sqrt(fan_in) if fix_mean else torch.zeros_like(peak)
    has_radius = "radius" in batch[0].state
    radius = _state_by_neuron(batch, "radius", neurons) if has_radius else torch.ones_like(peak)
    # the mean of a neuron that started at zero is free, and its norm may be shorter
    shift = torch.where(radius < 0, 0.0, shift)
    distance = shift.abs()
    if fix_norm:
        excess = (1 - shift.square()).clamp_min(0).sqrt() - radius.abs() / (peak * length)
        distance = torch.hypot(distance, torch.where(radius < 0, excess.clamp_min(0), excess))
    rounding = rounding_error(dtype)
    is_free = not (fix_mean or fix_norm)
    return _share(near), _share(~(distance <= rounding) & ~((peak == 0) & is_free))


def _share(mask: Tensor) -> Tensor:
    """Return the share of each layer's neurons for which the mask is true."""
    return mask.float().mean((1, 2))


def pooled(results: Sequence[BatchResult], parts: Sequence[Part], state: Mapping[Tensor, Any]) -> list[BatchResult]:
    """Replace the rows of sharded parameters by their means over all processes, weighted by the neurons followed.

    Shares become those of all followed neurons. A quantile becomes the mean of the quantiles of the processes.
    """
    sharded = [(place, part) for place, part in enumerate(parts) if is_sharded(part.parameter)]
    if not sharded:
        return list(results)
    measured: dict[int, tuple[int, Tensor | None]] = {
        head.place: (head.followed, row)
        for result in results
        for head, row in zip(result.heads, result.table.unbind(), strict=True)
    }
    nothing: tuple[int, Tensor | None] = (0, None)
    vectors = [_weighted(*measured.get(place, nothing), part, state) for place, part in sharded]
    sums = totals(vectors, [sharding_of(part.parameter, part.role) for _, part in sharded])
    heads, rows, skipped = [], [], []
    for (place, part), (counts, weights, values) in zip(sharded, (_split(total) for total in sums), strict=True):
        followed, missed = counts.long().tolist()
        heads.append(LayerHead(place, part.name, part.role.kind, followed))
        rows.append(values / weights)  # NaN where no process has a number
        skipped.append(missed)
    steps = torch.stack([state[part.parameter]["step"] for _, part in sharded])
    places = {place for place, _ in sharded}
    rest = [_without(result, places) for result in results]
    return [
        *(result for result in rest if result.heads),
        BatchResult(heads, steps, torch.tensor(skipped), torch.stack(rows)),
    ]


def _weighted(followed: int, row: Tensor | None, part: Part, state: Mapping[Tensor, Any]) -> Tensor:
    """Return the number of followed neurons, the skipped updates, and the weights and weighted numbers of a row."""
    local = local_of(part.parameter)
    row = local.new_full((ROW_LENGTH,), torch.nan, dtype=torch.float64) if row is None else row.double()
    is_missing, skipped = row.isnan(), state[part.parameter]["skipped"]
    counts = torch.stack([torch.full_like(skipped, followed), skipped]).double()
    weights = torch.full_like(row, followed).masked_fill(is_missing, 0)
    return torch.cat([counts, weights, (row * followed).masked_fill(is_missing, 0)])


def _split(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return total[:2], total[2 : 2 + ROW_LENGTH], total[2 + ROW_LENGTH :]


def _without(result: BatchResult, places: set[int]) -> BatchResult:
    kept = [number for number, head in enumerate(result.heads) if head.place not in places]
    tensors = (tensor[kept] for tensor in (result.steps, result.skipped, result.table))
    return BatchResult([result.heads[number] for number in kept], *tensors)
