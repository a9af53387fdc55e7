"""Rounding up or down by chance, so that in half precision a small step is not always rounded away."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Rounding: TypeAlias = Literal["nearest", "stochastic"]

HALVES = (torch.bfloat16, torch.float16)


def rounded(value: Tensor, dtype: torch.dtype, rounding: Rounding) -> Tensor:
    """The value in that dtype. With ``"stochastic"``, on average over torch's random numbers it is the value itself.

    What the dtype can hold stays as it is, bit for bit. In float32 and wider, rounding is to nearest. A number beyond
    the largest of a half becomes that, not infinite.
    """
    if dtype in HALVES:
        largest, beyond = torch.finfo(dtype).max, torch.finfo(value.dtype).max
        # zero, but where the value is not finite, and stays so; torch.where takes several times as long
        endless = value.clamp(-beyond, beyond).sub_(value)
        value = value.clamp(-largest, largest).sub_(endless)
    if rounding == "nearest" or dtype not in HALVES or value.dtype != torch.float32:
        return value.to(dtype)
    if dtype == torch.bfloat16:  # the upper half of a float32: what is dropped carries over by chance
        bits = value.contiguous().view(torch.int32)
        drawn = ((bits + torch.randint_like(bits, 1 << 16)) & ~0xFFFF).view(torch.float32)
        return torch.where(value.isfinite(), drawn, value).to(dtype)
    # 2**e of a number 1.x * 2**e, by its bits; float16 tells apart numbers 2**(e - 10) from each other, or 2**-24
    binade = (value.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    quantum = (binade * 2.0**-10).clamp_min_(2.0**-24)
    chance = torch.randint_like(value, 1 << 13) * 2.0**-13  # as many bits as are dropped, so that their sum is exact
    drawn = (value.abs() / quantum + chance).floor_().mul_(quantum).copysign_(value)
    return torch.where(value.isfinite(), drawn, value).to(dtype)
