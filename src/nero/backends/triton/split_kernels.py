"""Triton kernels for neurons that are split, since they are longer than a program can hold.

One launch measures the five sums of every piece, the next turns the neurons. See :mod:`nero.backends.triton.kernels`.
"""

import triton
import triton.language as tl

from nero.backends.triton.kernels import SIZES, mean_of, solve
from nero.backends.triton.record_kernels import (
    AVERAGE,
    BETA,
    BUFFER,
    FAN_IN,
    FIELDS,
    FIRST_TILE,
    NEURONS,
    ONE_MINUS_BETA,
    RADIUS,
    SKIPPED,
    SUMS,
    WEIGHT,
    begin,
    element_offset,
    finish,
    load_float,
    load_new,
    load_pointer,
    neuron_offset,
)
from nero.backends.triton.rounding_kernels import BUFFER_SHIFT, draw, noise_key, rounded

#: The pieces whose sums are added up at once.
PIECES = tl.constexpr(32)


@triton.jit
def _piece(
    record, grad, tile, W: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STRIDED: tl.constexpr,
    CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return the neurons and elements of a split tile: indices of both, masks of both, and pointers."""
    weight, grad = tl.load(record + WEIGHT).to(tl.pointer_type(W)), grad.to(tl.pointer_type(G))
    buffer = tl.load(record + BUFFER).to(tl.pointer_type(W))
    fan_in = tl.load(record + FAN_IN).to(tl.int32)
    if ALIGNED:
        weight, grad, buffer = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16), tl.multiple_of(buffer, 16)
        fan_in = tl.multiple_of(fan_in, 8)
    pieces = tl.cdiv(fan_in, BK)
    i = (tile // pieces) * BN + tl.arange(0, BN)
    k = (tile % pieces) * BK + tl.arange(0, BK)
    starts = neuron_offset(record, i)
    if ALIGNED:
        starts = tl.multiple_of(starts, 8)
    axis: tl.constexpr = 1 if STRIDED else 0  # neurons along the last axis if they lie side by side in memory
    at = tl.expand_dims(starts, 1 - axis) + tl.expand_dims(element_offset(record, k, CONTIGUOUS), axis)
    inside = i < tl.load(record + NEURONS)
    elements = tl.expand_dims(inside, 1 - axis) & tl.expand_dims(k < fan_in, axis)
    return i, k, inside, elements, weight + at, grad + at, buffer + at


@triton.jit
def measure(
    owners, records, changing, step_sizes, sums, noise, W: tl.constexpr, G: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STRIDED: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr, MOMENTUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum over a split tile."""
    begin(OVERLAP)
    owner = tl.load(owners + tl.program_id(0))
    grad = load_new(changing + owner, OVERLAP)
    if grad == 0:
        finish(OVERLAP)
        return
    record = records + owner.to(tl.int64) * FIELDS
    tile = tl.program_id(0) - tl.load(record + FIRST_TILE).to(tl.int32)
    i, _, inside, elements, weight, grad, buffer = _piece(
        record, grad, tile, W, G, BN, BK, STRIDED, CONTIGUOUS, ALIGNED
    )
    g = tl.load(grad, elements, 0).to(tl.float64)
    w = tl.load(weight, elements, 0).to(tl.float64)
    if MOMENTUM:
        m = tl.load(buffer, elements, 0).to(tl.float64)
        g = mean_of(m, g, load_new(step_sizes + SIZES * owner + 2, OVERLAP))
    axis: tl.constexpr = 0 if STRIDED else 1
    pieces = tl.cdiv(tl.load(record + FAN_IN).to(tl.int32), BK)
    piece = tile % pieces
    to = sums + tl.load(record + SUMS) + (piece * tl.load(record + NEURONS) + i) * 6
    tl.store(to, tl.sum(w, axis), inside)
    tl.store(to + 1, tl.sum(g, axis), inside)
    tl.store(to + 2, tl.sum(w * w, axis), inside)
    tl.store(to + 3, tl.sum(g * g, axis), inside)
    tl.store(to + 4, tl.sum(w * g, axis), inside)
    # store the old average too: the next launch overwrites it while other programs still read it
    old_average = tl.load(load_pointer(record, AVERAGE, tl.float32) + i, inside, 0).to(tl.float64)
    if piece > 0:
        old_average *= 0.0
    tl.store(to + 5, old_average, inside)
    finish(OVERLAP)


@triton.jit
def turn(
    owners, records, changing, step_sizes, sums, noise, W: tl.constexpr, G: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STRIDED: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr, MOMENTUM: tl.constexpr,
    FIX_MEAN: tl.constexpr, FIX_NORM: tl.constexpr, SCALED: tl.constexpr, STOCHASTIC: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Turn a split tile, after :func:`measure`."""
    begin(OVERLAP)
    owner = tl.load(owners + tl.program_id(0))
    grad = load_new(changing + owner, OVERLAP)
    if grad == 0:
        finish(OVERLAP)
        return
    record = records + owner.to(tl.int64) * FIELDS
    tile = tl.program_id(0) - tl.load(record + FIRST_TILE).to(tl.int32)
    i, k, inside, elements, weight, grad, buffer = _piece(
        record, grad, tile, W, G, BN, BK, STRIDED, CONTIGUOUS, ALIGNED
    )
    g = tl.load(grad, elements, 0)  # early: they arrive while the sums do
    w = tl.load(weight, elements, 0)
    sizes = step_sizes + SIZES * owner
    neurons = tl.load(record + NEURONS)
    fan_in = tl.load(record + FAN_IN).to(tl.int32)
    pieces = tl.cdiv(fan_in, BK)
    sum_w = tl.zeros([BN], tl.float64)
    sum_g, sum_ww, sum_gg, sum_wg, old_average = sum_w, sum_w, sum_w, sum_w, sum_w
    for first in range(0, pieces, PIECES):
        piece = first + tl.arange(0, PIECES)[:, None]
        of = sums + tl.load(record + SUMS) + (piece * neurons + i[None, :]) * 6
        some = (piece < pieces) & inside[None, :]
        sum_w += tl.sum(tl.load(of, some, 0), 0)
        sum_g += tl.sum(tl.load(of + 1, some, 0), 0)
        sum_ww += tl.sum(tl.load(of + 2, some, 0), 0)
        sum_gg += tl.sum(tl.load(of + 3, some, 0), 0)
        sum_wg += tl.sum(tl.load(of + 4, some, 0), 0)
        old_average += tl.sum(tl.load(of + 5, some, 0), 0)
    radius = tl.full([BN], 1.0, tl.float32)
    if FIX_NORM >= 2:
        radius = tl.load(load_pointer(record, RADIUS, tl.float32) + i, inside, 1)
    average, f, mean, stretch, moving, finite, _ = solve(
        sum_w, sum_g, sum_ww, sum_gg, sum_wg, old_average, fan_in, load_float(record, BETA),
        load_float(record, ONE_MINUS_BETA),
        load_new(sizes, OVERLAP), load_new(sizes + 1, OVERLAP), radius, FIX_MEAN, FIX_NORM, SCALED, MOMENTUM,
    )  # fmt: skip
    axis: tl.constexpr = 0 if STRIDED else 1
    w, g = w.to(tl.float64), g.to(tl.float64)
    if STOCHASTIC:
        bits = draw(noise_key(load_new(noise, OVERLAP), owner), i, k, axis, False)
    else:
        bits = 0
    if MOMENTUM:
        m = tl.load(buffer, elements, 0).to(tl.float64)
        g = mean_of(m, g, load_new(sizes + 2, OVERLAP))
        m = rounded(mean_of(m, g, load_new(sizes + 3, OVERLAP)), W, bits >> BUFFER_SHIFT, STOCHASTIC)
        tl.store(buffer, m, elements & tl.expand_dims(finite, axis))
    out = (w - tl.expand_dims(f, axis) * g - tl.expand_dims(mean, axis)) * tl.expand_dims(stretch, axis)
    tl.store(weight, rounded(out, W, bits, STOCHASTIC), elements & tl.expand_dims(moving, axis))
    if tile % pieces == 0:
        tl.store(load_pointer(record, AVERAGE, tl.float32) + i, average, inside)
        skipped = tl.sum((inside & ~finite).to(tl.int32), 0)
        if skipped > 0:
            tl.atomic_add(load_pointer(record, SKIPPED, tl.int64), skipped.to(tl.int64))
    finish(OVERLAP)
