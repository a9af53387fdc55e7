"""Decoding, cropping and resizing of image files by Pillow, into bytes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nero_lab.data.augmentation import random_boxes, random_flips
from nero_lab.data.dataset import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


class SizeMismatchError(Exception):
    """An image whose size differs from the expected one."""


def read_size(path: str) -> tuple[int, int]:
    """Return an image's height and width; read only its header."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _undecodable(path, error) from error


def decode(paths: Sequence[str], height: int, width: int) -> bytearray:
    """Decode images of one size into consecutive bytes, row by row, three bytes per pixel.

    Raises:
        SizeMismatchError: if an image has another size.
    """
    content = bytearray()
    for path in paths:
        image = _open_rgb(path)
        if image.size != (width, height):
            raise SizeMismatchError(path)
        content += image.tobytes()
    return content


def decode_random_crops(paths: Sequence[str], seeds: Sequence[int], crop: int) -> bytearray:
    """Decode a random box of each image, resized to a square and mirrored at random, as :func:`decode` lays it out."""
    from PIL import Image

    content = bytearray()
    for path, seed in zip(paths, seeds, strict=True):
        image = _open_rgb(path)
        generator = torch.Generator().manual_seed(seed)
        top, left, height, width = map(int, random_boxes(1, image.height, image.width, generator)[0].tolist())
        image = image.crop((left, top, left + width, top + height)).resize((crop, crop), Image.Resampling.BILINEAR)
        if random_flips(1, generator).item():
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        content += image.tobytes()
    return content


def decode_centre_crops(paths: Sequence[str], short_side: int, crop: int) -> bytearray:
    """Decode the central square of each image, after its shorter side is resized, as :func:`decode` lays it out."""
    from PIL import Image

    content = bytearray()
    for path in paths:
        image = _open_rgb(path)
        (height, width), (top, left) = centre_crop_box(image.height, image.width, short_side, crop)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        content += image.crop((left, top, left + crop, top + crop)).tobytes()
    return content


def centre_crop_box(height: int, width: int, short_side: int, crop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size of an image whose shorter side is resized, and the top left corner of its central square."""
    least = min(height, width)
    new_height, new_width = short_side * height // least, short_side * width // least
    return (new_height, new_width), (round((new_height - crop) / 2), round((new_width - crop) / 2))


def _open_rgb(path: str) -> "Image":
    from PIL import Image

    try:
        with Image.open(path) as image:
            return _convert_16_bit(image) if image.mode.startswith(("I", "F")) else image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _undecodable(path, error) from error


def _convert_16_bit(image: "Image") -> "Image":
    """Reduce 16-bit grey to its higher byte, as Pillow does with 16-bit colours; it clips greys instead."""
    numbers = image.convert("I")
    extrema: Any = numbers.getextrema()
    if image.mode == "F" or extrema[0] < 0 or extrema[1] >= 2**16:
        raise ValueError(f"pixels must be 16-bit integers, got mode {image.mode}")
    return numbers.point(lambda value: value * (1 / 256)).convert("RGB")


def _undecodable(path: str, error: Exception) -> DataError:
    return DataError(
        f"{path} does not decode ({error}): replace it by an intact copy, and the same command resumes; "
        "if you remove it, a new run starts"
    )
