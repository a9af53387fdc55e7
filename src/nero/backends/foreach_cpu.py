"""The foreach backend on the CPU: neurons turned and gains nudged in place, for ordinary values.

The statistics of all neurons form one long vector, and weights are turned in pieces that stay in cache.
Anything else (a gradient of 1e25 or NaN, a constant neuron, a turn of half a radian, half precision) is
left to the rule itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nero import rule
from nero.backends import eager
from nero.backends.job import Job, Settings, flat, shaped
from nero.backends.matrix import MAX_FAN_IN, ORDINARY, is_ordinary, norm_along, sum_along
from nero.options import FixNorm

#: Weights per piece: with their gradients, 32 MB in float32.
PIECE_ELEMENTS = 1 << 22
#: Tensors up to this size are concatenated with others of equal fan-in, to save operations.
MAX_SMALL_ELEMENTS = 1 << 16
#: Wider turns are left to the rule.
MAX_ANGLE_RAD = 0.5


class _Matrix(NamedTuple):
    """Weights as a matrix whose neurons run along one axis; or several such matrices, concatenated.

    ``grad`` is the direction of the step, which with momentum is not the gradient of the job.
    """

    weight: Tensor
    grad: Tensor
    average: Tensor
    radius: Tensor | None
    off: Tensor | None
    own: "tuple[Job, _View] | None" = None  # None: it has parts
    parts: tuple["_Matrix", ...] = ()

    def leave_to_rule(self, axis: int, step: float, settings: Settings) -> None:
        """Step by the rule; of concatenated matrices, only those that need it."""
        if self.own is None:
            _turn_matrices(self.parts, axis, step, settings)
            return
        job, view = self.own
        if job.buffer is not None:
            eager.finish(job, settings)
        else:
            state = {"grad_norm": self.average} | ({} if self.radius is None else {"radius": self.radius})
            eager.finish(Job(self.weight, self.grad, {**job.state, **state}, (axis,), job.pull), settings)
        view.version = None


def turn(jobs: Sequence[Job], settings: Settings) -> None:
    """Turn the neurons of every job. The steps are already counted."""
    with torch.autocast("cpu", enabled=False):  # some sums are matrix products, which must stay in float32
        _turn(jobs, settings)


def _turn(jobs: Sequence[Job], settings: Settings) -> None:
    quick = bool(settings.fix_norm) and float(settings.angle) != 0
    by_kind: dict[tuple[float, int, torch.dtype], list[_Matrix]] = {}
    for job in jobs:
        found = _matrix(job, settings) if quick else None
        if found is None:
            eager.finish(job, settings)
        else:
            step, (matrix, axis) = float(job.state["step"]), found
            if job.buffer is not None and matrix.weight.numel() > MAX_SMALL_ELEMENTS:
                # at once, to free the direction, as large as the weights
                _turn_matrices([matrix], axis, step, settings)
            else:
                by_kind.setdefault((step, axis, matrix.average.dtype), []).append(matrix)
    for (step, axis, _), matrices in by_kind.items():
        _turn_matrices(list(_concatenated(matrices, 1 - axis)), axis, step, settings)


def nudge(jobs: Sequence[Job], settings: Settings) -> bool:
    """Nudge gains and biases of equal step counts, if all values are ordinary; return whether they were."""
    averages, parameters = [job.state["grad_norm"] for job in jobs], [job.parameter for job in jobs]
    lr, dtype = float(settings.angle), averages[0].dtype
    if not 0 < abs(lr) < 1 or any(job.pull or job.parameter.dtype != dtype for job in jobs):
        return False
    own_grad = torch.cat([flat(job.grad) for job in jobs]).to(dtype)
    buffers = [job.buffer for job in jobs if job.buffer is not None]
    buffer = torch.cat([flat(each) for each in buffers]) if buffers else None
    grad = own_grad if buffer is None else torch.lerp(buffer, own_grad, 1 - settings.kept_by_step)
    before = torch.cat([flat(average) for average in averages])
    average = before.square_().mul_(settings.beta).addcmul_(grad, grad, value=1 - settings.beta).sqrt_()
    scales = (
        torch.stack([job.state["scale"] for job in jobs])
        if settings.scale is None
        else before.new_tensor(settings.scale)
    )
    if not all(map(is_ordinary, (grad.abs(), average, scales))):
        return False
    correction = rule.bias_correction(float(jobs[0].state["step"]), settings.beta, dtype)
    sizes = [parameter.numel() for parameter in parameters]
    units = shaped(grad.div_(_bounded(average, grad, correction, settings)).split_with_sizes(sizes), parameters)
    torch._foreach_addcmul_(parameters, units, list(scales.expand(len(jobs)).unbind()), value=-lr * correction)
    torch._foreach_copy_(averages, shaped(average.split_with_sizes(sizes), averages))
    if buffer is not None:
        buffer.lerp_(own_grad, 1 - settings.momentum)
        torch._foreach_copy_(buffers, shaped(buffer.split_with_sizes(sizes), buffers))
    return True


def _bounded(average: Tensor, grad: Tensor, correction: float, settings: Settings) -> Tensor:
    """Raise the running average where a step would be longer than the longest."""
    if settings.longest == math.inf:
        return average
    return torch.maximum(average, grad.abs() * (correction / settings.longest))


def _concatenated(matrices: Sequence[_Matrix], across: int) -> Iterator[_Matrix]:
    """Concatenate small matrices of equal fan-in."""
    small: dict[int, list[_Matrix]] = {}
    for matrix in matrices:
        if matrix.weight.numel() > MAX_SMALL_ELEMENTS:
            yield matrix
        else:
            small.setdefault(matrix.weight.shape[1 - across], []).append(matrix)
    for group in small.values():
        yield group[0] if len(group) == 1 else _together(group, across)


def _together(matrices: Sequence[_Matrix], across: int) -> _Matrix:
    off = None
    if any(matrix.off is not None for matrix in matrices):
        off = [torch.zeros_like(each.average, dtype=torch.bool) if each.off is None else each.off for each in matrices]
    return _Matrix(
        torch.cat([matrix.weight for matrix in matrices], across),
        torch.cat([matrix.grad for matrix in matrices], across),
        torch.cat([matrix.average for matrix in matrices], across),
        _radii(matrices, across),
        None if off is None else torch.cat(off, across),
        parts=tuple(matrices),
    )


def _radii(matrices: Sequence[_Matrix], across: int) -> Tensor | None:
    """Join the radii of all neurons; ``None`` if all are one."""
    if all(matrix.radius is None for matrix in matrices):
        return None
    return _join([torch.ones_like(each.average) if each.radius is None else each.radius for each in matrices], across)


@dataclass(slots=True)
class _View:
    """A tensor viewed as a matrix. It keeps the memory alive, so that its address is not reused."""

    at: tuple[object, ...]  # the address, shape and strides of the weights
    weight: Tensor  # the view
    axis: int  # the fan-in axis of the view
    order: list[int] | None  # the permutation before the view
    version: int | None = None  # torch's version counter when the weights were last measured
    constraints: tuple[bool, FixNorm] | None = None  # the constraints then
    off: Tensor | None = None  # the neurons that were not balanced then


# keyed by grad_norm, which lives as long as the optimiser's state; a view must not refer to it
_views: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _matrix(job: Job, settings: Settings) -> tuple[_Matrix, int] | None:
    """View a job as a matrix, with its fan-in axis; ``None`` if it needs the rule."""
    average = job.state["grad_norm"]
    known: _View | None = _views.get(average)  # type: ignore[no-untyped-call]
    if known is None or known.at != _place(job.parameter):
        known = _view(job)
        if known is None:
            return None
        _views[average] = known
    if job.grad.dtype != average.dtype:
        return None
    radius = None
    if "radius" in job.state:
        radius = job.state["radius"]
        if not is_ordinary(radius.abs()):
            return None
    # weights that nobody changed since the last turn are still balanced
    constraints = (settings.fix_mean, settings.fix_norm)
    if known.version != job.parameter._version or known.constraints != constraints:
        known.off, known.version = _off_balance(job, settings), job.parameter._version
        known.constraints = constraints
    if known.off is not None and bool(known.off.all()):
        return None
    grad = job.grad if job.buffer is None else torch.lerp(job.buffer, job.grad, 1 - settings.kept_by_step)
    if known.order is None:
        return _Matrix(known.weight, grad, average, radius, known.off, (job, known)), known.axis
    matrix = _Matrix(
        known.weight,
        grad.permute(known.order).reshape(known.weight.shape),
        average.view(-1, 1),
        None if radius is None else radius.view(-1, 1),
        None if known.off is None else known.off.view(-1, 1),
        (job, known),
    )
    return matrix, known.axis


def _view(job: Job) -> _View | None:
    """View the weights as a matrix, if dtype, fan-in and memory allow it."""
    weight, average = job.parameter, job.state["grad_norm"]
    if weight.dtype != average.dtype or not 2 < weight.numel() // average.numel() <= MAX_FAN_IN:
        return None
    at = _place(weight)
    if weight.dim() == 2 and len(job.axes) == 1:
        return _View(at, weight.detach(), job.axes[0], None)
    neurons = [axis for axis in range(weight.dim()) if axis not in job.axes]
    order = neurons + sorted(job.axes, key=weight.stride, reverse=True)
    try:
        view = weight.detach().permute(order).view(average.numel(), -1)
    except RuntimeError:  # the strides do not allow a view
        return None
    return _View(at, view, 1, order)


def _place(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight.shape, weight.stride()


def _off_balance(job: Job, settings: Settings) -> Tensor | None:
    """Return a mask of the neurons that are not balanced, or zero; ``None`` if all are balanced."""
    radius: rule.Number = job.state.get("radius", 1.0)
    distance = rule.distance(job.parameter, job.axes, fix_mean=settings.fix_mean, radius=radius)
    off = ~(distance <= rule.rounding_error(job.parameter.dtype) * rule.bound(radius))
    if isinstance(radius, Tensor):  # the rule decides whether a gradient gives a zero neuron a direction
        off |= (radius < 0) & (job.parameter.abs().amax(job.axes, keepdim=True) == 0)
    return off if bool(off.any()) else None


class _Turns(NamedTuple):
    """The turns of the neurons of several matrices, joined: w <- w + factor * g, and the constraints."""

    length: Tensor  # the norm of the gradient
    average: Tensor  # the new running average
    factor: Tensor
    angle: Tensor  # of the turn, in radians, signed; NaN, and so not ordinary, if the average or the rate is


def _turn_matrices(matrices: Sequence[_Matrix], axis: int, step: float, settings: Settings) -> None:
    """Turn neurons that run along one axis of their matrices and have equal step counts."""
    across = 1 - axis
    largest = max(matrix.weight.numel() for matrix in matrices) if axis == 0 else 0
    scratch = matrices[0].weight.new_empty(largest)
    turns = _measure(matrices, axis, step, settings, scratch)
    counts = [matrix.average.shape[across] for matrix in matrices]
    idle: Sequence[Tensor | None] = [None] * len(matrices)
    if not _all_ordinary(matrices, turns):
        lengths = _split(turns.length, counts, across)
        masks = [_without_gradient(matrix, part, axis) for matrix, part in zip(matrices, lengths, strict=True)]
        needs_rule = [
            not bool(mask.all()) for mask in _split(_ordinary(matrices, turns, masks, across), counts, across)
        ]
        if any(needs_rule):
            rest = []
            for matrix, is_odd in zip(matrices, needs_rule, strict=True):
                if is_odd:
                    matrix.leave_to_rule(axis, step, settings)
                else:
                    rest.append(matrix)
            if rest:
                _turn_matrices(rest, axis, step, settings)
            return
        idle = [mask.flatten().nonzero()[:, 0] for mask in masks]
    for matrix, factor, idle_neurons in zip(matrices, _split(turns.factor, counts, across), idle, strict=True):
        _write(matrix, factor, idle_neurons, axis, scratch, settings)
    single = [part for matrix in matrices for part in matrix.parts or (matrix,)]
    counts = [matrix.average.shape[across] for matrix in single]
    torch._foreach_copy_([matrix.average for matrix in single], list(_split(turns.average, counts, across)))
    for matrix in single:
        assert matrix.own is not None
        job, view = matrix.own
        if job.buffer is not None:  # all gradients are finite
            job.buffer.lerp_(job.grad, 1 - settings.momentum)
        view.version = job.parameter._version


def _measure(matrices: Sequence[_Matrix], axis: int, step: float, settings: Settings, scratch: Tensor) -> _Turns:
    """Apply the rule to the statistics of all neurons, as one vector."""
    across = 1 - axis
    length = _join([norm_along(matrix.grad, axis, scratch) for matrix in matrices], across)
    before = _join([matrix.average for matrix in matrices], across)
    average = torch.hypot(before * math.sqrt(settings.beta), length * math.sqrt(1 - settings.beta))
    radii = _radii(matrices, across)
    radius: Tensor | float = 1.0 if radii is None else radii.abs()
    scale = radius if settings.scale is None else settings.scale
    correction = rule.bias_correction(step, settings.beta, length.dtype)
    factor = -float(settings.angle) * correction * scale / _bounded(average, length, correction, settings)
    return _Turns(length, average, factor, factor * length / radius)


def _all_ordinary(matrices: Sequence[_Matrix], turns: _Turns) -> bool:
    """Return whether every neuron is balanced, moves, and turns by so little that it stays far from zero."""
    low, high, left, right = torch.stack([*torch.aminmax(turns.length), *torch.aminmax(turns.angle)]).tolist()
    in_range = low > ORDINARY[0] and high < ORDINARY[1] and left > -MAX_ANGLE_RAD and right < MAX_ANGLE_RAD
    return in_range and all(matrix.off is None for matrix in matrices)


def _ordinary(matrices: Sequence[_Matrix], turns: _Turns, idle: Sequence[Tensor], across: int) -> Tensor:
    """Return a mask of the neurons that do not need the rule: idle ones, and balanced ones of ordinary turns."""
    in_range = (turns.length > ORDINARY[0]) & (turns.length < ORDINARY[1]) & (turns.angle.abs() < MAX_ANGLE_RAD)
    balanced = [
        torch.ones_like(mask) if matrix.off is None else mask | ~matrix.off
        for matrix, mask in zip(matrices, idle, strict=True)
    ]
    return (_join(list(idle), across) | in_range) & _join(balanced, across)


def _write(
    matrix: _Matrix, factor: Tensor, idle: Tensor | None, axis: int, scratch: Tensor, settings: Settings
) -> None:
    """Turn the weights of a matrix in place, piece by piece; neurons without a gradient keep their bits."""
    across = 1 - axis
    kept = None if idle is None else matrix.weight.index_select(across, idle)
    for weight, grad, by, radius in _pieces(across, matrix.weight, matrix.grad, factor, matrix.radius):
        weight.addcmul_(grad, by)
        if settings.fix_mean:
            total = sum_along(weight, axis)
            weight.sub_(total if radius is None else total.mul_(radius > 0), alpha=1 / weight.shape[axis])
        stretch = norm_along(weight, axis, scratch).clamp_min_(torch.finfo(weight.dtype).tiny).reciprocal_()
        if radius is not None:
            stretch.mul_(radius.abs())
            stretch = torch.where(radius < 0, stretch.clamp_max(1), stretch)  # those that started at zero may be short
        weight.mul_(stretch)
    if idle is not None and kept is not None:
        matrix.weight.index_copy_(across, idle, kept)
    if matrix.parts:
        weights = [part.weight for part in matrix.parts]
        sizes = [weight.shape[across] for weight in weights]
        torch._foreach_copy_(weights, list(matrix.weight.split_with_sizes(sizes, across)))


def _pieces(
    across: int, weight: Tensor, grad: Tensor, factor: Tensor, radius: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Cut a matrix between neurons into pieces that stay in cache."""
    total = weight.shape[across]
    count = min(total, -(-weight.numel() // PIECE_ELEMENTS))
    if count == 1:
        yield weight, grad, factor, radius
        return
    for start in range(0, total, most := -(-total // count)):
        cut = (across, start, min(most, total - start))
        part = None if radius is None else radius.narrow(*cut)
        yield weight.narrow(*cut), grad.narrow(*cut), factor.narrow(*cut), part


def _without_gradient(matrix: _Matrix, length: Tensor, axis: int) -> Tensor:
    """Return a mask of the neurons whose gradient is zero, not just its square."""
    without_gradient = length == 0
    return without_gradient if not bool(without_gradient.any()) else matrix.grad.abs().amax(axis, keepdim=True) == 0


def _split(joined: Tensor, counts: list[int], axis: int) -> Sequence[Tensor]:
    return [joined] if len(counts) == 1 else joined.split_with_sizes(counts, axis)


def _join(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
