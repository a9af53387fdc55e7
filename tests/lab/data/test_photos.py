"""Photographs: folders of classes, decoding, decoder processes, and images in memory or streamed."""

import multiprocessing
import os
import re
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")

from lab.photo_cases import as_tiny_imagenet, damage, decoded, streamed, write_class_folder, write_image
from PIL import Image

from nero_lab import distributed
from nero_lab.data import DataError, augmentation, class_folder, decoding, load, photos
from nero_lab.data.class_folder import ClassFolder, Listing, find_class_folder
from nero_lab.data.decoding import DecoderPool
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


def test_both_layouts_are_listed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = find_class_folder(write_class_folder(tmp_path / "My photos"))
    tiny = find_class_folder(as_tiny_imagenet(write_class_folder(tmp_path / "tiny-imagenet-200")))
    assert plain.classes == tiny.classes == ("a", "b", "c")
    assert plain.train.labels == tiny.train.labels == [0] * 4 + [1] * 4 + [2] * 4
    assert plain.test.labels == tiny.test.labels == [0, 0, 1, 1, 2, 2]
    assert [Path(file).read_bytes() for file in plain.train.files + plain.test.files] == [
        Path(file).read_bytes() for file in tiny.train.files + tiny.test.files
    ]
    assert re.fullmatch(r"My-photos-3-classes-12-images-of-32-[0-9a-f]{8}", plain.dataset_name(32))
    monkeypatch.setitem(class_folder.KNOWN, (3, 12, 6, 32), "three")
    assert find_class_folder(tmp_path).dataset_name(32) == "three"  # found in its parent folder, too
    monkeypatch.setattr(decoding, "default_count", lambda _: 0)
    data = load("imagenet", tmp_path)
    assert (data.name, data.examples, data.sizes) == ("three", 12, {"classes": 3})


def test_name_depends_on_the_images_only(tmp_path: Path):
    folders = [write_class_folder(tmp_path / str(place) / "made", train=2) for place in range(5)]
    names = [find_class_folder(folder).dataset_name(32) for folder in folders]
    assert len(set(names)) == 1  # the location does not matter
    (tmp_path / "1/made/val/a/1.JPEG").unlink()
    (tmp_path / "2/made/train/a/1.JPEG").rename(tmp_path / "2/made/train/a/01.JPEG")
    (tmp_path / "3/made/val/b/1.JPEG").rename(tmp_path / "3/made/val/c/5.JPEG")
    changed = [find_class_folder(folder).dataset_name(32) for folder in folders[:4]]
    assert changed[0] == names[0]
    assert len({*changed, find_class_folder(folders[4]).dataset_name(64)}) == 5
    long = write_class_folder(tmp_path / ("long" * 50), train=1, test=1)
    assert len(find_class_folder(long).dataset_name(32)) < 90


@pytest.mark.parametrize(
    ("numbers", "short", "name"),
    [
        ((1000, 1_281_167, 50_000), 256, "imagenet"),
        ((1000, 1_281_167, 50_000), 64, "made-1000-classes-"),
        ((200, 100_000, 10_000), 64, "tiny-imagenet"),
        ((200, 100_000, 9_999), 64, "made-200-classes-"),
        ((200, 100_000, 10_000), 256, "made-200-classes-"),
    ],
)
def test_known_name_needs_every_number(monkeypatch: pytest.MonkeyPatch, numbers, short: int, name: str):
    monkeypatch.setattr(ClassFolder, "_digest", lambda _: "digest")  # slow on a million names
    count, *parts = numbers
    train, test = (Listing(["a.JPEG"] * size, [0] * size) for size in parts)
    assert ClassFolder(Path("made"), tuple(map(str, range(count))), train, test).dataset_name(short).startswith(name)


def test_hidden_files_are_ignored(tmp_path: Path):
    folder = write_class_folder(tmp_path / "made")
    before = find_class_folder(folder)
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    write_image(folder / "val" / ".ipynb_checkpoints" / "0-checkpoint.JPEG")
    (folder / "train" / "a" / "._0.JPEG").write_bytes(b"a resource fork of macOS")
    assert find_class_folder(folder) == before


@pytest.mark.parametrize(
    ("part", "named", "message"),
    [
        ("train", ".", "name one by --data that has train/<class>"),
        ("val", "val", "does not exist: put the test images there"),
        ("val/b", "val/b", "has no images .*: unpack that class again"),
        ("train/b", "train", "has no class b: train and val must have equal classes"),
        ("train/a/1.JPEG", "train/a/1.JPEG", "does not decode .*: replace it by an intact copy"),
        ("val/a/1.JPEG", "val/a/1.JPEG", "does not decode"),
    ],
)
def test_missing_or_damaged_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part, named, message):
    damage(write_class_folder(tmp_path / "made"), part)
    monkeypatch.setattr(decoding, "default_count", lambda _: 0)
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path / 'made' / named))}.* ?{message}"):
        load("imagenet", tmp_path / "made")


def test_class_missing_in_val_is_named(tmp_path: Path):
    folder = write_class_folder(tmp_path / "made")
    for name in "bc":
        (folder / "val" / name).rename(folder / "val" / f"other{name}")
    with pytest.raises(DataError, match=r"val has no class b \(and 1 more\)"):
        find_class_folder(folder)


def test_annotations_malformed_are_named(tmp_path: Path):
    tiny = as_tiny_imagenet(write_class_folder(tmp_path / "tiny"))
    annotations = tiny / "val" / "val_annotations.txt"
    lines = annotations.read_text()
    annotations.write_text(lines + "a_9.JPEG\ta\n")
    with pytest.raises(DataError, match=r"a_9.JPEG does not exist, but .*annotations.txt names it"):
        find_class_folder(tiny)
    annotations.write_text(lines + "a_0.JPEG\n")
    with pytest.raises(DataError, match="malformed: line 7 is not a file, a tab and a class"):
        find_class_folder(tiny)
    annotations.write_bytes(lines.encode() + "é".encode("latin-1"))
    with pytest.raises(DataError, match=rf"{annotations} is not UTF-8: byte {len(lines)} is 0xe9. Save it as UTF-8"):
        find_class_folder(tiny)
    annotations.write_bytes(lines.replace("\n", "\r\n").encode())
    assert find_class_folder(tiny).classes == ("a", "b", "c")
    annotations.unlink()
    with pytest.raises(DataError, match="val has no class a"):
        find_class_folder(tiny)


def test_too_few_classes_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"alone must have two classes or more, got a only"):
        find_class_folder(write_class_folder(tmp_path / "alone", names="a"))
    empty = tmp_path / "empty"
    (empty / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="has no folders of classes"):
        find_class_folder(empty)


def test_undecodable_image_or_missing_pillow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = write_class_folder(tmp_path / "broken")
    (broken / "train" / "a" / "3.JPEG").write_bytes(b"no image")  # in the sample of sizes
    with pytest.raises(DataError, match=r"3.JPEG does not decode \(cannot identify"):
        load_photos(find_class_folder(broken), DecoderPool(0))
    monkeypatch.setattr(photos, "find_spec", lambda _: None)
    with pytest.raises(DataError, match="needs Pillow: pip install"):
        load_photos(find_class_folder(write_class_folder(tmp_path / "again", train=1, test=1)), DecoderPool(0))


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
        boxes, flips = augmentation.random_boxes(1, 60, 90, generator), augmentation.random_flips(1, generator)
        ours = augmentation.crop_and_resize(pixels.view(1, 60, 90, 3), boxes, (28, 28), flips)[0]
        theirs = torch.frombuffer(decoding.decode_random_crops([str(path)], [seed], 28), dtype=torch.uint8)
        assert (ours - theirs.view(28, 28, 3)).abs().max() < 1.6


def test_pool_decodes_as_the_caller_and_names_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_class_folder(tmp_path)
    alone = decoded(folder)
    together = load_photos(find_class_folder(folder), DecoderPool(2))
    assert torch.equal(alone.train[0], together.train[0])
    assert torch.equal(alone.test[0], together.test[0])
    pooled = streamed(folder, monkeypatch, 2).with_measured_rate(4)
    assert pooled.rate > 0
    assert "streamed by 2 processes; " in pooled.description
    assert "images a second can be loaded" in pooled.description
    monkeypatch.setattr(photos, "JOB_IMAGES", 3)
    batches = (data.epoch(5, torch.Generator(), None) for data in (streamed(folder, monkeypatch), pooled))
    for (one, labels), (other, same) in zip(*batches, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(labels, same)
    broken = damage(folder, "train/b/2.JPEG")
    with pytest.raises(DataError, match=f"^{re.escape(str(broken))} does not decode"):
        list(pooled.epoch(4, torch.Generator(), None))
    with pytest.raises(DataError, match=r"a process that decodes images died, .*: run the same command again"):
        decoding.result(pooled.pool.submit(os._exit, 1))
    pooled.pool.close()


def test_pool_after_a_death_raises_and_ends_the_others():
    """The error meets the next submit; the surviving worker is busy and ignores SIGTERM."""
    pool, before = DecoderPool(2), multiprocessing.active_children()
    for future in [pool.submit(time.sleep, 0.3) for _ in range(2)]:
        decoding.result(future)
    pending = [pool.submit(time.sleep, 600) for _ in range(2)]
    workers = [child for child in multiprocessing.active_children() if child not in before]
    assert len(workers) == 2
    workers[0].kill()
    assert isinstance(pending[0].exception(60), BrokenProcessPool)
    with pytest.raises(DataError, match=r"a process that decodes images died, .*: run the same command again"):
        pool.submit(int)
    workers[1].join(60)
    assert not workers[1].is_alive()
    pool.close()


def test_pool_ignores_signals_to_the_training_process():
    """Job managers signal every process of a job."""
    pool = DecoderPool(1)
    # the worker, and the fork server
    others = [decoding.result(pool.submit(which)) for which in (os.getpid, os.getppid)]
    assert os.getpid() not in others
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        for other in others:
            os.kill(other, number)
        assert decoding.result(pool.submit(os.getpid)) == others[0]
    assert signal.getsignal(signal.SIGTERM) == before
    pool.close()


def test_default_count_shares_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert [decoding.default_count(processes) for processes in (1, 4, 16)] == [16, 4, 0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert distributed.local_world_size() == 1  # not started by torchrun
    monkeypatch.setattr(distributed, "is_launched", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert distributed.local_world_size() == 4
    assert distributed.local_gpu() == torch.device("cuda:3")
