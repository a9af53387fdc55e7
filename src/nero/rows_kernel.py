"""What :mod:`nero.rows` launches; imported where Triton is there."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
#: (16 eps)², as in nero.balance.project: what rounding leaves of a constant neuron is no direction
NOTHING = tl.constexpr((16 * 2.0**-23) ** 2)


@triton.jit
def project(
    weight, radii, fan_in, apart, radius, FIX_MEAN: tl.constexpr, FIX_NORM: tl.constexpr, RADII: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One neuron; as it was, if it has no projection."""
    i = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    here = k < fan_in
    at = weight + i * apart + k
    w = tl.load(at, here, 0.0)
    size = tl.abs(w)
    peak = tl.max(size, 0)
    broken = tl.sum((~(size <= LARGEST)).to(tl.int32), 0)
    possible = (peak > 0) & (broken == 0)
    unit = tl.div_rn(w, tl.where(possible, peak, 1.0) + tl.zeros([WIDTH], tl.float32))
    square = tl.sum(unit * unit, 0)
    if FIX_MEAN:
        unit = tl.where(here, unit - tl.sum(unit, 0) / fan_in, 0.0)
        left = tl.sum(unit * unit, 0)
        possible = possible & (left > NOTHING * square)
        square = left
    if FIX_NORM:
        if RADII:
            radius = tl.load(radii + i)
        unit *= radius / tl.sqrt_rn(tl.where(possible, square, 1.0))
    else:
        possible = possible & (peak < LARGEST / 2)
        unit = unit * peak
    tl.store(at, tl.where(possible, unit, w), here)
