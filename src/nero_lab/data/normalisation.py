"""Normalisation of pixels by the moments of their channels."""

from functools import cache

import torch
from torch import Tensor


@cache  # copying to a GPU synchronises with it, so do it once
def scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (C,) tensors such that ``pixels * scale + shift`` is ``(pixels / 255 - mean) / std``.

    Example:
        >>> scale, shift = scale_and_shift((0.5,), (0.25,), torch.device("cpu"))
        >>> (torch.tensor([0, 255]) * scale + shift).tolist()
        [-2.0, 2.0]
    """
    scale = [1 / (255 * deviation) for deviation in std]
    shift = [-middle / deviation for middle, deviation in zip(mean, std, strict=True)]
    return torch.tensor(scale, device=device), torch.tensor(shift, device=device)
