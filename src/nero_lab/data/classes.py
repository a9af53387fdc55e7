"""A folder of classes: which images there are, and of which class each is. None of them is opened here.

``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, as ImageNet is usually unpacked, or Tiny ImageNet's own way:
``train/<class>/images/*.JPEG``, ``val/images/*.JPEG`` and ``val/val_annotations.txt``.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from nero_lab.data.errors import DataError
from nero_lab.data.formats import lines

ENDINGS = (".jpeg", ".jpg", ".png")
ANNOTATIONS = "val_annotations.txt"
#: Data sets by their numbers of classes, of images to train on, of others, and of pixels of a shorter side.
KNOWN = {(1000, 1_281_167, 50_000, 256): "imagenet", (200, 100_000, 10_000, 64): "tiny-imagenet"}


@dataclass(frozen=True)
class Listing:
    """Files and the numbers of their classes."""

    files: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Classes:
    """What a folder of classes holds.

    Attributes:
        folder: that holds them.
        classes: their names, in the order of their labels.
        train: what networks are trained on.
        test: the validation set, which they are tested on.
    """

    folder: Path
    classes: tuple[str, ...]
    train: Listing
    test: Listing

    def name(self, short: int) -> str:
        """Of the data set: one that is known by its numbers, or else the folder's, and what tells it from others.

        Args:
            short: what the shorter side of an image is brought to, to test on.
        """
        numbers = (len(self.classes), len(self.train.files), len(self.test.files), short)
        plain = re.sub(r"[^\w.-]+", "-", self.folder.resolve().name)[:40]
        return KNOWN.get(numbers) or f"{plain}-{numbers[0]}-classes-{numbers[1]}-images-of-{short}-{self._digest()}"

    def _digest(self) -> str:
        """Of which images there are, by the names of their classes and files, wherever the folder is."""
        listed = [
            [
                (self.classes[label], file.rpartition(os.sep)[2])
                for file, label in zip(part.files, part.labels, strict=True)
            ]
            for part in (self.train, self.test)
        ]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:8]


def find(folder: Path) -> Classes:
    """The classes of a folder, or of the one of ImageNet or Tiny ImageNet in it.

    Raises:
        DataError: if a part or a class is missing, or has no images.
    """
    places = (folder / "imagenet", folder / "tiny-imagenet-200", folder)
    place = next((place for place in places if (place / "train").is_dir()), None)
    if place is None:
        raise DataError(
            f"{folder} holds no folder of classes: name one by --data that has train/<class>/*.JPEG and "
            "val/<class>/*.JPEG, such as ImageNet's, which its makers hand out at image-net.org, or Tiny ImageNet's"
        )
    train = _by_class(place / "train")
    if not (place / "val").is_dir():
        raise DataError(f"{place / 'val'} does not exist: put the images to test on there, as in {place / 'train'}")
    annotated = place / "val" / ANNOTATIONS
    test = _annotated(annotated) if annotated.is_file() else _by_class(place / "val")
    for one, other, where in ((train, test, "val"), (test, train, "train")):
        if missing := sorted(one.keys() - other.keys()):
            raise DataError(
                f"{place / where} has no class {missing[0]}{_and_more(missing)}: both parts must have the same classes"
            )
    classes = tuple(sorted(train))
    if len(classes) == 1:
        raise DataError(f"{place} has one class alone, {classes[0]}: put the images of another into train and val")
    return Classes(place, classes, _listing(train, classes), _listing(test, classes))


def _by_class(part: Path) -> dict[str, list[str]]:
    found = {each.name: _images(Path(each.path)) for each in _entries(part) if each.is_dir()}
    if not found:
        raise DataError(f"{part} has no folders of classes: put each class's images into a folder of its own there")
    if empty := [name for name, files in found.items() if not files]:
        raise DataError(
            f"{part / empty[0]} has no images ({', '.join(ENDINGS)}){_and_more(empty)}: unpack that class again, "
            "or remove its folder from train and val"
        )
    return found


def _images(folder: Path) -> list[str]:
    """Those of a class, directly in its folder or in its "images"."""
    folders = (folder, folder / "images") if (folder / "images").is_dir() else (folder,)
    return [each.path for inside in folders for each in _entries(inside) if each.name.lower().endswith(ENDINGS)]


def _annotated(path: Path) -> dict[str, list[str]]:
    """The images of a list: on each line a file of the folder "images", a tab, its class, and perhaps more."""
    there = {each.name for each in _entries(path.parent / "images")} if (path.parent / "images").is_dir() else set()
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines(path.read_bytes(), str(path)), 1):
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0].strip()
        if not name:
            raise DataError(f"{path} is malformed: line {number} is not a file, a tab and a class. Unpack it again")
        if file not in there:
            raise DataError(f"{path.parent / 'images' / file} does not exist, and {path} names it: unpack it again")
        found.setdefault(name, []).append(str(path.parent / "images" / file))
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, but for what programs hide there, such as .ipynb_checkpoints."""
    with os.scandir(folder) as entries:
        return sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)


def _listing(found: dict[str, list[str]], classes: tuple[str, ...]) -> Listing:
    pairs = [(file, label) for label, name in enumerate(classes) for file in found[name]]
    return Listing([file for file, _ in pairs], [label for _, label in pairs])


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1:,} more like it)" if len(names) > 1 else ""
