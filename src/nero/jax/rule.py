"""The rule of Nero on one array, in jax.numpy: what :mod:`nero.rule` is for torch.

:func:`step` is the step for a learning rate of one, and :func:`constrain` changes any step so that neurons end up
balanced. All functions are pure. The rule is written twice on purpose, since one text for both libraries would hide it
behind a layer of wrappers; the same oracle tests both.

The symbols are those of :mod:`nero.rule`: w the parameter; g its gradient; ḡ ``grad_norm``; β ``beta``; σ ``scale``;
t ``count``; m the momentum buffer; μ ``momentum``; u the direction of a step.
"""

import math
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

Number: TypeAlias = float | Array

#: The scale of a parameter that starts at zero: the paper's default for biases, as in :mod:`nero.rule`.
SCALE_AT_ORIGIN = 0.01
#: Divisors above it are scaled down, so that their inverses stay in float32's range.
HUGE = 2.0**64


class Step(NamedTuple):
    """A step, and the state after it: ḡ, a mask of the neurons that were skipped, and m if there is momentum."""

    step: Array
    grad_norm: Array
    skipped: Array
    m: Array | None


class Average(NamedTuple):
    """The running average after a gradient: ḡ, the divisor of the gradient, and two masks."""

    grad_norm: Array
    divisor: Array
    moving: Array
    skipped: Array


class Projection(NamedTuple):
    """A projected array, and a mask of the neurons that have a projection."""

    array: Array
    possible: Array


def step(
    w: Array,
    g: Array,
    grad_norm: Array,
    count: Array,
    *,
    axes: tuple[int, ...],
    beta: Number,
    scale: Number,
    longest: Number = math.inf,
    pull: Number = 0.0,
    m: Array | None = None,
    momentum: Number = 0.0,
    nesterov: bool = True,
) -> Step:
    """Return σ u / ḡ, which times -η is the step of neurons, or of gains or biases if there are no fan-in axes.

    Args:
        w: the weights, gains or biases.
        g: their gradient.
        grad_norm: ḡ, shaped as ``w`` with 1 along the fan-in axes.
        count: t, the number of this step, from 1.
        axes: the fan-in axes; empty for gains and biases.
        beta: β.
        scale: σ; where it is zero, the neuron's norm.
        longest: the longest step, as a multiple of ``scale``.
        pull: λ of the penalty λ/2 (w - 1)², a part of the gradient.
        m: the average of gradients, if there is momentum.
        momentum: μ.
        nesterov: step along μ m + (1 - μ) g instead of m.
    """
    dtype, least = grad_norm.dtype, 0.0
    w, g, pull, momentum = w.astype(dtype), g.astype(dtype), as_dtype(pull, dtype), as_dtype(momentum, dtype)
    if not isinstance(pull, float) or pull:
        g = g + pull * (w - 1)
    u = g
    if m is not None:
        old, least = m.astype(dtype), float(limits(dtype).tiny)  # rounding keeps a rest of m from decaying
        m = momentum * old + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g if nesterov else m
    average = running_average(grad_norm, norm(u, axes), count, as_dtype(beta, dtype), as_dtype(longest, dtype), least)
    if m is not None:
        m = jnp.where(average.skipped, old, m)
    if axes and not isinstance(scale, float):
        size = norm(w, axes)
        scale = jnp.where(jnp.greater(scale, 0), as_dtype(scale, dtype), jnp.where(size > 0, size, SCALE_AT_ORIGIN))
    divisor = jnp.where(average.moving, average.divisor, 1.0)  # 0 / 0 would stop a run under jax_debug_nans
    change = as_dtype(scale, dtype) * jnp.where(average.moving, _quotient(u, divisor), 0.0)
    return Step(change, average.grad_norm, average.skipped, m)


def constrain(
    w: Array, change: Array, *, axes: tuple[int, ...], fix_mean: bool, fix_norm: bool, radius: Array
) -> Array:
    """Return the change after which neurons are balanced; zero for neurons that the given one leaves as they are.

    Gains and biases, which have no fan-in axes, only skip what is not finite.
    """
    dtype = statistics_dtype(w.dtype)
    wide, change = w.astype(dtype), change.astype(dtype)
    moved = wide + change
    if axes:
        is_changed = jnp.any(change != 0, axes, keepdims=True)
        moved, possible = project(moved, axes, fix_mean=fix_mean, fix_norm=fix_norm, radius=radius)
        moving = is_changed & possible
    else:
        moving = jnp.isfinite(moved)
    if w.dtype != dtype:  # half precision has a largest number that a free neuron can pass
        limit = float(limits(w.dtype).max)
        moved = jnp.clip(moved, -limit, limit)
    return jnp.where(moving, moved - wide, 0.0)


def running_average(
    grad_norm: Array, length: Array, count: Array, beta: Number, longest: Number = math.inf, least: float = 0.0
) -> Average:
    """Update ḡ² <- β ḡ² + (1 - β) |u|², without overflow or underflow before |u| itself.

    The divisor is ḡ / sqrt(1 - β^t), but at least |u| / ``longest``, which bounds the step. A length that
    is not finite leaves ḡ unchanged and is skipped. A length of at most ``least`` moves nothing.
    """
    finite = jnp.isfinite(length)
    # hypot(√β ḡ, √(1-β) |u|): the squares would leave float32's range, their root does not
    updated = jnp.hypot(_sqrt(beta) * grad_norm, _sqrt(1 - beta) * length)
    grad_norm = jnp.where(finite, updated, grad_norm)
    divisor = grad_norm / bias_correction(count.astype(grad_norm.dtype), beta)
    moving = finite & (length > least) & (divisor > 0)
    if not isinstance(longest, float) or longest < math.inf:
        divisor = jnp.maximum(divisor, length / longest)
    return Average(grad_norm, divisor, moving, ~finite)


def bias_correction(count: Array, beta: Number) -> Array:
    """Compute sqrt(1 - β^t) without the cancellation of 1 - β^t in float32 at small t."""
    if isinstance(beta, float):
        log_beta: Number = math.log(beta) if beta else -math.inf
    else:
        log_beta = jnp.log(beta)
    return jnp.sqrt(-jnp.expm1(count * log_beta))


def project(
    array: Array, axes: tuple[int, ...], *, fix_mean: bool = True, fix_norm: bool = True, radius: Number = 1.0
) -> Projection:
    """Subtract each neuron's mean and set its norm to ``radius`` (Definition 1).

    A neuron without a projection (zero, constant or not finite) is returned unchanged. A neuron of two
    elements keeps its mean: both constraints would leave it only two points. So does a neuron of negative
    radius, whose norm is cut to ``-radius`` if it is longer.
    """
    peak = jnp.max(jnp.abs(array), axes, keepdims=True, initial=0)
    possible = (peak > 0) & jnp.isfinite(peak)
    size = fan_in(array, axes)
    fix_mean = fix_mean and size != 2
    if not (fix_mean or fix_norm):
        return Projection(array, possible)
    unit = _quotient(array, jnp.where(possible, peak, 1.0))
    if fix_mean:
        mean = held(jnp.mean(unit, axes, keepdims=True), radius)
        unit = unit - mean
        # the rounding error of the mean, which a nearly constant neuron has
        rest = held(jnp.mean(unit, axes, keepdims=True), radius)
        square = _sum_of_squares(unit, axes) - size * rest * rest
        unit = unit - rest
        # the rounding error of a constant neuron is not a direction
        least = float(16 * limits(array.dtype).eps) ** 2
        possible = possible & (square > least * (square + size * mean * mean))
    else:
        square = _sum_of_squares(unit, axes)
    if fix_norm:
        length = jnp.sqrt(jnp.where(possible, square, 1.0))
        # a neuron that started at zero may be shorter
        unit = jnp.where(length * peak < -radius, unit * peak, unit / length * jnp.abs(radius))
    else:
        possible = possible & (peak < float(limits(array.dtype).max) / 2)
        unit = unit * peak
    return Projection(jnp.where(possible, unit, array), possible)


def distance(
    array: Array, axes: tuple[int, ...], *, fix_mean: bool = True, fix_norm: bool = True, radius: Number = 1.0
) -> Array:
    """Measure each neuron's distance to the nearest balanced one; NaN or infinite if the neuron is not finite."""
    size = fan_in(array, axes)
    mean = held(jnp.mean(array, axes, keepdims=True), radius) * float(fix_mean and size != 2)
    if not fix_norm:
        return jnp.abs(mean) * math.sqrt(size)
    off = norm(array - mean, axes) - jnp.abs(radius)
    off = jnp.where(jnp.less(radius, 0), jnp.maximum(off, 0), off)
    return jnp.hypot(off, mean * math.sqrt(size))


@partial(jax.jit, static_argnames="axes")  # since init calls it outside of jit
def norm(array: Array, axes: tuple[int, ...]) -> Array:
    """Compute the norm of each neuron, axes kept, without overflow or underflow.

    Squares leave float32's range long before the norm does, so elements are first divided by the largest.
    """
    if not axes:
        return jnp.abs(array)
    peak = jnp.max(jnp.abs(array), axes, keepdims=True, initial=0)
    unit = jnp.where((peak > 0) & jnp.isfinite(peak), peak, 1.0)
    return unit * jnp.sqrt(_sum_of_squares(_quotient(array, unit), axes))


def held(mean: Array, radius: Number) -> Array:
    """Return the means that are held to zero: not those of neurons that started at zero."""
    return jnp.where(jnp.less(radius, 0), 0.0, mean)


def statistics_dtype(dtype: DTypeLike) -> jnp.dtype[Any]:
    """Return the dtype of a parameter's statistics and of its step: float32, or float64 for float64."""
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


def limits(dtype: DTypeLike) -> Any:
    """Return the limits of a dtype: ``eps``, ``max``, ``tiny``."""
    return jnp.finfo(dtype)  # type: ignore[no-untyped-call]


def rounding_error(dtype: DTypeLike) -> float:
    """Bound how far rounding to a dtype can move a balanced neuron, relative to its norm."""
    return float(limits(dtype).eps) + 16 * float(limits(statistics_dtype(dtype)).eps)


def as_dtype(number: Number, dtype: DTypeLike) -> Number:
    """Cast an array, such as an injected hyperparameter; a Python float takes any dtype as it is."""
    return number if isinstance(number, float) else jnp.asarray(number, dtype)


def fan_in(array: Array, axes: tuple[int, ...]) -> int:
    """Return the number of elements of a neuron."""
    return math.prod([array.shape[axis] for axis in axes])


def _quotient(array: Array, divisor: Array) -> Array:
    """Divide by numbers per neuron. XLA multiplies by their inverses, and takes those below 1.2e-38 for zero."""
    shrink = jnp.where(divisor > HUGE, 1 / HUGE, 1.0)
    return (array * shrink) / (divisor * shrink)


def _sum_of_squares(array: Array, axes: tuple[int, ...]) -> Array:
    return jnp.sum(jnp.square(array), axes, keepdims=True)


def _sqrt(number: Number) -> Number:
    return math.sqrt(number) if isinstance(number, float) else jnp.sqrt(number)
