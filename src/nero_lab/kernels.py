"""Triton kernels of LAMB, Madam and the translator's attention, imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def madam(weight, grad, square, correction, lr, count, beta, fresh, clip, limit, tiny, BLOCK: tl.constexpr):
    """Step BLOCK weights by Madam's rule, each read once and written once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    w = tl.load(weight + i, here, 0.0)
    g = tl.load(grad + i, here, 0.0)
    v = tl.load(square + i, here, 0.0) * beta + fresh * g * g
    root = tl.sqrt_rn(v)  # tl.sqrt flushes denormals to zero
    turn = g / tl.where(root < tiny, tiny, root) * tl.load(correction)
    # comparisons, unlike tl.clamp, keep a NaN
    turn = tl.where(turn > clip, clip, tl.where(turn < -clip, -clip, turn))
    sign = tl.where(w > 0, 1.0, tl.where(w < 0, -1.0, 0.0))
    w = w * tl.exp(-tl.load(lr) * sign * turn)
    w = tl.where(w > limit, limit, tl.where(w < -limit, -limit, w))
    tl.store(weight + i, w, here)
    tl.store(square + i, v, here)


@triton.jit
def lamb_look(
    weight, grad, average, square, sums, count, beta1, fresh1, beta2, fresh2, eps, PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the running averages, and sum the squares of weights and of updates."""
    of_weights = tl.zeros([BLOCK], tl.float32)
    of_updates = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        here = i < count
        w = tl.load(weight + i, here, 0.0)
        g = tl.load(grad + i, here, 0.0)
        m = tl.load(average + i, here, 0.0) * beta1 + fresh1 * g
        v = tl.load(square + i, here, 0.0) * beta2 + fresh2 * g * g
        tl.store(average + i, m, here)
        tl.store(square + i, v, here)
        u = m / (tl.sqrt_rn(v) + eps)
        of_weights += w * w
        of_updates += u * u
    tl.store(sums + 2 * tl.program_id(0), tl.sum(of_weights, 0))
    tl.store(sums + 2 * tl.program_id(0) + 1, tl.sum(of_updates, 0))


@triton.jit
def lamb_move(weight, average, square, rate, count, eps, BLOCK: tl.constexpr):
    """Step by the update times the rate, which depends on the sums of all programs of lamb_look."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    u = tl.load(average + i, here, 0.0) / (tl.sqrt_rn(tl.load(square + i, here, 0.0)) + eps)
    tl.store(weight + i, tl.load(weight + i, here, 0.0) - tl.load(rate) * u, here)


@triton.jit
def _weights(
    q, k, seed, own_length, other_length, scale, keep, LENGTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_DROPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return softmax(q k / scale), and the factors by which dropout multiplies it: 0, or 1 / keep."""
    i, j = tl.arange(0, LENGTH)[:, None], tl.arange(0, LENGTH)[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) / scale
    seen = (i < own_length) & (j < other_length)
    if IS_CAUSAL:
        seen = seen & (j <= i)
    scores = tl.where(seen, scores, -1e9)  # not -inf: a sentence may be empty
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    factors = tl.where(seen, 1.0, 0.0)
    if IS_DROPPED:
        drawn = tl.rand(tl.load(seed), (tl.program_id(0) * LENGTH + i) * LENGTH + j)
        factors = tl.where(drawn < keep, factors / keep, 0.0)
    return weights, factors


@triton.jit
def _place(
    own_starts, own_lengths, other_starts, other_lengths, heads, WIDTH: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return rows, and which elements exist, of the words of a program's two sentences; its columns, and lengths."""
    sentence = tl.program_id(0) // heads
    i, d = tl.arange(0, LENGTH)[:, None], tl.arange(0, BLOCK)[None, :]
    own_length, other_length = tl.load(own_lengths + sentence), tl.load(other_lengths + sentence)
    own_here, other_here = (i < own_length) & (d < WIDTH), (i < other_length) & (d < WIDTH)
    own_rows, other_rows = tl.load(own_starts + sentence) + i, tl.load(other_starts + sentence) + i
    return own_rows, own_here, own_length, other_rows, other_here, other_length, tl.program_id(0) % heads * WIDTH + d


@triton.jit
def attend(
    own, keys, values, out, seed, own_starts, own_lengths, other_starts, other_lengths, own_stride, other_stride,
    out_stride, heads, scale, keep, WIDTH: tl.constexpr, LENGTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_DROPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend from all words of one sentence to all of another, in one head."""
    own_rows, own_here, own_length, other_rows, other_here, other_length, columns = _place(
        own_starts, own_lengths, other_starts, other_lengths, heads, WIDTH, LENGTH, BLOCK
    )
    others = other_rows * other_stride + columns
    q = tl.load(own + own_rows * own_stride + columns, own_here, 0.0)
    k = tl.load(keys + others, other_here, 0.0)
    weights, factors = _weights(
        q, k, seed, own_length, other_length, scale, keep, LENGTH, IS_CAUSAL, IS_DROPPED, PRECISION
    )
    v = tl.load(values + others, other_here, 0.0)
    found = tl.dot(weights * factors, v, input_precision=PRECISION)
    tl.store(out + own_rows * out_stride + columns, found, own_here)


@triton.jit
def attend_back(
    own, keys, values, grad, own_grad, keys_grad, values_grad, seed, own_starts, own_lengths, other_starts,
    other_lengths, own_stride, other_stride, grad_stride, heads, scale, keep, WIDTH: tl.constexpr,
    LENGTH: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_DROPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of :func:`attend`. A program has all words of its sentences, so none share a sum."""
    own_rows, own_here, own_length, other_rows, other_here, other_length, columns = _place(
        own_starts, own_lengths, other_starts, other_lengths, heads, WIDTH, LENGTH, BLOCK
    )
    owns, others = own_rows * own_stride + columns, other_rows * other_stride + columns
    q = tl.load(own + owns, own_here, 0.0)
    k = tl.load(keys + others, other_here, 0.0)
    weights, factors = _weights(
        q, k, seed, own_length, other_length, scale, keep, LENGTH, IS_CAUSAL, IS_DROPPED, PRECISION
    )
    g = tl.load(grad + own_rows * grad_stride + columns, own_here, 0.0)
    v = tl.load(values + others, other_here, 0.0)
    tl.store(values_grad + others, tl.dot(tl.trans(weights * factors), g, input_precision=PRECISION), other_here)
    g = tl.dot(g, tl.trans(v), input_precision=PRECISION) * factors
    scores = weights * (g - tl.sum(g * weights, 1)[:, None]) / scale
    tl.store(own_grad + owns, tl.dot(scores, k, input_precision=PRECISION), own_here)
    tl.store(keys_grad + others, tl.dot(tl.trans(scores), q, input_precision=PRECISION), other_here)
