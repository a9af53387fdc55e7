"""Random crops, resized crops, flips and rotations, against references and Pillow."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL")

from PIL import Image

from nero_lab.data import augmentation
from nero_lab.data.augmentation import crop_flip_rotate, flip, translate_and_flip

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def seeded(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def random_bytes(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=seeded(1)).to(device)


def mostly_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether pixels agree, up to a few that rounding may tip to a neighbour."""
    return int((one != other).sum()) <= 3 + 1e-3 * one.numel()


def reference(pixels: Tensor, draws: augmentation._Draws, padding: int) -> Tensor:
    """Crop, flip and rotate pixel by pixel."""
    count, _, height, width = pixels.shape
    result = torch.zeros_like(pixels)
    for i in range(count):
        down, right = (draws.shifts[i] + padding).tolist()
        image = torch.nn.functional.pad(pixels[i], (padding,) * 4)[:, down : down + height, right : right + width]
        if draws.flips[i]:
            image = image.flip(2)
        cos, sin = math.cos(draws.angles[i]), math.sin(draws.angles[i])
        for y in range(height):
            for x in range(width):
                from_middle_x, from_middle_y = x + 0.5 - width / 2, y + 0.5 - height / 2
                source_x = math.floor(cos * from_middle_x - sin * from_middle_y + width / 2)
                source_y = math.floor(sin * from_middle_x + cos * from_middle_y + height / 2)
                if 0 <= source_x < width and 0 <= source_y < height:
                    result[i, :, y, x] = image[:, source_y, source_x]
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "padding", "degrees"),
    [
        ((6, 3, 32, 32), 4, 15.0),
        ((5, 1, 28, 28), 2, 40),
        ((9, 2, 7, 12), 3, 180.0),
        ((40, 1, 4, 3), 9, 15.0),  # some crops are all padding
        ((5, 3, 16, 16), 0, 15.0),
        ((5, 3, 16, 16), 4, 0),
        ((0, 3, 16, 16), 4, 15.0),
    ],
)
def test_crop_flip_rotate_matches_reference(device: str, shape: tuple[int, ...], padding: int, degrees: float):
    pixels = random_bytes(*shape, device=device)
    before = pixels.clone()
    moved = crop_flip_rotate(pixels, seeded(device=device), padding=padding, degrees=degrees)
    draws = augmentation._draw(shape[0], seeded(device=device), padding, degrees, pixels.device)
    assert moved.dtype == torch.uint8
    assert moved.device == pixels.device
    on_cpu = augmentation._Draws(*(draw.cpu() for draw in draws))
    assert mostly_equal(moved.cpu(), reference(pixels.cpu(), on_cpu, padding))
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("device", DEVICES)
def test_crop_flip_rotate_is_chunk_free_and_reproducible(device: str):
    pixels = random_bytes(50, 3, 12, 12, device=device)
    moved = crop_flip_rotate(pixels, seeded(device=device))
    for chunk in (1, 7, 50, 51):
        assert mostly_equal(moved, crop_flip_rotate(pixels, seeded(device=device), chunk=chunk))
    assert not torch.equal(moved, crop_flip_rotate(pixels, seeded(7, device)))
    generator = seeded(device=device)
    assert torch.equal(moved, crop_flip_rotate(pixels, generator))
    assert not torch.equal(moved, crop_flip_rotate(pixels, generator))  # the generator has advanced


def test_crop_flip_rotate_accepts_channels_last():
    pixels = random_bytes(9, 3, 12, 10)
    expected = crop_flip_rotate(pixels, seeded())
    other = pixels.to(memory_format=torch.channels_last)
    assert mostly_equal(crop_flip_rotate(other, seeded(), chunk=4), expected)


def test_crop_flip_rotate_mirrors_half_of_the_images():
    pixels = random_bytes(2000, 3, 5, 6)
    moved = crop_flip_rotate(pixels, seeded(), padding=0, degrees=0)
    same, mirrored = ((moved == other).flatten(1).all(1) for other in (pixels, pixels.flip(3)))
    assert bool((same ^ mirrored).all())
    assert 900 < int(mirrored.sum()) < 1100  # 4.5 standard deviations


def test_draws_are_uniform():
    shifts, _, angles = augmentation._draw(9000, seeded(), 4, 15.0, torch.device("cpu"))
    for axis in (0, 1):
        counts = (shifts[:, axis] + 4).bincount(minlength=9)
        assert len(counts) == 9
        assert 850 < int(counts.min()) <= int(counts.max()) < 1150  # 5 standard deviations
    degrees = angles.rad2deg()
    assert degrees.abs().max() <= 15
    counts = degrees.histc(9, -15, 15)
    assert 850 < int(counts.min()) <= int(counts.max()) < 1150


@pytest.mark.parametrize("angle", [-15.0, -7.3, -0.4, 0.0, 3.7, 11.1, 14.9, 47.0])
@pytest.mark.parametrize("size", [(32, 32), (28, 21)])
def test_crop_flip_rotate_matches_pillow(monkeypatch: pytest.MonkeyPatch, angle: float, size: tuple[int, int]):
    """Pillow's fixed-point arithmetic may differ where two pixels are nearly equidistant."""
    image_module = pytest.importorskip("PIL.Image")
    height, width = size
    pixels = random_bytes(3, 1, height, width)
    turn = torch.full((3,), math.radians(angle), dtype=torch.float64)
    draws = augmentation._Draws(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.bool), turn)
    monkeypatch.setattr(augmentation, "_draw", lambda *_: draws)
    ours = crop_flip_rotate(pixels, seeded())
    down, right = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) + 0.5 - height / 2,
        torch.arange(width, dtype=torch.float64) + 0.5 - width / 2,
        indexing="ij",
    )
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    places = torch.stack([cos * right - sin * down + width / 2, sin * right + cos * down + height / 2])
    undecided = ((places - places.round()).abs() < 2e-3).any(0)
    for i in range(3):
        image = image_module.frombytes("L", (width, height), bytes(pixels[i].flatten()))
        turned = image.rotate(angle, image_module.Resampling.NEAREST).tobytes()
        theirs = torch.frombuffer(bytearray(turned), dtype=torch.uint8).view(height, width)
        differ = ours[i, 0] != theirs
        assert not bool((differ & ~undecided).any())
        assert int(differ.sum()) <= 8


def test_flip_mirrors_half_of_the_images():
    pixels = torch.randint(256, (500, 3, 2, 4), dtype=torch.uint8)
    before = pixels.clone()
    moved = flip(pixels, torch.Generator().manual_seed(1))
    flipped = (moved == pixels.flip(3)).flatten(1).all(1)
    assert 200 < flipped.sum() < 300
    assert torch.equal(moved[~flipped], pixels[~flipped])
    assert torch.equal(pixels, before)


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
    boxes = augmentation.random_boxes(200, *size, torch.Generator(device).manual_seed(3))
    again = torch.Generator(device).manual_seed(3)
    drawn = [torch.rand(shape, generator=again, device=device, dtype=torch.float64) for shape in [(200, 10)] * 2]
    places = torch.rand(2, 200, generator=again, device=device, dtype=torch.float64)
    slow = [reference_box(*size, *each) for each in zip(*(part.tolist() for part in (*drawn, *places)), strict=True)]
    assert boxes.tolist() == slow
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor(size, device=device)).all()


def test_random_flips_mirror_half():
    share = augmentation.random_flips(10_000, torch.Generator().manual_seed(0)).double().mean().item()
    assert share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(64, 64), (50, 70)])
@pytest.mark.parametrize("into", [56, 20])
def test_crop_and_resize_matches_pillow(shape: tuple[int, int], into: int, device: str):
    pixels = torch.randint(256, (40, *shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    boxes, flips = augmentation.random_boxes(40, *shape, generator), augmentation.random_flips(40, generator)
    moved = (each.to(device) for each in (pixels, boxes, flips))
    found = augmentation.crop_and_resize(*(next(moved), next(moved)), (into, into), next(moved)).cpu()
    for row, (top, left, high, wide), is_flipped, ours in zip(pixels, boxes.tolist(), flips, found, strict=True):
        picture = Image.frombytes("RGB", shape[::-1], bytes(row.flatten().tolist()))
        picture = picture.crop((left, top, left + wide, top + high)).resize((into, into), Image.Resampling.BILINEAR)
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_flipped else picture
        theirs = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(into, into, 3)
        assert (ours - theirs).abs().max() < 1.6  # Pillow rounds to bytes twice
    whole = torch.tensor([[0, 0, *shape]] * 40)
    shown = augmentation.crop_and_resize(pixels, whole, shape, torch.zeros(40, dtype=torch.bool))
    torch.testing.assert_close(shown, pixels.float(), rtol=0, atol=1e-4)


def test_crop_and_resize_limits_its_memory(monkeypatch: pytest.MonkeyPatch):
    pixels = torch.randint(256, (7, 8, 9, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    boxes, flips = augmentation.random_boxes(7, 8, 9, generator), augmentation.random_flips(7, generator)
    together = augmentation.crop_and_resize(pixels, boxes, (4, 4), flips)
    sizes = []
    weights = augmentation._resize_weights
    monkeypatch.setattr(augmentation, "_resize_weights", lambda *each: sizes.append(len(each[0])) or weights(*each))
    for bound, pieces in ((3 * 8 * 9 * 3, [3, 3, 3, 3, 1, 1]), (1, [1] * 14)):
        monkeypatch.setattr(augmentation, "MAX_ELEMENTS", bound)
        torch.testing.assert_close(augmentation.crop_and_resize(pixels, boxes, (4, 4), flips), together)
        assert sizes == pieces
        sizes.clear()


@pytest.mark.parametrize("device", DEVICES)
def test_translation_reflects_the_border(device: str) -> None:
    pixels = random_bytes(25, 3, 5, 7, device=device)
    moves = [(down, right) for down in range(-2, 3) for right in range(-2, 3)]
    flips = torch.arange(25, device=device) % 3 == 0
    found = translate_and_flip(pixels, torch.tensor(moves, device=device), flips)
    assert found.is_contiguous(memory_format=torch.channels_last)
    padded = torch.nn.functional.pad(pixels.float(), (2, 2, 2, 2), "reflect").byte()
    for image, source, (down, right), is_flipped in zip(found, padded, moves, flips.tolist(), strict=True):
        window = source[:, 2 + down : 7 + down, 2 + right : 9 + right]
        assert torch.equal(image, window.flip(2) if is_flipped else window)
