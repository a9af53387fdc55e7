"""Random resized crops of a whole batch at once, on its device."""

import math

import torch
from torch import Tensor

#: Range of a box's area relative to its image, and of its width over its height.
AREA_RANGE, ASPECT_RANGE = (0.08, 1.0), (3 / 4, 4 / 3)
#: Boxes drawn per image; if none fits, the largest central box is taken.
MAX_TRIES = 10
#: Most float32 elements of images that are cropped together.
MAX_ELEMENTS = 2**27


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
