"""Photographs in folders of classes: kept decoded on the device if small and few, else read as they are needed.

To train on, a random box of each image is brought to a square and every other one is mirrored. To test on, the shorter
side is brought to 256 pixels and the middle 224 x 224 are taken. Smaller images are not blown up: their shorter side
stays what it is, and the square has 7/8 of it, as 224 has of 256.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from nero_lab import distributed
from nero_lab.data import readers
from nero_lab.data.classes import Classes, Listing, find
from nero_lab.data.crops import cut, random_boxes, random_flips
from nero_lab.data.errors import DataError
from nero_lab.data.folder import Folder
from nero_lab.data.readers import OtherSize, Readers

#: ImageNet's, of each channel, of pixels in [0, 1].
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: What the shorter side is brought to, to test on.
SHORT = 256
#: The bytes of decoded images that are kept in memory at most.
ROOM = 8 * 2**30
#: Of how many images, from all over the classes, the sizes tell what the others are like.
SAMPLE = 60
#: How many images are looked at together, and how many a reader takes at a time.
LOOK, PIECE = 500, 32
#: How many batches are under way before they are asked for.
AHEAD = 4
#: How many batches are made ready to see how fast that is.
BURST = 8

Batch: TypeAlias = tuple[Tensor, Tensor]


class Batches(Sequence[Batch]):
    """Batches that are made when they are asked for, by their number."""

    def __init__(self, count: int, make: Callable[[int], Batch]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._count:
            raise IndexError(f"there are batches 0 to {self._count - 1}, and no {number}")
        return self._make(number)


class Ahead(Batches):
    """Batches that are begun while those before them are used; whoever asks out of turn waits for the first."""

    def __init__(
        self, count: int, begin: Callable[[int], list[Future[bytearray]]], end: Callable[[int, list[bytearray]], Batch]
    ) -> None:
        super().__init__(count, self._next)
        self._begin, self._end = begin, end
        self._begun: deque[list[Future[bytearray]]] = deque()
        self._first = 0

    def _next(self, number: int) -> Batch:
        if number != self._first:
            self._begun.clear()
            self._first = number
        while len(self._begun) < AHEAD and self._first + len(self._begun) < len(self):
            self._begun.append(self._begin(self._first + len(self._begun)))
        self._first += 1
        return self._end(number, [readers.result(each) for each in self._begun.popleft()])


@dataclass(frozen=True)
class Photos(ABC):
    """Photographs of some classes. Several processes have a share of every batch each.

    Attributes:
        name: as :mod:`nero_lab.data.classes` names it.
        classes: their names.
        short: what the shorter side of an image is brought to, to test on.
        readers: who decodes.
        rate: how many images a second can be made ready for this process, where it was measured.
    """

    name: str
    classes: tuple[str, ...]
    short: int
    readers: Readers = field(repr=False, compare=False)
    rate: float | None = field(default=None, kw_only=True)

    @property
    def crop(self) -> int:
        """The side of the squares that a network sees."""
        return self.short * 7 // 8

    @property
    def parts(self) -> tuple[str, ...]:
        return ("test",)

    @property
    def sizes(self) -> dict[str, int]:
        return {"classes": len(self.classes)}

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """How many images there are to train on, and to test on."""

    @property
    def examples(self) -> int:
        return self.counts[0]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where batches are wanted."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """The same for another device."""

    @abstractmethod
    def epoch(self, batch: int, generator: torch.Generator, augment: object) -> Sequence[Batch]:
        """Batches of random crops, of which this process has its share; all chance is in the generator."""

    @abstractmethod
    def batches(self, part: str) -> Iterator[Batch]:
        """The images to test on, of which this process has its share."""

    @property
    @abstractmethod
    def kept(self) -> str:
        """Where the images are, for people."""

    def measured(self, batch: int) -> Self:
        """The same with its rate, by a short burst."""
        generator = torch.Generator(self.device)
        self.epoch(batch, generator.manual_seed(0), None)[0]  # wakes the readers
        batches = self.epoch(batch, generator.manual_seed(1), None)
        self._wait()
        start, images = time.perf_counter(), 0
        for _, (inputs, _labels) in zip(range(BURST), batches, strict=False):
            images += len(inputs)
        self._wait()
        return replace(self, rate=images / (time.perf_counter() - start))

    @property
    def told(self) -> str:
        """What this is and what it can sustain, for people."""
        name = self.name if self.name == "imagenet" else f"{self.name}, a stand-in for ImageNet"
        text = (
            f"{name}: {self.counts[0]:,} images of {len(self.classes):,} classes to train on, {self.counts[1]:,} to "
            f"test on, in squares of {self.crop}, {self.kept}"
        )
        return (
            text
            if self.rate is None
            else f"{text}; {self.rate:,.0f} a second can be made ready{distributed.per_process()}"
        )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _normalised(self, pixels: Tensor) -> Tensor:
        """From (N, H, W, C), 0 to 255, to (N, C, H, W) in the layout of the former, which convolutions want."""
        scale, shift = _affine(pixels.device)
        return torch.mul(pixels, scale).add_(shift).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Held(Photos):
    """Images of one size, decoded and on the device; their shorter side is what it is brought to, to test on.

    Attributes:
        train, test: uint8 (N, H, W, 3) and int64 (N,).
        seconds: what decoding them took.
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
    def kept(self) -> str:
        return f"decoded by {_processes(self.readers)} in {self.seconds:.1f} s and kept on {self.device}"

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
            crops = cut(pixels[chosen], boxes[which], (self.crop, self.crop), flips[which])
            return self._normalised(crops), labels[chosen]

        return Batches(-(-count // batch), make)

    def batches(self, part: str) -> Iterator[Batch]:
        pixels, labels = getattr(self, part)
        _, height, width, _ = pixels.shape
        _, (top, left) = readers.middle(height, width, self.short, self.crop)
        for start in range(0, len(labels), LOOK):
            which = distributed.local_slice(start, start + LOOK)
            if len(labels[which]):
                middle = pixels[which, top : top + self.crop, left : left + self.crop]
                yield self._normalised(middle), labels[which]


@dataclass(frozen=True)
class Streamed(Photos):
    """Images that are read from their files whenever they are needed, ahead of that.

    Attributes:
        train, test: the files.
        place: the device that batches are brought to.
    """

    train: Listing
    test: Listing
    place: torch.device

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train.files), len(self.test.files)

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def kept(self) -> str:
        return f"read as they are needed by {_processes(self.readers)}"

    def to(self, device: torch.device | str) -> Self:
        return replace(self, place=torch.device(device))

    def epoch(self, batch: int, generator: torch.Generator, augment: object) -> Sequence[Batch]:  # noqa: ARG002
        order = torch.randperm(self.examples, generator=generator, device=self.device).tolist()
        seeds = torch.randint(2**62, (self.examples,), generator=generator, device=self.device).tolist()

        def work(which: slice) -> Future[bytearray]:
            files = [self.train.files[each] for each in order[which]]
            return self.readers.submit(readers.at_random, files, seeds[which], self.crop)

        labels = [self.train.labels[each] for each in order]
        return self._read(labels, batch, work)

    def batches(self, part: str) -> Iterator[Batch]:
        listing: Listing = getattr(self, part)

        def work(which: slice) -> Future[bytearray]:
            return self.readers.submit(readers.in_the_middle, listing.files[which], self.short, self.crop)

        return (each for each in self._read(listing.labels, LOOK, work) if len(each[1]))

    def _read(self, labels: list[int], batch: int, work: Callable[[slice], Future[bytearray]]) -> Ahead:
        """Batches of the images in a row that have these labels, in pieces that are each one reader's work."""

        def begin(number: int) -> list[Future[bytearray]]:
            stop = min((number + 1) * batch, len(labels))
            each = PIECE * distributed.world_size()
            return [
                work(which)
                for start in range(number * batch, stop, each)
                if range(stop)[which := distributed.local_slice(start, min(start + each, stop))]
            ]

        def end(number: int, found: list[bytearray]) -> Batch:
            targets = torch.tensor(labels[distributed.local_slice(number * batch, (number + 1) * batch)])
            on_gpu = self.device.type == "cuda"
            pixels = torch.empty(len(targets), self.crop, self.crop, 3, dtype=torch.uint8, pin_memory=on_gpu)
            targets = targets.pin_memory() if on_gpu else targets
            at = 0
            for content in found:
                piece = torch.frombuffer(content, dtype=torch.uint8).view(-1, *pixels.shape[1:])
                pixels[at : at + len(piece)] = piece
                at += len(piece)
            # the memory that is copied from is not used again before it has been
            there = pixels.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
            return self._normalised(there[0]), there[1]

        return Ahead(-(-len(labels) // batch), begin, end)


def imagenet(folder: Folder) -> Photos:
    """The photographs of a folder of classes."""
    return kept_or_read(find(folder.path), Readers(readers.default_count(distributed.local_world_size())))


def kept_or_read(found: Classes, who: Readers) -> Photos:
    """Photographs decoded at once if all are small, of one size and not too many, else read as they are needed."""
    if find_spec("PIL") is None:
        raise DataError("images are decoded by Pillow, which is not there: pip install 'nero-optim[paper]'")
    files = found.train.files
    some = min(SAMPLE, len(files))
    seen = [readers.size_of(files[each * len(files) // some]) for each in range(some)]
    short = min(SHORT, statistics.median_low(min(size) for size in seen))
    if short < 2:
        raise DataError(f"the images of {found.folder} are a pixel wide or high: a network needs more to see")
    named = found.name(short), found.classes, short, who
    needed = (len(files) + len(found.test.files)) * seen[0][0] * seen[0][1] * 3
    if set(seen) == {seen[0]} and min(seen[0]) <= SHORT and needed <= ROOM:
        start = time.perf_counter()
        try:
            train, test = (_decoded(listing, *seen[0], who) for listing in (found.train, found.test))
        except OtherSize:
            pass
        else:
            return Held(*named, train, test, time.perf_counter() - start)
        finally:
            who.close()
    return Streamed(*named, found.train, found.test, torch.device("cpu"))


def _decoded(listing: Listing, height: int, width: int, who: Readers) -> Batch:
    pixels = torch.empty(len(listing.files), height, width, 3, dtype=torch.uint8)
    starts = range(0, len(listing.files), PIECE)
    pieces = ((listing.files[start : start + PIECE], height, width) for start in starts)
    for start, content in zip(starts, who.each(readers.whole, pieces), strict=True):
        pixels[start : start + PIECE] = torch.frombuffer(content, dtype=torch.uint8).view(-1, height, width, 3)
    return pixels, torch.tensor(listing.labels)


def _processes(who: Readers) -> str:
    return f"{who.count} processes" if who.count > 1 else "one process"


@cache  # a copy to the device waits for it: once is enough
def _affine(device: torch.device) -> tuple[Tensor, Tensor]:
    scale = [1 / (255 * deviation) for deviation in STD]
    shift = [-middle / deviation for middle, deviation in zip(MEAN, STD, strict=True)]
    return torch.tensor(scale, device=device), torch.tensor(shift, device=device)
