"""Triton kernels of the step: the rule in five sums over a neuron's elements.

For weights w and gradient g the sums are Σw, Σg, Σw², Σg² and Σwg. The mean and the norm of w - f g follow
from them, so a neuron that fits on the chip is read once and written once. Its sums are float32. Where
values are extreme or cancel, and for neurons that are split, the sums are float64, which holds the square
of any float32.

A *record* is a row of int64s about one tensor: addresses, layout and constants (floats by their bits).
``changing`` holds what may change between steps: the address of each gradient, 0 for none, then five words
per group about its learning rate and momentum (see :func:`count`, which copies it from the host's memory).
``step_sizes`` holds four numbers per tensor that :func:`count` computes from it. A *tile* is the work of one
program; ``owners`` maps programs to records.

With momentum, the direction u takes the place of g: a mean of g and the buffer m, of which u keeps a share. The
new m is a mean of the old m and u, so that g is not needed after u is known.
"""

import triton
import triton.language as tl

from nero.backends.triton.record_kernels import (
    AVERAGE,
    BETA,
    BUFFER,
    FAN_IN,
    FIELDS,
    FIRST_TILE,
    GIVEN_SCALE,
    GROUP,
    INNER,
    INNER_STRIDE,
    LEAST_DIVISOR,
    LOG_BETA,
    NEURONS,
    ONE_MINUS_BETA,
    OUTER_STRIDE,
    PULL,
    RADIUS,
    SCALE,
    SHAPE,
    SKIPPED,
    STEP,
    WEIGHT,
    begin,
    element_offset,
    finish,
    load_float,
    load_new,
    load_pointer,
    neuron_offset,
)
from nero.backends.triton.rounding_kernels import (
    BUFFER_SHIFT,
    IS_INTERPRETED,
    MAX_FLOAT32,
    draw,
    mixed,
    noise_key,
    rounded,
)
from nero.rule import SCALE_AT_ORIGIN

#: The least normal float32: see nero.rule.least_length.
TINY = tl.constexpr(2.0**-126)
#: (16 eps)², as in nero.rule.project: the rounding error of a constant neuron is not a direction.
NO_DIRECTION = tl.constexpr((16 * 2.0**-23) ** 2)
#: The rounding error of a square in float64.
ROUNDING_LEFT = tl.constexpr(1e-14)
ORIGIN_SCALE = tl.constexpr(SCALE_AT_ORIGIN)
#: Gains and biases fill only 1/8 of a tile, since each needs registers of its own.
GAIN_SHARE = tl.constexpr(8)
#: Narrower neurons fill half of a tile.
MIN_FULL_WIDTH = tl.constexpr(256)
#: Tiles of this size have several warps, which add up faster if they exchange all sums at once.
MIN_JOINT_TILE = tl.constexpr(2048)
#: The words of a group in ``changing``.
GROUP_WORDS = tl.constexpr(5)
#: The numbers of a tensor in ``step_sizes``: η σ sqrt(1 - β^t), the least divisor, and the shares that u and the new m
#: keep of the old m.
SIZES = tl.constexpr(4)


@triton.jit
def mean_of(old, new, share):
    """Return a weighted mean; ``share`` is the weight of the old."""
    return share.to(new.dtype) * old + (1 - share).to(new.dtype) * new


@triton.jit
def _add(a, b, c, d, e, v, w, x, y, z):
    return a + v, b + w, c + x, d + y, e + z


@triton.jit
def summed(a, b, c, d, e, AXIS: tl.constexpr, JOINTLY: tl.constexpr = True):
    """Sum five tiles along an axis; jointly in one exchange between warps."""
    if IS_INTERPRETED or not JOINTLY:  # the interpreter calls _add for each element
        sums = tl.sum(a, AXIS), tl.sum(b, AXIS), tl.sum(c, AXIS), tl.sum(d, AXIS), tl.sum(e, AXIS)
    else:
        sums = tl.reduce((a, b, c, d, e), AXIS, _add)
    return sums


@triton.jit
def count(
    records, source, changing, step_sizes, tensors, words, BLOCK: tl.constexpr, MOMENTUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Count the step of every tensor that has a gradient, and compute its ``step_sizes``.

    ``source`` has the words of ``changing``, in the host's memory if they are new.
    """
    begin(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(source + i, i < words, 0)
    tl.store(changing + i, word, i < words)
    inside = (i < tensors) & (word != 0)
    record = records + i * FIELDS
    step = tl.load(record + STEP, inside, 0).to(tl.pointer_type(tl.float32))
    t = tl.load(step, inside, 0) + 1
    tl.store(step, t, inside)
    log_beta = tl.load(record + LOG_BETA, inside, 0).to(tl.float64, bitcast=True)
    scale = tl.load(record + GIVEN_SCALE, inside, 0).to(tl.float64, bitcast=True)
    own = tl.load(record + SCALE, inside, 0)
    own_scale = tl.load(own.to(tl.pointer_type(tl.float32)), inside & (own != 0), 1).to(tl.float64)
    scale = tl.where(scale > 0, scale, own_scale)
    # the learning rate: a factor, times a float32 or float64 in memory if there is one
    rate = source + tensors + GROUP_WORDS * tl.load(record + GROUP, inside, 0)
    single = tl.load(rate, inside, 0)
    double = tl.load(rate + 1, inside, 0)
    lr = tl.load(rate + 2, inside, 0).to(tl.float64, bitcast=True)
    lr *= tl.load(single.to(tl.pointer_type(tl.float32)), inside & (single != 0), 1).to(tl.float64)
    lr *= tl.load(double.to(tl.pointer_type(tl.float64)), inside & (double != 0), 1)
    x = t.to(tl.float64) * log_beta
    correction = tl.sqrt(tl.where(x > -1e-4, -x * (1 + x / 2 * (1 + x / 3)), 1 - tl.exp(x)))  # -expm1(x)
    least = tl.load(record + LEAST_DIVISOR, inside, 0).to(tl.float64, bitcast=True)
    tl.store(step_sizes + SIZES * i, lr * scale * correction, inside)
    tl.store(step_sizes + SIZES * i + 1, least * correction, inside)
    if MOMENTUM:
        kept = tl.load(rate + 3, inside, 0).to(tl.float64, bitcast=True)
        lag = tl.load(rate + 4, inside, 0).to(tl.float64, bitcast=True)
        tl.store(step_sizes + SIZES * i + 2, kept, inside)
        tl.store(step_sizes + SIZES * i + 3, lag, inside)


@triton.jit
def solve(
    w, g, ww, gg, wg, old_average, fan_in, beta, one_minus_beta, rate, least, radius, FIX_MEAN: tl.constexpr,
    FIX_NORM: tl.constexpr, SCALED: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Apply the rule to a neuron's five sums, in their dtype.

    Returns ḡ; f, mean and stretch, which give the new elements (w - f g - mean) * stretch; whether the neuron moves;
    whether its gradient is finite; and whether float32 is precise enough.
    """
    dtype: tl.constexpr = gg.dtype
    beta, one_minus_beta, rate, least, old_average = (
        beta.to(dtype), one_minus_beta.to(dtype), rate.to(dtype), least.to(dtype), old_average.to(dtype)
    )  # fmt: skip
    if dtype == tl.float64:
        finite = gg <= MAX_FLOAT32 * MAX_FLOAT32
    else:
        finite = gg <= MAX_FLOAT32
    average = tl.where(finite, tl.sqrt(beta * old_average * old_average + one_minus_beta * gg), old_average).to(
        tl.float32
    )
    moving = finite & (gg > 0) & (average > 0)
    if MOMENTUM and dtype == tl.float64:  # in float32 so short a u is not ordinary
        moving &= gg > TINY * TINY
    size = 1.0 if SCALED else tl.where(ww > 0, tl.sqrt(ww), ORIGIN_SCALE)
    if FIX_NORM >= 2 and not SCALED:
        size = tl.where(radius < 0, -radius, size)
    divisor = tl.maximum(average.to(dtype), least * tl.sqrt(gg))
    f = tl.where(moving, rate * size / tl.where(moving, divisor, 1.0), 0.0)
    moving &= f != 0  # zero if lr is
    # w - f g, and then without its mean
    terms = ww + f * f * gg
    square = terms - 2 * f * wg
    if FIX_MEAN:
        mean = tl.where((fan_in > 2) & (radius > 0), (w - f * g) / fan_in, 0.0)
    else:
        mean = tl.zeros_like(f)
    left = square - fan_in * mean * mean
    moving &= left > ROUNDING_LEFT * terms
    if FIX_MEAN:
        moving &= left > NO_DIRECTION * square
    if FIX_NORM == 1:
        stretch = radius / tl.sqrt(tl.where(moving, left, 1.0))
    elif FIX_NORM == 2:
        stretch = tl.abs(radius) / tl.sqrt(tl.where(moving, left, 1.0))
        stretch = tl.where(radius < 0, tl.minimum(stretch, 1.0), stretch)
    else:
        moving &= tl.sqrt(square) < MAX_FLOAT32 / 2
        stretch = tl.zeros_like(f) + 1.0
    ordinary = (gg > 1e-30) & (gg < 1e30) & (ww > 1e-30) & (ww < 1e30) & (old_average < 1e15) & (left > 0.25 * terms)
    return average, f, mean, stretch, moving, finite, ordinary


@triton.jit
def _slice(record, starts, inside, number, fan_in, SLICE: tl.constexpr, AXIS: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """Return the elements of a slice of some neurons: indices, offsets and mask."""
    k = number * SLICE + tl.arange(0, SLICE)
    steps = element_offset(record, k, CONTIGUOUS)
    at = tl.expand_dims(starts, AXIS) + tl.expand_dims(steps, 1 - AXIS)
    return k, at, tl.expand_dims(inside, AXIS) & tl.expand_dims(k < fan_in, 1 - AXIS)


@triton.jit
def turn_precisely(
    record, weight, grad, buffer, sizes, noise, i, inside, starts, fan_in, averages, old_average, square, radius, rate,
    least, slices, SLICE: tl.constexpr, AXIS: tl.constexpr, CONTIGUOUS: tl.constexpr, W: tl.constexpr,
    FIX_MEAN: tl.constexpr, FIX_NORM: tl.constexpr, SCALED: tl.constexpr, STOCHASTIC: tl.constexpr,
    MOMENTUM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Turn the neurons ``inside`` slice by slice, in float64. ``AXIS`` is that of their elements."""
    beta = load_float(record, BETA)
    if tl.sum(inside.to(tl.int32), 0) > 0:
        # dead units, of which some networks have many, have a zero gradient: their averages decay
        peak = tl.zeros_like(square)
        for slice in range(slices):
            _, at, some = _slice(record, starts, inside, slice, fan_in, SLICE, AXIS, CONTIGUOUS)
            g = tl.load(grad + at, some, 0).to(tl.float32)
            peak = tl.maximum(peak, tl.max(tl.abs(g), AXIS))
            if MOMENTUM:
                m = tl.load(buffer + at, some, 0).to(tl.float32)
                peak = tl.maximum(peak, tl.max(tl.abs(m), AXIS))
        dead = (square == 0) & (peak == 0)
        tl.store(averages, (old_average.to(tl.float64) * tl.sqrt(beta)).to(tl.float32), inside & dead)
        inside &= ~dead
    if tl.sum(inside.to(tl.int32), 0) > 0:
        sum_w = tl.zeros_like(square).to(tl.float64)
        sum_g, sum_ww, sum_gg, sum_wg = sum_w, sum_w, sum_w, sum_w
        for slice in range(slices):
            _, at, some = _slice(record, starts, inside, slice, fan_in, SLICE, AXIS, CONTIGUOUS)
            g = tl.load(grad + at, some, 0).to(tl.float64)
            w = tl.load(weight + at, some, 0).to(tl.float64)
            if MOMENTUM:
                m = tl.load(buffer + at, some, 0).to(tl.float64)
                g = mean_of(m, g, load_new(sizes + 2, OVERLAP))
            sum_w += tl.sum(w, AXIS)
            sum_g += tl.sum(g, AXIS)
            sum_ww += tl.sum(w * w, AXIS)
            sum_gg += tl.sum(g * g, AXIS)
            sum_wg += tl.sum(w * g, AXIS)
        average, f, mean, stretch, moving, finite, _ = solve(
            sum_w, sum_g, sum_ww, sum_gg, sum_wg, old_average, fan_in, beta, load_float(record, ONE_MINUS_BETA), rate,
            least, radius, FIX_MEAN, FIX_NORM, SCALED, MOMENTUM,
        )  # fmt: skip
        for slice in range(slices):
            k, at, some = _slice(record, starts, inside, slice, fan_in, SLICE, AXIS, CONTIGUOUS)
            g = tl.load(grad + at, some, 0).to(tl.float64)
            w = tl.load(weight + at, some, 0).to(tl.float64)
            bits = draw(noise, i, k, AXIS, False) if STOCHASTIC else 0
            if MOMENTUM:
                m = tl.load(buffer + at, some, 0).to(tl.float64)
                g = mean_of(m, g, load_new(sizes + 2, OVERLAP))
                m = rounded(mean_of(m, g, load_new(sizes + 3, OVERLAP)), W, bits >> BUFFER_SHIFT, STOCHASTIC)
                tl.store(buffer + at, m, some & tl.expand_dims(finite, AXIS))
            out = (w - tl.expand_dims(f, AXIS) * g - tl.expand_dims(mean, AXIS)) * tl.expand_dims(stretch, AXIS)
            tl.store(weight + at, rounded(out, W, bits, STOCHASTIC), some & tl.expand_dims(moving, AXIS))
        tl.store(averages, average, inside)
        skipped = tl.sum((inside & ~finite).to(tl.int32), 0)
        if skipped > 0:
            tl.atomic_add(load_pointer(record, SKIPPED, tl.int64), skipped.to(tl.int64))


@triton.jit
def _turn_tile(
    record, grad, rate, least, sizes, noise, tile, W: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, FIX_MEAN: tl.constexpr, FIX_NORM: tl.constexpr, SCALED: tl.constexpr,
    STOCHASTIC: tl.constexpr, MOMENTUM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Turn the whole neurons of a tile, in float32 where that is precise enough, else in float64."""
    ROWS: tl.constexpr = TILE // WIDTH if WIDTH >= MIN_FULL_WIDTH else TILE // 2 // WIDTH
    SLICE: tl.constexpr = max(1, WIDTH // 8)
    weight = tl.load(record + WEIGHT).to(tl.pointer_type(W))  # loaded here, so that the alignment hint below applies
    grad = grad.to(tl.pointer_type(G))
    fan_in = tl.load(record + FAN_IN).to(tl.int32)
    neurons = tl.load(record + NEURONS).to(tl.int32)
    inner = tl.load(record + INNER).to(tl.int32)
    inner_stride = tl.load(record + INNER_STRIDE)
    outer_stride = tl.load(record + OUTER_STRIDE)
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        grad = tl.multiple_of(grad, 16)
        fan_in = tl.multiple_of(fan_in, 8)
        inner_stride = tl.multiple_of(inner_stride, 8)
        outer_stride = tl.multiple_of(outer_stride, 8)
    i = tile * ROWS + tl.arange(0, ROWS)
    inside = i < neurons
    starts = (i // inner) * outer_stride + (i % inner) * inner_stride
    k = tl.arange(0, WIDTH)
    within = k < fan_in
    if not ALIGNED:  # the fan-in is over half of the width: saves half of the masks, of which each takes instructions
        within |= k < WIDTH // 2
    elements = inside[:, None] & within[None, :]
    at = starts[:, None] + k[None, :]
    g = tl.load(grad + at, elements, 0).to(tl.float32)
    w = tl.load(weight + at, elements, 0).to(tl.float32)
    buffer = weight
    if MOMENTUM:
        buffer = tl.load(record + BUFFER).to(tl.pointer_type(W))
        if ALIGNED:
            buffer = tl.multiple_of(buffer, 16)
        m = tl.load(buffer + at, elements, 0).to(tl.float32)
        g = mean_of(m, g, load_new(sizes + 2, OVERLAP))
    averages = load_pointer(record, AVERAGE, tl.float32) + i
    old_average = tl.load(averages, inside, 0)
    beta = load_float(record, BETA)
    one_minus_beta = load_float(record, ONE_MINUS_BETA)
    radius = tl.full([ROWS], 1.0, tl.float32)
    if FIX_NORM >= 2:
        radius = tl.load(load_pointer(record, RADIUS, tl.float32) + i, inside, 1)

    JOINTLY: tl.constexpr = TILE >= MIN_JOINT_TILE or MOMENTUM
    sum_w, sum_g, sum_ww, square, sum_wg = summed(w, g, w * w, g * g, w * g, 1, JOINTLY)
    average, f, mean, stretch, moving, _, ordinary = solve(
        sum_w, sum_g, sum_ww, square, sum_wg, old_average, fan_in, beta, one_minus_beta, rate, least, radius, FIX_MEAN,
        FIX_NORM, SCALED, MOMENTUM,
    )  # fmt: skip
    if JOINTLY:
        out = w * stretch[:, None] - (g * (f * stretch)[:, None] + (mean * stretch)[:, None])
    else:  # an operation more per element, but fewer registers, of which a single warp has few
        out = (w - f[:, None] * g - mean[:, None]) * stretch[:, None]
    bits = draw(noise, i, k, 1, not MOMENTUM) if STOCHASTIC else 0
    out = rounded(out, W, bits, STOCHASTIC, FIX_NORM == 1)
    tl.store(weight + at, out, elements & (moving & ordinary)[:, None])
    if MOMENTUM:
        m = rounded(mean_of(m, g, load_new(sizes + 3, OVERLAP)), W, bits >> BUFFER_SHIFT, STOCHASTIC)
        tl.store(buffer + at, m, elements & ordinary[:, None])
    tl.store(averages, average, inside & ordinary)
    turn_precisely(
        record, weight, grad, buffer, sizes, noise, i, inside & ~ordinary, starts, fan_in, averages, old_average,
        square, radius, rate, least, WIDTH // SLICE, SLICE, 1, True, W, FIX_MEAN, FIX_NORM, SCALED, STOCHASTIC,
        MOMENTUM, OVERLAP,
    )  # fmt: skip


@triton.jit
def _nudge_tile(
    record, grad, rate, least, sizes, noise, tile, W: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr,
    STOCHASTIC: tl.constexpr, MOMENTUM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Nudge the gains or biases of a tile."""
    i = tile * (TILE // GAIN_SHARE) + tl.arange(0, TILE // GAIN_SHARE)
    inside = i < tl.load(record + NEURONS)
    at = neuron_offset(record, i)
    weight = load_pointer(record, WEIGHT, W) + at
    b = tl.load(weight, inside, 0).to(tl.float64)
    g = tl.load(grad.to(tl.pointer_type(G)) + at, inside, 0).to(tl.float64)
    pull = load_float(record, PULL)
    if pull != 0:
        g += pull * (b - 1)
    if MOMENTUM:
        buffer = load_pointer(record, BUFFER, W) + at
        m = tl.load(buffer, inside, 0).to(tl.float64)
        g = mean_of(m, g, load_new(sizes + 2, OVERLAP))
    averages = load_pointer(record, AVERAGE, tl.float32) + i
    old_average = tl.load(averages, inside, 0).to(tl.float64)
    beta = load_float(record, BETA)
    one_minus_beta = load_float(record, ONE_MINUS_BETA)
    finite = tl.abs(g) <= MAX_FLOAT32
    average = tl.where(finite, tl.sqrt(beta * old_average * old_average + one_minus_beta * g * g), old_average).to(
        tl.float32
    )
    moving = inside & finite & (average > 0)
    if MOMENTUM:
        moving &= tl.abs(g) > TINY
    divisor = tl.maximum(average.to(tl.float64), least * tl.abs(g))
    change = rate * g / tl.where(moving, divisor, 1.0)
    out = b - change
    moving &= (change != 0) & (tl.abs(out) <= MAX_FLOAT32)
    bits = mixed(i, noise.to(tl.uint32), (noise >> 32).to(tl.uint32)) if STOCHASTIC else 0
    tl.store(weight, rounded(out, W, bits, STOCHASTIC), moving)
    if MOMENTUM:
        m = rounded(mean_of(m, g, load_new(sizes + 3, OVERLAP)), W, bits >> BUFFER_SHIFT, STOCHASTIC)
        tl.store(buffer, m, inside & finite)
    tl.store(averages, average, inside)
    skipped = tl.sum((inside & ~finite).to(tl.int32), 0)
    if skipped > 0:
        tl.atomic_add(load_pointer(record, SKIPPED, tl.int64), skipped.to(tl.int64))


@triton.jit
def step(
    owners, records, changing, step_sizes, sums, noise, W: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr,
    SHAPES: tl.constexpr, FIX_MEAN: tl.constexpr, FIX_NORM: tl.constexpr, SCALED: tl.constexpr,
    STOCHASTIC: tl.constexpr, MOMENTUM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Step one tile of gains, biases or whole neurons. ``SHAPES`` has a bit for each shape of tile."""
    begin(OVERLAP)
    owner = tl.load(owners + tl.program_id(0))
    grad = load_new(changing + owner, OVERLAP)
    if grad == 0:
        finish(OVERLAP)
        return
    record = records + owner.to(tl.int64) * FIELDS
    sizes = step_sizes + SIZES * owner
    rate, least = load_new(sizes, OVERLAP), load_new(sizes + 1, OVERLAP)
    shape = tl.load(record + SHAPE)
    tile = tl.program_id(0) - tl.load(record + FIRST_TILE).to(tl.int32)
    if STOCHASTIC:
        noise = noise_key(load_new(noise, OVERLAP), owner)
    for each in tl.static_range(0, 2 * 15):
        if (SHAPES >> each) & 1:
            if shape == each:
                if each == 0:
                    _nudge_tile(
                        record, grad, rate, least, sizes, noise, tile, W, G, TILE, STOCHASTIC, MOMENTUM, OVERLAP
                    )
                else:
                    _turn_tile(
                        record, grad, rate, least, sizes, noise, tile, W, G, TILE, 1 << (each // 2), each % 2,
                        FIX_MEAN, FIX_NORM, SCALED, STOCHASTIC, MOMENTUM, OVERLAP,
                    )  # fmt: skip
    finish(OVERLAP)
