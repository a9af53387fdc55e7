"""The rule on many tensors at once, in plain torch operations.

Gains and biases of all tensors are nudged as one long vector, and neurons in tensors of one shape
are turned as one stack. Large tensors on the CPU are not copied to a stack: there the statistics of
all neurons are one long vector, and weights are turned in place, in pieces that stay in cache, by
a short path for ordinary numbers. What is not ordinary (a gradient of 1e25 or NaN, a constant
neuron, a turn through half a radian) goes to the rule itself, which knows what to do.
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
from nero.backends.job import Job, Settings, apply_rule
from nero.balance import norm

#: Weights worked on at a time: with their gradients, 16 MB in float32.
PIECE = 1 << 22
#: Tensors of one shape are stacked up to this many entries, to be turned together.
STACK = 1 << 24
#: On the CPU, only tensors up to this size are.
SMALL = 1 << 10
#: Norms in this range have squares that float32 holds.
ORDINARY = (1e-15, 1e15)
#: Above this fan-in, the fast sums lose more precision than float32 should.
LONGEST = 1 << 15
#: Radians: a turn as wide as this is left to the rule.
WIDEST = 0.5


def step(jobs: Sequence[Job], settings: Settings) -> None:
    """Take one step with every job."""
    if not jobs:
        return
    torch._foreach_add_([job.state["step"] for job in jobs], 1)
    gains: list[Job] = []
    neurons: list[Job] = []
    for job in jobs:
        if job.grad.layout is not torch.strided:
            eager.finish(job, settings)
        else:
            (neurons if job.axes else gains).append(job)
    _nudge(gains, settings)
    _turn(neurons, settings)


def _nudge(jobs: Sequence[Job], settings: Settings) -> None:
    """Nudge all gains and biases as one vector for each device, precision and pull."""
    alike: dict[tuple[torch.device, torch.dtype, float], list[Job]] = {}
    for job in jobs:
        alike.setdefault((job.parameter.device, job.state["grad_norm"].dtype, job.pull), []).append(job)
    for (device, dtype, pull), batch in alike.items():
        states = [job.state for job in batch]
        sizes = [job.parameter.numel() for job in batch]
        # where waiting for the numbers costs nothing, look whether they are all the same
        spread = device.type != "cpu" or len({float(state["step"]) for state in states}) > 1
        owner = torch.repeat_interleave(
            torch.arange(len(batch), device=device), torch.tensor(sizes, device=device), output_size=sum(sizes)
        )
        update = rule.nudge(
            torch.cat([_flat(job.parameter) for job in batch]).to(dtype),
            torch.cat([_flat(job.grad) for job in batch]).to(dtype),
            torch.cat([_flat(state["grad_norm"]) for state in states]),
            torch.stack([state["step"] for state in states])[owner] if spread else states[0]["step"],
            lr=settings.lr,
            beta=settings.beta,
            scale=torch.stack([state["scale"] for state in states])[owner]
            if settings.scale is None
            else settings.scale,
            pull=pull,
        )
        _scatter([job.parameter for job in batch], update.parameter.split_with_sizes(sizes))
        _scatter([state["grad_norm"] for state in states], update.grad_norm.split_with_sizes(sizes))
        skipped = torch.zeros(len(batch), dtype=torch.int64, device=device).index_add_(0, owner, update.sat_out.long())
        torch._foreach_add_([state["skipped"] for state in states], list(skipped.unbind()))


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _scatter(targets: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    shaped = [
        part if target.dim() == 1 else part.view(target.shape) for target, part in zip(targets, parts, strict=True)
    ]
    torch._foreach_copy_(list(targets), shaped)


class _Sheet(NamedTuple):
    """Weights as a matrix, their neurons' entries along one axis of it; or a piece of one."""

    job: Job
    weight: Tensor
    grad: Tensor
    average: Tensor
    radius: Tensor | None
    loose: Tensor | None

    def piece(self, across: int, start: int, count: int) -> "_Sheet":
        """Some of the neurons."""
        cut = (across, start, count)
        return _Sheet(
            self.job,
            self.weight.narrow(*cut),
            self.grad.narrow(*cut),
            self.average.narrow(*cut),
            None if self.radius is None else self.radius.narrow(*cut),
            None if self.loose is None else self.loose.narrow(*cut),
        )

    def give_up(self, axis: int, settings: Settings) -> None:
        """Leave it to the rule."""
        own = {"grad_norm": self.average} | ({} if self.radius is None else {"radius": self.radius})
        eager.finish(Job(self.weight, self.grad, {**self.job.state, **own}, (axis,), self.job.pull), settings)
        _forms[self.job.state["grad_norm"]].version = None


def _turn(jobs: Sequence[Job], settings: Settings) -> None:
    here: list[Job] = []
    stackable: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        weight = job.parameter
        if weight.device.type == "cpu" and weight.numel() > SMALL:
            here.append(job)
        else:
            kind = (weight.device, weight.shape, job.axes, weight.dtype, job.grad.dtype)
            stackable.setdefault(kind, []).append(job)
    for alike in stackable.values():
        most = max(1, STACK // alike[0].parameter.numel())
        for start in range(0, len(alike), most):
            _turn_stack(alike[start : start + most], settings)
    if here:
        _turn_here(here, settings)


def _turn_stack(jobs: Sequence[Job], settings: Settings) -> None:
    """Turn tensors of one shape as one, by the rule: on an accelerator it is launches that cost."""
    states = [job.state for job in jobs]
    step = torch.stack([state["step"] for state in states])
    stacked = {
        "step": step.view(-1, *[1] * jobs[0].parameter.dim()),
        "grad_norm": torch.stack([state["grad_norm"] for state in states]),
    }
    if settings.fix_norm == "initial":
        stacked["radius"] = torch.stack([state["radius"] for state in states])
    weights = [job.parameter for job in jobs]
    axes = tuple(axis + 1 for axis in jobs[0].axes)
    job = Job(torch.stack(weights), torch.stack([job.grad for job in jobs]), stacked, axes, 0.0)
    update = apply_rule(job, settings)
    torch._foreach_copy_(weights, list(update.parameter.unbind()))
    torch._foreach_copy_([state["grad_norm"] for state in states], list(update.grad_norm.unbind()))
    skipped = update.sat_out.flatten(1).sum(1)
    torch._foreach_add_([state["skipped"] for state in states], list(skipped.unbind()))


def _turn_here(jobs: Sequence[Job], settings: Settings) -> None:
    """Turn large tensors on the CPU, where it is sweeps over memory that cost."""
    quick = bool(settings.fix_norm) and float(settings.lr) != 0
    alike: dict[tuple[float, int, torch.dtype], list[_Sheet]] = {}
    for job in jobs:
        sheet = _sheet(job, settings) if quick else None
        if sheet is None:
            eager.finish(job, settings)
        else:
            axis = job.axes[0] if job.parameter.dim() == 2 else 1
            kind = (float(job.state["step"]), axis, sheet.average.dtype)
            alike.setdefault(kind, []).extend(_pieces(sheet, 1 - axis))
    for (number, axis, _), sheets in alike.items():
        _turn_sheets(sheets, axis, number, settings)


def _pieces(sheet: _Sheet, across: int) -> Iterator[_Sheet]:
    """The sheet, cut between neurons if it would not stay in cache."""
    total, size = sheet.weight.shape[across], sheet.weight.numel()
    most = max(1, PIECE * total // size)
    if total <= most:
        yield sheet
        return
    for start in range(0, total, most):
        yield sheet.piece(across, start, min(most, total - start))


@dataclass(slots=True)
class _Form:
    """What the short path remembers of a tensor."""

    at: int
    weight: Tensor  # as a matrix
    order: list[int] | None  # of the axes that make it one
    version: int | None = None  # torch's count of the changes to the weights when last looked at
    loose: Tensor | None = None  # the neurons that were not balanced then


# by a tensor's running average, which lives and dies with the optimiser's state; a form must not refer to it
_forms: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _sheet(job: Job, settings: Settings) -> _Sheet | None:
    """The job as a sheet, if its neurons can take the short path."""
    average = job.state["grad_norm"]
    form: _Form | None = _forms.get(average)  # type: ignore[no-untyped-call]
    if form is None or form.at != job.parameter.data_ptr() or form.weight.numel() != job.parameter.numel():
        form = _form(job)
        if form is None:
            return None
        _forms[average] = form
    if job.grad.dtype != average.dtype:
        return None
    # what has not been touched since the last turn is still balanced, and need not be measured again
    if form.version != job.parameter._version:
        form.loose, form.version = _loose(job, settings), job.parameter._version
    if form.loose is not None and bool(form.loose.all()):
        return None
    radius = job.state["radius"] if settings.fix_norm == "initial" else None
    if form.order is None:
        return _Sheet(job, form.weight, job.grad, average, radius, form.loose)
    return _Sheet(
        job,
        form.weight,
        job.grad.permute(form.order).reshape(form.weight.shape),
        average.view(-1, 1),
        None if radius is None else radius.view(-1, 1),
        None if form.loose is None else form.loose.view(-1, 1),
    )


def _form(job: Job) -> _Form | None:
    """The weights as a matrix, if they are here, in full precision, of middling fan-in, and memory allows a view."""
    weight, average = job.parameter, job.state["grad_norm"]
    if weight.device.type != "cpu" or weight.dtype != average.dtype:
        return None
    if not 2 < weight.numel() // average.numel() <= LONGEST:
        return None
    if weight.dim() == 2:
        return _Form(weight.data_ptr(), weight, None)
    neurons = [axis for axis in range(weight.dim()) if axis not in job.axes]
    order = neurons + sorted(job.axes, key=weight.stride, reverse=True)
    try:
        view = weight.permute(order).view(average.numel(), -1)
    except RuntimeError:  # torch's way to say that no view will do
        return None
    return _Form(weight.data_ptr(), view, order)


def _loose(job: Job, settings: Settings) -> Tensor | None:
    """Which neurons are off the constraint set, if any."""
    weight, average = job.parameter, job.state["grad_norm"]
    radius = job.state["radius"] if settings.fix_norm == "initial" else 1.0
    rounding = 8 * torch.finfo(weight.dtype).eps
    loose = (norm(weight, job.axes) / radius - 1).abs() > rounding
    if settings.fix_mean:
        drift = weight.mean(job.axes, keepdim=True) * math.sqrt(weight.numel() // average.numel())
        loose |= drift.abs() > rounding * radius
    return loose if bool(loose.any()) else None


def _turn_sheets(sheets: list[_Sheet], axis: int, step: float, settings: Settings) -> None:
    """Turn balanced neurons, which run along one axis of their sheets and have made as many steps."""
    across = 1 - axis
    counts = [sheet.average.shape[across] for sheet in sheets]
    length = _join([_norm(sheet.grad, axis) for sheet in sheets], across)
    before = _join([sheet.average for sheet in sheets], across)
    average = torch.hypot(before * math.sqrt(settings.beta), length * math.sqrt(1 - settings.beta))
    radius: Tensor | float = 1.0
    if settings.fix_norm == "initial":
        radius = _join([sheet.radius for sheet in sheets if sheet.radius is not None], across)
    scale = radius if settings.scale is None else settings.scale
    factor = -float(settings.lr) * rule.bias_correction(step, settings.beta, length.dtype) * scale / average
    angle = (factor * length / radius).nan_to_num_(0.0)  # 0 / 0: a neuron that has never moved

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
                    sheet.give_up(axis, settings)
            rest = [sheet for sheet, is_odd in zip(sheets, odd, strict=True) if not is_odd]
            if rest:
                _turn_sheets(rest, axis, step, settings)
            return
        still = [each.flatten().nonzero()[:, 0] for each in resting]

    for sheet, each, idle in zip(sheets, _part(factor, counts, across), still, strict=True):
        weight = sheet.weight
        kept = None if idle is None else weight.index_select(across, idle)
        weight.addcmul_(sheet.grad, each)
        if settings.fix_mean:
            weight.sub_(_sum(weight, axis), alpha=1 / weight.shape[axis])
        stretch = _norm(weight, axis).clamp_min_(torch.finfo(weight.dtype).tiny).reciprocal_()
        weight.mul_(stretch if sheet.radius is None else stretch.mul_(sheet.radius))
        if idle is not None and kept is not None:
            weight.index_copy_(across, idle, kept)
        form = _forms[sheet.job.state["grad_norm"]]
        if form.version is not None:
            form.version = sheet.job.parameter._version
    torch._foreach_copy_([sheet.average for sheet in sheets], list(_part(average, counts, across)))


def _at_rest(sheet: _Sheet, length: Tensor, axis: int) -> Tensor:
    """The neurons whose gradient is zero; not those where only its square is."""
    at_rest = length == 0
    return at_rest if not bool(at_rest.any()) else sheet.grad.abs().amax(axis, keepdim=True) == 0


def _part(joined: Tensor, counts: list[int], axis: int) -> Sequence[Tensor]:
    return [joined] if len(counts) == 1 else joined.split_with_sizes(counts, axis)


def _join(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _norm(sheet: Tensor, axis: int) -> Tensor:
    if axis == 1:
        size: Tensor = torch.linalg.vector_norm(sheet, dim=1, keepdim=True)
        return size
    return _sum(sheet.square(), axis).sqrt_()


def _sum(sheet: Tensor, axis: int) -> Tensor:
    if axis == 1:
        return sheet.sum(1, keepdim=True)
    return torch.ones(1, sheet.shape[0], dtype=sheet.dtype).mm(sheet)
