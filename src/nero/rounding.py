"""Rounding up or down by chance, so that in half precision a small step is not always rounded away."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Rounding: TypeAlias = Literal["nearest", "stochastic"]

#: Of each dtype that float32 is rounded to: the bits of its fraction, and the smallest step between two numbers that
#: is told apart (below float32's own smallest normal number nothing is).
HALVES = {torch.bfloat16: (7, 2.0**-126), torch.float16: (10, 2.0**-24)}


def rounded(value: Tensor, dtype: torch.dtype, rounding: Rounding) -> Tensor:
    """The value in that dtype. With ``"stochastic"``, on average over torch's random numbers it is the value itself.

    What the dtype can hold stays as it is. In float32 and wider, rounding is to nearest.
    """
    if rounding == "nearest" or dtype not in HALVES or value.dtype != torch.float32:
        return value.to(dtype)
    kept, smallest = HALVES[dtype]
    # 2**e of a number 1.x * 2**e, by its bits
    binade = (value.view(torch.int32) & 0x7F800000).view(torch.float32)
    quantum = (binade * 2.0**-kept).clamp_min_(smallest)
    # as many random bits as rounding drops: their sum is exact
    chance = torch.randint_like(value, 1 << (23 - kept)).mul_(2.0 ** (kept - 23))
    return (value / quantum).add_(chance).floor_().mul_(quantum).to(dtype)
