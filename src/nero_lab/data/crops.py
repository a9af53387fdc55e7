"""Random resized crops of whole batches at once, on their device: which box of each image, and the box at a size."""

import math

import torch
from torch import Tensor

#: A box's share of its image, and its width over its height: from, to.
SHARE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
#: How many boxes are drawn for an image; if none of them lies within it, the largest in its middle is taken.
TRIES = 10
#: How many numbers of images are cut together at most, in float32.
TOGETHER = 2**27


def random_boxes(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """A box for each of so many images, as torchvision's RandomResizedCrop chooses it.

    Args:
        count: how many.
        height: of every image.
        width: likewise.
        generator: of random numbers, on the device where the boxes are wanted.

    Returns:
        float64 (N, 4): top, left, height and width, whole numbers all.
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
        return low + (high - low) * drawn

    area = height * width * uniform(*SHARE, count, TRIES)
    ratio = uniform(math.log(RATIO[0]), math.log(RATIO[1]), count, TRIES).exp()
    high, wide = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (high >= 1) & (high <= height) & (wide >= 1) & (wide <= width)
    first = fits.int().argmax(1, keepdim=True)
    found = fits.any(1)
    middle = _largest(height, width)
    high = torch.where(found, high.gather(1, first).squeeze(1), middle[0])
    wide = torch.where(found, wide.gather(1, first).squeeze(1), middle[1])
    down, right = uniform(0, 1, 2, count)
    top = torch.where(found, (down * (height - high + 1)).floor(), (height - middle[0]) // 2)
    left = torch.where(found, (right * (width - wide + 1)).floor(), (width - middle[1]) // 2)
    return torch.stack([top, left, high, wide], 1)


def random_flips(count: int, generator: torch.Generator) -> Tensor:
    """Whether each of so many images is mirrored: bool (N,), one in two."""
    return torch.rand(count, generator=generator, device=generator.device) < 0.5


def cut(pixels: Tensor, boxes: Tensor, size: tuple[int, int], flips: Tensor) -> Tensor:
    """The boxes of images, all brought to one size, and some of them mirrored.

    As Pillow's bilinear ``crop(box).resize(size)``, which averages where the image becomes smaller, but for its
    rounding to bytes. Rows and columns are weighed by a matrix each, so that a batch is two products of matrices.

    Args:
        pixels: uint8 (N, H, W, C).
        boxes: (N, 4): top, left, height, width.
        size: height and width to bring them to.
        flips: (N,), whether to mirror.

    Returns:
        float32 (N, height, width, C), from 0 to 255.

    Example:
        >>> pixels = torch.arange(16, dtype=torch.uint8).view(1, 4, 4, 1)
        >>> cut(pixels, torch.tensor([[0, 1, 2, 2]]), (2, 2), torch.tensor([True])).flatten().tolist()
        [2.0, 1.0, 6.0, 5.0]
    """
    count, height, width, channels = pixels.shape
    if count > (some := max(1, TOGETHER // (height * width * channels))):
        pieces = zip(*(torch.split(each, some) for each in (pixels, boxes, flips)), strict=True)
        return torch.cat([cut(piece, within, size, mirrored) for piece, within, mirrored in pieces])
    top, left, high, wide = boxes.float().unbind(1)
    rows, columns = _weights(top, high, height, size[0]), _weights(left, wide, width, size[1])
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    return torch.einsum("nyh,nhwc,nxw->nyxc", rows, pixels.float(), columns).contiguous()


def _weights(starts: Tensor, lengths: Tensor, size: int, into: int) -> Tensor:
    """How much of each pixel along an axis goes into each of a box's new ones: (N, new pixels, pixels)."""
    steps = (lengths / into)[:, None, None]
    places = torch.arange(size, device=starts.device) + 0.5
    middles = starts[:, None, None] + (torch.arange(into, device=starts.device)[:, None] + 0.5) * steps
    weights = (1 - (places - middles).abs() / steps.clamp(min=1)).clamp_(min=0)
    offsets = places - starts[:, None]
    weights *= ((offsets > 0) & (offsets < lengths[:, None]))[:, None]
    return weights / weights.sum(2, keepdim=True)


def _largest(height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box whose ratio will do."""
    if width / height < RATIO[0]:
        return round(width / RATIO[0]), width
    if width / height > RATIO[1]:
        return height, round(height * RATIO[1])
    return height, width
