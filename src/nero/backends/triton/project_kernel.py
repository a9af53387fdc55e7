"""The kernel of :mod:`nero.backends.triton.project`, and its launch."""

import triton
import triton.language as tl
from torch import Tensor

from nero.backends.triton.kernels import MAX_FLOAT32, NO_DIRECTION

#: nero.rule.rounding_error(torch.float32): a neuron this near to its projection is left as it is.
ROUNDING_ERROR = tl.constexpr(17 * 2.0**-23)


@triton.jit
def project(
    weight, radii, fan_in, row_stride, radius, FIX_MEAN: tl.constexpr, FIX_NORM: tl.constexpr, RADII: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Project one neuron, unless it is balanced already or has no projection."""
    i = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    inside = k < fan_in
    at = weight + i * row_stride + k
    w = tl.load(at, inside, 0.0)
    peak = tl.max(tl.abs(w), 0)
    nonfinite = tl.sum((~(tl.abs(w) <= MAX_FLOAT32)).to(tl.int32), 0)
    possible = (peak > 0) & (nonfinite == 0)
    unit = tl.div_rn(w, tl.where(possible, peak, 1.0) + tl.zeros([WIDTH], tl.float32))
    square = tl.sum(unit * unit, 0)
    size = tl.sqrt_rn(tl.where(possible, square, 1.0))  # of the whole neuron, in units of the peak
    drift = square * 0.0  # the square of the distance to zero mean, in the same units
    if RADII:
        radius = tl.load(radii + i)
    if FIX_MEAN:
        mean = tl.where(radius > 0, tl.sum(unit, 0) / fan_in, 0.0)  # neurons that started at zero keep their mean
        drift = fan_in * mean * mean
        unit = tl.where(inside, unit - mean, 0.0)
        rest = tl.where(radius > 0, tl.sum(unit, 0) / fan_in, 0.0)  # exact for nearly constant neurons too
        unit = tl.where(inside, unit - rest, 0.0)
        left = tl.sum(unit * unit, 0)
        possible = possible & (left > NO_DIRECTION * square)
        square = left
    norm = tl.sqrt_rn(tl.where(possible, square, 1.0))
    if FIX_NORM:
        bound = tl.abs(radius)
        scale = tl.minimum(peak / bound, 1e18)  # not infinite: it is multiplied by zero where there is no drift
        is_short = (radius < 0) & (norm * peak < bound)  # as a neuron may be that started at zero
        excess = tl.where(is_short, 0.0, norm * scale - 1)
        off = excess * excess + drift * scale * scale
        unit *= tl.where(is_short, peak, bound / norm)
    else:
        possible = possible & (peak < MAX_FLOAT32 / 2)
        off = drift / (size * size)
        unit = unit * peak
    moving = possible & (off > ROUNDING_ERROR * ROUNDING_ERROR)
    tl.store(at, tl.where(moving, unit, w), inside)


def launch(
    tensor: Tensor,
    neurons: int,
    fan_in: int,
    row_stride: int,
    *,
    fix_mean: bool = True,
    fix_norm: bool = True,
    radius: float | Tensor = 1.0,
) -> None:
    """Project the rows of a tensor, one program per neuron."""
    width = max(16, 1 << (fan_in - 1).bit_length())
    project[(neurons,)](
        tensor,
        radius.reshape(-1).to(tensor.device) if isinstance(radius, Tensor) else tensor,
        fan_in,
        row_stride,
        1.0 if isinstance(radius, Tensor) else float(radius),
        FIX_MEAN=fix_mean and fan_in != 2,
        FIX_NORM=fix_norm,
        RADII=isinstance(radius, Tensor),
        WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
    )
