"""Decoding of image files."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")
from lab.photo_cases import (
    write_image,
)
from PIL import Image

from nero_lab.data import DataError, crops, decoding


def test_decode_16_bit_grey_takes_the_higher_byte(tmp_path: Path):
    values = [0, 255, 256, 300, 32_768, 65_535]
    deep = Image.new("I;16", (3, 2))
    deep.putdata(values)
    for name in ("deep.png", "whole.tiff"):
        (deep if name == "deep.png" else deep.convert("I")).save(tmp_path / name)
        assert [*decoding.decode([str(tmp_path / name)], 2, 3)] == [value // 256 for value in values for _ in range(3)]
    for mode, value in (("I", 70_000), ("I", -1), ("F", 0.5)):
        Image.new(mode, (3, 2), value).save(tmp_path / "odd.tiff")
        with pytest.raises(
            DataError, match=f"odd.tiff does not decode .pixels must be 16-bit integers, got mode {mode}"
        ):
            decoding.decode([str(tmp_path / "odd.tiff")], 2, 3)


def test_decode_random_crops_match_crop_and_resize(tmp_path: Path):
    path = write_image(tmp_path / "a.JPEG", (60, 90))
    pixels = torch.frombuffer(bytearray(Image.open(path).convert("RGB").tobytes()), dtype=torch.uint8)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        boxes, flips = crops.random_boxes(1, 60, 90, generator), crops.random_flips(1, generator)
        ours = crops.crop_and_resize(pixels.view(1, 60, 90, 3), boxes, (28, 28), flips)[0]
        theirs = torch.frombuffer(decoding.decode_random_crops([str(path)], [seed], 28), dtype=torch.uint8)
        assert (ours - theirs.view(28, 28, 3)).abs().max() < 1.6
