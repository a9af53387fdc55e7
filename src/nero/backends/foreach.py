"""The rule on many tensors at once, in plain torch operations.

Gains and biases of all tensors are nudged as one long vector. On an accelerator, where launches are
expensive, neurons of equal shape are stacked and turned together. On the CPU, where memory traffic is
expensive, they are turned in place (:mod:`nero.backends.foreach_cpu`).
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nero import rule
from nero.backends import eager
from nero.backends.job import Job, Settings, flat, shaped
from nero.rounding import rounded

#: Tensors of one shape are stacked up to this many elements.
MAX_STACK_ELEMENTS = 1 << 24


def step(jobs: Sequence[Job], settings: Settings) -> None:
    """Step every job."""
    torch._foreach_add_([job.state["step"] for job in jobs], 1)
    gains: list[Job] = []
    neurons: list[Job] = []
    for job in jobs:
        wrapped: bool = is_traceable_wrapper_subclass(job.parameter)
        if job.grad.layout is not torch.strided or wrapped:
            eager.finish(job, settings)  # sparse, or a subclass
        else:
            (neurons if job.axes else gains).append(job)
    _nudge(gains, settings)
    _turn(neurons, settings)


def _nudge(jobs: Sequence[Job], settings: Settings) -> None:
    """Nudge all gains and biases as one vector per device, dtype and pull."""
    by_kind: dict[tuple[torch.device, torch.dtype, torch.dtype, float], list[Job]] = {}
    for job in jobs:
        kind = (job.parameter.device, job.parameter.dtype, job.state["grad_norm"].dtype, job.pull)
        by_kind.setdefault(kind, []).append(job)
    for (device, own, dtype, pull), batch in by_kind.items():
        states = [job.state for job in batch]
        sizes = [job.parameter.numel() for job in batch]
        # reading the steps is free on a CPU; elsewhere it would wait for the device
        same_step = device.type == "cpu" and len({float(state["step"]) for state in states}) == 1
        if same_step and _cpu().nudge(batch, settings):
            continue
        # made on the device: a CUDA graph could not copy the sizes from the host
        indices = torch.arange(len(batch), device=device).unbind()
        owner = torch.cat([index.expand(size) for index, size in zip(indices, sizes, strict=True)])
        update = rule.nudge(
            torch.cat([flat(job.parameter) for job in batch]).to(dtype),
            torch.cat([flat(job.grad) for job in batch]).to(dtype),
            torch.cat([flat(state["grad_norm"]) for state in states]),
            states[0]["step"] if same_step else torch.stack([state["step"] for state in states])[owner],
            lr=settings.angle,
            beta=settings.beta,
            longest=settings.longest,
            scale=torch.stack([state["scale"] for state in states])[owner]
            if settings.scale is None
            else settings.scale,
            pull=pull,
            momentum=_momentum(batch, settings),
        )
        averages, parameters = [state["grad_norm"] for state in states], [job.parameter for job in batch]
        targets = [(parameters, update.parameter)]
        if update.momentum_buffer is not None:
            targets.append(([job.buffer for job in batch if job.buffer is not None], update.momentum_buffer))
        for tensors, values in targets:
            parts = rounded(values, own, settings.rounding, settings.generator).split_with_sizes(sizes)
            torch._foreach_copy_(tensors, shaped(parts, tensors))
        torch._foreach_copy_(averages, shaped(update.grad_norm.split_with_sizes(sizes), averages))
        if device.type != "cpu" or bool(update.skipped.any()):  # elsewhere reading the mask would wait
            skipped = torch.zeros(len(batch), dtype=torch.int64, device=device)
            skipped.index_add_(0, owner, update.skipped.long())
            torch._foreach_add_([state["skipped"] for state in states], list(skipped.unbind()))


def _cpu() -> ModuleType:
    from nero.backends import foreach_cpu  # a GPU does not need it

    return foreach_cpu


def _momentum(jobs: Sequence[Job], settings: Settings) -> rule.Momentum | None:
    """Return the momentum of gains and biases as one vector; ``None`` without momentum."""
    buffers = [flat(job.buffer) for job in jobs if job.buffer is not None]
    return rule.Momentum(torch.cat(buffers), settings.momentum, settings.kept_by_step) if buffers else None


def _turn(jobs: Sequence[Job], settings: Settings) -> None:
    if on_cpu := [job for job in jobs if job.parameter.is_cpu]:
        _cpu().turn(on_cpu, settings)
    _turn_stacks([job for job in jobs if not job.parameter.is_cpu], settings)


def _turn_stacks(jobs: Sequence[Job], settings: Settings) -> None:
    stackable: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        weight = job.parameter
        kind = (weight.device, weight.shape, job.axes, weight.dtype, job.grad.dtype, "radius" in job.state)
        stackable.setdefault(kind, []).append(job)
    for stack in stackable.values():
        most = max(1, MAX_STACK_ELEMENTS // stack[0].parameter.numel())
        for start in range(0, len(stack), most):
            _turn_stack(stack[start : start + most], settings)


def _turn_stack(jobs: Sequence[Job], settings: Settings) -> None:
    """Turn tensors of one shape as one stack."""
    states = [job.state for job in jobs]
    step = torch.stack([state["step"] for state in states])
    stacked = {
        "step": step.view(-1, *[1] * jobs[0].parameter.dim()),
        "grad_norm": _stacked([state["grad_norm"] for state in states]),
    }
    if "radius" in states[0]:
        stacked["radius"] = _stacked([state["radius"] for state in states])
    weights, buffers = [job.parameter for job in jobs], [job.buffer for job in jobs if job.buffer is not None]
    axes = tuple(axis + 1 for axis in jobs[0].axes)
    buffer = _stacked(buffers) if buffers else None
    job = Job(_stacked(weights), _stacked([job.grad for job in jobs]), stacked, axes, 0.0, buffer)
    # float64 weights would need a wider dtype, and Apple's and some of Intel's GPUs have no float64
    is_single = states[0]["grad_norm"].dtype == torch.float32 and weights[0].device.type in ("cuda", "cpu")
    update = _turned_in_double(job, settings) if is_single else eager.apply_rule(job, settings)
    targets = [(weights, update.parameter)]
    if update.momentum_buffer is not None:
        targets.append((buffers, update.momentum_buffer))
    for tensors, values in targets:
        parts = rounded(values, tensors[0].dtype, settings.rounding, settings.generator)
        torch._foreach_copy_(tensors, list(parts.unbind()))
    torch._foreach_copy_([state["grad_norm"] for state in states], list(update.grad_norm.unbind()))
    skipped = update.skipped.flatten(1).sum(1)
    torch._foreach_add_([state["skipped"] for state in states], list(skipped.unbind()))


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _turned_in_double(job: Job, settings: Settings) -> rule.Update:
    """Apply :func:`nero.rule.turn` to float32 or narrower weights, in fewer passes over the elements.

    In float64 no square of a float32 leaves the range, so elements need not be divided by the largest first, and the
    norm after the step follows from that before its mean is subtracted.
    """
    w, state, axes, lr = job.parameter, job.state, job.axes, settings.angle
    radius, momentum = state.get("radius", 1.0), job.momentum(settings)
    u, moved = rule.direction(job.grad if momentum is None else job.grad.float(), momentum)
    length, least = _norm(u, axes).float(), rule.least_length(momentum, torch.float32)
    average = rule.running_average(state["grad_norm"], length, state["step"], settings.beta, settings.longest, least)

    # w <- w - η |w| / ḡ · u
    scale = rule.default_scale(_norm(w, axes), radius) if settings.scale is None else settings.scale
    turned = torch.addcmul(w, u, -(lr * scale) / average.divisor.double())

    # w <- w - mean(w); w <- w / |w|
    left = square = _norm(turned, axes).square()
    possible, mean = (square > 0) & square.isfinite(), torch.zeros_like(square)
    fan_in = w.numel() // square.numel()
    if settings.fix_mean and fan_in != 2:
        mean = rule.held(turned.mean(axes, keepdim=True), radius)
        left = square - fan_in * mean.square()
        possible &= left > rule.least_share(torch.float32) * square
    if settings.fix_norm:
        stretch = rule.stretch(torch.where(possible, left, 1.0).sqrt(), radius)
    else:
        stretch = torch.ones_like(mean)
        possible &= square.sqrt() < torch.finfo(torch.float32).max / 2
    projected = torch.empty_like(turned, dtype=torch.float32)
    torch.addcmul(-mean * stretch, turned, stretch, out=projected)
    weights = torch.where(average.moving & possible & (lr != 0), projected, w)
    return rule.Update(weights, average.grad_norm, average.skipped, rule.kept_buffer(momentum, moved, average.skipped))


def _norm(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=axes, keepdim=True, dtype=torch.float64)
    return norms
