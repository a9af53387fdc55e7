"""Triton kernels of LAMB and Madam, imported only where Triton is installed."""

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
