"""The kernel of :mod:`nero.backends.triton.project`, and its launches.

As in :mod:`nero.backends.triton.kernels`, a *record* is a row of int64s about one tensor, a *tile* is the work of one
program, and ``owners`` maps programs to records.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nero.backends.triton.kernels import MIN_FULL_WIDTH, NO_DIRECTION
from nero.backends.triton.rounding_kernels import MAX_FLOAT32, rounded
from nero.rule import rounding_error

# the fields of a record
WEIGHT = tl.constexpr(0)
RADIUS = tl.constexpr(1)  # the address of one radius per neuron; 0 if every radius is COMMON_RADIUS
COMMON_RADIUS = tl.constexpr(2)
NEURONS = tl.constexpr(3)
FAN_IN = tl.constexpr(4)
INNER = tl.constexpr(5)  # neuron i starts at (i // INNER) * OUTER_STRIDE + (i % INNER) * INNER_STRIDE
INNER_STRIDE = tl.constexpr(6)
OUTER_STRIDE = tl.constexpr(7)
SHAPE = tl.constexpr(8)  # of its tiles: 2 * log2(width) + is_aligned
FIRST_TILE = tl.constexpr(9)
FIELDS = tl.constexpr(10)
# of float32: the bits of a mantissa, and twice the bias of exponents
MANTISSA = tl.constexpr(23)
MAX_EXPONENT = tl.constexpr(254)
LARGE = tl.constexpr(2.0**64)


@triton.jit
def _project_tile(
    record, tile, W: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    FIX_MEAN: tl.constexpr, FIX_NORM: tl.constexpr, ROUNDING_ERROR: tl.constexpr,
):  # fmt: skip
    """Project the neurons of a tile, except those that are balanced already or have no projection."""
    ROWS: tl.constexpr = TILE // WIDTH if WIDTH >= MIN_FULL_WIDTH else TILE // 2 // WIDTH
    weight = tl.load(record + WEIGHT).to(tl.pointer_type(W))
    fan_in = tl.load(record + FAN_IN).to(tl.int32)
    inner = tl.load(record + INNER).to(tl.int32)
    inner_stride = tl.load(record + INNER_STRIDE)
    outer_stride = tl.load(record + OUTER_STRIDE)
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        fan_in = tl.multiple_of(fan_in, 8)
        inner_stride = tl.multiple_of(inner_stride, 8)
        outer_stride = tl.multiple_of(outer_stride, 8)
    i = tile * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    inside = i < tl.load(record + NEURONS).to(tl.int32)
    elements = inside[:, None] & (k < fan_in)[None, :]
    starts = (i // inner) * outer_stride + (i % inner) * inner_stride
    at = weight + (starts[:, None] + k[None, :])
    w = tl.load(at, elements, 0).to(tl.float32)
    radii = tl.load(record + RADIUS)
    common = tl.load(record + COMMON_RADIUS).to(tl.float64, bitcast=True).to(tl.float32)
    has_own = tl.where(inside, radii, 0) != 0
    radius = tl.where(has_own, tl.load(radii.to(tl.pointer_type(tl.float32)) + i, has_own, 0), common)

    # sums are of units of a power of two near the peak: exact, and without overflow
    peak = tl.max(tl.abs(w), 1)
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> MANTISSA, 1), MAX_EXPONENT - 1)
    power = (exponent << MANTISSA).to(tl.float32, bitcast=True)
    unit = w * ((-exponent + MAX_EXPONENT) << MANTISSA).to(tl.float32, bitcast=True)[:, None]
    square = tl.sum(unit * unit, 1)
    possible = (peak > 0) & (square <= MAX_FLOAT32)  # not of inf or NaN
    whole = tl.where(possible, square, 1.0)
    drift = square * 0.0  # the square of the distance to zero mean
    if FIX_MEAN:
        centring = (fan_in != 2) & (radius > 0)  # neurons that started at zero keep their mean
        mean = tl.where(centring, tl.sum(unit, 1) / fan_in, 0.0)
        drift = fan_in * mean * mean
        unit = tl.where(elements, unit - mean[:, None], 0.0)
        rest = tl.where(centring, tl.sum(unit, 1) / fan_in, 0.0)  # exact for nearly constant neurons too
        unit = tl.where(elements, unit - rest[:, None], 0.0)
        left = tl.sum(unit * unit, 1)
        possible = possible & (left > NO_DIRECTION * square)
        square = left
    norm = tl.sqrt_rn(tl.where(possible, square, 1.0))
    if FIX_NORM:
        bound = tl.abs(radius)
        scale = tl.minimum(power / bound, 1e18)  # not infinite: it is multiplied by zero where there is no drift
        is_short = (radius < 0) & (norm * power < bound)  # as a neuron may be that started at zero
        excess = tl.where(is_short, 0.0, norm * scale - 1)
        off = excess * excess + drift * scale * scale
        large = tl.where(bound > LARGE, LARGE, 1.0)  # a factor of its own, so that the other one is finite
        unit = unit * tl.where(is_short, power, bound / large / norm)[:, None]
        unit = unit * tl.where(is_short, 1.0, large)[:, None]
    else:
        possible = possible & (peak < MAX_FLOAT32 / 2)
        off = drift / whole
        unit = unit * power[:, None]
    moving = possible & (off > ROUNDING_ERROR * ROUNDING_ERROR)
    tl.store(at, rounded(unit, W, 0, False), elements & moving[:, None])


@triton.jit
def project(
    owners, records, active, W: tl.constexpr, TILE: tl.constexpr, SHAPES: tl.constexpr, FIX_MEAN: tl.constexpr,
    FIX_NORM: tl.constexpr, ROUNDING_ERROR: tl.constexpr,
):  # fmt: skip
    """Project one tile of an active tensor. ``SHAPES`` has a bit for each shape of tile."""
    owner = tl.load(owners + tl.program_id(0))
    if tl.load(active + owner) == 0:
        return
    record = records + owner.to(tl.int64) * FIELDS
    shape = tl.load(record + SHAPE)
    tile = tl.program_id(0) - tl.load(record + FIRST_TILE).to(tl.int32)
    for each in tl.static_range(0, 2 * 15):
        if (SHAPES >> each) & 1:
            if shape == each:
                _project_tile(record, tile, W, TILE, 1 << (each // 2), each % 2, FIX_MEAN, FIX_NORM, ROUNDING_ERROR)


def probe(zeros: Tensor) -> None:
    """Launch the kernel on tables of zeros, in which no tensor is active."""
    constants = {"W": tl.float32, "TILE": 1024, "SHAPES": 1 << 8, "FIX_MEAN": True, "FIX_NORM": True}
    constants |= {"ROUNDING_ERROR": rounding_error(torch.float32), "enable_fp_fusion": True}  # as tables.Launch has it
    project[(1,)](zeros.int(), zeros.long(), zeros.int(), **constants)
