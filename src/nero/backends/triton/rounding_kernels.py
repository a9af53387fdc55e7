"""Rounding in Triton kernels: to nearest, or stochastic, as :mod:`nero.rounding` does it."""

import torch
import triton
import triton.language as tl

#: Triton's names of the dtypes.
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MAX_FLOAT32 = tl.constexpr(3.4028234663852886e38)
#: The factors of MurmurHash3's last step: a product spreads bits upwards, and a shift downwards.
SPREAD = tl.constexpr(0x85EBCA6B)
SPREAD_AGAIN = tl.constexpr(0xC2B2AE35)
#: The momentum buffer is rounded by the upper half of a random number, the weight by the lower half.
BUFFER_SHIFT = tl.constexpr(16)


@triton.jit
def noise_key(noise, owner):
    """Draw the key of a tensor from the noise of a step; :func:`draw` derives a number for each element."""
    low, high, _, _ = tl.randint4x(noise, owner)
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def mixed(x, first, second):
    """Hash x with two keys, by as few operations as keep the hashes of neighbours independent."""
    x = (x.to(tl.uint32) ^ first) * SPREAD
    x = (x ^ (x >> 13) ^ second) * SPREAD_AGAIN
    return x ^ (x >> 16)


IS_INTERPRETED = tl.constexpr(not isinstance(mixed, triton.JITFunction))


@triton.jit
def draw(key, i, k, AXIS: tl.constexpr, PAIRED: tl.constexpr):
    """Draw 32 random bits for element k of neuron i; 16 if ``PAIRED``, for then two elements share a number."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    first, second = tl.expand_dims(mixed(i, low, high), AXIS), tl.expand_dims(mixed(i, high, low), AXIS)
    k = tl.expand_dims(k, 1 - AXIS)
    if PAIRED:
        pair = mixed(k >> 1, first, second)
        bits = tl.where((k & 1) == 0, pair, pair >> 16)
    else:
        bits = mixed(k, first, second)
    return bits


@triton.jit
def rounded(x, dtype: tl.constexpr, bits, STOCHASTIC: tl.constexpr, IS_BOUNDED: tl.constexpr = False):
    """Round to the dtype of the weights.

    ``bits`` are random; the lower 16 count. ``IS_BOUNDED`` says that no finite x is beyond the largest of the dtype.
    """
    x = x.to(tl.float32)
    if dtype != tl.float32 and not IS_BOUNDED:
        largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
        x = tl.where(tl.abs(x) <= MAX_FLOAT32, tl.minimum(tl.maximum(x, -largest), largest), x)
    if dtype == tl.bfloat16 and (STOCHASTIC or IS_INTERPRETED):  # Triton's interpreter rounds down
        held = x.to(tl.int32, bitcast=True)
        carry = (bits & 0xFFFF).to(tl.int32) if STOCHASTIC else 0x7FFF + ((held >> 16) & 1)
        out = ((held + carry) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16 and STOCHASTIC:
        held = x.to(tl.int32, bitcast=True)
        exponent = tl.maximum(((held >> 23) & 0xFF) - 10, 103)  # 103 is the exponent of 2**-24
        quantum = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        chance = (bits & 0x1FFF).to(tl.float32) * (1.0 / 0x2000)
        size = tl.floor(tl.abs(x) * inverse + chance) * quantum
        out = tl.where(held < 0, -size, size).to(dtype)
    else:
        out = x.to(dtype)
    return out
