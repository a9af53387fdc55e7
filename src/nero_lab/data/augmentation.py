"""Normalisation, and random crops, flips, rotations and resizes, of a whole set of images at once, on its device."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

#: Range of a box's area relative to its image, and of its width over its height.
AREA_RANGE, ASPECT_RANGE = (0.08, 1.0), (3 / 4, 4 / 3)
#: Boxes drawn per image; if none fits, the largest central box is taken.
MAX_TRIES = 10
#: Most float32 elements of images that are cropped together.
MAX_ELEMENTS = 2**27


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


def random_boxes(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw a box for each image, as torchvision's RandomResizedCrop does.

    Args:
        count: number of images.
        height: height of every image.
        width: width of every image.
        generator: random generator on the device of the boxes.

    Returns:
        float64 (N, 4): top, left, height and width, in whole pixels.
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
        return low + (high - low) * drawn

    area = height * width * uniform(*AREA_RANGE, count, MAX_TRIES)
    aspect = uniform(math.log(ASPECT_RANGE[0]), math.log(ASPECT_RANGE[1]), count, MAX_TRIES).exp()
    heights, widths = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    first, any_fits = fits.int().argmax(1, keepdim=True), fits.any(1)
    central = _largest_box(height, width)
    box_height = torch.where(any_fits, heights.gather(1, first).squeeze(1), central[0])
    box_width = torch.where(any_fits, widths.gather(1, first).squeeze(1), central[1])
    down, right = uniform(0, 1, 2, count)
    top = torch.where(any_fits, (down * (height - box_height + 1)).floor(), (height - central[0]) // 2)
    left = torch.where(any_fits, (right * (width - box_width + 1)).floor(), (width - central[1]) // 2)
    return torch.stack([top, left, box_height, box_width], 1)


def random_flips(count: int, generator: torch.Generator) -> Tensor:
    """Draw for each image whether it is mirrored, with probability one half: bool (N,)."""
    return torch.rand(count, generator=generator, device=generator.device) < 0.5


def crop_and_resize(pixels: Tensor, boxes: Tensor, size: tuple[int, int], flips: Tensor) -> Tensor:
    """Crop a box from each image, resize it to a common size, and mirror it where asked.

    Equals Pillow's bilinear ``crop(box).resize(size)``, which averages when it shrinks, up to its rounding to bytes.
    Rows and columns are weighted by one matrix each, so a batch takes two matrix products.

    Args:
        pixels: uint8 (N, H, W, C).
        boxes: (N, 4): top, left, height, width.
        size: height and width of the result.
        flips: bool (N,): True to mirror.

    Returns:
        float32 (N, height, width, C), in [0, 255].

    Example:
        >>> pixels = torch.arange(16, dtype=torch.uint8).view(1, 4, 4, 1)
        >>> crop_and_resize(pixels, torch.tensor([[0, 1, 2, 2]]), (2, 2), torch.tensor([True])).flatten().tolist()
        [2.0, 1.0, 6.0, 5.0]
    """
    count, height, width, channels = pixels.shape
    if count > (most := max(1, MAX_ELEMENTS // (height * width * channels))):
        pieces = zip(*(torch.split(each, most) for each in (pixels, boxes, flips)), strict=True)
        return torch.cat([crop_and_resize(piece, within, size, mirrored) for piece, within, mirrored in pieces])
    top, left, box_height, box_width = boxes.float().unbind(1)
    rows = _resize_weights(top, box_height, height, size[0])
    columns = _resize_weights(left, box_width, width, size[1])
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    return torch.einsum("nyh,nhwc,nxw->nyxc", rows, pixels.float(), columns).contiguous()


def _resize_weights(starts: Tensor, lengths: Tensor, size: int, into: int) -> Tensor:
    """Compute the bilinear weights of old pixels in new ones, along one axis: (N, new pixels, old pixels)."""
    steps = (lengths / into)[:, None, None]
    centres = torch.arange(size, device=starts.device) + 0.5
    targets = starts[:, None, None] + (torch.arange(into, device=starts.device)[:, None] + 0.5) * steps
    weights = (1 - (centres - targets).abs() / steps.clamp(min=1)).clamp_(min=0)
    offsets = centres - starts[:, None]
    weights *= ((offsets > 0) & (offsets < lengths[:, None]))[:, None]
    return weights / weights.sum(2, keepdim=True)


def _largest_box(height: int, width: int) -> tuple[int, int]:
    """Return height and width of the largest box with an allowed aspect ratio."""
    if width / height < ASPECT_RANGE[0]:
        return round(width / ASPECT_RANGE[0]), width
    if width / height > ASPECT_RANGE[1]:
        return height, round(height * ASPECT_RANGE[1])
    return height, width
