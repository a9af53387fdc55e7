"""The data sets of the paper's experiments: found or downloaded, checked, and whole in memory.

:func:`load` gives a :class:`Dataset`: of images (MNIST, CIFAR-10), kept as bytes, which
:func:`nero_lab.data.augment.crop_flip_rotate` moves about, of words (WikiText-2,
Multi30k), or of photographs in folders of classes (ImageNet and its stand-ins), which may not fit into memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from nero_lab.data import formats, sources
from nero_lab.data.arcade import pong
from nero_lab.data.corpus import Corpus, wikitext2
from nero_lab.data.errors import DataError
from nero_lab.data.folder import Folder, checked, read
from nero_lab.data.pairs import Pairs, multi30k
from nero_lab.data.photos import Photos, imagenet
from nero_lab.data.sources import FILES

__all__ = ["FILES", "Corpus", "DataError", "Dataset", "Images", "Pairs", "Photos", "Pictures", "load"]

#: New pixels from pixels, and a generator of random numbers.
Moving: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
#: How many images are looked at together.
LOOK = 1000


class Dataset(Protocol):
    """What the training loop asks of a data set. Labels of -100 count for nothing."""

    @property
    def name(self) -> str:
        """As tasks call it."""

    @property
    def parts(self) -> tuple[str, ...]:
        """What is looked at after each epoch, the training set apart."""

    @property
    def examples(self) -> int:
        """How many there are to train on."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""

    @property
    def sizes(self) -> dict[str, int]:
        """What a network has to be told of it, by the names of its maker's arguments: nothing, if made for it."""

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""

    def epoch(self, batch: int, generator: torch.Generator, augment: Moving | None) -> Sequence[tuple[Tensor, ...]]:
        """Inputs, which may be several, and labels of all examples, in an epoch's order and in batches of that size."""

    def batches(self, part: str) -> Iterator[tuple[Tensor, ...]]:
        """Inputs and labels of a part, batch by batch."""


@dataclass(frozen=True)
class Images:
    """Labelled images, whole and on one device.

    Attributes:
        pixels: uint8 (N, C, H, W).
        labels: int64 (N,), in 0 .. 9.
    """

    pixels: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> "Images":
        return Images(self.pixels.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Pictures:
    """A data set of images, and what its pixels are normalised by.

    Attributes:
        name: "mnist" or "cifar10".
        train: what networks are trained on.
        test: what they are tested on.
        mean: of each channel, of the training pixels in [0, 1].
        std: likewise.
    """

    name: str
    train: Images
    test: Images
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        return ("test",)

    @property
    def sizes(self) -> dict[str, int]:
        return {}

    @property
    def examples(self) -> int:
        return len(self.train.labels)

    @property
    def device(self) -> torch.device:
        return self.train.pixels.device

    def to(self, device: torch.device | str) -> "Pictures":
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def epoch(self, batch: int, generator: torch.Generator, augment: Moving | None) -> Sequence[tuple[Tensor, Tensor]]:
        order = torch.randperm(self.examples, generator=generator, device=self.device)
        pixels = self.train.pixels[order]
        if augment is not None:
            pixels = augment(pixels, generator)
        inputs, labels = _channels_last(self.normalised(pixels)), self.train.labels[order]
        return list(zip(torch.split(inputs, batch), torch.split(labels, batch), strict=True))

    def batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        images: Images = getattr(self, part)
        for pixels, labels in zip(torch.split(images.pixels, LOOK), torch.split(images.labels, LOOK), strict=True):
            yield _channels_last(self.normalised(pixels)), labels

    def normalised(self, pixels: Tensor) -> Tensor:
        """``(pixels / 255 - mean) / std`` in float32, on the pixels' device."""
        scale, shift = _affine(self.mean, self.std, pixels.device)
        return torch.mul(pixels, scale).add_(shift)


def load(name: str, folder: Path | None = None, *, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
    """A data set, from the user's folder; what is not there is downloaded into it.

    Args:
        name: "mnist", "cifar10", "wikitext2" or "multi30k"; "imagenet", which stands for any folder of classes; or a
            game, "pong".
        folder: where the files are, or are to be; None: $NERO_DATA, else ``~/.cache/nero``.
        progress: told, as a file is downloaded or tokenised, just that and its name, how many bytes are done, and of
            how many (0 where a server does not say).

    Raises:
        DataError: if a file is broken or malformed, or is neither there nor to be had.
    """
    if name not in LOADERS:
        raise DataError(f"there is no data set {name!r}: choose one of {', '.join(LOADERS)}")
    try:
        found: Dataset = LOADERS[name](Folder(name, folder, progress))
        return found
    except OSError as error:
        raise DataError(
            f"the data cannot be read: {error}; give yourself the right to, or name another folder"
        ) from error


def _mnist(folder: Folder) -> Pictures:
    names = tuple(f"{stem}.gz" for stem in (*sources.MNIST_TRAIN, *sources.MNIST_TEST))

    def file(stem: str) -> tuple[bytes, str]:
        path = folder.find(f"{stem}.gz", stem)
        if path is None:
            path = folder.bring(f"{stem}.gz", sources.FOLDERS["mnist"], names)
        content = read(path)
        return (formats.gunzip(content, str(path)) if path.suffix == ".gz" else content), str(path)

    def images(pixels: str, labels: str) -> Images:
        found = Images(formats.mnist_images(*file(pixels)), formats.mnist_labels(*file(labels)))
        if len(found.pixels) != len(found.labels):
            raise DataError(
                f"{pixels} has {len(found.pixels):,} images and {labels} has {len(found.labels):,} labels: "
                f"these do not belong together. Delete both from {folder.path} and run again"
            )
        return found

    return Pictures("mnist", images(*sources.MNIST_TRAIN), images(*sources.MNIST_TEST), (0.1307,), (0.3081,))


def _cifar10(folder: Folder) -> Pictures:
    contents = _cifar10_contents(folder)

    def images(*names: str) -> Images:
        pixels, labels = zip(*(formats.cifar10_batch(*contents[name]) for name in names), strict=True)
        return Images(torch.cat(pixels), torch.cat(labels))

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Pictures("cifar10", images(*sources.CIFAR10_TRAIN), images(sources.CIFAR10_TEST), mean, std)


def _cifar10_contents(folder: Folder) -> dict[str, tuple[bytes, str]]:
    """The six batches, each with where it is from: as they lie there, or out of the archive, which stays packed."""
    names = (*sources.CIFAR10_TRAIN, sources.CIFAR10_TEST)
    paths = [path for path in map(folder.find, names) if path is not None]
    if len(paths) == len(names):
        return {path.name: (read(path), str(path)) for path in paths}
    archive = folder.find(sources.CIFAR10_ARCHIVE)
    if archive is None:
        archive = folder.bring(sources.CIFAR10_ARCHIVE, "", (sources.CIFAR10_ARCHIVE,))
    inside = [f"{sources.FOLDERS['cifar10']}/{name}" for name in names]
    members = formats.untar(read(archive), inside, str(archive))
    contents = {}
    for name, member in zip(names, inside, strict=True):
        source = f"{archive} (its {member})"
        contents[name] = checked(members[member], name, source), source
    return contents


#: Of games there are no examples, and the loop that plays them asks for none.
LOADERS: dict[str, Callable[[Folder], Any]] = {
    "mnist": _mnist,
    "cifar10": _cifar10,
    "wikitext2": wikitext2,
    "multi30k": multi30k,
    "pong": pong,
    "imagenet": imagenet,
}


def _channels_last(images: Tensor) -> Tensor:
    """As convolutions on a GPU's tensor cores want them."""
    return images.contiguous(memory_format=torch.channels_last)


@cache  # a copy to the device waits for it: once is enough
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    scale = [1 / (255 * deviation) for deviation in std]
    shift = [-middle / deviation for middle, deviation in zip(mean, std, strict=True)]
    return (torch.tensor(scale, device=device).view(-1, 1, 1), torch.tensor(shift, device=device).view(-1, 1, 1))
