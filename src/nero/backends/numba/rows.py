"""Compiled loops for neurons that are cut: their local sums, and the turn."""

from nero.backends.numba.loops import BLOCK_ELEMENTS, _sum, _write
from nero.backends.numba.tasks import compiled


@compiled
def sum_rows(weights, grads, sums):
    """Write Σw, Σg, Σw², Σg² and Σwg of each row."""
    for row in range(weights.shape[0]):
        w, g, ww, gg, wg = 0.0, 0.0, 0.0, 0.0, 0.0
        for begin in range(0, weights.shape[1], BLOCK_ELEMENTS):
            end = min(begin + BLOCK_ELEMENTS, weights.shape[1])
            block = _sum(weights[row, begin:end], grads[row, begin:end])
            w, g, ww, gg, wg = w + block[0], g + block[1], ww + block[2], gg + block[3], wg + block[4]
        sums[0, row], sums[1, row], sums[2, row], sums[3, row], sums[4, row] = w, g, ww, gg, wg


@compiled
def write_rows(weights, grads, stretch, along, shift):
    """Set w <- stretch * w + along * g + shift."""
    for row in range(weights.shape[0]):
        _write(weights[row], grads[row], stretch[row], along[row], shift[row])
