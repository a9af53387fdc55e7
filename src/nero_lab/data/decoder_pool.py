"""Worker processes that decode images, and batches whose images they decode ahead of time."""

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
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from nero_lab.data.dataset import DataError

P = ParamSpec("P")
T = TypeVar("T")
Batch: TypeAlias = tuple[Tensor, Tensor]
#: Batches that are started before they are asked for.
PREFETCHED = 4


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
            context.set_forkserver_preload(["__main__", __name__, "nero_lab.data.decoding"])
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
