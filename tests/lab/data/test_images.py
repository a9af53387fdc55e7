"""MNIST and CIFAR-10: reading, normalisation, the published files, and malformed ones."""

import gzip
from pathlib import Path

import pytest
import torch
from lab.data_cases import CIFAR10, MNIST, archive_of, checksum, real_folder, tiny_cifar10, tiny_mnist
from torch import Tensor

from nero_lab.data import FILES, DataError, ImageDataset, Images, images, load, sources
from nero_lab.data.folder import Folder


@pytest.mark.parametrize("inside", ["mnist", "."])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_mnist_gzipped_or_plain_is_read(tmp_path: Path, put, inside: str, packed: bool):
    contents, train, test = tiny_mnist()
    for name, content in contents.items():
        put(tmp_path / inside / (f"{name}.gz" if packed else name), gzip.compress(content) if packed else content)
    dataset = load("mnist", tmp_path)
    assert (dataset.name, dataset.mean, dataset.std) == ("mnist", (0.1307,), (0.3081,))
    for read, made in ((dataset.train, train), (dataset.test, test)):
        assert read.pixels.dtype == torch.uint8
        assert read.labels.dtype == torch.int64
        assert torch.equal(read.pixels, made.pixels)
        assert torch.equal(read.labels, made.labels)


def test_data_set_with_mnists_file_names_has_own_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    contents, train, _ = tiny_mnist()
    monkeypatch.setitem(sources.FOLDERS, "fashion", "fashion")
    monkeypatch.setitem(FILES, "fashion", {name: checksum(content, name) for name, content in contents.items()})
    (tmp_path / "fashion").mkdir()
    for name, content in contents.items():
        (tmp_path / "fashion" / name).write_bytes(content)
    dataset = images._idx_dataset(Folder("fashion", tmp_path, None), mean=0.286, std=0.353)
    assert (dataset.name, dataset.mean) == ("fashion", (0.286,))
    assert torch.equal(dataset.train.pixels, train.pixels)


@pytest.mark.parametrize("inside", ["cifar-10-batches-bin", ".", "archive"])
def test_cifar10_unpacked_or_in_archive_is_read(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch, inside: str):
    contents, labels, pixels = tiny_cifar10()
    for name, content in contents.items():
        if inside == "archive":
            monkeypatch.setitem(FILES["cifar10"], name, checksum(content, name))
        else:
            put(tmp_path / inside / name, content)
    if inside == "archive":
        put(tmp_path / sources.CIFAR10_ARCHIVE, archive_of(contents))
    dataset = load("cifar10", tmp_path)
    assert torch.equal(dataset.train.pixels.flatten(1), pixels[:10])
    assert torch.equal(dataset.test.pixels.flatten(1), pixels[10:])
    assert dataset.train.pixels.shape[1:] == (3, 32, 32)
    assert torch.equal(torch.cat([dataset.train.labels, dataset.test.labels]), labels)
    assert dataset.train.labels.dtype == torch.int64


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_normalise_matches_float64_formula(device: str):
    images = Images(torch.randint(256, (5, 3, 4, 6), dtype=torch.uint8), torch.arange(5))
    dataset = ImageDataset("made", images, images, (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)).to(device)
    assert dataset.train.pixels.device.type == dataset.test.labels.device.type == device
    before = dataset.train.pixels.clone()
    mean = torch.tensor(dataset.mean, dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor(dataset.std, dtype=torch.float64).view(3, 1, 1)
    for pixels in (dataset.train.pixels, dataset.train.pixels.float()):
        got = dataset.normalise(pixels)
        assert got.dtype == torch.float32
        assert got.device == pixels.device
        torch.testing.assert_close(got.cpu().double(), (before.cpu() / 255.0 - mean) / std, rtol=0, atol=2e-6)
        assert torch.equal(pixels, before.to(pixels.dtype))  # unmodified


def test_mnist_published_files_have_known_moments(tmp_path: Path):
    folder = real_folder("mnist", *(f"{name}.gz" for name in MNIST))
    dataset = load("mnist", folder)
    assert dataset.train.pixels.shape == (60_000, 1, 28, 28)
    assert dataset.test.pixels.shape == (10_000, 1, 28, 28)
    assert dataset.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert dataset.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert moments(dataset.train.pixels) == (dataset.mean, dataset.std)
    for name in MNIST:
        (tmp_path / name).write_bytes(gzip.decompress((folder / f"mnist/{name}.gz").read_bytes()))
    assert torch.equal(load("mnist", tmp_path).test.pixels, dataset.test.pixels), "the plain files, by their own sums"


def test_cifar10_published_files_have_known_moments():
    dataset = load("cifar10", real_folder("cifar10", *CIFAR10))
    assert dataset.train.pixels.shape == (50_000, 3, 32, 32)
    assert dataset.test.pixels.shape == (10_000, 3, 32, 32)
    assert dataset.train.labels.bincount().tolist() == [5_000] * 10
    assert dataset.test.labels.bincount().tolist() == [1_000] * 10
    assert moments(dataset.train.pixels) == (dataset.mean, dataset.std)


def moments(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation of each channel to four decimals, from the histogram of its bytes."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(pixels.shape[1]):
        share = pixels[:, channel].flatten().bincount(minlength=256).double()
        share /= share.sum()
        mean = (share * values).sum()
        means.append(round(mean.item(), 4))
        deviations.append(round((share * (values - mean).square()).sum().sqrt().item(), 4))
    return tuple(means), tuple(deviations)


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
