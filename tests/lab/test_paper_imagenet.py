"""ResNet-50 on folders of classes: found, decoded, cropped, trained on by one process or several, taken up again."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

pytest.importorskip("typer")
pytest.importorskip("PIL")
from PIL import Image
from rich.console import Console

import nero
from nero_lab import baselines, cli, distributed
from nero_lab.data import DataError, classes, crops, load, photos, readers
from nero_lab.data.classes import Classes, Listing, find
from nero_lab.data.photos import Held, Streamed, kept_or_read
from nero_lab.data.readers import Readers
from nero_lab.loops import supervised
from nero_lab.loops.captured import Captured
from nero_lab.loops.supervised import Supervised
from nero_lab.models.resnet import resnet50
from nero_lab.progress import NullObserver
from nero_lab.protocol import SettingError, warm_up_then_cosine
from nero_lab.store import ReadOnlyStore, Store, read_records
from nero_lab.sweep import train
from nero_lab.tasks import TASKS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TASK = TASKS["imagenet"]
#: The same with a network of four channels, in small batches.
SMALL = replace(TASK, model=partial(resnet50, width=1 / 16), batch=4)


def image(path: Path, size: tuple[int, int] = (32, 32), seed: int = 0, mode: str = "RGB") -> Path:
    """Smooth noise, which a JPEG keeps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    small = Image.frombytes("RGB", (8, 8), bytes(noise.flatten().tolist()))
    small.resize(size[::-1], Image.Resampling.BICUBIC).convert(mode).save(path, "JPEG", quality=95)
    return path


def made(folder: Path, names: str = "abc", train: int = 4, test: int = 2, size: tuple[int, int] = (32, 32)) -> Path:
    """A folder of classes; heights and widths are all the same."""
    for place, name in enumerate(names):
        for index in range(train):
            image(folder / "train" / name / f"{index}.JPEG", size, 100 * place + index, "L" if index == 3 else "RGB")
        for index in range(test):
            image(folder / "val" / name / f"{index}.JPEG", size, 1000 + 100 * place + index)
    return folder


def as_tiny(folder: Path) -> Path:
    """The same images laid out as Tiny ImageNet's."""
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


def kept(folder: Path) -> Held:
    data = kept_or_read(find(folder), Readers(0))
    assert isinstance(data, Held)
    return data


def read(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 0) -> Streamed:
    monkeypatch.setattr(photos, "ROOM", 0)
    data = kept_or_read(find(folder), Readers(count))
    assert isinstance(data, Streamed)
    return data


# -- the data ----------------------------------------------------------------------------------


def test_both_layouts_are_read_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain, tiny = find(made(tmp_path / "My photos")), find(as_tiny(made(tmp_path / "tiny-imagenet-200")))
    assert plain.classes == tiny.classes == ("a", "b", "c")
    assert plain.train.labels == tiny.train.labels == [0] * 4 + [1] * 4 + [2] * 4
    assert plain.test.labels == tiny.test.labels == [0, 0, 1, 1, 2, 2]
    assert [Path(file).read_bytes() for file in plain.train.files + plain.test.files] == [
        Path(file).read_bytes() for file in tiny.train.files + tiny.test.files
    ]
    assert re.fullmatch(r"My-photos-3-classes-12-images-of-32-[0-9a-f]{8}", plain.name(32))
    monkeypatch.setitem(classes.KNOWN, (3, 12, 6, 32), "three")
    assert find(tmp_path).name(32) == "three"  # in the folder that holds it, too
    monkeypatch.setattr(readers, "default_count", lambda _: 0)
    data = load("imagenet", tmp_path)
    assert (data.name, data.examples, data.sizes) == ("three", 12, {"classes": 3})


def test_a_name_is_of_these_images_and_of_no_others(tmp_path: Path):
    names = [find(made(tmp_path / str(place) / "made")).name(32) for place in range(5)]
    assert len(set(names)) == 1  # wherever they are
    (tmp_path / "1/made/val/a/1.JPEG").unlink()
    (tmp_path / "2/made/train/a/1.JPEG").rename(tmp_path / "2/made/train/a/01.JPEG")
    (tmp_path / "3/made/val/b/1.JPEG").rename(tmp_path / "3/made/val/c/5.JPEG")
    changed = [find(tmp_path / str(place) / "made").name(32) for place in range(4)]
    assert changed[0] == names[0]
    assert len({*changed, find(tmp_path / "4/made").name(64)}) == 5
    long = made(tmp_path / ("long" * 50), train=1, test=1)
    assert len(find(long).name(32)) < 90


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
def test_only_what_is_imagenet_in_all_its_numbers_is_called_so(numbers, short: int, name: str):
    count, *parts = numbers
    train, test = (Listing(["a.JPEG"] * size, [0] * size) for size in parts)
    assert Classes(Path("made"), tuple(map(str, range(count))), train, test).name(short).startswith(name)


def break_in(folder: Path, what: str) -> Path:
    """Break something, and say which path has to be named."""
    path = folder / what
    if what == "val/b":
        for each in path.iterdir():
            each.unlink()
    elif what.endswith("JPEG"):
        path.write_bytes(path.read_bytes()[:300])
    else:
        path.rename(folder / "elsewhere")
    return path


def test_what_programs_hide_is_no_class_and_no_image(tmp_path: Path):
    folder = made(tmp_path / "made")
    before = find(folder)
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    image(folder / "val" / ".ipynb_checkpoints" / "0-checkpoint.JPEG")
    (folder / "train" / "a" / "._0.JPEG").write_bytes(b"what a Mac leaves beside a file")
    assert find(folder) == before


@pytest.mark.parametrize(
    ("what", "named", "says"),
    [
        ("train", ".", "name one by --data that has train/<class>"),
        ("val", "val", "does not exist: put the images to test on there"),
        ("val/b", "val/b", "has no images .*: unpack that class again"),
        ("train/b", "train", "has no class b: both parts must have the same classes"),
        ("train/a/1.JPEG", "train/a/1.JPEG", "does not decode .*: put a good copy there, and the same command goes on"),
        ("val/a/1.JPEG", "val/a/1.JPEG", "does not decode"),
    ],
)
def test_what_is_missing_or_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what, named, says):
    break_in(made(tmp_path / "made"), what)
    monkeypatch.setattr(readers, "default_count", lambda _: 0)
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path / 'made' / named))}.* ?{says}"):
        load("imagenet", tmp_path / "made")


def test_more_that_is_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = made(tmp_path / "made")
    for name in "bc":
        (folder / "val" / name).rename(folder / "val" / f"other{name}")
    with pytest.raises(DataError, match=r"val has no class b \(and 1 more like it\)"):
        find(folder)
    tiny = as_tiny(made(tmp_path / "tiny"))
    list_of = tiny / "val" / "val_annotations.txt"
    lines = list_of.read_text()
    list_of.write_text(lines + "a_9.JPEG\ta\n")
    with pytest.raises(DataError, match=r"a_9.JPEG does not exist, and .*annotations.txt names it"):
        find(tiny)
    list_of.write_text(lines + "a_0.JPEG\n")
    with pytest.raises(DataError, match="malformed: line 7 is not a file, a tab and a class"):
        find(tiny)
    list_of.write_bytes(lines.encode() + "é".encode("latin-1"))
    with pytest.raises(DataError, match=rf"{list_of} is not UTF-8: byte {len(lines)} is 0xe9. Save it as UTF-8"):
        find(tiny)
    list_of.write_bytes(lines.replace("\n", "\r\n").encode())
    assert find(tiny).classes == ("a", "b", "c")
    list_of.unlink()
    with pytest.raises(DataError, match="val has no class a"):
        find(tiny)
    with pytest.raises(DataError, match=r"alone has one class alone, a: put the images of another into train and val"):
        find(made(tmp_path / "alone", names="a"))
    empty = tmp_path / "empty"
    (empty / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="has no folders of classes"):
        find(empty)
    broken = made(tmp_path / "broken")
    (broken / "train" / "a" / "3.JPEG").write_bytes(b"no image")  # one of those that are looked at first
    with pytest.raises(DataError, match=r"3.JPEG does not decode \(cannot identify"):
        kept_or_read(find(broken), Readers(0))
    monkeypatch.setattr(photos, "find_spec", lambda _: None)
    with pytest.raises(DataError, match="Pillow, which is not there: pip install"):
        kept_or_read(find(made(tmp_path / "again")), Readers(0))


def test_images_are_kept_as_they_are_in_squares_of_seven_eighths(tmp_path: Path):
    data = kept(made(tmp_path, size=(32, 40)))
    found = find(tmp_path)
    for (pixels, labels), listing in ((data.train, found.train), (data.test, found.test)):
        assert labels.tolist() == listing.labels
        for row, file in zip(pixels, listing.files, strict=True):
            assert bytes(row.flatten().tolist()) == Image.open(file).convert("RGB").tobytes()
    assert (data.short, data.crop) == (32, 28)
    ((inputs, labels),) = data.batches("test")
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    shown = (data.test[0][:, 2:30, 6:34].permute(0, 3, 1, 2) / 255 - torch.tensor(photos.MEAN).view(3, 1, 1)) / (
        torch.tensor(photos.STD).view(3, 1, 1)
    )
    torch.testing.assert_close(inputs, shown, rtol=0, atol=1e-5)
    assert replace(data, short=256).crop == 224


def test_what_does_not_fit_is_read_and_looks_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = kept(made(tmp_path, size=(300, 256)))
    streamed = read(tmp_path, monkeypatch).to("cpu")
    assert held.short == streamed.short == 256
    monkeypatch.setattr(photos, "LOOK", 4)
    for (one, labels), (other, same) in zip(held.batches("test"), streamed.batches("test"), strict=True):
        assert one.shape[2:] == (224, 224)
        torch.testing.assert_close(one, other)
        assert labels.tolist() == same.tolist()
        assert other.is_contiguous(memory_format=torch.channels_last)


def test_large_images_are_read_and_brought_to_256(tmp_path: Path):
    data = kept_or_read(find(made(tmp_path, names="ab", train=2, test=1, size=(300, 257))), Readers(0))
    assert isinstance(data, Streamed)
    assert (data.short, data.crop) == (256, 224)
    ((inputs, _),) = data.batches("test")
    assert inputs.shape == (2, 3, 224, 224)


def test_one_odd_image_does_not_decide_the_crop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = made(tmp_path, names="ab")
    for name in "ab":
        image(folder / "train" / name / "9.JPEG", (200, 200))  # the last of each class
    assert kept_or_read(find(folder), Readers(0)).short == 32
    seen = []
    monkeypatch.setattr(photos, "SAMPLE", 5)
    monkeypatch.setattr(readers, "size_of", lambda file: seen.append(file) or (32, 32))
    assert isinstance(kept_or_read(find(folder), Readers(0)), Streamed)
    assert [str(Path(file).relative_to(folder / "train")) for file in seen] == [
        f"{each}.JPEG" for each in ("a/0", "a/2", "a/9", "b/1", "b/3")
    ]


def test_images_of_a_pixel_are_refused(tmp_path: Path):
    """Seven eighths of it are none, and the network said so in a traceback."""
    with pytest.raises(DataError, match=r"the images of .*small are a pixel wide or high"):
        kept_or_read(find(made(tmp_path / "small", size=(1, 9))), Readers(0))


def test_images_of_many_sizes_are_read(tmp_path: Path):
    folder = made(tmp_path)
    image(folder / "val" / "b" / "1.JPEG", (24, 50))  # which is met while the others are decoded
    data = kept_or_read(find(folder), Readers(0))
    assert isinstance(data, Streamed)
    assert data.crop == 28
    image(folder / "train" / "b" / "3.JPEG", (48, 50))  # and this one before
    assert isinstance(kept_or_read(find(folder), Readers(0)), Streamed)
    ((inputs, labels),) = kept_or_read(find(folder), Readers(0)).epoch(20, torch.Generator(), None)
    assert inputs.shape == (12, 3, 28, 28)
    assert sorted(labels.tolist()) == find(folder).train.labels


@pytest.mark.parametrize("which", ["kept", "read"])
def test_an_epoch_has_every_image_once_and_hangs_on_its_generator_alone(tmp_path: Path, monkeypatch, which: str):
    folder = made(tmp_path, names="abcdefgh", train=3)
    data = kept(folder) if which == "kept" else read(folder, monkeypatch)
    epochs = [data.epoch(5, torch.Generator().manual_seed(seed), None) for seed in (1, 1, 2)]
    whole = [list(epoch) for epoch in epochs]
    assert [len(labels) for _, labels in whole[0]] == [5, 5, 5, 5, 4]
    for batches in whole:
        assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == sorted([*range(8)] * 3)
    for step in (3, 1, 2, 4):  # in any order
        assert torch.equal(epochs[1][step][0], whole[0][step][0])
    assert not torch.equal(whole[0][0][1], whole[2][0][1])
    with pytest.raises(IndexError, match="0 to 4"):
        epochs[0][5]


def test_processes_read_and_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As one alone does; and one that dies is told from a file that is broken."""
    folder = made(tmp_path)
    alone = kept(folder)
    together = kept_or_read(find(folder), Readers(2))
    assert torch.equal(alone.train[0], together.train[0])
    assert torch.equal(alone.test[0], together.test[0])
    streamed = read(folder, monkeypatch, 2).measured(4)
    assert streamed.rate > 0
    assert "read as they are needed by 2 processes; " in streamed.told
    assert "made ready" in streamed.told
    monkeypatch.setattr(photos, "PIECE", 3)
    batches = (data.epoch(5, torch.Generator(), None) for data in (read(folder, monkeypatch), streamed))
    for (one, labels), (other, same) in zip(*batches, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(labels, same)
    broken = break_in(folder, "train/b/2.JPEG")
    with pytest.raises(DataError, match=f"^{re.escape(str(broken))} does not decode"):
        list(streamed.epoch(4, torch.Generator(), None))
    with pytest.raises(DataError, match=r"a process that reads images died, .*: run the same command again"):
        readers.result(streamed.readers.submit(os._exit, 1))
    streamed.readers.close()


def test_a_reader_that_dies_while_the_network_trains_is_told_and_the_others_end():
    """Whoever asks for the next batch meets it, not who waits for one; and another may be at work, deaf to SIGTERM."""
    who, before = Readers(2), multiprocessing.active_children()
    for each in [who.submit(time.sleep, 0.3) for _ in range(2)]:
        readers.result(each)
    waiting = [who.submit(time.sleep, 600) for _ in range(2)]
    both = [each for each in multiprocessing.active_children() if each not in before]
    assert len(both) == 2
    both[0].kill()
    assert isinstance(waiting[0].exception(60), BrokenProcessPool)
    with pytest.raises(DataError, match=r"a process that reads images died, .*: run the same command again"):
        who.submit(int)
    both[1].join(60)
    assert not both[1].is_alive()
    who.close()


def test_readers_outlive_what_stops_the_process_that_trains():
    """A signal to all of a job, of which the one that trains makes the best."""
    who = Readers(1)
    others = [readers.result(who.submit(which)) for which in (os.getpid, os.getppid)]  # a reader, and who started it
    assert os.getpid() not in others
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        for other in others:
            os.kill(other, number)
        assert readers.result(who.submit(os.getpid)) == others[0]
    assert signal.getsignal(signal.SIGTERM) == before
    who.close()


def test_grey_of_sixteen_bits_is_brought_to_eight(tmp_path: Path):
    values = [0, 255, 256, 300, 32_768, 65_535]
    deep = Image.new("I;16", (3, 2))
    deep.putdata(values)
    for name in ("deep.png", "whole.tiff"):
        (deep if name == "deep.png" else deep.convert("I")).save(tmp_path / name)
        assert [*readers.whole([str(tmp_path / name)], 2, 3)] == [value // 256 for value in values for _ in range(3)]
    for mode, value in (("I", 70_000), ("I", -1), ("F", 0.5)):
        Image.new(mode, (3, 2), value).save(tmp_path / "odd.tiff")
        with pytest.raises(DataError, match=f"odd.tiff does not decode .its pixels are of mode {mode}"):
            readers.whole([str(tmp_path / "odd.tiff")], 2, 3)


def test_readers_suit_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert [readers.default_count(processes) for processes in (1, 4, 16)] == [16, 4, 0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert distributed.local_world_size() == 1  # torchrun has not said so
    monkeypatch.setattr(distributed, "started", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert distributed.local_world_size() == 4
    assert distributed.local_gpu() == torch.device("cuda:3")


# -- crops -------------------------------------------------------------------------------------


def slow_box(height: int, width: int, shares: list[float], ratios: list[float], down: float, right: float):
    """Torchvision's way, one try after the other, from numbers in [0, 1)."""
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
def test_boxes_are_those_of_a_slow_loop(size: tuple[int, int], device: str):
    boxes = crops.random_boxes(200, *size, torch.Generator(device).manual_seed(3))
    again = torch.Generator(device).manual_seed(3)
    drawn = [torch.rand(shape, generator=again, device=device, dtype=torch.float64) for shape in [(200, 10)] * 2]
    places = torch.rand(2, 200, generator=again, device=device, dtype=torch.float64)
    slow = [slow_box(*size, *each) for each in zip(*(part.tolist() for part in (*drawn, *places)), strict=True)]
    assert boxes.tolist() == slow
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor(size, device=device)).all()


def test_flips_are_every_other_one():
    share = crops.random_flips(10_000, torch.Generator().manual_seed(0)).double().mean().item()
    assert share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(64, 64), (50, 70)])
@pytest.mark.parametrize("into", [56, 20])
def test_cut_is_pillows_crop_and_resize(shape: tuple[int, int], into: int, device: str):
    pixels = torch.randint(256, (40, *shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    boxes, flips = crops.random_boxes(40, *shape, generator), crops.random_flips(40, generator)
    moved = (each.to(device) for each in (pixels, boxes, flips))
    found = crops.cut(*(next(moved), next(moved)), (into, into), next(moved)).cpu()
    for row, (top, left, high, wide), flip, ours in zip(pixels, boxes.tolist(), flips, found, strict=True):
        picture = Image.frombytes("RGB", shape[::-1], bytes(row.flatten().tolist()))
        picture = picture.crop((left, top, left + wide, top + high)).resize((into, into), Image.Resampling.BILINEAR)
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else picture
        theirs = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(into, into, 3)
        assert (ours - theirs).abs().max() < 1.6  # it rounds to bytes twice
    whole = torch.tensor([[0, 0, *shape]] * 40)
    shown = crops.cut(pixels, whole, shape, torch.zeros(40, dtype=torch.bool))
    torch.testing.assert_close(shown, pixels.float(), rtol=0, atol=1e-4)


def test_what_is_cut_together_is_bounded(monkeypatch: pytest.MonkeyPatch):
    pixels = torch.randint(256, (7, 8, 9, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    boxes, flips = crops.random_boxes(7, 8, 9, generator), crops.random_flips(7, generator)
    together = crops.cut(pixels, boxes, (4, 4), flips)
    sizes = []
    weights = crops._weights
    monkeypatch.setattr(crops, "_weights", lambda *each: sizes.append(len(each[0])) or weights(*each))
    for bound, pieces in ((3 * 8 * 9 * 3, [3, 3, 3, 3, 1, 1]), (1, [1] * 14)):
        monkeypatch.setattr(crops, "TOGETHER", bound)
        torch.testing.assert_close(crops.cut(pixels, boxes, (4, 4), flips), together)
        assert sizes == pieces
        sizes.clear()


def test_readers_crop_at_random_as_batches_do(tmp_path: Path):
    """From one seed an image."""
    path = image(tmp_path / "a.JPEG", (60, 90))
    pixels = torch.frombuffer(bytearray(Image.open(path).convert("RGB").tobytes()), dtype=torch.uint8)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        boxes, flips = crops.random_boxes(1, 60, 90, generator), crops.random_flips(1, generator)
        ours = crops.cut(pixels.view(1, 60, 90, 3), boxes, (28, 28), flips)[0]
        theirs = torch.frombuffer(readers.at_random([str(path)], [seed], 28), dtype=torch.uint8)
        assert (ours - theirs.view(28, 28, 3)).abs().max() < 1.6


# -- the network, the schedule, the contenders -------------------------------------------------


def test_resnet50_is_torchvisions():
    """By its numbers; and as the one of transformers, which has the same blocks, to the last digits."""
    with torch.device("meta"):
        whole = resnet50()
    assert sum(parameter.numel() for parameter in whole.parameters()) == 25_557_032
    assert len(list(whole.parameters())) == 161
    assert [tuple(layer.shape) for layer in (whole[0].weight, whole[-1].weight)] == [(64, 3, 7, 7), (1000, 2048)]
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[16, 32, 64, 128], depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=5
    )
    torch.manual_seed(0)
    theirs, ours = transformers.ResNetForImageClassification(config).eval(), resnet50(5, width=1 / 16).eval()
    layers = theirs.resnet.encoder.stages
    blocks = [block for stage in layers for block in stage.layers]
    in_order = [theirs.resnet.embedder, *(part for block in blocks for part in (block.layer, block.shortcut))]
    values = [value for part in [*in_order, theirs.classifier] for value in part.state_dict().values()]
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    inputs = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        torch.testing.assert_close(ours(inputs), theirs(inputs).logits, rtol=1e-5, atol=1e-5)


def test_resnet50_starts_as_torchvisions():
    torch.manual_seed(0)
    model = resnet50(10, width=0.5)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.out_channels * layer.kernel_size[0] ** 2
            assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
        if isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all()
            assert (layer.bias == 0).all()


def test_the_rate_rises_for_an_epoch_and_falls_as_a_cosine():
    schedule = warm_up_then_cosine(1, 90)
    rates = [schedule(step, 10) for step in range(900)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10 + 445] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx((1 + math.cos(math.pi * 889 / 890)) / 2)
    assert schedule(900, 10) == pytest.approx(0)


def test_the_task_is_as_the_paper_ran_it():
    """Number by number, from its appendix and shared/paper/settings.md."""
    assert (TASK.batch, TASK.epochs, TASK.metric, TASK.grid) == (400, 90, "test_accuracy", ())
    assert "about matches SGD" in TASK.title
    assert {name: (each.optimiser, each.best, dict(each.options)) for name, each in TASK.contenders.items()} == {
        "nero": ("nero", 0.01, {}),
        "nero-tuned": (
            "nero",
            0.02,
            {"scale": 1.0, "gain_penalty": TASK.contenders["nero-tuned"].options["gain_penalty"]},
        ),
        "nero-free-gains": ("nero", 0.02, {"scale": 1.0}),
        "sgd-decay": ("sgd", 0.1, {"momentum": 0.9, "weight_decay": 0.0001}),
        "sgd": ("sgd", 0.1, {"momentum": 0.9}),
    }
    assert TASK.contenders["nero-tuned"].options["gain_penalty"] > 0


def test_sgd_has_momentum_and_decays_everything():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimiser = baselines.make("sgd", model, 0.1, momentum=0.9, weight_decay=0.01)
    baselines.prime(optimiser)
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    speeds = [torch.zeros_like(parameter) for parameter in wanted]
    for step in range(3):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, step + index - 1.5)
            speeds[index] = 0.9 * speeds[index] + parameter.grad + 0.01 * wanted[index]
            wanted[index] = wanted[index] - 0.1 * speeds[index]
        optimiser.step()
    for parameter, value in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), value)
    for options, says in (({"momentum": 1.0}, "momentum must be"), ({"weight_decay": -1.0}, "weight_decay must be")):
        with pytest.raises(ValueError, match=says):
            baselines.make("sgd", model, 0.1, **options)


def test_nero_tuned_moves_biases_by_the_rate_and_pulls_gains_to_one():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    nn.init.constant_(model[1].weight, 1.5)
    optimiser = baselines.make("nero", model, 0.02, scale=1.0, gain_penalty=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model[1].bias.grad.fill_(3.0)
    optimiser.step()
    assert model[1].bias.tolist() == pytest.approx([-0.02, -0.02])
    assert model[1].weight.tolist() == pytest.approx([1.48, 1.48])
    assert model[0].bias.grad.abs().max() == 0


@pytest.mark.parametrize("contender", TASK.contenders)
def test_every_contender_trains_and_says_on_what(tmp_path: Path, contender: str):
    data = kept(made(tmp_path / "made", names="ab", train=3, size=(64, 64)))
    settings = replace(SMALL.settings(contender, epochs=1), data=data.name)
    training = Supervised(SMALL, settings, data)
    before = [value.detach().clone() for value in training.model.parameters()]
    while not training.finished:
        training.advance()
    for value, was in zip(training.model.parameters(), before, strict=True):
        assert value.isfinite().all()
        assert not torch.equal(value, was)
    assert nero.is_balanced(training.model) == contender.startswith("nero")
    found = Store(tmp_path).finish(training)
    assert (found["data"], found["classes"], found["crop"]) == (data.name, 2, 56)
    assert found["processes"] == 1
    assert (found["options"], found["batch"]) == (dict(TASK.contenders[contender].options), 4)
    assert found["curve"]["test_accuracy"][0] in [index / 4 for index in range(5)]
    name = f"{contender}-lr{settings.lr}-seed0-epochs1-{data.name}.json"
    assert json.loads((tmp_path / "imagenet" / name).read_text()) == found


# -- going on, and together --------------------------------------------------------------------


def shallow(classes: int = 2, *, norm: bool = True) -> nn.Sequential:
    """A convolution and a linear layer."""
    between = [nn.BatchNorm2d(8), nn.ReLU()] if norm else [nn.ReLU()]
    return nn.Sequential(nn.Conv2d(3, 8, 5, 4), *between, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes))


@pytest.mark.parametrize("contender", ["nero-tuned", "sgd-decay"])
@pytest.mark.parametrize("which", ["kept", "read"])
def test_taken_up_anywhere_a_run_is_the_same_to_the_bit(tmp_path: Path, monkeypatch, contender: str, which: str):
    folder = made(tmp_path, test=1)
    data = kept(folder) if which == "kept" else read(folder, monkeypatch)
    task = replace(TASK, model=shallow, batch=5)
    settings = task.settings(contender, epochs=2)
    whole = Supervised(task, settings, data)
    states = []
    while not whole.finished:
        states.append(whole.state())
        whole.advance()
    assert len(states) == 6
    for state in states[1:]:
        torch.save(state, tmp_path / "state")
        again = Supervised(task, settings, data, torch.load(tmp_path / "state", weights_only=True))
        while not again.finished:
            again.advance()
        assert again.curve == whole.curve
        for name, value in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], value), name


@pytest.mark.parametrize("what", ["train/a/1.JPEG", "val/a/1.JPEG"])
def test_an_image_that_breaks_in_mid_run_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    folder, begun = made(tmp_path / "made", names="ab", train=6), []
    task, data = replace(SMALL, model=shallow), read(folder, monkeypatch)
    settings = task.settings("sgd-decay", epochs=2)
    good = (folder / what).read_bytes()

    class Breaking(NullObserver):
        def begun(self, training: Supervised) -> None:
            begun.append(training.steps_done)

        def stepped(self, training: Supervised) -> None:
            if training.epoch == 1 and training.step == 0:
                break_in(folder, what)

    (whole,) = train(task, [settings], data, Store(tmp_path / "whole"), NullObserver())
    with pytest.raises(DataError, match=r"does not decode .* the same command goes on from what was kept"):
        train(task, [settings], data, Store(tmp_path / "broken"), Breaking())
    (folder / what).write_bytes(good)
    (again,) = train(task, [settings], data, Store(tmp_path / "broken"), Breaking())
    assert begun[0] == 0
    assert begun[1] == 6 if what.startswith("val") else 3 <= begun[1] < 6
    assert again["curve"] == whole["curve"]


def sweep_together(*arguments: str) -> None:
    """What each of several processes does: the command, on a network whose result does not hang on their number.

    Batch norm's would, since its statistics are of a process's share. At the end weights are kept, by process.
    """

    def verdict(model: nn.Module, _: object) -> dict[str, float]:
        torch.save(model.state_dict(), Path(arguments[-1]) / f"weights{distributed.rank()}")
        return {"processes": distributed.world_size()}

    TASKS["imagenet"] = replace(TASK, model=partial(shallow, norm=False), batch=7, verdict=verdict)
    sys.argv = ["nero", *arguments]
    cli.main()


def together(folder: Path, what: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Have two processes do what is a call of a function here."""
    here, script = Path(__file__), folder / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(here.parent)!r})\nfrom {here.stem} import *\n"
        f"if __name__ == '__main__': {what}\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    return subprocess.run(
        [*torchrun, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:gain_penalty")  # of which the network without norms has none
def test_two_processes_do_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The whole command; one of the two tells and writes."""
    made(tmp_path / "made")  # a batch of seven and a last one of five: shares of four and three, three and two
    image(tmp_path / "made" / "val" / "a" / "2.JPEG")  # and of four and three to look at
    arguments = ["sweep", "imagenet", "--optimiser", "nero-tuned", "--optimiser", "sgd-decay", "--seeds", "1"]
    arguments += ["--epochs", "2", "--device", "cpu", "--data", str(tmp_path / "made"), "--out"]
    two = together(tmp_path, "sweep_together(*sys.argv[1:])", *arguments, str(tmp_path / "two"))
    assert two.returncode == 0, two.stderr
    assert two.stdout.count(", a stand-in for ImageNet: 12 images of 3 classes") == 1
    assert two.stdout.count(" can be made ready for each of 2 processes\n") == 3
    assert two.stdout.count("images a second, start included, and ") == 2
    assert "nero-tuned: the paper has 0.02 as its best" in two.stdout  # and no grid was searched
    assert len(list((tmp_path / "two" / "tensorboard").rglob("events*"))) == 2
    monkeypatch.setitem(TASKS, "imagenet", TASK)  # which is put back
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(readers, "default_count", lambda _: 0)
    with pytest.raises(SystemExit):
        sweep_together(*arguments, str(tmp_path / "one"))
    for one, other in zip(read_records(tmp_path / "one"), read_records(tmp_path / "two"), strict=True):
        assert (one["processes"], other["processes"]) == (1, 2)
        for name, values in one["curve"].items():
            assert other["curve"][name] == pytest.approx(values, rel=2e-4), name
    alone, first, second = (
        torch.load(tmp_path / where, weights_only=True) for where in ("one/weights0", "two/weights0", "two/weights1")
    )
    for name, value in alone.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-5)


def test_several_processes_are_started_by_the_command_itself():
    """As the page says it, but for one, to list: what is interrupted during the imports then ends in a line, too."""
    page = (Path(__file__).parents[2] / "docs" / "paper" / "imagenet.md").read_text()
    (command,) = re.findall(r"^torchrun --nproc_per_node=4 (.* nero) run imagenet", page, re.M)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split(), "list"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TASK ")


def test_what_several_processes_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = kept(made(tmp_path))
    task = replace(SMALL, batch=6)
    state = Supervised(task, task.settings("nero"), data).state()
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    with pytest.raises(SettingError, match="begun by 1 processes, and now there are 3: start 1 again"):
        Supervised(task, task.settings("nero"), data, state)
    with pytest.raises(
        SettingError, match="a batch has 5 images for 3 processes, which need two each: start 2 or fewer"
    ):
        Supervised(replace(SMALL, batch=5), SMALL.settings("nero"), data)
    for task, beside, says in (
        (TASKS["mnist-deep"], 1, "mnist-deep is trained by one process: start it without torchrun"),
        (SMALL, 2, "several processes make one run at a time: start them without --side-by-side"),
    ):
        workplace = cli._training_session(task, tmp_path, "cpu", tmp_path, "float32", beside)
        with pytest.raises(SettingError, match=says):
            workplace.__enter__()


def stand_apart(told: Path) -> None:
    """What each of two processes does that stand at different places, in different ways."""
    with distributed.process_group(torch.device("cpu")):
        data = kept(told / "made")
        task = replace(SMALL, model=shallow)
        settings = task.settings("nero", epochs=2)
        training = Supervised(task, settings, data)
        states = [training.state() for _ in range(2)]
        states[0] |= {"epoch": 1, "curve": {name: [0.5] for name in training.curve}}
        next(iter(states[1]["model"].values()))[0] += 1e-6
        mine = distributed.rank() == 1
        tries = [(settings, state if mine else None) for state in states]
        tries.append((replace(settings, lr=0.5) if mine else settings, None))
        said = []
        for wanted, state in tries:
            with pytest.raises(SettingError, match="do not all stand where this one does") as error:
                Supervised(task, wanted, data, state)
            said.append(str(error.value))
        with (
            patch.object(distributed, "process_group", lambda _: nullcontext()),
            patch.object(Store, "record", lambda *_: {} if mine else None),  # one of them finds its run done
            pytest.raises(SettingError, match=r"not have the same runs to make: .* see the same --out"),
            cli._training_session(task, told / "made", "cpu", told / "out", "float32", 1) as runs,
        ):
            runs([settings], False)
        (told / f"told{distributed.rank()}").write_text("\n".join(said))


def test_processes_that_stand_at_different_places_say_so_all(tmp_path: Path):
    made(tmp_path / "made", names="ab", train=2, test=1)
    told = together(tmp_path, "stand_apart(Path(sys.argv[1]))", str(tmp_path))
    assert told.returncode == 0, told.stderr
    first, second = ((tmp_path / f"told{rank}").read_text().splitlines() for rank in range(2))
    assert len(first) == len(second) == 3
    assert "at epoch 0, step 0 of nero-lr0.01-seed0-epochs2: start all by the same command" in first[0]
    assert "at epoch 1, step 0 of" in second[0]


@pytest.mark.parametrize(
    ("images", "batch", "processes", "steps"),
    [(13, 4, 1, 3), (14, 4, 1, 4), (12, 4, 1, 3), (15, 4, 2, 3), (16, 4, 2, 4), (11, 8, 2, 1), (12, 8, 2, 2)],
)
def test_a_last_batch_of_which_some_had_one_image_is_left_out(monkeypatch, images, batch, processes, steps):
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    assert supervised._steps(replace(TASK, batch=batch), images) == steps
    assert supervised._steps(replace(TASK, batch=batch, several=False), images) == math.ceil(images / batch)


def test_batch_norm_meets_no_single_image_of_one_pixel(tmp_path: Path):
    folder = made(tmp_path)
    image(folder / "train" / "a" / "9.JPEG")  # the thirteenth, in batches of four
    training = Supervised(SMALL, SMALL.settings("sgd", epochs=1), kept(folder))
    while not training.finished:
        training.advance()
    assert training.steps_done == 3


def test_onlookers_write_nothing(tmp_path: Path):
    data = kept(made(tmp_path / "made"))
    training = Supervised(SMALL, SMALL.settings("nero", epochs=1), data)
    while not training.finished:
        training.advance()
    store = ReadOnlyStore(tmp_path / "out")
    training.files["-a.png"] = b"picture"
    store.check(SMALL, 2**62)
    store.save(training)
    store.write_files(training)
    assert store.finish(training)["curve"] == Store(tmp_path / "other").finish(training)["curve"]
    assert not training.files
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_the_data_sustains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made(tmp_path / "made", names="ab", train=3, test=1, size=(64, 64))
    monkeypatch.setitem(TASKS, "imagenet", SMALL)
    monkeypatch.setattr(readers, "default_count", lambda _: 0)
    told = StringIO()
    monkeypatch.setattr(cli, "console", Console(file=told, width=160, markup=False, highlight=False))
    arguments = ["run", "imagenet", "--data", tmp_path / "made", "--out", tmp_path / "out", "--epochs", 1]
    monkeypatch.setattr(sys, "argv", ["nero", *map(str, arguments), "--device", "cpu"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    said = " ".join(told.getvalue().split())
    assert "in squares of 56, decoded by one process in" in said
    assert re.search(r"trains on [\d,]+ images a second, start included, and [\d,]+ can be made ready", said)


@pytest.mark.gpu
@pytest.mark.parametrize("contender", TASK.contenders)
@pytest.mark.parametrize("which", ["kept", "read"])
def test_captured_steps_are_the_steps(tmp_path: Path, monkeypatch, contender: str, which: str):
    flags = partial(torch.backends.cudnn.flags, deterministic=True)
    monkeypatch.setattr(torch.backends.cudnn, "flags", lambda **asked: flags(**{**asked, "benchmark": False}))
    folder = made(tmp_path, size=(64, 64))
    data = (kept(folder) if which == "kept" else read(folder, monkeypatch)).to("cuda")
    task = replace(SMALL, batch=8)
    runs = []
    for call in (Captured.__call__, lambda self, *inputs, **_: self.function(*inputs)):
        monkeypatch.setattr(Captured, "__call__", call)
        runs.append(Supervised(task, task.settings(contender, epochs=2), data))
        while not runs[-1].finished:
            runs[-1].advance()
    captured, plain = runs
    assert len(captured._learn.graphs) == 2
    for name, values in plain.curve.items():
        assert captured.curve[name] == pytest.approx(values, rel=1e-2, abs=1e-3), name
