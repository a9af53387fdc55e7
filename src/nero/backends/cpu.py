"""Neurons turned and gains nudged in place, on the CPU, by a short path for ordinary numbers.

The statistics of all neurons are one long vector, and weights are turned in pieces that stay in
cache. What is not ordinary (a gradient of 1e25 or NaN, a constant neuron, a turn through half a
radian, half precision) goes to the rule itself, which knows what to do.
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
from nero.balance import FixNorm, norm

#: Weights worked on at a time: with their gradients, 32 MB in float32.
PIECE = 1 << 22
#: Tensors up to this size are copied together, if they have the same fan-in, since each operation has its price.
SMALL = 1 << 16
#: Norms in this range have squares that float32 holds.
ORDINARY = (1e-15, 1e15)
#: Above this fan-in, the fast sums lose more precision than float32 should.
LONGEST = 1 << 15
#: Radians: a turn as wide as this is left to the rule.
WIDEST = 0.5


class _Sheet(NamedTuple):
    """Weights as a matrix, their neurons' entries along one axis of it; or several such as one."""

    weight: Tensor
    grad: Tensor
    average: Tensor
    radius: Tensor | None
    loose: Tensor | None
    job: Job | None
    parts: tuple["_Sheet", ...] = ()

    def give_up(self, axis: int, step: float, settings: Settings) -> None:
        """Leave it to the rule; if it is several, those of them that are odd."""
        if self.job is None:
            _turn_sheets(self.parts, axis, step, settings)
            return
        own = {"grad_norm": self.average} | ({} if self.radius is None else {"radius": self.radius})
        eager.finish(Job(self.weight, self.grad, {**self.job.state, **own}, (axis,), self.job.pull), settings)
        _forms[self.job.state["grad_norm"]].version = None


def turn(jobs: Sequence[Job], settings: Settings) -> None:
    """Turn the neurons of every job, whose steps are counted already."""
    with torch.autocast("cpu", enabled=False):  # some sums are matrix products, and must not become bf16's
        _turn(jobs, settings)


def _turn(jobs: Sequence[Job], settings: Settings) -> None:
    quick = bool(settings.fix_norm) and float(settings.lr) != 0
    alike: dict[tuple[float, int, torch.dtype], list[_Sheet]] = {}
    for job in jobs:
        sheet = _sheet(job, settings) if quick else None
        if sheet is None:
            eager.finish(job, settings)
        else:
            kind = (float(job.state["step"]), _forms[job.state["grad_norm"]].axis, sheet.average.dtype)
            alike.setdefault(kind, []).append(sheet)
    for (step, axis, _), sheets in alike.items():
        _turn_sheets(list(_gathered(sheets, 1 - axis)), axis, step, settings)


def nudge(jobs: Sequence[Job], settings: Settings) -> bool:
    """Nudge gains and biases whose steps are counted and equal; or, if any number is odd, change nothing."""
    averages, parameters = [job.state["grad_norm"] for job in jobs], [job.parameter for job in jobs]
    lr, dtype = float(settings.lr), averages[0].dtype
    if not 0 < abs(lr) < 1 or any(job.pull or job.parameter.dtype != dtype for job in jobs):
        return False
    grad = torch.cat([flat(job.grad) for job in jobs]).to(dtype)
    before = torch.cat([flat(average) for average in averages])
    average = before.square_().mul_(settings.beta).addcmul_(grad, grad, value=1 - settings.beta).sqrt_()
    scales = (
        torch.stack([job.state["scale"] for job in jobs])
        if settings.scale is None
        else before.new_tensor(settings.scale)
    )
    for numbers in (grad.abs(), average, scales):  # each by itself: a NaN compares as false
        low, high = torch.stack(torch.aminmax(numbers)).tolist()
        if not (low > ORDINARY[0] and high < ORDINARY[1]):
            return False
    correction = rule.bias_correction(float(jobs[0].state["step"]), settings.beta, dtype)
    sizes = [parameter.numel() for parameter in parameters]
    units = shaped(grad.div_(_bounded(average, grad, correction, settings)).split_with_sizes(sizes), parameters)
    torch._foreach_addcmul_(parameters, units, list(scales.expand(len(jobs)).unbind()), value=-lr * correction)
    torch._foreach_copy_(averages, shaped(average.split_with_sizes(sizes), averages))
    return True


def _bounded(average: Tensor, grad: Tensor, correction: float, settings: Settings) -> Tensor:
    """The average of gradients or of their norms, or so much more that no step is longer than the longest."""
    if settings.longest == math.inf:
        return average
    return torch.maximum(average, grad.abs() * (correction / settings.longest))


def _gathered(sheets: Sequence[_Sheet], across: int) -> Iterator[_Sheet]:
    """The sheets, small ones of the same fan-in together."""
    small: dict[int, list[_Sheet]] = {}
    for sheet in sheets:
        if sheet.weight.numel() > SMALL:
            yield sheet
        else:
            small.setdefault(sheet.weight.shape[1 - across], []).append(sheet)
    for alike in small.values():
        yield alike[0] if len(alike) == 1 else _together(alike, across)


def _together(sheets: Sequence[_Sheet], across: int) -> _Sheet:
    radii = [sheet.radius for sheet in sheets if sheet.radius is not None]
    loose = [
        torch.zeros_like(sheet.average, dtype=torch.bool) if sheet.loose is None else sheet.loose for sheet in sheets
    ]
    return _Sheet(
        torch.cat([sheet.weight for sheet in sheets], across),
        torch.cat([sheet.grad for sheet in sheets], across),
        torch.cat([sheet.average for sheet in sheets], across),
        torch.cat(radii, across) if radii else None,
        None if all(sheet.loose is None for sheet in sheets) else torch.cat(loose, across),
        None,
        tuple(sheets),
    )


@dataclass(slots=True)
class _Form:
    """What the short path remembers of a tensor; it holds its memory, so that no other can get its place."""

    at: tuple[int, tuple[int, ...]]  # where the weights are, and their strides
    weight: Tensor  # as a matrix
    axis: int  # of its fan-in
    order: list[int] | None  # of the axes that make it a matrix
    version: int | None = None  # torch's count of the changes to the weights when last looked at
    held: tuple[bool, FixNorm] | None = None  # to which constraints
    loose: Tensor | None = None  # the neurons that were not balanced then


# by a tensor's running average, which lives and dies with the optimiser's state; a form must not refer to it
_forms: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _sheet(job: Job, settings: Settings) -> _Sheet | None:
    """The job as a sheet, if its neurons can take the short path."""
    average = job.state["grad_norm"]
    form: _Form | None = _forms.get(average)  # type: ignore[no-untyped-call]
    if form is None or form.at != (job.parameter.data_ptr(), job.parameter.stride()):
        form = _form(job)
        if form is None:
            return None
        _forms[average] = form
    if job.grad.dtype != average.dtype:
        return None
    radius = None
    if settings.fix_norm == "initial":
        radius = job.state["radius"]
        low, high = torch.stack(torch.aminmax(radius)).tolist()
        if not (low > ORDINARY[0] and high < ORDINARY[1]):
            return None
    # what has not been touched since the last turn is still balanced, and need not be measured again
    held = (settings.fix_mean, settings.fix_norm)
    if form.version != job.parameter._version or form.held != held:
        form.loose, form.held, form.version = _loose(job, settings), held, job.parameter._version
    if form.loose is not None and bool(form.loose.all()):
        return None
    if form.order is None:
        return _Sheet(form.weight, job.grad, average, radius, form.loose, job)
    return _Sheet(
        form.weight,
        job.grad.permute(form.order).reshape(form.weight.shape),
        average.view(-1, 1),
        None if radius is None else radius.view(-1, 1),
        None if form.loose is None else form.loose.view(-1, 1),
        job,
    )


def _form(job: Job) -> _Form | None:
    """The weights as a matrix, if they are in full precision, of middling fan-in, and memory allows a view."""
    weight, average = job.parameter, job.state["grad_norm"]
    if weight.dtype != average.dtype or not 2 < weight.numel() // average.numel() <= LONGEST:
        return None
    at = (weight.data_ptr(), weight.stride())
    if weight.dim() == 2 and len(job.axes) == 1:
        return _Form(at, weight.detach(), job.axes[0], None)
    neurons = [axis for axis in range(weight.dim()) if axis not in job.axes]
    order = neurons + sorted(job.axes, key=weight.stride, reverse=True)
    try:
        view = weight.detach().permute(order).view(average.numel(), -1)
    except RuntimeError:  # torch's way to say that no view will do
        return None
    return _Form(at, view, 1, order)


def _loose(job: Job, settings: Settings) -> Tensor | None:
    """Which neurons are off the constraint set, if any."""
    weight, average = job.parameter, job.state["grad_norm"]
    radius = job.state["radius"] if settings.fix_norm == "initial" else 1.0
    rounding = 8 * torch.finfo(weight.dtype).eps
    loose = ~((norm(weight, job.axes) / radius - 1).abs() <= rounding)
    if settings.fix_mean:
        drift = weight.mean(job.axes, keepdim=True) * math.sqrt(weight.numel() // average.numel())
        loose |= drift.abs() > rounding * radius
    return loose if bool(loose.any()) else None


def _turn_sheets(sheets: Sequence[_Sheet], axis: int, step: float, settings: Settings) -> None:
    """Turn balanced neurons, which run along one axis of their sheets and have made as many steps."""
    across = 1 - axis
    counts = [sheet.average.shape[across] for sheet in sheets]
    largest = max(sheet.weight.numel() for sheet in sheets) if axis == 0 else 0
    scratch = sheets[0].weight.new_empty(largest)
    length = _join([_norm(sheet.grad, axis, scratch) for sheet in sheets], across)
    before = _join([sheet.average for sheet in sheets], across)
    average = torch.hypot(before * math.sqrt(settings.beta), length * math.sqrt(1 - settings.beta))
    radius: Tensor | float = 1.0
    if settings.fix_norm == "initial":
        radius = _join([sheet.radius for sheet in sheets if sheet.radius is not None], across)
    scale = radius if settings.scale is None else settings.scale
    correction = rule.bias_correction(step, settings.beta, length.dtype)
    factor = -float(settings.lr) * correction * scale / _bounded(average, length, correction, settings)
    angle = factor * length / radius  # NaN, and so not ordinary, for a neuron that has never moved and for a bad lr

    low, high, left, right = torch.stack([*torch.aminmax(length), *torch.aminmax(angle)]).tolist()
    still: Sequence[Tensor | None] = [None] * len(sheets)
    all_tight = all(sheet.loose is None for sheet in sheets)
    # a turn through less than WIDEST cannot bring a balanced neuron near the origin, nor near a constant
    if not (all_tight and low > ORDINARY[0] and high < ORDINARY[1] and left > -WIDEST and right < WIDEST):
        resting = [
            _at_rest(sheet, each, axis) for sheet, each in zip(sheets, _part(length, counts, across), strict=True)
        ]
        at_rest = _join(resting, across)
        plain = at_rest | ((length > ORDINARY[0]) & (length < ORDINARY[1]) & (angle.abs() < WIDEST))
        if not all_tight:
            tight = [
                torch.ones_like(each) if sheet.loose is None else each | ~sheet.loose
                for sheet, each in zip(sheets, resting, strict=True)
            ]
            plain &= _join(tight, across)
        odd = [not bool(each.all()) for each in _part(plain, counts, across)]
        if any(odd):
            for sheet, is_odd in zip(sheets, odd, strict=True):
                if is_odd:
                    sheet.give_up(axis, step, settings)
            rest = [sheet for sheet, is_odd in zip(sheets, odd, strict=True) if not is_odd]
            if rest:
                _turn_sheets(rest, axis, step, settings)
            return
        still = [each.flatten().nonzero()[:, 0] for each in resting]

    for sheet, each, idle in zip(sheets, _part(factor, counts, across), still, strict=True):
        kept = None if idle is None else sheet.weight.index_select(across, idle)
        for weight, grad, by, held in _pieces(across, sheet.weight, sheet.grad, each, sheet.radius):
            weight.addcmul_(grad, by)
            if settings.fix_mean:
                weight.sub_(_sum(weight, axis), alpha=1 / weight.shape[axis])
            stretch = _norm(weight, axis, scratch).clamp_min_(torch.finfo(weight.dtype).tiny).reciprocal_()
            weight.mul_(stretch if held is None else stretch.mul_(held))
        if idle is not None and kept is not None:
            sheet.weight.index_copy_(across, idle, kept)
        if sheet.parts:
            here = [part.weight for part in sheet.parts]
            torch._foreach_copy_(
                here, list(sheet.weight.split_with_sizes([each.shape[across] for each in here], across))
            )

    single = [part for sheet in sheets for part in sheet.parts or (sheet,)]
    counts = [sheet.average.shape[across] for sheet in single]
    torch._foreach_copy_([sheet.average for sheet in single], list(_part(average, counts, across)))
    for sheet in single:
        assert sheet.job is not None
        _forms[sheet.job.state["grad_norm"]].version = sheet.job.parameter._version


def _pieces(
    across: int, weight: Tensor, grad: Tensor, factor: Tensor, radius: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """A sheet cut between its neurons into equal pieces that stay in cache."""
    total = weight.shape[across]
    count = min(total, -(-weight.numel() // PIECE))
    if count == 1:
        yield weight, grad, factor, radius
        return
    for start in range(0, total, most := -(-total // count)):
        cut = (across, start, min(most, total - start))
        part = None if radius is None else radius.narrow(*cut)
        yield weight.narrow(*cut), grad.narrow(*cut), factor.narrow(*cut), part


def _at_rest(sheet: _Sheet, length: Tensor, axis: int) -> Tensor:
    """The neurons whose gradient is zero; not those where only its square is."""
    at_rest = length == 0
    return at_rest if not bool(at_rest.any()) else sheet.grad.abs().amax(axis, keepdim=True) == 0


def _part(joined: Tensor, counts: list[int], axis: int) -> Sequence[Tensor]:
    return [joined] if len(counts) == 1 else joined.split_with_sizes(counts, axis)


def _join(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _norm(sheet: Tensor, axis: int, scratch: Tensor) -> Tensor:
    if axis == 1:
        size: Tensor = torch.linalg.vector_norm(sheet, dim=1, keepdim=True)
        return size
    # torch's own norm is not vectorised down columns; a product with ones is
    return _sum(torch.mul(sheet, sheet, out=scratch[: sheet.numel()].view(sheet.shape)), axis).sqrt_()


def _sum(sheet: Tensor, axis: int) -> Tensor:
    if axis == 1:
        return sheet.sum(1, keepdim=True)
    return torch.mm(torch.ones(1, sheet.shape[0], dtype=sheet.dtype, device=sheet.device), sheet)
