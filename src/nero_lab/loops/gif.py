"""Animated GIFs of played episodes."""

import io
from collections.abc import Sequence

from torch import Tensor

#: Time per picture in hundredths of a second: about four frames at 60 a second.
PICTURE_CENTISECONDS = 7
MAX_BYTES = 1_000_000


def encode_gif(pictures: Sequence[Tensor]) -> bytes:
    """Encode pictures, uint8 (height, width, 3), as an endless GIF; shorten it to at most :data:`MAX_BYTES`."""
    from PIL import Image

    images = [Image.fromarray(picture.numpy()) for picture in pictures]
    while True:
        file = io.BytesIO()
        duration_ms = 10 * PICTURE_CENTISECONDS
        images[0].save(file, "gif", save_all=True, append_images=images[1:], duration=duration_ms, loop=0)
        if file.tell() <= MAX_BYTES or len(images) == 1:
            return file.getvalue()
        images = images[: len(images) * 3 // 4]
