"""Tiny copies of MNIST and CIFAR-10, in their published formats."""

import hashlib
import io
import os
import struct
import tarfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nero_lab.data import FILES, Images, sources

MNIST = (*sources.MNIST_TRAIN, *sources.MNIST_TEST)
CIFAR10 = (*sources.CIFAR10_TRAIN, sources.CIFAR10_TEST)
#: Read at import: the tests unset the variable.
REAL = os.environ.get("NERO_DATA")


def idx(tensor: Tensor) -> bytes:
    return bytes([0, 0, 8, tensor.ndim]) + struct.pack(f">{tensor.ndim}I", *tensor.shape) + bytes(tensor.flatten())


def digits(count: int) -> Images:
    return Images(torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8), torch.randint(10, (count,)))


def tiny_mnist() -> tuple[dict[str, bytes], Images, Images]:
    """Return four files by name, with 7 and 3 images, and the parsed images."""
    train, test = digits(7), digits(3)
    contents = {}
    for (pixels, labels), images in ((sources.MNIST_TRAIN, train), (sources.MNIST_TEST, test)):
        contents[pixels] = idx(images.pixels.squeeze(1))
        contents[labels] = idx(images.labels.byte())
    return contents, train, test


def tiny_cifar10() -> tuple[dict[str, bytes], Tensor, Tensor]:
    """Return six files by name, with two images each, and all labels and pixels."""
    labels = torch.randint(10, (12, 1), dtype=torch.uint8)
    pixels = torch.randint(256, (12, 3072), dtype=torch.uint8)
    rows = torch.cat([labels, pixels], 1).view(6, 2, 3073)
    return {name: bytes(rows[i].flatten()) for i, name in enumerate(CIFAR10)}, labels.flatten().long(), pixels


def archive_of(contents: dict[str, bytes], folder: str = "cifar-10-batches-bin") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {"readme.html": b"<html>", **contents}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def checksum(content: bytes, name: str) -> str:
    kind = files_of(name)[name].partition(":")[0]
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def files_of(name: str) -> dict[str, str]:
    """Return the checksums of the data set that has a file of that name."""
    return next(files for files in FILES.values() if name in files)


def real_folder(name: str, *files: str) -> Path:
    """Return the folder with the published files, from $NERO_DATA or beside the checkout; skip without one."""
    folders = [Path(REAL)] if REAL else []
    folders.append(Path(__file__).parents[3] / "shared/data")
    for folder in folders:
        if all((folder / sources.FOLDERS[name] / file).is_file() for file in files):
            return folder
    pytest.skip(f"{name} is not in $NERO_DATA")
