"""THE rule: Algorithm 1 of the paper on one tensor, pure and readable.

:func:`turn` is the update of neurons, :func:`nudge` that of gains and biases. Every backend is
tested against these two. They return new tensors and change nothing.

The paper's symbols: w, b the parameter; g its gradient; ḡ ``grad_norm``, the running root mean
square of the gradient's norm; η ``lr``; β ``beta``; σ ``scale``; t ``step``.
"""

import math
from typing import NamedTuple, TypeAlias, overload

import torch
from torch import Tensor

from nero.balance import SCALE_AT_ORIGIN, Radius, norm, project

Number: TypeAlias = float | Tensor


class Update(NamedTuple):
    """What a step gives: the parameter, its running average, and which updates sat out."""

    parameter: Tensor
    grad_norm: Tensor
    sat_out: Tensor


class Average(NamedTuple):
    """The running average after a gradient: ḡ, what the gradient is divided by, and who can move."""

    grad_norm: Tensor
    divisor: Tensor
    moving: Tensor
    sat_out: Tensor


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
    radius: Radius = 1.0,
) -> Update:
    """Turn every neuron of a tensor through an angle of about ``lr`` and balance it.

    Args:
        w: the weights.
        g: their gradient.
        grad_norm: ḡ, one number a neuron, shaped as ``w`` with 1 along the fan-in axes.
        step: t, the number of this step, from 1.
        axes: the fan-in axes.
        lr: η; negative to go up instead of down; at zero the weights stay as they are.
        beta: β.
        longest: how many times ``lr`` a step may be.
        fix_mean: take off each neuron's mean.
        fix_norm: set each neuron's norm to ``radius``.
        scale: what the step is relative to; by default each neuron's norm.
        radius: the norm to hold a neuron to.

    Returns:
        the new weights in the dtype of ``grad_norm``, the new ḡ, and which neurons sat out
        because their gradient was not finite.
    """
    w, g = w.to(grad_norm.dtype), g.to(grad_norm.dtype)
    average = running_average(grad_norm, norm(g, axes), step, beta, longest)

    # w <- w - η |w| / ḡ · g
    if scale is None:
        size = norm(w, axes)
        scale = torch.where(size > 0, size, SCALE_AT_ORIGIN)
    turned = w - lr * scale * torch.where(average.moving, g / average.divisor, 0.0)

    # w <- w - mean(w); w <- w / |w|
    balanced, possible = project(turned, axes, fix_mean=fix_mean, fix_norm=fix_norm, radius=radius)
    moving = average.moving & possible & (lr != 0)
    return Update(torch.where(moving, balanced, w), average.grad_norm, average.sat_out)


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
) -> Update:
    """Move every gain or bias of a tensor by about ``lr * scale``.

    Args:
        b: the gains or biases.
        g: their gradient.
        grad_norm: ḡ, one number an entry.
        step: t, the number of this step, from 1.
        lr: η; negative to go up instead of down; at zero the entries stay as they are.
        beta: β.
        scale: σ_b, what the step is relative to.
        longest: how many times ``lr * scale`` a step may be.
        pull: the strength of a quadratic penalty that pulls towards one (Section 5.6).

    Returns:
        the new entries in the dtype of ``grad_norm``, the new ḡ, and which entries sat out
        because their gradient was not finite.
    """
    b, g = b.to(grad_norm.dtype), g.to(grad_norm.dtype)
    if not isinstance(pull, float) or pull:
        g = g + pull * (b - 1)
    average = running_average(grad_norm, g.abs(), step, beta, longest)

    # b <- b - η σ_b / ḡ · g
    nudged = b - lr * scale * torch.where(average.moving, g / average.divisor, 0.0)
    moving = average.moving & nudged.isfinite() & (lr != 0)
    return Update(torch.where(moving, nudged, b), average.grad_norm, average.sat_out)


def running_average(grad_norm: Tensor, length: Tensor, step: Number, beta: float, longest: float = math.inf) -> Average:
    """ḡ² <- β ḡ² + (1 - β) |g|², in a form that neither overflows nor underflows before |g| does.

    The divisor is ḡ / sqrt(1 - β^t), but at least |g| / ``longest``, so that no step is longer than that. A length that
    is not finite leaves its average alone and sits out. One of zero moves nothing.
    """
    finite = length.isfinite()
    # hypot(√β ḡ, √(1-β) |g|): the squares would leave float32's range, their root does not
    updated = torch.hypot(math.sqrt(beta) * grad_norm, math.sqrt(1 - beta) * length)
    grad_norm = torch.where(finite, updated, grad_norm)
    divisor = grad_norm / bias_correction(step, beta, grad_norm.dtype)
    moving = finite & (length > 0) & (divisor > 0)
    if longest < math.inf:
        divisor = torch.maximum(divisor, length / longest)
    return Average(grad_norm, divisor, moving, ~finite)


@overload
def bias_correction(step: float, beta: float, dtype: torch.dtype) -> float: ...


@overload
def bias_correction(step: Tensor, beta: float, dtype: torch.dtype) -> Tensor: ...


def bias_correction(step: Number, beta: float, dtype: torch.dtype) -> Number:
    """sqrt(1 - β^t), without the cancellation that 1 - β^t suffers in float32 at small t."""
    log_beta = math.log(beta) if beta else -math.inf
    if isinstance(step, Tensor):
        return (-torch.expm1(step.to(dtype) * log_beta)).sqrt()
    return math.sqrt(-math.expm1(step * log_beta))
