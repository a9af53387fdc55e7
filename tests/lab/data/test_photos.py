"""Photographs, decoded into memory or streamed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")
from lab.photo_cases import decoded, streamed, write_class_folder, write_image
from PIL import Image

from nero_lab.data import DataError, decoding, photos
from nero_lab.data.class_folder import find_class_folder
from nero_lab.data.decoder_pool import DecoderPool
from nero_lab.data.photos import StreamedPhotos, load_photos


def test_decoded_images_equal_pillow_and_are_cropped(tmp_path: Path):
    data = decoded(write_class_folder(tmp_path, size=(32, 40)))
    found = find_class_folder(tmp_path)
    for (pixels, labels), listing in ((data.train, found.train), (data.test, found.test)):
        assert labels.tolist() == listing.labels
        for row, file in zip(pixels, listing.files, strict=True):
            assert bytes(row.flatten().tolist()) == Image.open(file).convert("RGB").tobytes()
    assert (data.short_side, data.crop) == (32, 28)
    ((inputs, labels),) = data.batches("test")
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (photos.MEAN, photos.STD))
    expected = (data.test[0][:, 2:30, 6:34].permute(0, 3, 1, 2) / 255 - mean) / std
    torch.testing.assert_close(inputs, expected, rtol=0, atol=1e-5)
    assert replace(data, short_side=256).crop == 224


def test_streamed_test_images_match_decoded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = decoded(write_class_folder(tmp_path, size=(300, 256)))
    read = streamed(tmp_path, monkeypatch).to("cpu")
    assert held.short_side == read.short_side == 256
    monkeypatch.setattr(photos, "EVAL_BATCH", 4)
    for (one, labels), (other, same) in zip(held.batches("test"), read.batches("test"), strict=True):
        assert one.shape[2:] == (224, 224)
        torch.testing.assert_close(one, other)
        assert labels.tolist() == same.tolist()
        assert other.is_contiguous(memory_format=torch.channels_last)


def test_large_images_are_streamed_and_resized_to_256(tmp_path: Path):
    folder = write_class_folder(tmp_path, names="ab", train=2, test=1, size=(300, 257))
    data = load_photos(find_class_folder(folder), DecoderPool(0))
    assert isinstance(data, StreamedPhotos)
    assert (data.short_side, data.crop) == (256, 224)
    ((inputs, _),) = data.batches("test")
    assert inputs.shape == (2, 3, 224, 224)


def test_crop_follows_median_of_a_spread_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_class_folder(tmp_path, names="ab")
    for name in "ab":
        write_image(folder / "train" / name / "9.JPEG", (200, 200))  # the last of each class
    assert load_photos(find_class_folder(folder), DecoderPool(0)).short_side == 32
    seen = []
    monkeypatch.setattr(photos, "SIZE_SAMPLE", 5)
    monkeypatch.setattr(decoding, "read_size", lambda file: seen.append(file) or (32, 32))
    assert isinstance(load_photos(find_class_folder(folder), DecoderPool(0)), StreamedPhotos)
    assert [str(Path(file).relative_to(folder / "train")) for file in seen] == [
        f"{each}.JPEG" for each in ("a/0", "a/2", "a/9", "b/1", "b/3")
    ]


def test_images_of_one_pixel_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"at least 2 pixels wide and high, got a side of 1 in .*small"):
        load_photos(find_class_folder(write_class_folder(tmp_path / "small", size=(1, 9))), DecoderPool(0))


def test_images_of_several_sizes_are_streamed(tmp_path: Path):
    folder = write_class_folder(tmp_path)
    write_image(folder / "val" / "b" / "1.JPEG", (24, 50))  # met while the others are decoded
    data = load_photos(find_class_folder(folder), DecoderPool(0))
    assert isinstance(data, StreamedPhotos)
    assert data.crop == 28
    write_image(folder / "train" / "b" / "3.JPEG", (48, 50))  # met in the sample of sizes
    assert isinstance(load_photos(find_class_folder(folder), DecoderPool(0)), StreamedPhotos)
    ((inputs, labels),) = load_photos(find_class_folder(folder), DecoderPool(0)).epoch(20, torch.Generator(), None)
    assert inputs.shape == (12, 3, 28, 28)
    assert sorted(labels.tolist()) == find_class_folder(folder).train.labels


@pytest.mark.parametrize("which", ["decoded", "streamed"])
def test_epoch_has_every_image_once_and_is_reproducible(tmp_path: Path, monkeypatch, which: str):
    folder = write_class_folder(tmp_path, names="abcdefgh", train=3)
    data = decoded(folder) if which == "decoded" else streamed(folder, monkeypatch)
    epochs = [data.epoch(5, torch.Generator().manual_seed(seed), None) for seed in (1, 1, 2)]
    batches = [list(epoch) for epoch in epochs]
    assert [len(labels) for _, labels in batches[0]] == [5, 5, 5, 5, 4]
    for epoch in batches:
        assert sorted(torch.cat([labels for _, labels in epoch]).tolist()) == sorted([*range(8)] * 3)
    for step in (3, 1, 2, 4):  # in any order
        assert torch.equal(epochs[1][step][0], batches[0][step][0])
    assert not torch.equal(batches[0][0][1], batches[2][0][1])
    with pytest.raises(IndexError, match=r"0 \.\. 4, got 5"):
        epochs[0][5]
