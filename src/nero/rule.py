"""The rule of Nero (Algorithm 1 of the paper) on one tensor.

:func:`turn` updates neurons, :func:`nudge` updates gains and biases, :func:`project` is the constraint
set. All functions are pure: they return new tensors. They are tested against an oracle written from the
paper, as is every backend.

The paper's symbols: w, b the parameter; g its gradient; ḡ ``grad_norm``, the running root mean square
of the gradient's norm; η ``lr``; β ``beta``; σ ``scale``; t ``step``.

Momentum is not in the paper: m ``momentum_buffer``; μ ``momentum``; u the direction of a step, which takes
the place of g in Algorithm 1. Without momentum u is g.
"""

import math
from typing import NamedTuple, TypeAlias, overload

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor

#: The scale of a parameter that starts at zero: the paper's default for biases.
SCALE_AT_ORIGIN = 0.01


class Update(NamedTuple):
    """The result of a step: the parameter, ḡ, a mask of the updates that were skipped, and m if there is momentum."""

    parameter: Tensor
    grad_norm: Tensor
    skipped: Tensor
    momentum_buffer: Tensor | None = None


class Momentum(NamedTuple):
    """The momentum of a step: m, before the step and not changed by it, and how much the step keeps of it.

    Attributes:
        buffer: m, shaped as the parameter.
        kept: the share of m that the new m keeps: μ.
        kept_by_step: the share of m in the direction of the step: μ, or μ² for Nesterov's momentum.
    """

    buffer: Tensor
    kept: float
    kept_by_step: float


class Average(NamedTuple):
    """The running average after a gradient: ḡ, the divisor of the gradient, and two masks."""

    grad_norm: Tensor
    divisor: Tensor
    moving: Tensor
    skipped: Tensor


class Projection(NamedTuple):
    """A projected tensor, and a mask of the neurons that have a projection."""

    tensor: Tensor
    possible: Tensor


def turn(
    w: Tensor,
    g: Tensor,
    grad_norm: Tensor,
    step: Number,
    *,
    axes: tuple[int, ...],
    lr: Number,
    beta: float,
    longest: float = math.inf,
    fix_mean: bool = True,
    fix_norm: bool = True,
    scale: Number | None = None,
    radius: Number = 1.0,
    momentum: Momentum | None = None,
) -> Update:
    """Turn every neuron of a tensor through an angle of about ``lr``, then project it.

    Args:
        w: the weights.
        g: their gradient.
        grad_norm: ḡ, one number per neuron, shaped as ``w`` with 1 along the fan-in axes.
        step: t, the number of this step, from 1.
        axes: the fan-in axes.
        lr: η; negative to ascend; zero leaves the weights unchanged.
        beta: β.
        longest: the longest step, as a multiple of ``lr``.
        fix_mean: subtract each neuron's mean.
        fix_norm: set each neuron's norm to ``radius``.
        scale: σ; by default each neuron's norm.
        radius: the norm of a balanced neuron. Where it is negative, the neuron started at zero: its mean is free, its
            norm is at most ``-radius``, and that is also its σ by default.
        momentum: m and μ, if there is momentum; see :func:`direction`.

    Returns:
        The weights and m in the dtype of ``grad_norm``, ḡ, and the neurons skipped for a non-finite gradient.
    """
    w, g = w.to(grad_norm.dtype), g.to(grad_norm.dtype)
    u, moved = direction(g, momentum)
    average = running_average(grad_norm, norm(u, axes), step, beta, longest, least_length(momentum, u.dtype))

    # w <- w - η |w| / ḡ · u
    if scale is None:
        scale = default_scale(norm(w, axes), radius)
    turned = w - lr * scale * torch.where(average.moving, u / average.divisor, 0.0)

    # w <- w - mean(w); w <- w / |w|
    projected, possible = project(turned, axes, fix_mean=fix_mean, fix_norm=fix_norm, radius=radius)
    moving = average.moving & possible & (lr != 0)
    weights = torch.where(moving, projected, w)
    return Update(weights, average.grad_norm, average.skipped, kept_buffer(momentum, moved, average.skipped))


def nudge(
    b: Tensor,
    g: Tensor,
    grad_norm: Tensor,
    step: Number,
    *,
    lr: Number,
    beta: float,
    scale: Number,
    longest: float = math.inf,
    pull: Number = 0.0,
    momentum: Momentum | None = None,
) -> Update:
    """Move every gain or bias of a tensor by about ``lr * scale``.

    Args:
        b: the gains or biases.
        g: their gradient.
        grad_norm: ḡ, one number per element.
        step: t, the number of this step, from 1.
        lr: η; negative to ascend; zero leaves the elements unchanged.
        beta: β.
        scale: σ_b.
        longest: the longest step, as a multiple of ``lr * scale``.
        pull: λ of the penalty λ/2 (b - 1)², which pulls towards one (Section 5.6). It is a part of the gradient.
        momentum: m and μ, if there is momentum; see :func:`direction`.

    Returns:
        The elements and m in the dtype of ``grad_norm``, ḡ, and the elements skipped for a non-finite gradient.
    """
    b, g = b.to(grad_norm.dtype), g.to(grad_norm.dtype)
    if not isinstance(pull, float) or pull:
        g = g + pull * (b - 1)
    u, moved = direction(g, momentum)
    average = running_average(grad_norm, u.abs(), step, beta, longest, least_length(momentum, u.dtype))

    # b <- b - η σ_b / ḡ · u
    nudged = b - lr * scale * torch.where(average.moving, u / average.divisor, 0.0)
    moving = average.moving & nudged.isfinite() & (lr != 0)
    elements = torch.where(moving, nudged, b)
    return Update(elements, average.grad_norm, average.skipped, kept_buffer(momentum, moved, average.skipped))


def direction(g: Tensor, momentum: Momentum | None) -> tuple[Tensor, Tensor | None]:
    """Average gradients: m <- μ m + (1 - μ) g. The step takes u = m, or Nesterov's u = μ m + (1 - μ) g with the new m.

    Written in the old m, Nesterov's u is μ² m + (1 - μ²) g: g is averaged in twice. m has no bias correction: the step
    divides by the running average of u, which starts as short as u does.

    Returns:
        u, and the new m; ``None`` without momentum.
    """
    if momentum is None:
        return g, None
    m, kept, kept_by_step = momentum.buffer.to(g.dtype), momentum.kept, momentum.kept_by_step
    moved = kept * m + (1 - kept) * g
    return moved if kept_by_step == kept else kept_by_step * m + (1 - kept_by_step) * g, moved


def kept_buffer(momentum: Momentum | None, moved: Tensor | None, skipped: Tensor) -> Tensor | None:
    """Return m after a step: neurons that skip the step keep the old m."""
    if momentum is None or moved is None:
        return None
    return torch.where(skipped, momentum.buffer.to(moved.dtype), moved)


def project(
    tensor: Tensor, axes: tuple[int, ...], *, fix_mean: bool = True, fix_norm: bool = True, radius: Number = 1.0
) -> Projection:
    """Subtract each neuron's mean and set its norm to ``radius`` (Definition 1).

    A neuron without a projection (zero, constant or not finite) is returned unchanged. A neuron of two
    elements keeps its mean: both constraints would leave it only two points. So does a neuron of negative
    radius, whose norm is cut to ``-radius`` if it is longer.
    """
    peak = tensor.detach().abs().amax(axes, keepdim=True)
    possible = (peak > 0) & peak.isfinite()
    fix_mean = fix_mean and _fan_in(tensor, axes) != 2
    if not (fix_mean or fix_norm):
        return Projection(tensor, possible)
    unit = tensor / torch.where(possible, peak, 1.0)
    square = unit.square().sum(axes, keepdim=True)
    if fix_mean:
        for _ in range(2):  # the second removes the rounding error of the first, which a nearly constant neuron has
            unit = unit - held(unit.mean(axes, keepdim=True), radius)
        left = unit.square().sum(axes, keepdim=True)
        possible = possible & (left > least_share(tensor.dtype) * square)
        square = left
    if fix_norm:
        length = torch.where(possible, square, 1.0).sqrt()
        on_sphere = unit / length * bound(radius)
        # a neuron that started at zero may be shorter
        unit = torch.where(length * peak < -radius, unit * peak, on_sphere) if isinstance(radius, Tensor) else on_sphere
    else:
        possible = possible & (peak < torch.finfo(tensor.dtype).max / 2)
        unit = unit * peak
    return Projection(torch.where(possible, unit, tensor), possible)


def distance(
    tensor: Tensor, axes: tuple[int, ...], *, fix_mean: bool = True, fix_norm: bool = True, radius: Number = 1.0
) -> Tensor:
    """Measure each neuron's distance to the nearest balanced one; NaN or infinite if the neuron is not finite."""
    mean = torch.zeros_like(tensor.amax(axes, keepdim=True))
    fan_in = _fan_in(tensor, axes)
    if fix_mean and fan_in != 2:
        mean = held(tensor.mean(axes, keepdim=True), radius)
    off_radius = torch.zeros_like(mean)
    if fix_norm:
        off_radius = excess(norm(tensor - mean, axes), radius)
    return torch.hypot(off_radius, mean * math.sqrt(fan_in))


def held(mean: Tensor, radius: Number) -> Tensor:
    """Return the means that are held to zero: not those of neurons that started at zero."""
    return torch.where(radius < 0, 0.0, mean) if isinstance(radius, Tensor) else mean


def bound(radius: Number) -> Number:
    """Return the greatest norm that a radius allows."""
    return radius.abs() if isinstance(radius, Tensor) else radius


def excess(size: Tensor, radius: Number) -> Tensor:
    """Return by how much norms exceed their radius; zero where a neuron that started at zero is shorter."""
    beyond = size - bound(radius)
    return torch.where(radius < 0, beyond.relu(), beyond) if isinstance(radius, Tensor) else beyond


def stretch(size: Tensor, radius: Number) -> Tensor:
    """Return the factor that sets neurons of these norms to their radius; those that started at zero may be shorter."""
    factor = bound(radius) / size
    return torch.where(radius < 0, factor.clamp_max(1), factor) if isinstance(radius, Tensor) else factor


def default_scale(size: Tensor, radius: Number) -> Tensor:
    """Return σ of neurons of these norms: the norm, or the radius if a neuron started at zero."""
    scale = torch.where(size > 0, size, SCALE_AT_ORIGIN)
    return torch.where(radius < 0, -radius, scale) if isinstance(radius, Tensor) else scale


def least_share(dtype: torch.dtype) -> float:
    """Return the share of a squared norm without its mean below which a neuron is constant, but for rounding."""
    return (16 * torch.finfo(dtype).eps) ** 2


def norm(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Compute the norm of each neuron, axes kept, without overflow or underflow.

    Squares leave float32's range long before the norm does, so elements are first divided by the largest.
    """
    if not axes:
        return tensor.abs()
    peak = tensor.detach().abs().amax(axes, keepdim=True)
    unit = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
    return unit * (tensor / unit).square().sum(axes, keepdim=True).sqrt()


def least_length(momentum: object, dtype: torch.dtype) -> float:
    """Return the |u| that does not move a neuron yet: zero, or with momentum the least normal number.

    Rounding keeps an m of a few times the least subnormal number from decaying further, and ḡ follows it. So without
    a bound, a neuron that no longer has a gradient would stop, and some thousand steps later turn along that rest.
    """
    return 0.0 if momentum is None else torch.finfo(dtype).tiny


def running_average(
    grad_norm: Tensor, length: Tensor, step: Number, beta: float, longest: float = math.inf, least: float = 0.0
) -> Average:
    """Update ḡ² <- β ḡ² + (1 - β) |g|², without overflow or underflow before |g| itself.

    The divisor is ḡ / sqrt(1 - β^t), but at least |g| / ``longest``, which bounds the step. A length that
    is not finite leaves ḡ unchanged and is skipped. A length of at most ``least`` moves nothing.
    """
    finite = length.isfinite()
    # hypot(√β ḡ, √(1-β) |g|): the squares would leave float32's range, their root does not
    updated = torch.hypot(math.sqrt(beta) * grad_norm, math.sqrt(1 - beta) * length)
    grad_norm = torch.where(finite, updated, grad_norm)
    divisor = grad_norm / bias_correction(step, beta, grad_norm.dtype)
    moving = finite & (length > least) & (divisor > 0)
    if longest < math.inf:
        divisor = torch.maximum(divisor, length / longest)
    return Average(grad_norm, divisor, moving, ~finite)


@overload
def bias_correction(step: float, beta: float, dtype: torch.dtype) -> float: ...


@overload
def bias_correction(step: Tensor, beta: float, dtype: torch.dtype) -> Tensor: ...


def bias_correction(step: Number, beta: float, dtype: torch.dtype) -> Number:
    """Compute sqrt(1 - β^t) without the cancellation of 1 - β^t in float32 at small t."""
    log_beta = math.log(beta) if beta else -math.inf
    if isinstance(step, Tensor):
        return (-torch.expm1(step.to(dtype) * log_beta)).sqrt()
    return math.sqrt(-math.expm1(step * log_beta))


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter's statistics and of its step: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounding_error(dtype: torch.dtype) -> float:
    """Bound how far rounding to a dtype can move a balanced neuron, relative to its norm."""
    return torch.finfo(dtype).eps + 16 * torch.finfo(statistics_dtype(dtype)).eps


def _fan_in(tensor: Tensor, axes: tuple[int, ...]) -> int:
    return math.prod([tensor.shape[axis] for axis in axes])
