"""MNIST and CIFAR-10: small labelled images, held in memory as bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nero_lab.data import formats, sources
from nero_lab.data.augmentation import scale_and_shift
from nero_lab.data.dataset import Augment
from nero_lab.data.folder import Folder

#: Images per batch of an evaluation.
EVAL_BATCH = 1000


@dataclass(frozen=True)
class Images:
    """Labelled images on one device.

    Attributes:
        pixels: uint8 (N, C, H, W).
        labels: int64 (N,), in 0 .. 9.
    """

    pixels: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> "Images":
        return Images(self.pixels.to(device), self.labels.to(device))


@dataclass(frozen=True)
class ImageDataset:
    """Training and test images, and the moments that normalise their pixels.

    Attributes:
        name: name that tasks refer to.
        train: training images.
        test: test images.
        mean: mean of each channel over the training pixels, scaled to [0, 1].
        std: standard deviation of each channel, likewise.
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

    def to(self, device: torch.device | str) -> "ImageDataset":
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def epoch(self, batch: int, generator: torch.Generator, augment: Augment | None) -> Sequence[tuple[Tensor, Tensor]]:
        order = torch.randperm(self.examples, generator=generator, device=self.device)
        pixels = self.train.pixels[order]
        if augment is not None:
            pixels = augment(pixels, generator)
        inputs, labels = _channels_last(self.normalise(pixels)), self.train.labels[order]
        return list(zip(torch.split(inputs, batch), torch.split(labels, batch), strict=True))

    def batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        images: Images = getattr(self, part)
        both = zip(torch.split(images.pixels, EVAL_BATCH), torch.split(images.labels, EVAL_BATCH), strict=True)
        for pixels, labels in both:
            yield _channels_last(self.normalise(pixels)), labels

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return ``(pixels / 255 - mean) / std`` in float32, on the device of the pixels."""
        scale, shift = (part.view(-1, 1, 1) for part in scale_and_shift(self.mean, self.std, pixels.device))
        return torch.mul(pixels, scale).add_(shift)


def mnist(folder: Folder) -> ImageDataset:
    """Load MNIST from its four files, gzipped or plain."""
    return _idx_dataset(folder, mean=0.1307, std=0.3081)


def cifar10(folder: Folder) -> ImageDataset:
    """Load CIFAR-10 from its six binary batches, unpacked or in their archive."""
    contents = _cifar10_contents(folder)

    def images(*names: str) -> Images:
        pixels, labels = zip(*(formats.cifar10_batch(contents[name]) for name in names), strict=True)
        return Images(torch.cat(pixels), torch.cat(labels))

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return ImageDataset("cifar10", images(*sources.CIFAR10_TRAIN), images(sources.CIFAR10_TEST), mean, std)


def _idx_dataset(folder: Folder, mean: float, std: float) -> ImageDataset:
    """Load a data set with MNIST's file names and format. The folder names the data set."""
    names = tuple(f"{stem}.gz" for stem in (*sources.MNIST_TRAIN, *sources.MNIST_TEST))

    def content(stem: str) -> bytes:
        path = folder.find(f"{stem}.gz", stem)
        if path is None:
            path = folder.download(f"{stem}.gz", sources.FOLDERS[folder.dataset], names)
        found = folder.read(path)
        return formats.gunzip(found, str(path)) if path.suffix == ".gz" else found

    def images(pixels: str, labels: str) -> Images:
        return Images(formats.mnist_images(content(pixels)), formats.mnist_labels(content(labels)))

    train, test = images(*sources.MNIST_TRAIN), images(*sources.MNIST_TEST)
    return ImageDataset(folder.dataset, train, test, (mean,), (std,))


def _cifar10_contents(folder: Folder) -> dict[str, bytes]:
    """Return the content of each batch file, by name. The archive is read in memory, not unpacked."""
    names = (*sources.CIFAR10_TRAIN, sources.CIFAR10_TEST)
    paths = [path for path in map(folder.find, names) if path is not None]
    if len(paths) == len(names):
        return {path.name: folder.read(path) for path in paths}
    archive = folder.find(sources.CIFAR10_ARCHIVE)
    if archive is None:
        missing = [name for name in names if folder.find(name) is None] if paths else []
        archive = folder.download(sources.CIFAR10_ARCHIVE, "", tuple(missing) or (sources.CIFAR10_ARCHIVE,))
    inside = {f"{sources.FOLDERS['cifar10']}/{name}": name for name in names}
    members = formats.untar(folder.read(archive), inside, str(archive))
    return {
        name: folder.verify(members[member], name, f"{archive} (member {member})") for member, name in inside.items()
    }


def _channels_last(images: Tensor) -> Tensor:
    # tensor cores run convolutions fastest in this layout
    return images.contiguous(memory_format=torch.channels_last)
