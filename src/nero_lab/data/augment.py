"""Random crops, flips and rotations of whole sets of images at once, on their own device."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class _Draws(NamedTuple):
    """What chance decides, image by image."""

    shifts: Tensor  # (N, 2): how far down and right of the image its crop begins; negative: in the padding
    flips: Tensor  # (N,): whether it is mirrored
    angles: Tensor  # (N,): how far it is turned, in radians, anticlockwise

    def part(self, which: slice) -> "_Draws":
        return _Draws(self.shifts[which], self.flips[which], self.angles[which])


def crop_flip_rotate(
    pixels: Tensor, generator: torch.Generator, *, padding: int = 4, degrees: float = 15.0, chunk: int = 4096
) -> Tensor:
    """Crop each image out of its zero-padded self, mirror every other one, and turn it a little, at random.

    What torchvision's RandomCrop, RandomHorizontalFlip and RandomRotation do one after the other to
    one image after the other: the rotation is about the middle, takes the nearest pixel, and is
    zero where it looks past the edge of the crop.

    Args:
        pixels: uint8 (N, C, H, W); left as it is.
        generator: of random numbers, on the pixels' device.
        padding: the crop begins up to so many pixels off, either way and along either axis.
        degrees: the angle is uniform between minus and plus this.
        chunk: how many images at a time, which bounds the memory and changes no result.

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
        index, inside = _sources(draws.part(which), height, width)
        index = index[:, None].expand(-1, channels, -1)
        torch.gather(pixels[which].flatten(2), 2, index, out=moved[which].flatten(2)).mul_(inside[:, None])
    return moved


def flip(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror every other image, at random.

    Args:
        pixels: uint8 (N, C, H, W); left as it is.
        generator: of random numbers, on the pixels' device.

    Example:
        >>> pixels = torch.arange(2, dtype=torch.uint8).expand(4, 3, 2, 2)
        >>> flip(pixels, torch.Generator().manual_seed(0))[:, 0, 0].tolist()
        [[0, 1], [1, 0], [1, 0], [0, 1]]
    """
    mirrored = torch.randint(2, (len(pixels), 1, 1, 1), generator=generator, device=pixels.device).bool()
    return torch.where(mirrored, pixels.flip(3), pixels)


def _draw(count: int, generator: torch.Generator, padding: int, degrees: float, device: torch.device) -> _Draws:
    shifts = torch.randint(-padding, padding + 1, (count, 2), generator=generator, device=device)
    flips = torch.randint(2, (count,), generator=generator, device=device).bool()
    turns = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    return _Draws(shifts, flips, (2 * turns - 1) * math.radians(degrees))


def _sources(draws: _Draws, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Which pixel, counted row by row, each pixel of each result is, and whether it is one at all; both (N, H * W).

    The three steps are undone from the last to the first. In float64, so that devices agree on
    which pixel is the nearest.
    """
    shifts, flips, angles = draws
    # from the middle of the image to the middles of its pixels
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
    # a place outside is masked, but has to be one that can be read
    index = row.clamp_(0, height - 1).mul_(width).add_(column.clamp_(0, width - 1)).long()
    return index.flatten(1), inside.flatten(1)


def _within(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)


def _check(pixels: Tensor, padding: int, degrees: float, chunk: int) -> None:
    if pixels.dtype != torch.uint8 or pixels.ndim != 4:
        raise ValueError(f"pixels must be uint8 (N, C, H, W), but they are {pixels.dtype} {tuple(pixels.shape)}")
    if padding < 0:
        raise ValueError(f"padding must not be negative, but it is {padding!r}")
    if not 0 <= degrees <= 180:
        raise ValueError(f"degrees must be between 0 and 180, but it is {degrees!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, but it is {chunk!r}")
