"""Rounding to half precision: to nearest, or stochastic, which keeps small steps on average; and the noise of that."""

from typing import NamedTuple

import torch
from torch import Tensor

from nero.options import Rounding
from nero.process import is_one_of_several
from nero.role import Role
from nero.sharding import MeshSharding, is_sharded, local_of

HALVES = (torch.bfloat16, torch.float16)


def rounded(value: Tensor, dtype: torch.dtype, rounding: Rounding, generator: torch.Generator | None = None) -> Tensor:
    """Round to a dtype. With ``"stochastic"``, the expectation over the generator's numbers is the value itself.

    Values that the dtype represents exactly keep their bits. In float32 and wider, rounding is to nearest. A finite
    value beyond the largest half becomes that, not infinite.
    """
    if dtype in HALVES:
        largest, beyond = torch.finfo(dtype).max, torch.finfo(value.dtype).max
        # zero where the value is finite, else infinite or NaN; torch.where takes several times as long
        nonfinite = value.clamp(-beyond, beyond).sub_(value)
        value = value.clamp(-largest, largest).sub_(nonfinite)
    if rounding == "nearest" or dtype not in HALVES or value.dtype != torch.float32:
        return value.to(dtype)
    if dtype == torch.bfloat16:  # the upper half of a float32: the lower half carries over at random
        bits = value.contiguous().view(torch.int32)
        drawn = ((bits + _random(bits, 1 << 16, generator)) & ~0xFFFF).view(torch.float32)
        return torch.where(value.isfinite(), drawn, value).to(dtype)
    # 2**e of a number 1.x * 2**e, from its bits; float16 has a spacing of 2**(e - 10), at least 2**-24
    binade = (value.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    quantum = (binade * 2.0**-10).clamp_min_(2.0**-24)
    chance = _random(value, 1 << 13, generator) * 2.0**-13  # as many bits as are dropped, so that the sum is exact
    drawn = (value.abs() / quantum + chance).floor_().mul_(quantum).copysign_(value)
    return torch.where(value.isfinite(), drawn, value).to(dtype)


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a dtype; a value beyond its largest becomes that, not infinite. Itself if it has the dtype."""
    if value.dtype == dtype:
        return value
    largest = torch.finfo(dtype).max
    return value.to(torch.promote_types(value.dtype, dtype)).clamp(-largest, largest).to(dtype)


class Noise(NamedTuple):
    """The noise of stochastic rounding. It is equal on processes that hold the same part of a parameter."""

    place: tuple[tuple[int, int, int], ...]
    device: torch.device

    def generator(self) -> torch.Generator:
        """Make a generator with a seed that depends on the place alone."""
        return torch.Generator(self.device).manual_seed(hash(self.place) % (1 << 62))


def noise_of(parameter: Tensor, role: Role) -> Noise | None:
    """Return the noise of a parameter; ``None`` in a single process, which draws from torch's own generator.

    Processes may be seeded differently, but replicas must draw the same numbers. The place of a plain tensor is that of
    a replica, as under DistributedDataParallel.
    """
    if not is_one_of_several():
        return None
    place = MeshSharding(parameter, role).coordinate if is_sharded(parameter) else ()
    return Noise(place, local_of(parameter).device)


def _random(like: Tensor, below: int, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.randint_like(like, below)
    return torch.randint(below, like.shape, generator=generator, dtype=like.dtype, device=like.device)
