"""Small folders of classes, and small tasks on them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("PIL")
from PIL import Image

from nero_lab.data import photos
from nero_lab.data.class_folder import find_class_folder
from nero_lab.data.decoding import DecoderPool
from nero_lab.data.photos import DecodedPhotos, StreamedPhotos, load_photos
from nero_lab.models.resnet import resnet50
from nero_lab.tasks import TASKS

TASK = TASKS["imagenet"]
#: The task with a network of four channels, in small batches.
SMALL = replace(TASK, model=partial(resnet50, width=1 / 16), batch=4)


def write_image(path: Path, size: tuple[int, int] = (32, 32), seed: int = 0, mode: str = "RGB") -> Path:
    """Write smooth noise, which JPEG preserves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    small = Image.frombytes("RGB", (8, 8), bytes(noise.flatten().tolist()))
    small.resize(size[::-1], Image.Resampling.BICUBIC).convert(mode).save(path, "JPEG", quality=95)
    return path


def write_class_folder(
    folder: Path, names: str = "abc", train: int = 4, test: int = 2, size: tuple[int, int] = (32, 32)
) -> Path:
    """Write a folder of classes with images of one size; the fourth training image of a class is grey."""
    for place, name in enumerate(names):
        for index in range(train):
            mode = "L" if index == 3 else "RGB"
            write_image(folder / "train" / name / f"{index}.JPEG", size, 100 * place + index, mode)
        for index in range(test):
            write_image(folder / "val" / name / f"{index}.JPEG", size, 1000 + 100 * place + index)
    return folder


def as_tiny_imagenet(folder: Path) -> Path:
    """Move the images of a folder of classes into the layout of Tiny ImageNet."""
    lines = []
    for part in ("train", "val"):
        for path in sorted((folder / part).glob("*/*.JPEG")):
            inside = path.parent if part == "train" else path.parent.parent
            name = path.name if part == "train" else f"{path.parent.name}_{path.name}"
            (inside / "images").mkdir(exist_ok=True)
            path.rename(inside / "images" / name)
            lines += [f"{name}\t{path.parent.name}\t0\t0\t62\t62\n"] if part == "val" else []
    for path in (folder / "val").glob("?"):
        path.rmdir()
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    for path in (folder / "train").iterdir():
        (path / f"{path.name}_boxes.txt").write_text("0.JPEG\t0\t10\t63\t58\n")
    return folder


def decoded(folder: Path) -> DecodedPhotos:
    data = load_photos(find_class_folder(folder), DecoderPool(0))
    assert isinstance(data, DecodedPhotos)
    return data


def streamed(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 0) -> StreamedPhotos:
    monkeypatch.setattr(photos, "MAX_DECODED_BYTES", 0)
    data = load_photos(find_class_folder(folder), DecoderPool(count))
    assert isinstance(data, StreamedPhotos)
    return data


def damage(folder: Path, part: str) -> Path:
    """Empty the class val/b, truncate an image, or move another part away; return its path."""
    path = folder / part
    if part == "val/b":
        for file in path.iterdir():
            file.unlink()
    elif part.endswith("JPEG"):
        path.write_bytes(path.read_bytes()[:300])
    else:
        path.rename(folder / "elsewhere")
    return path


def shallow(classes: int = 2, *, norm: bool = True) -> nn.Sequential:
    """Build a convolution, and a block with a linear layer in it."""
    between = [nn.BatchNorm2d(8), nn.ReLU()] if norm else [nn.ReLU()]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes))
    # a norm hides the bias before it, whose gradient would be rounding alone, and Nero would follow it
    return nn.Sequential(nn.Conv2d(3, 8, 5, 4, bias=not norm), *between, head)
