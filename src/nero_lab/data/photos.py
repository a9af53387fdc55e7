"""Photographs in folders of classes: decoded into memory if small and few, else streamed from their files.

Training takes a random box of each image, resized to a square and mirrored at random. Testing resizes the shorter side
to 256 pixels and takes the central 224 x 224. Smaller images are not enlarged: their shorter side stays, and the square
has 7/8 of it, as 224 is of 256.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch
from torch import Tensor
from typing_extensions import Self

from nero.messages import how_to_install
from nero_lab import distributed
from nero_lab.data import decoding
from nero_lab.data.augmentation import crop_and_resize, random_boxes, random_flips, scale_and_shift
from nero_lab.data.class_folder import ClassFolder, Listing, find_class_folder
from nero_lab.data.dataset import DataError
from nero_lab.data.decoding import Batch, DecoderPool, LazyBatches, PrefetchedBatches
from nero_lab.data.folder import Folder

#: ImageNet's moments of each channel, for pixels in [0, 1].
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Length that the shorter side of a test image is resized to, at most.
SHORT_SIDE = 256
#: Largest size of the decoded images that are held in memory.
MAX_DECODED_BYTES = 8 * 2**30
#: Images, spread over the classes, whose sizes stand for all.
SIZE_SAMPLE = 60
#: Images per batch of an evaluation.
EVAL_BATCH = 500
#: Images per job of a decoder process.
JOB_IMAGES = 32
#: Batches that are timed to measure the loading rate.
RATE_BATCHES = 8


@dataclass(frozen=True)
class Photos(ABC):
    """Photographs of several classes. Each of several training processes gets its share of every batch.

    Attributes:
        name: name of the data set, from :meth:`ClassFolder.dataset_name`.
        classes: class names.
        short_side: length that the shorter side of a test image is resized to.
        pool: the decoder processes.
        rate: images per second that can be prepared for this process, if measured.
    """

    name: str
    classes: tuple[str, ...]
    short_side: int
    pool: DecoderPool = field(repr=False, compare=False)
    rate: float | None = field(default=None, kw_only=True)

    @property
    def crop(self) -> int:
        """Side of the squares that the network sees."""
        return self.short_side * 7 // 8

    @property
    def parts(self) -> tuple[str, ...]:
        return ("test",)

    @property
    def sizes(self) -> dict[str, int]:
        return {"classes": len(self.classes)}

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Numbers of training and test images."""

    @property
    def examples(self) -> int:
        return self.counts[0]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the batches."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """Return a copy for another device."""

    @abstractmethod
    def epoch(self, batch: int, generator: torch.Generator, augment: object) -> Sequence[Batch]:
        """Return this process's share of the batches of random crops; only the generator is random."""

    @abstractmethod
    def batches(self, part: str) -> Iterator[Batch]:
        """Iterate over this process's share of the test images."""

    @property
    @abstractmethod
    def storage(self) -> str:
        """Phrase that says where the images are."""

    def with_measured_rate(self, batch: int) -> Self:
        """Return a copy with its loading rate, measured on a few batches."""
        generator = torch.Generator(self.device)
        self.epoch(batch, generator.manual_seed(0), None)[0]  # starts the decoder processes
        batches = self.epoch(batch, generator.manual_seed(1), None)
        self._synchronise()
        start, images = time.perf_counter(), 0
        for _, (inputs, _labels) in zip(range(RATE_BATCHES), batches, strict=False):
            images += len(inputs)
        self._synchronise()
        return replace(self, rate=images / (time.perf_counter() - start))

    @property
    def description(self) -> str:
        """Line that describes the data set and its loading rate."""
        name = self.name if self.name == "imagenet" else f"{self.name}, a stand-in for ImageNet"
        text = (
            f"{name}: {self.counts[0]:,} training and {self.counts[1]:,} test images of {len(self.classes):,} classes, "
            f"in squares of {self.crop}, {self.storage}"
        )
        if self.rate is None:
            return text
        return f"{text}; {self.rate:,.0f} images a second can be loaded{distributed.per_process()}"

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _normalise(self, pixels: Tensor) -> Tensor:
        """Normalise (N, H, W, C) in [0, 255], and return it as (N, C, H, W) in channels-last layout."""
        scale, shift = scale_and_shift(MEAN, STD, pixels.device)
        return torch.mul(pixels, scale).add_(shift).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class DecodedPhotos(Photos):
    """Images of one size, decoded and on the device. Their own shorter side is :attr:`short_side`.

    Attributes:
        train, test: pixels, uint8 (N, H, W, 3), and labels, int64 (N,).
        seconds: time that decoding took.
    """

    train: Batch
    test: Batch
    seconds: float

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train[1]), len(self.test[1])

    @property
    def device(self) -> torch.device:
        return self.train[0].device

    @property
    def storage(self) -> str:
        return f"decoded by {_processes(self.pool)} in {self.seconds:.1f} s and held on {self.device}"

    def to(self, device: torch.device | str) -> Self:
        train, test = ((pixels.to(device), labels.to(device)) for pixels, labels in (self.train, self.test))
        return replace(self, train=train, test=test)

    def epoch(self, batch: int, generator: torch.Generator, augment: object) -> Sequence[Batch]:  # noqa: ARG002
        (pixels, labels), count = self.train, self.examples
        order = torch.randperm(count, generator=generator, device=self.device)
        boxes = random_boxes(count, pixels.shape[1], pixels.shape[2], generator)
        flips = random_flips(count, generator)

        def make(number: int) -> Batch:
            which = distributed.local_slice(number * batch, (number + 1) * batch)
            chosen = order[which]
            crops = crop_and_resize(pixels[chosen], boxes[which], (self.crop, self.crop), flips[which])
            return self._normalise(crops), labels[chosen]

        return LazyBatches(-(-count // batch), make)

    def batches(self, part: str) -> Iterator[Batch]:
        pixels, labels = getattr(self, part)
        _, height, width, _ = pixels.shape
        _, (top, left) = decoding.centre_crop_box(height, width, self.short_side, self.crop)
        for start in range(0, len(labels), EVAL_BATCH):
            which = distributed.local_slice(start, start + EVAL_BATCH)
            if len(labels[which]):
                centre = pixels[which, top : top + self.crop, left : left + self.crop]
                yield self._normalise(centre), labels[which]


@dataclass(frozen=True)
class StreamedPhotos(Photos):
    """Images that are read from their files for every batch, ahead of time.

    Attributes:
        train, test: the files.
        target: device that batches are copied to.
    """

    train: Listing
    test: Listing
    target: torch.device

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train.files), len(self.test.files)

    @property
    def device(self) -> torch.device:
        return self.target

    @property
    def storage(self) -> str:
        return f"streamed by {_processes(self.pool)}"

    def to(self, device: torch.device | str) -> Self:
        return replace(self, target=torch.device(device))

    def epoch(self, batch: int, generator: torch.Generator, augment: object) -> Sequence[Batch]:  # noqa: ARG002
        order = torch.randperm(self.examples, generator=generator, device=self.device).tolist()
        seeds = torch.randint(2**62, (self.examples,), generator=generator, device=self.device).tolist()

        def submit(which: slice) -> Future[bytearray]:
            files = [self.train.files[index] for index in order[which]]
            return self.pool.submit(decoding.decode_random_crops, files, seeds[which], self.crop)

        return self._prefetch([self.train.labels[index] for index in order], batch, submit)

    def batches(self, part: str) -> Iterator[Batch]:
        listing: Listing = getattr(self, part)

        def submit(which: slice) -> Future[bytearray]:
            return self.pool.submit(decoding.decode_centre_crops, listing.files[which], self.short_side, self.crop)

        batches = self._prefetch(listing.labels, EVAL_BATCH, submit)
        return (batch for batch in batches if len(batch[1]))

    def _prefetch(
        self, labels: list[int], batch: int, submit: Callable[[slice], Future[bytearray]]
    ) -> PrefetchedBatches:
        """Return batches of consecutive images with these labels, decoded in jobs of :data:`JOB_IMAGES`."""

        def start(number: int) -> list[Future[bytearray]]:
            stop = min((number + 1) * batch, len(labels))
            step = JOB_IMAGES * distributed.world_size()
            return [
                submit(which)
                for first in range(number * batch, stop, step)
                if range(stop)[which := distributed.local_slice(first, min(first + step, stop))]
            ]

        def finish(number: int, contents: list[bytearray]) -> Batch:
            return self._assemble(labels[distributed.local_slice(number * batch, (number + 1) * batch)], contents)

        return PrefetchedBatches(-(-len(labels) // batch), start, finish)

    def _assemble(self, labels: list[int], contents: list[bytearray]) -> Batch:
        """Join decoded images into a batch on the device."""
        on_gpu = self.device.type == "cuda"
        targets = torch.tensor(labels).pin_memory() if on_gpu else torch.tensor(labels)
        pixels = torch.empty(len(targets), self.crop, self.crop, 3, dtype=torch.uint8, pin_memory=on_gpu)
        first = 0
        for content in contents:
            piece = torch.frombuffer(content, dtype=torch.uint8).view(-1, *pixels.shape[1:])
            pixels[first : first + len(piece)] = piece
            first += len(piece)
        # torch's allocator reuses pinned memory only after the copy
        pixels, targets = pixels.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
        return self._normalise(pixels), targets


def imagenet(folder: Folder) -> Photos:
    """Load the photographs of a folder of classes."""
    count = decoding.default_count(distributed.local_world_size())
    return load_photos(find_class_folder(folder.path), DecoderPool(count))


def load_photos(folder: ClassFolder, pool: DecoderPool) -> Photos:
    """Decode the photographs into memory if all are small, of one size and not too many; else stream them."""
    if find_spec("PIL") is None:
        raise DataError(f"decoding images needs Pillow: {how_to_install('lab')}")
    files = folder.train.files
    count = min(SIZE_SAMPLE, len(files))
    sizes = [decoding.read_size(files[index * len(files) // count]) for index in range(count)]
    short_side = min(SHORT_SIDE, statistics.median_low(min(size) for size in sizes))
    if short_side < 2:
        raise DataError(f"images must be at least 2 pixels wide and high, got a side of 1 in {folder.folder}")
    common = folder.dataset_name(short_side), folder.classes, short_side, pool
    height, width = sizes[0]
    needed = (len(files) + len(folder.test.files)) * height * width * 3
    if set(sizes) == {sizes[0]} and min(sizes[0]) <= SHORT_SIDE and needed <= MAX_DECODED_BYTES:
        start = time.perf_counter()
        try:
            train, test = (_decode_all(listing, height, width, pool) for listing in (folder.train, folder.test))
        except decoding.SizeMismatchError:
            pass  # the sample missed an image of another size: stream
        else:
            return DecodedPhotos(*common, train, test, time.perf_counter() - start)
        finally:
            pool.close()
    return StreamedPhotos(*common, folder.train, folder.test, torch.device("cpu"))


def _decode_all(listing: Listing, height: int, width: int, pool: DecoderPool) -> Batch:
    pixels = torch.empty(len(listing.files), height, width, 3, dtype=torch.uint8)
    starts = range(0, len(listing.files), JOB_IMAGES)
    jobs = ((listing.files[start : start + JOB_IMAGES], height, width) for start in starts)
    for start, content in zip(starts, pool.map(decoding.decode, jobs), strict=True):
        pixels[start : start + JOB_IMAGES] = torch.frombuffer(content, dtype=torch.uint8).view(-1, height, width, 3)
    return pixels, torch.tensor(listing.labels)


def _processes(pool: DecoderPool) -> str:
    return f"{pool.count} processes" if pool.count > 1 else "one process"
