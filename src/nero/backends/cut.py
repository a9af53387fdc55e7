"""The step of neurons that are cut: their elements are on different processes.

Five sums over a neuron's elements (Σw, Σg, Σw², Σg² and Σwg) determine its turn. The processes add them up, for all
tensors in one all-reduce; everything else is local. With momentum, the direction of the step takes the place of g. A
neuron whose gradient is not finite on another process must keep its buffer, so buffers are written after the reduction.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero import rule
from nero.backends.job import Cut, Job, Settings
from nero.rounding import rounded

#: The longest local part of a neuron whose sums in float32 are precise enough.
MAX_QUICK_ELEMENTS = 4096
#: Elements per piece on a CPU: with their gradients, 256 KiB in float32.
PIECE_ELEMENTS = 1 << 15
#: Sums of squares in this range neither overflow nor underflow in float32.
ORDINARY = (1e-30, 1e30)
#: The smallest share of a neuron's squared norm, after its mean is removed, that sums in float64 resolve.
MIN_LEFT = 1e-13


class Work(NamedTuple):
    """A job on the local part of a parameter whose neurons are cut, and the compiled loops for it, if any."""

    job: Job
    settings: Settings
    cut: Cut
    loops: Any = None


def step(works: Sequence[Work]) -> None:
    """Step every job, with one reduction for all jobs that are cut over the same processes."""
    batches: dict[Hashable, list[Work]] = {}
    for work in works:
        batches.setdefault((work.cut.reduce, work.job.parameter.device), []).append(work)
    for batch in batches.values():
        alike: dict[Hashable, list[Work]] = {}
        for work in batch:
            state = work.job.state
            kind = (id(work.settings), work.cut.fan_in, state["grad_norm"].dtype, "radius" in state)
            alike.setdefault(kind, []).append(work)
        reduce: Callable[[Tensor], Tensor] = batch[0].cut.reduce
        totals = reduce(torch.cat([local_sums(work).flatten(1) for own in alike.values() for work in own], 1))
        sizes = [sum(work.job.state["grad_norm"].numel() for work in own) for own in alike.values()]
        for own, sums in zip(alike.values(), totals.split_with_sizes(sizes, 1), strict=True):
            _turn(own, sums)


def local_sums(work: Work) -> Tensor:
    """Return Σw, Σg, Σw², Σg² and Σwg over the local elements of each neuron, in float64."""
    work = _directed(work)
    job, _, cut, loops = work
    w, g = job.parameter, job.grad
    if (arrays := _arrays(work)) is not None:
        five = torch.empty(5, *job.state["grad_norm"].shape, dtype=torch.float64, device=w.device)
        loops.sum_rows(*arrays, five.view(5, -1).numpy())
        return five if _is_precise(five, job) else _sums(w.double(), g.double(), job.axes)
    axes = job.axes if cut.owners is None else tuple(axis - 1 for axis in job.axes if axis > 1)
    wide = rule.statistics_dtype(w.dtype)
    is_quick = w.is_cpu and wide == torch.float32 and w.numel() <= MAX_QUICK_ELEMENTS * job.state["grad_norm"].numel()
    quick = _sums(w.to(wide), g.to(wide), axes) if is_quick else None
    five = quick if quick is not None and _is_precise(quick, job) else _sums(w.double(), g.double(), axes)
    if cut.owners is None:
        return five.double()
    groups = job.state["grad_norm"].shape[0]
    total = five.new_zeros(5, groups, *five.shape[2:], dtype=torch.float64)
    total.index_add_(1, cut.owners.to(five.device), five.double())
    return total.view(5, *job.state["grad_norm"].shape)


def _directed(work: Work) -> Work:
    """Put the direction of the step in place of the gradient. Computed anew for each use, to save memory."""
    job = work.job
    if job.buffer is None:
        return work
    wide = rule.statistics_dtype(job.buffer.dtype)
    direction = torch.lerp(job.buffer.to(wide), job.grad.to(wide), 1 - work.settings.kept_by_step)
    return work._replace(job=job._replace(grad=direction))


def _sums(w: Tensor, g: Tensor, axes: tuple[int, ...]) -> Tensor:
    rows = _rows_per_piece(w)
    if w.is_cpu and 0 not in axes and rows < w.shape[0]:
        return torch.cat([_sums(*pair, axes) for pair in zip(_pieces(w, rows), _pieces(g, rows), strict=True)], 1)
    if not axes:
        return torch.stack([w, g, w * w, g * g, w * g])
    squares = [torch.linalg.vector_norm(each, dim=axes, keepdim=True).square_() for each in (w, g)]
    return torch.stack([w.sum(axes, True), g.sum(axes, True), *squares, (w * g).sum(axes, True)])


def _is_precise(five: Tensor, job: Job) -> bool:
    """Return whether float32 sums are precise: they are in range, and no neuron is nearly constant."""
    w, _, ww, *_ = five
    if not five.numel() or not job.parameter.numel():
        return True
    low, high = torch.stack(torch.aminmax(five[2:4])).tolist()  # NaN compares as false
    elements = job.parameter.numel() // ww.numel()
    return low > ORDINARY[0] and high < ORDINARY[1] and bool((w.square() <= 0.5 * elements * ww).all())


def _turn(works: Sequence[Work], sums: Tensor) -> None:
    """Turn the local parts of neurons, given the sums over all of their elements. See :func:`nero.rule.turn`.

    The neurons of all works form one vector: a device would take long to launch so many operations for each.
    """
    settings, fan_in = works[0].settings, works[0].cut.fan_in
    states = [work.job.state for work in works]
    counts = [state["grad_norm"].numel() for state in states]
    torch._foreach_add_([state["step"] for state in states], 1)
    steps = torch.cat([state["step"].expand(count) for state, count in zip(states, counts, strict=True)])
    grad_norm = torch.cat([state["grad_norm"].flatten() for state in states])
    w_sum, g_sum, ww, gg, wg = sums
    length = gg.sqrt().to(grad_norm.dtype)
    least = rule.least_length(works[0].job.buffer, length.dtype)
    average = rule.running_average(grad_norm, length, steps, settings.beta, settings.longest, least)
    radius: rule.Number = 1.0
    if "radius" in states[0]:
        radius = torch.cat([state["radius"].flatten() for state in states]).double()
    scale = rule.default_scale(ww.sqrt(), radius) if settings.scale is None else torch.full_like(ww, settings.scale)
    factor = torch.where(average.moving, settings.angle * scale / average.divisor, 0.0)

    # w <- w - mean(w); w <- w / |w|
    square = ww - 2 * factor * wg + factor * factor * gg
    mean = torch.zeros_like(square)
    if settings.fix_mean and fan_in != 2:
        mean = rule.held((w_sum - factor * g_sum) / fan_in, radius)
    left = square - fan_in * mean * mean
    possible = (left > max(rule.least_share(grad_norm.dtype), MIN_LEFT) * square) & left.isfinite()
    stretch = torch.ones_like(left)
    if settings.fix_norm:
        stretch = rule.stretch(torch.where(possible, left, 1.0).sqrt(), radius)

    moving = average.moving & possible & (settings.angle != 0)
    turns = [each.to(grad_norm.dtype) for each in (stretch, -factor * stretch, -mean * stretch)]
    results = (each.split_with_sizes(counts) for each in (*turns, moving, average.grad_norm, average.skipped))
    for work, state, *own in zip(works, states, *results, strict=True):
        *numbers, new_grad_norm, skipped = (each.view(state["grad_norm"].shape) for each in own)
        _write(_directed(work), numbers[:3], numbers[3])
        _advance(work, skipped)
        state["grad_norm"].copy_(new_grad_norm)
        state["skipped"].add_(skipped.sum())


def _write(work: Work, numbers: Sequence[Tensor], moving: Tensor) -> None:
    """Set w <- stretch * w + along * g + shift, where the neuron moves."""
    job, owners = work.job, work.cut.owners
    if not job.parameter.numel():
        return
    if owners is not None:
        *numbers, moving = (each.squeeze(1)[owners.to(each.device)] for each in (*numbers, moving))
    stretch, along, shift = numbers
    if job.parameter.is_cpu and job.parameter.dtype == job.grad.dtype == stretch.dtype and bool(moving.all()):
        _write_in_place(work, stretch, along, shift)
        return
    w = job.parameter.to(stretch.dtype)
    new = torch.addcmul(shift, w, stretch).addcmul_(job.grad.to(stretch.dtype), along)
    new = rounded(torch.where(moving, new, w), job.parameter.dtype, work.settings.rounding, work.settings.generator)
    job.parameter.copy_(new)


def _advance(work: Work, skipped: Tensor) -> None:
    """Update the momentum of the local elements, but of neurons that skip the step."""
    job, owners = work.job, work.cut.owners
    if job.buffer is None or not job.buffer.numel():
        return
    if owners is not None:
        skipped = skipped.squeeze(1)[owners.to(skipped.device)]
    new = 1 - work.settings.momentum
    wide = rule.statistics_dtype(job.buffer.dtype)
    if job.buffer.is_cpu and job.buffer.dtype == job.grad.dtype == wide and not bool(skipped.any()):
        job.buffer.lerp_(job.grad, new)
        return
    before = job.buffer.to(wide)
    moved = torch.where(skipped, before, torch.lerp(before, job.grad.to(wide), new))
    job.buffer.copy_(rounded(moved, job.buffer.dtype, work.settings.rounding, work.settings.generator))


def _write_in_place(work: Work, stretch: Tensor, along: Tensor, shift: Tensor) -> None:
    """Turn all neurons on a CPU, piece by piece."""
    weight, grad = work.job.parameter, work.job.grad
    if (arrays := _arrays(work)) is not None:
        numbers = (each.flatten().numpy() for each in (stretch, along, shift))
        work.loops.write_rows(*arrays, *numbers)
        torch.autograd.graph.increment_version(weight)  # torch did not see the loops write
        return
    tensors = (weight, stretch, grad, along, shift)
    for w, by, g, times, plus in zip(*(_pieces(each, _rows_per_piece(weight)) for each in tensors), strict=True):
        w.mul_(by).addcmul_(g, times).add_(plus)


def _arrays(work: Work) -> Any:
    """Return weights and gradient as matrices for the compiled loops; ``None`` if the loops cannot take them."""
    weight, grad = work.job.parameter, work.job.grad
    is_by_row = work.job.axes == tuple(range(1, weight.dim())) and work.cut.owners is None
    if work.loops is None or not is_by_row or not weight.is_cpu or weight.dtype not in (torch.float32, torch.float64):
        return None
    if grad.dtype != weight.dtype or not (weight.is_contiguous() and grad.is_contiguous()):
        return None
    return tuple(each.detach().view(weight.shape[0], -1).numpy() for each in (weight, grad))


def _pieces(tensor: Tensor, rows: int) -> Sequence[Tensor]:
    return tensor.split_with_sizes([min(rows, tensor.shape[0] - start) for start in range(0, tensor.shape[0], rows)])


def _rows_per_piece(tensor: Tensor) -> int:
    """Return how many rows of a tensor make a piece that fits in a CPU's cache."""
    return max(1, PIECE_ELEMENTS * tensor.shape[0] // max(1, tensor.numel()))
