"""Decoding of image files by Pillow, in worker processes, and batches whose images they decode ahead of time."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from nero_lab.data.augmentation import random_boxes, random_flips
from nero_lab.data.dataset import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

P = ParamSpec("P")
T = TypeVar("T")
Batch: TypeAlias = tuple[Tensor, Tensor]
#: Batches that are started before they are asked for.
PREFETCHED = 4


class SizeMismatchError(Exception):
    """An image whose size differs from the expected one."""


def read_size(path: str) -> tuple[int, int]:
    """Return an image's height and width; read only its header."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _undecodable(path, error) from error


def decode(paths: Sequence[str], height: int, width: int) -> bytearray:
    """Decode images of one size into consecutive bytes, row by row, three bytes per pixel.

    Raises:
        SizeMismatchError: if an image has another size.
    """
    content = bytearray()
    for path in paths:
        image = _open_rgb(path)
        if image.size != (width, height):
            raise SizeMismatchError(path)
        content += image.tobytes()
    return content


def decode_random_crops(paths: Sequence[str], seeds: Sequence[int], crop: int) -> bytearray:
    """Decode a random box of each image, resized to a square and mirrored at random, as :func:`decode` lays it out."""
    from PIL import Image

    content = bytearray()
    for path, seed in zip(paths, seeds, strict=True):
        image = _open_rgb(path)
        generator = torch.Generator().manual_seed(seed)
        top, left, height, width = map(int, random_boxes(1, image.height, image.width, generator)[0].tolist())
        image = image.crop((left, top, left + width, top + height)).resize((crop, crop), Image.Resampling.BILINEAR)
        if random_flips(1, generator).item():
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        content += image.tobytes()
    return content


def decode_centre_crops(paths: Sequence[str], short_side: int, crop: int) -> bytearray:
    """Decode the central square of each image, after its shorter side is resized, as :func:`decode` lays it out."""
    from PIL import Image

    content = bytearray()
    for path in paths:
        image = _open_rgb(path)
        (height, width), (top, left) = centre_crop_box(image.height, image.width, short_side, crop)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        content += image.crop((left, top, left + crop, top + crop)).tobytes()
    return content


def centre_crop_box(height: int, width: int, short_side: int, crop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size of an image whose shorter side is resized, and the top left corner of its central square."""
    least = min(height, width)
    new_height, new_width = short_side * height // least, short_side * width // least
    return (new_height, new_width), (round((new_height - crop) / 2), round((new_width - crop) / 2))


def _open_rgb(path: str) -> "Image":
    from PIL import Image

    try:
        with Image.open(path) as image:
            return _convert_16_bit(image) if image.mode.startswith(("I", "F")) else image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _undecodable(path, error) from error


def _convert_16_bit(image: "Image") -> "Image":
    """Reduce 16-bit grey to its higher byte, as Pillow does with 16-bit colours; it clips greys instead."""
    numbers = image.convert("I")
    extrema: Any = numbers.getextrema()
    if image.mode == "F" or extrema[0] < 0 or extrema[1] >= 2**16:
        raise ValueError(f"pixels must be 16-bit integers, got mode {image.mode}")
    return numbers.point(lambda value: value * (1 / 256)).convert("RGB")


def _undecodable(path: str, error: Exception) -> DataError:
    return DataError(
        f"{path} does not decode ({error}): replace it by an intact copy, and the same command resumes; "
        "if you remove it, a new run starts"
    )


class _Worker(ForkServerProcess):
    """Worker that the pool can end: after another worker's death the pool sends SIGTERM, which workers ignore."""

    def terminate(self) -> None:
        self.kill()


class _Context(ForkServerContext):
    Process = _Worker


class DecoderPool:
    """Pool of worker processes; with a count of zero, the caller does the work.

    The workers start with the first job, from a fork server that has no threads and no GPU context, unlike a fork of
    this process. Results travel through pipes, so a small ``/dev/shm`` suffices.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Start a job; :func:`result` waits for it.

        Raises:
            DataError: if a worker has died.
        """
        if not self.count:
            done: Future[T] = Future()
            done.set_result(work(*arguments, **options))
            return done
        if self._pool is None:
            context = _Context()
            context.set_forkserver_preload(["__main__", __name__])
            with _sigterm_ignored():
                forkserver.ensure_running()
            self._pool = ProcessPoolExecutor(self.count, context, _initialise_worker)
        with _explained():
            return self._pool.submit(work, *arguments, **options)

    def map(self, work: Callable[..., T], jobs: Iterable[tuple[Any, ...]]) -> Iterator[T]:
        """Yield the result of each job, in order, with a few jobs ahead."""
        pending: deque[Future[T]] = deque()
        for job in jobs:
            pending.append(self.submit(work, *job))
            if len(pending) > 4 * self.count:
                yield result(pending.popleft())
        while pending:
            yield result(pending.popleft())

    def close(self) -> None:
        """Stop the workers and cancel pending jobs."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def result(future: Future[T]) -> T:
    """Wait for a job and return its result.

    Raises:
        DataError: if a worker has died. Exceptions of the job itself pass through.
    """
    with _explained():
        return future.result()


class LazyBatches(Sequence[Batch]):
    """Batches that are made by number, when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], Batch]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._count:
            raise IndexError(f"batch must be in 0 .. {self._count - 1}, got {number}")
        return self._make(number)


class PrefetchedBatches(LazyBatches):
    """Batches whose jobs start while earlier batches are in use. Access out of order restarts the prefetching."""

    def __init__(
        self,
        count: int,
        start: Callable[[int], list[Future[bytearray]]],
        finish: Callable[[int, list[bytearray]], Batch],
    ) -> None:
        super().__init__(count, self._next)
        self._start, self._finish = start, finish
        self._pending: deque[list[Future[bytearray]]] = deque()
        self._first = 0

    def _next(self, number: int) -> Batch:
        if number != self._first:
            self._pending.clear()
            self._first = number
        while len(self._pending) < PREFETCHED and self._first + len(self._pending) < len(self):
            self._pending.append(self._start(self._first + len(self._pending)))
        self._first += 1
        return self._finish(number, [result(future) for future in self._pending.popleft()])


def default_count(processes: int = 1) -> int:
    """Return the number of workers per training process: the cores, shared; zero for a single core."""
    cores = len(os.sched_getaffinity(0)) // processes
    return cores if cores > 1 else 0


@contextmanager
def _explained() -> Iterator[None]:
    """Turn the death of a worker into a DataError."""
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            "a process that decodes images died, perhaps out of memory: run the same command again to resume"
        ) from error


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Have a process that starts meanwhile ignore SIGTERM, which job managers send to every process of a job."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _initialise_worker() -> None:
    """Ignore signals, which are meant for the training process, and exit when that process dies."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="PIL")  # odd metadata would warn image by image


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
