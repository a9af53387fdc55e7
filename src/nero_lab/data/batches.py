"""Sequences of batches that are made on demand, or ahead of it."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from torch import Tensor

from nero_lab.data import decoder_pool

#: Batches that are started before they are asked for.
PREFETCHED = 4

Batch: TypeAlias = tuple[Tensor, Tensor]


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
        return self._finish(number, [decoder_pool.result(future) for future in self._pending.popleft()])
