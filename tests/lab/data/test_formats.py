"""Malformed files of MNIST and CIFAR-10."""

import gzip
from pathlib import Path

import pytest
import torch
from lab.data_cases import CIFAR10, MNIST, archive_of, idx, tiny_cifar10, tiny_mnist

from nero_lab.data import DataError, load, sources


@pytest.mark.parametrize(
    ("which", "content", "message"),
    [
        (0, b"", "got nothing"),
        (0, idx(torch.zeros(2, 28, dtype=torch.uint8)), "got 00 00 08 02"),
        (0, b"\0\0\x0d\x03" + bytes(12), "got 00 00 0d 03"),
        (0, b"\0\0\x08\x03\0\0", "3 lengths"),
        (0, idx(torch.zeros(2, 28, 28, dtype=torch.uint8))[:-1], "2 x 28 x 28 bytes, got 1,567"),
        (0, idx(torch.zeros(0, 28, 28, dtype=torch.uint8)), "0 x 28 x 28"),
        (0, idx(torch.zeros(2, 28, 27, dtype=torch.uint8)), "got 28 x 27"),
        (1, idx(torch.tensor([1, 2, 10], dtype=torch.uint8)), "labels must be in 0 .. 9, got 10"),
    ],
    ids=["empty", "labels for images", "floats", "a short header", "cut short", "no image", "shape", "label"],
)
def test_mnist_malformed_file_is_named(tmp_path: Path, put, which: int, content: bytes, message: str):
    contents, _, _ = tiny_mnist()
    contents[MNIST[which]] = content
    for name, each in contents.items():
        put(tmp_path / name, each)
    with pytest.raises(DataError, match=f"{tmp_path / MNIST[which]} is malformed: .*{message}"):
        load("mnist", tmp_path)


def test_archives_damaged_or_incomplete_are_named(tmp_path: Path, put):
    for content in (b"no gzip", gzip.compress(b"content")[:-9], gzip.compress(b"x" * 99)[:12] + b"?" * 20):
        put(tmp_path / f"{MNIST[0]}.gz", content)
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is malformed: it does not unpack"):
            load("mnist", tmp_path)
    contents, _, _ = tiny_cifar10()
    whole = archive_of(contents)
    for content in (b"no archive", gzip.compress(b"no archive"), whole[: len(whole) // 2]):
        put(tmp_path / sources.CIFAR10_ARCHIVE, content)
        with pytest.raises(DataError, match=r"tar.gz is malformed: it does not unpack"):
            load("cifar10", tmp_path)
    del contents[CIFAR10[2]]
    for content in (archive_of(contents), archive_of(tiny_cifar10()[0], folder="elsewhere")):
        put(tmp_path / sources.CIFAR10_ARCHIVE, content)
        with pytest.raises(DataError, match=r"tar.gz is malformed: it does not hold .*data_batch_3.bin"):
            load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "got 0 bytes"), (bytes(3072), "got 3,072 bytes"), (bytes([17]) + bytes(3072), "got 17")],
)
def test_cifar10_malformed_file_is_named(tmp_path: Path, put, content: bytes, message: str):
    contents, _, _ = tiny_cifar10()
    contents[CIFAR10[1]] = content
    for name, each in contents.items():
        put(tmp_path / name, each)
    with pytest.raises(DataError, match=f"{CIFAR10[1]} is malformed: .*{message}"):
        load("cifar10", tmp_path)
