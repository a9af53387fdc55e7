"""Processes that decode images, by Pillow; what they give is bytes."""

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
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from nero_lab.data.crops import random_boxes, random_flips
from nero_lab.data.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

P = ParamSpec("P")
T = TypeVar("T")


class OtherSize(Exception):  # noqa: N818
    """An image that is not of the size of the others."""


class _Reader(ForkServerProcess):
    """One whom the pool can end: where another has died, it asks by SIGTERM, which none heeds, and waits."""

    def terminate(self) -> None:
        self.kill()


class _Context(ForkServerContext):
    Process = _Reader


class Readers:
    """So many processes that decode images side by side; with none, whoever asks does it.

    They are started at the first piece of work by a server that has no threads and no GPU, as a fork of this process
    might, and what they give comes through pipes, so that a small ``/dev/shm`` will do.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Have a piece of work done; :func:`result` waits for what comes of it.

        Raises:
            DataError: if a reader has died.
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
            self._pool = ProcessPoolExecutor(self.count, context, _settle)
        with _told():
            return self._pool.submit(work, *arguments, **options)

    def each(self, work: Callable[..., T], pieces: Iterable[tuple[Any, ...]]) -> Iterator[T]:
        """What comes of the work on each piece, in their order; some are always under way."""
        begun: deque[Future[T]] = deque()
        for piece in pieces:
            begun.append(self.submit(work, *piece))
            if len(begun) > 4 * self.count:
                yield result(begun.popleft())
        while begun:
            yield result(begun.popleft())

    def close(self) -> None:
        """Send them home, if they have come; what was not begun is not done."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def result(future: Future[T]) -> T:
    """What a reader gave.

    Raises:
        DataError: if a reader has died; and what reading itself raised.
    """
    with _told():
        return future.result()


@contextmanager
def _told() -> Iterator[None]:
    """Say it in a line if a reader has died, whoever meets it: who waits for one, or who asks for more meanwhile."""
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            "a process that reads images died, perhaps for want of memory: run the same command again, "
            "and it goes on from what was kept"
        ) from error


def default_count(processes: int = 1) -> int:
    """How many readers suit this machine, shared by so many processes that train; where there is one core, none."""
    cores = len(os.sched_getaffinity(0)) // processes
    return cores if cores > 1 else 0


def size_of(path: str) -> tuple[int, int]:
    """An image's height and width, of which only the head is read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from error


def whole(paths: Sequence[str], height: int, width: int) -> bytearray:
    """Images as they are, one after the other, row by row, three bytes a pixel.

    Raises:
        OtherSize: if one is of another size.
    """
    found = bytearray()
    for path in paths:
        image = _opened(path)
        if image.size != (width, height):
            raise OtherSize(path)
        found += image.tobytes()
    return found


def at_random(paths: Sequence[str], seeds: Sequence[int], crop: int) -> bytearray:
    """A random box of each image, brought to a square, and every other one mirrored; as :func:`whole` gives them."""
    from PIL import Image

    found = bytearray()
    for path, seed in zip(paths, seeds, strict=True):
        image = _opened(path)
        generator = torch.Generator().manual_seed(seed)
        top, left, height, width = map(int, random_boxes(1, image.height, image.width, generator)[0].tolist())
        image = image.crop((left, top, left + width, top + height)).resize((crop, crop), Image.Resampling.BILINEAR)
        if random_flips(1, generator).item():
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        found += image.tobytes()
    return found


def in_the_middle(paths: Sequence[str], short: int, crop: int) -> bytearray:
    """The middle of each image whose shorter side is brought to a length; as :func:`whole` gives them."""
    from PIL import Image

    found = bytearray()
    for path in paths:
        image = _opened(path)
        (height, width), (top, left) = middle(image.height, image.width, short, crop)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        found += image.crop((left, top, left + crop, top + crop)).tobytes()
    return found


def middle(height: int, width: int, short: int, crop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """What an image is resized to for its shorter side to have a length, and where its middle begins then."""
    least = min(height, width)
    high, wide = short * height // least, short * width // least
    return (high, wide), (round((high - crop) / 2), round((wide - crop) / 2))


def _opened(path: str) -> "Image":
    from PIL import Image

    try:
        with Image.open(path) as image:
            return _deep(image) if image.mode.startswith(("I", "F")) else image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from error


def _deep(image: "Image") -> "Image":
    """Grey of 16 bits in bytes, by the higher of the two, as Pillow does it to colours; it would clip these."""
    numbers = image.convert("I")
    extrema: Any = numbers.getextrema()
    if image.mode == "F" or extrema[0] < 0 or extrema[1] >= 2**16:
        raise ValueError(f"its pixels are of mode {image.mode}, and not whole numbers of 16 bits")
    return numbers.point(lambda value: value * (1 / 256)).convert("RGB")


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(
        f"{path} does not decode ({error}): put a good copy there, and the same command goes on from what was kept; "
        "if it is removed, a new run begins"
    )


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """For what is started meanwhile: whoever ends a job tells every process of it, and without a server none reads."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where signals cannot be set
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _settle() -> None:
    """Whoever interrupts means the process that trains, which is to stop between two steps; if it dies, so do these."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="PIL")  # of odd remarks in an image's head, image by image
