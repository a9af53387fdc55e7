"""Folders of classes: layouts, names, and missing or damaged parts."""

import re
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from lab.photo_cases import as_tiny_imagenet, damage, write_class_folder, write_image

from nero_lab.data import DataError, class_folder, decoder_pool, load, photos
from nero_lab.data.class_folder import ClassFolder, Listing, find_class_folder
from nero_lab.data.decoder_pool import DecoderPool
from nero_lab.data.photos import load_photos


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
    monkeypatch.setattr(decoder_pool, "default_count", lambda _: 0)
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
    monkeypatch.setattr(decoder_pool, "default_count", lambda _: 0)
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
