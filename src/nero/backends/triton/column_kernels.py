"""A Triton kernel for whole neurons that are not contiguous in memory, such as the columns of a matrix.

A program takes a block of neighbouring neurons with all of their elements. It reads them once if they fit into its
registers. If not, it reads them twice, chunk by chunk: the second time from the cache. See
:mod:`nero.backends.triton.kernels`.
"""

import triton
import triton.language as tl

from nero.backends.triton.kernels import SIZES, mean_of, solve, summed, turn_precisely
from nero.backends.triton.record_kernels import (
    AVERAGE,
    BETA,
    BUFFER,
    FAN_IN,
    FIELDS,
    FIRST_TILE,
    INNER,
    INNER_STRIDE,
    NEURONS,
    ONE_MINUS_BETA,
    OUTER_STRIDE,
    RADIUS,
    STRIDE,
    WEIGHT,
    begin,
    element_offset,
    finish,
    load_float,
    load_new,
    load_pointer,
)
from nero.backends.triton.rounding_kernels import BUFFER_SHIFT, draw, noise_key, rounded

#: A slice of a block, as a share of it: float64 needs more registers.
SLICES = tl.constexpr(8)


@triton.jit
def _load(
    weight, grad, buffer, sizes, starts, inside, first, record, fan_in, BK: tl.constexpr, AXIS: tl.constexpr,
    ALIGNED: tl.constexpr, MOMENTUM: tl.constexpr, OVERLAP: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Load a chunk of a block: element indices, offsets, mask, weights, directions and momentum.

    ``CACHE`` says what the cache should do with them, if it must choose.
    """
    k = first + tl.arange(0, BK)
    if ALIGNED:
        steps = k.to(tl.int64) * tl.multiple_of(tl.load(record + STRIDE), 8)
    else:
        steps = element_offset(record, k, False)
    at = tl.expand_dims(starts, AXIS) + tl.expand_dims(steps, 1 - AXIS)
    elements = tl.expand_dims(inside, AXIS) & tl.expand_dims(k < fan_in, 1 - AXIS)
    u = tl.load(grad + at, elements, 0, eviction_policy=CACHE).to(tl.float32)
    w = tl.load(weight + at, elements, 0, eviction_policy=CACHE).to(tl.float32)
    m = w
    if MOMENTUM:
        m = tl.load(buffer + at, elements, 0, eviction_policy=CACHE).to(tl.float32)
        u = mean_of(m, u, load_new(sizes + 2, OVERLAP))
    return k, at, elements, w, u, m


@triton.jit
def _store(
    weight, buffer, sizes, noise, i, k, at, elements, w, u, m, f, mean, stretch, moving, ordinary,
    W: tl.constexpr, AXIS: tl.constexpr, FIX_NORM: tl.constexpr, STOCHASTIC: tl.constexpr, MOMENTUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Turn a chunk and store it; neurons that do not move, or need float64, keep their values."""
    out = (w - tl.expand_dims(f, AXIS) * u - tl.expand_dims(mean, AXIS)) * tl.expand_dims(stretch, AXIS)
    # write all neurons, moved or not: a mask by neuron would split vectorised stores
    out = tl.where(tl.expand_dims(moving & ordinary, AXIS), out, w)
    # keyed by k, since a thread holds elements of neighbouring neurons
    bits = draw(noise, k, i, 1 - AXIS, not MOMENTUM) if STOCHASTIC else 0
    tl.store(weight + at, rounded(out, W, bits, STOCHASTIC, FIX_NORM == 1), elements)
    if MOMENTUM:
        m = tl.where(tl.expand_dims(ordinary, AXIS), mean_of(m, u, load_new(sizes + 3, OVERLAP)), m)
        tl.store(buffer + at, rounded(m, W, bits >> BUFFER_SHIFT, STOCHASTIC), elements)


@triton.jit
def _folded(x, BN: tl.constexpr, BK: tl.constexpr, AXIS: tl.constexpr, FOLD: tl.constexpr):
    """Add up elements that one thread holds, so that sums over chunks need few registers."""
    if AXIS == 0:
        x = tl.reshape(x, [FOLD, BK // FOLD, BN])
    else:
        x = tl.reshape(x, [BN, FOLD, BK // FOLD])
    return tl.sum(x, AXIS)


@triton.jit
def turn_block(
    owners, records, changing, step_sizes, sums, noise, W: tl.constexpr, G: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FOLD: tl.constexpr, AXIS: tl.constexpr, ALIGNED: tl.constexpr, FIX_MEAN: tl.constexpr,
    FIX_NORM: tl.constexpr, SCALED: tl.constexpr, STOCHASTIC: tl.constexpr, MOMENTUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Turn a block of ``BN`` neurons, in chunks of ``BK`` elements if ``FOLD`` is not zero.

    ``AXIS`` is that of a neuron's elements in a block: 0 for neurons that lie side by side, as columns do.
    """
    begin(OVERLAP)
    owner = tl.load(owners + tl.program_id(0))
    grad = load_new(changing + owner, OVERLAP)
    if grad == 0:
        finish(OVERLAP)
        return
    record = records + owner.to(tl.int64) * FIELDS
    sizes = step_sizes + SIZES * owner
    rate, least = load_new(sizes, OVERLAP), load_new(sizes + 1, OVERLAP)
    tile = tl.program_id(0) - tl.load(record + FIRST_TILE).to(tl.int32)
    if STOCHASTIC:
        noise = noise_key(load_new(noise, OVERLAP), owner)
    weight = tl.load(record + WEIGHT).to(tl.pointer_type(W))
    grad = grad.to(tl.pointer_type(G))
    buffer = weight
    if MOMENTUM:
        buffer = tl.load(record + BUFFER).to(tl.pointer_type(W))
    fan_in = tl.load(record + FAN_IN).to(tl.int32)
    neurons = tl.load(record + NEURONS).to(tl.int32)
    inner = tl.load(record + INNER).to(tl.int32)
    inner_stride, outer_stride = tl.load(record + INNER_STRIDE), tl.load(record + OUTER_STRIDE)
    if ALIGNED:
        inner_stride = 1
        neurons = tl.multiple_of(neurons, 8)
        weight, grad, buffer = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16), tl.multiple_of(buffer, 16)
        inner, outer_stride = tl.multiple_of(inner, 8), tl.multiple_of(outer_stride, 8)
    i = tile * BN + tl.arange(0, BN)
    inside = i < neurons
    starts = (i // inner).to(tl.int64) * outer_stride + (i % inner).to(tl.int64) * inner_stride
    averages = load_pointer(record, AVERAGE, tl.float32) + i
    old_average = tl.load(averages, inside, 0)
    radius = tl.full([BN], 1.0, tl.float32)
    if FIX_NORM >= 2:
        radius = tl.load(load_pointer(record, RADIUS, tl.float32) + i, inside, 1)

    if FOLD == 0:
        k, at, elements, w, u, m = _load(
            weight, grad, buffer, sizes, starts, inside, 0, record, fan_in, BK, AXIS, ALIGNED, MOMENTUM, OVERLAP, ""
        )
        sum_w, sum_u, sum_ww, square, sum_wu = summed(w, u, w * w, u * u, w * u, AXIS)
    else:
        part_w = tl.zeros([BK // FOLD, BN] if AXIS == 0 else [BN, BK // FOLD], tl.float32)
        part_u, part_ww, part_uu, part_wu = part_w, part_w, part_w, part_w
        for first in range(0, fan_in, BK):
            _, _, _, w, u, _ = _load(
                weight, grad, buffer, sizes, starts, inside, first, record, fan_in, BK, AXIS, ALIGNED, MOMENTUM,
                OVERLAP, "evict_last",
            )  # fmt: skip
            part_w += _folded(w, BN, BK, AXIS, FOLD)
            part_u += _folded(u, BN, BK, AXIS, FOLD)
            part_ww += _folded(w * w, BN, BK, AXIS, FOLD)
            part_uu += _folded(u * u, BN, BK, AXIS, FOLD)
            part_wu += _folded(w * u, BN, BK, AXIS, FOLD)
        sum_w, sum_u, sum_ww, square, sum_wu = summed(part_w, part_u, part_ww, part_uu, part_wu, AXIS)
    average, f, mean, stretch, moving, _, ordinary = solve(
        sum_w, sum_u, sum_ww, square, sum_wu, old_average, fan_in, load_float(record, BETA),
        load_float(record, ONE_MINUS_BETA), rate, least, radius, FIX_MEAN, FIX_NORM, SCALED, MOMENTUM,
    )  # fmt: skip
    if FOLD == 0:
        _store(
            weight, buffer, sizes, noise, i, k, at, elements, w, u, m, f, mean, stretch, moving, ordinary, W,
            AXIS, FIX_NORM, STOCHASTIC, MOMENTUM, OVERLAP,
        )  # fmt: skip
    else:
        last = (fan_in - 1) // BK * BK
        for back in range(0, fan_in, BK):  # backwards: the cache is likeliest to have what was read last
            k, at, elements, w, u, m = _load(
                weight, grad, buffer, sizes, starts, inside, last - back, record, fan_in, BK, AXIS, ALIGNED, MOMENTUM,
                OVERLAP, "evict_first",
            )  # fmt: skip
            _store(
                weight, buffer, sizes, noise, i, k, at, elements, w, u, m, f, mean, stretch, moving, ordinary,
                W, AXIS, FIX_NORM, STOCHASTIC, MOMENTUM, OVERLAP,
            )  # fmt: skip
    tl.store(averages, average, inside & ordinary)
    turn_precisely(
        record, weight, grad, buffer, sizes, noise, i, inside & ~ordinary, starts, fan_in, averages, old_average,
        square, radius, rate, least, tl.cdiv(fan_in, BK // SLICES), BK // SLICES, AXIS, False, W, FIX_MEAN, FIX_NORM,
        SCALED, STOCHASTIC, MOMENTUM, OVERLAP,
    )  # fmt: skip
    finish(OVERLAP)
