"""Random resized crops, against a reference and Pillow."""

import math

import pytest
import torch

pytest.importorskip("PIL")
from PIL import Image

from nero_lab.data import crops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference_box(height: int, width: int, shares: list[float], ratios: list[float], down: float, right: float):
    """Choose a box as torchvision does, one try after the other, from numbers in [0, 1)."""
    for share, ratio in zip(shares, ratios, strict=True):
        area = height * width * (0.08 + 0.92 * share)
        shape = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * ratio)
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            return [int(down * (height - high + 1)), int(right * (width - wide + 1)), high, wide]
    wide, high = width, height
    if width / height < 3 / 4:
        high = round(width / (3 / 4))
    elif width / height > 4 / 3:
        wide = round(height * (4 / 3))
    return [(height - high) // 2, (width - wide) // 2, high, wide]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(64, 64), (40, 100), (100, 31), (9, 200), (200, 9), (1, 1)])
def test_random_boxes_match_reference(size: tuple[int, int], device: str):
    boxes = crops.random_boxes(200, *size, torch.Generator(device).manual_seed(3))
    again = torch.Generator(device).manual_seed(3)
    drawn = [torch.rand(shape, generator=again, device=device, dtype=torch.float64) for shape in [(200, 10)] * 2]
    places = torch.rand(2, 200, generator=again, device=device, dtype=torch.float64)
    slow = [reference_box(*size, *each) for each in zip(*(part.tolist() for part in (*drawn, *places)), strict=True)]
    assert boxes.tolist() == slow
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor(size, device=device)).all()


def test_random_flips_mirror_half():
    share = crops.random_flips(10_000, torch.Generator().manual_seed(0)).double().mean().item()
    assert share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(64, 64), (50, 70)])
@pytest.mark.parametrize("into", [56, 20])
def test_crop_and_resize_matches_pillow(shape: tuple[int, int], into: int, device: str):
    pixels = torch.randint(256, (40, *shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    boxes, flips = crops.random_boxes(40, *shape, generator), crops.random_flips(40, generator)
    moved = (each.to(device) for each in (pixels, boxes, flips))
    found = crops.crop_and_resize(*(next(moved), next(moved)), (into, into), next(moved)).cpu()
    for row, (top, left, high, wide), flip, ours in zip(pixels, boxes.tolist(), flips, found, strict=True):
        picture = Image.frombytes("RGB", shape[::-1], bytes(row.flatten().tolist()))
        picture = picture.crop((left, top, left + wide, top + high)).resize((into, into), Image.Resampling.BILINEAR)
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else picture
        theirs = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(into, into, 3)
        assert (ours - theirs).abs().max() < 1.6  # Pillow rounds to bytes twice
    whole = torch.tensor([[0, 0, *shape]] * 40)
    shown = crops.crop_and_resize(pixels, whole, shape, torch.zeros(40, dtype=torch.bool))
    torch.testing.assert_close(shown, pixels.float(), rtol=0, atol=1e-4)


def test_crop_and_resize_limits_its_memory(monkeypatch: pytest.MonkeyPatch):
    pixels = torch.randint(256, (7, 8, 9, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    boxes, flips = crops.random_boxes(7, 8, 9, generator), crops.random_flips(7, generator)
    together = crops.crop_and_resize(pixels, boxes, (4, 4), flips)
    sizes = []
    weights = crops._resize_weights
    monkeypatch.setattr(crops, "_resize_weights", lambda *each: sizes.append(len(each[0])) or weights(*each))
    for bound, pieces in ((3 * 8 * 9 * 3, [3, 3, 3, 3, 1, 1]), (1, [1] * 14)):
        monkeypatch.setattr(crops, "MAX_ELEMENTS", bound)
        torch.testing.assert_close(crops.crop_and_resize(pixels, boxes, (4, 4), flips), together)
        assert sizes == pieces
        sizes.clear()
