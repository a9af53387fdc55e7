"""Folders of classes: the image files and their labels, found without opening an image.

Supports ``train/<class>/*.JPEG`` with ``val/<class>/*.JPEG``, as ImageNet is usually unpacked, and the layout of Tiny
ImageNet: ``train/<class>/images/*.JPEG``, ``val/images/*.JPEG`` and ``val/val_annotations.txt``.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from nero_lab.data.dataset import DataError
from nero_lab.data.formats import lines

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
ANNOTATIONS = "val_annotations.txt"
#: Names of data sets, by the numbers of classes, training images, test images, and pixels of a shorter side.
KNOWN = {(1000, 1_281_167, 50_000, 256): "imagenet", (200, 100_000, 10_000, 64): "tiny-imagenet"}


@dataclass(frozen=True)
class Listing:
    """Image files and their labels."""

    files: list[str]
    labels: list[int]


@dataclass(frozen=True)
class ClassFolder:
    """Content of a folder of classes.

    Attributes:
        folder: the folder with ``train`` and ``val``.
        classes: class names, in the order of their labels.
        train: training images.
        test: the validation set, which serves as the test set.
    """

    folder: Path
    classes: tuple[str, ...]
    train: Listing
    test: Listing

    def dataset_name(self, short_side: int) -> str:
        """Name the data set: a known name, or the folder's name with its numbers and a digest.

        Args:
            short_side: length that the shorter side of a test image is resized to.
        """
        numbers = (len(self.classes), len(self.train.files), len(self.test.files), short_side)
        if name := KNOWN.get(numbers):
            return name
        plain = re.sub(r"[^\w.-]+", "-", self.folder.resolve().name)[:40]
        return f"{plain}-{numbers[0]}-classes-{numbers[1]}-images-of-{short_side}-{self._digest()}"

    def _digest(self) -> str:
        """Hash the class and file names of all images, independent of the folder's location."""
        listed = [
            [
                (self.classes[label], file.rpartition(os.sep)[2])
                for file, label in zip(part.files, part.labels, strict=True)
            ]
            for part in (self.train, self.test)
        ]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:8]


def find_class_folder(folder: Path) -> ClassFolder:
    """List the classes of a folder, or of ``imagenet`` or ``tiny-imagenet-200`` in it.

    Raises:
        DataError: if a part or a class is missing, or has no images.
    """
    places = (folder / "imagenet", folder / "tiny-imagenet-200", folder)
    place = next((place for place in places if (place / "train").is_dir()), None)
    if place is None:
        raise DataError(
            f"{folder} holds no folder of classes: name one by --data that has train/<class>/*.JPEG and "
            "val/<class>/*.JPEG, such as ImageNet from image-net.org, or Tiny ImageNet"
        )
    train = _list_by_class(place / "train")
    if not (place / "val").is_dir():
        raise DataError(f"{place / 'val'} does not exist: put the test images there, as in {place / 'train'}")
    annotated = place / "val" / ANNOTATIONS
    test = _list_annotated(annotated) if annotated.is_file() else _list_by_class(place / "val")
    for one, other, where in ((train, test, "val"), (test, train, "train")):
        if missing := sorted(one.keys() - other.keys()):
            raise DataError(
                f"{place / where} has no class {missing[0]}{_and_more(missing)}: train and val must have equal classes"
            )
    classes = tuple(sorted(train))
    if len(classes) == 1:
        raise DataError(f"{place} must have two classes or more, got {classes[0]} only: add another to train and val")
    return ClassFolder(place, classes, _listing(train, classes), _listing(test, classes))


def _list_by_class(part: Path) -> dict[str, list[str]]:
    """List the images of each class's folder."""
    images = {entry.name: _list_images(Path(entry.path)) for entry in _visible_entries(part) if entry.is_dir()}
    if not images:
        raise DataError(f"{part} has no folders of classes: put the images of each class into a folder of its own")
    if empty := [name for name, files in images.items() if not files]:
        raise DataError(
            f"{part / empty[0]} has no images ({', '.join(IMAGE_SUFFIXES)}){_and_more(empty)}: unpack that class "
            "again, or remove its folder from train and val"
        )
    return images


def _list_images(folder: Path) -> list[str]:
    """List the images directly in a class's folder and in its subfolder "images"."""
    folders = (folder, folder / "images") if (folder / "images").is_dir() else (folder,)
    entries = (entry for inside in folders for entry in _visible_entries(inside))
    return [entry.path for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES)]


def _list_annotated(path: Path) -> dict[str, list[str]]:
    """Parse a list with one image per line: a file of the folder "images", a tab, its class, optionally more."""
    folder = path.parent / "images"
    existing = {entry.name for entry in _visible_entries(folder)} if folder.is_dir() else set()
    images: dict[str, list[str]] = {}
    for number, line in enumerate(lines(path.read_bytes(), str(path)), 1):
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0].strip()
        if not name:
            raise DataError(f"{path} is malformed: line {number} is not a file, a tab and a class. Unpack it again")
        if file not in existing:
            raise DataError(f"{folder / file} does not exist, but {path} names it: unpack it again")
        images.setdefault(name, []).append(str(folder / file))
    return images


def _visible_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the sorted entries of a folder, without hidden ones such as .ipynb_checkpoints."""
    with os.scandir(folder) as entries:
        return sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)


def _listing(images: dict[str, list[str]], classes: tuple[str, ...]) -> Listing:
    pairs = [(file, label) for label, name in enumerate(classes) for file in images[name]]
    return Listing([file for file, _ in pairs], [label for _, label in pairs])


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
