"""Pictures in a row, as a GIF."""

import io
from collections.abc import Sequence

from torch import Tensor

#: Hundredths of a second that a picture is shown for; as long as four frames of a console's 60 a second, nearly.
PICTURE = 7
#: So many bytes at the most.
LARGEST = 1_000_000


def gif(pictures: Sequence[Tensor]) -> bytes:
    """An endless film of pictures, as bytes (height, width, 3); of one too large, the beginning."""
    from PIL import Image

    images = [Image.fromarray(picture.numpy()) for picture in pictures]
    while True:
        file = io.BytesIO()
        images[0].save(file, "gif", save_all=True, append_images=images[1:], duration=10 * PICTURE, loop=0)
        if file.tell() <= LARGEST or len(images) == 1:
            return file.getvalue()
        images = images[: len(images) * 3 // 4]
