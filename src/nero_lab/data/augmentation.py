"""Normalisation, and random crops, flips and rotations, of a whole set of images at once, on its device."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class _Draws(NamedTuple):
    """Random numbers of each image."""

    shifts: Tensor  # (N, 2): offset of the crop, down and right; negative values start in the padding
    flips: Tensor  # (N,): True if mirrored
    angles: Tensor  # (N,): rotation in radians, anticlockwise

    def select(self, which: slice) -> "_Draws":
        return _Draws(self.shifts[which], self.flips[which], self.angles[which])


def crop_flip_rotate(
    pixels: Tensor, generator: torch.Generator, *, padding: int = 4, degrees: float = 15.0, chunk: int = 4096
) -> Tensor:
    """Crop each image from its zero-padded version, mirror half of them, and rotate each, all at random.

    Equals torchvision's RandomCrop, RandomHorizontalFlip and RandomRotation in sequence. The rotation is about the
    centre, takes the nearest pixel, and gives zero outside the crop.

    Args:
        pixels: uint8 (N, C, H, W); not modified.
        generator: random generator on the device of the pixels.
        padding: largest offset of the crop along each axis, in pixels.
        degrees: the angle is uniform in [-degrees, degrees].
        chunk: images per pass; limits memory, does not change the result.

    Example:
        >>> pixels = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
        >>> moved = crop_flip_rotate(pixels, torch.Generator().manual_seed(0))
        >>> moved.shape == pixels.shape, moved.dtype
        (True, torch.uint8)
    """
    _check(pixels, padding, degrees, chunk)
    count, channels, height, width = pixels.shape
    draws = _draw(count, generator, padding, degrees, pixels.device)
    moved = torch.empty_like(pixels, memory_format=torch.contiguous_format)
    for start in range(0, count, chunk):
        which = slice(start, start + chunk)
        index, inside = _source_pixels(draws.select(which), height, width)
        index = index[:, None].expand(-1, channels, -1)
        torch.gather(pixels[which].flatten(2), 2, index, out=moved[which].flatten(2)).mul_(inside[:, None])
    return moved


def flip(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror half of the images, at random.

    Args:
        pixels: uint8 (N, C, H, W); not modified.
        generator: random generator on the device of the pixels.

    Example:
        >>> pixels = torch.arange(2, dtype=torch.uint8).expand(4, 3, 2, 2)
        >>> flip(pixels, torch.Generator().manual_seed(0))[:, 0, 0].tolist()
        [[0, 1], [1, 0], [1, 0], [0, 1]]
    """
    mirrored = torch.randint(2, (len(pixels), 1, 1, 1), generator=generator, device=pixels.device).bool()
    return torch.where(mirrored, pixels.flip(3), pixels)


def translate_and_flip(pixels: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
    """Move each image by whole pixels, with its reflection where the image ends, and mirror some.

    Args:
        pixels: (N, C, H, W); not modified.
        shifts: integers (N, 2): how far to move the window down and right.
        flips: bool (N,): True to mirror.

    Returns:
        The moved images, in channels-last layout.

    Example:
        >>> pixels = torch.arange(4).expand(2, 1, 1, 4)
        >>> translate_and_flip(pixels, torch.tensor([[0, 1], [0, -2]]), torch.tensor([False, True])).flatten(1).tolist()
        [[1, 2, 3, 2], [1, 0, 1, 2]]
    """
    rows, columns = (
        (size - 1) - ((size - 1) - (torch.arange(size, device=pixels.device) + shift[:, None]).abs()).abs()
        for size, shift in zip(pixels.shape[2:], shifts.unbind(1), strict=True)
    )
    columns = torch.where(flips[:, None], columns.flip(1), columns)
    images = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    return pixels.permute(0, 2, 3, 1)[images, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


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


def _draw(count: int, generator: torch.Generator, padding: int, degrees: float, device: torch.device) -> _Draws:
    shifts = torch.randint(-padding, padding + 1, (count, 2), generator=generator, device=device)
    flips = torch.randint(2, (count,), generator=generator, device=device).bool()
    turns = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    return _Draws(shifts, flips, (2 * turns - 1) * math.radians(degrees))


def _source_pixels(draws: _Draws, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the row-major source index of each output pixel, and whether it lies inside the image; both (N, H * W).

    Inverts rotation, flip and crop, in this order. Computes in float64, so that devices agree on the nearest pixel.
    """
    shifts, flips, angles = draws
    # offsets of the pixel centres from the image centre
    down = torch.arange(height, dtype=torch.float64, device=angles.device)[:, None] + (0.5 - height / 2)
    right = torch.arange(width, dtype=torch.float64, device=angles.device) + (0.5 - width / 2)
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
    row = (cos * down + sin * right).add_(height / 2).floor_()
    column = (cos * right - sin * down).add_(width / 2).floor_()
    inside = _within(row, height) & _within(column, width)
    column = torch.where(flips[:, None, None], width - 1 - column, column)
    row += shifts[:, 0, None, None]
    column += shifts[:, 1, None, None]
    inside &= _within(row, height) & _within(column, width)
    # masked pixels need a valid index, too
    index = row.clamp_(0, height - 1).mul_(width).add_(column.clamp_(0, width - 1)).long()
    return index.flatten(1), inside.flatten(1)


def _within(positions: Tensor, size: int) -> Tensor:
    return (positions >= 0) & (positions < size)


def _check(pixels: Tensor, padding: int, degrees: float, chunk: int) -> None:
    if pixels.dtype != torch.uint8 or pixels.ndim != 4:
        raise ValueError(f"pixels must be uint8 (N, C, H, W), got {pixels.dtype} {tuple(pixels.shape)}")
    if padding < 0:
        raise ValueError(f"padding must be non-negative, got {padding!r}")
    if not 0 <= degrees <= 180:
        raise ValueError(f"degrees must be in [0, 180], got {degrees!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk!r}")
