"""GIFs of episodes."""

from io import BytesIO

import torch
from PIL import Image

from nero_lab.loops import gif


def test_encode_gif_shortens_to_the_limit(monkeypatch):
    pictures = [torch.randint(256, (20, 15, 3), dtype=torch.uint8) for _ in range(40)]
    with Image.open(BytesIO(gif.encode_gif(pictures))) as whole:
        assert (whole.n_frames, whole.size, whole.info["duration"]) == (40, (15, 20), 70)
    monkeypatch.setattr(gif, "MAX_BYTES", 10_000)
    content = gif.encode_gif(pictures)
    assert len(content) <= 10_000
    with Image.open(BytesIO(content)) as cut:
        assert 1 < cut.n_frames < 40
