"""All parameters of a device in a few launches of Triton kernels."""

import ctypes
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nero.backends.available import why_not_triton
from nero.backends.job import Rates
from nero.backends.layout import Layout
from nero.backends.sweep import Line, Sweep
from nero.backends.triton.tables import MAX_COUNT, bits, is_aligned, make_tables

#: A tensor of the host, and its memory, which is filled without a call of torch.
Buffer: TypeAlias = tuple[Tensor, Any]
#: Buffers of uploads that are gone, which the device may still read, with the events of the reading.
DROPPED: deque[tuple[Buffer, Any]] = deque()


class TritonSweep(Sweep):
    """The steps of many parameters by Triton kernels."""

    @torch.inference_mode(False)
    def __init__(self, lines: Sequence[Line], generator: torch.Generator | None = None) -> None:
        super().__init__(lines, generator)
        self._device = self._parameters[0].device
        self._is_stochastic = any(line.settings.rounding == "stochastic" for line in lines)
        self._aligned = list(map(is_aligned, lines))
        self._tables = make_tables(lines, self._aligned, self._device)
        self._groups = 1 + max(line.group for line in lines)  # groups behind these have no parameter here
        self._rates: Sequence[Rates] = ()
        self._words: list[int] = []
        self._upload = Upload(self._tables.changing)
        self._uploaded: tuple[list[int], list[int]] = ([], [])
        self._on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Return whether the kernels can read a parameter or a gradient."""
        return why_not_triton(tensor) is None

    @staticmethod
    def follows(layout: Layout, axes: tuple[int, ...]) -> bool:  # noqa: ARG004
        """Return whether the kernels can count the neurons and their elements."""
        return max(layout.neurons, layout.fan_in) <= MAX_COUNT

    @staticmethod
    def key(line: Line) -> object:
        """Return the device: one sweep steps all groups."""
        return line.parameter.device

    def _accepts(self, addresses: list[int]) -> bool:
        """Return whether gradients are aligned where the kernels read sixteen bytes at a time."""
        return not (
            reduce(or_, addresses) & 15
            and any(address & 15 and aligned for address, aligned in zip(addresses, self._aligned, strict=True))
        )

    def _step(self, addresses: list[int], rates: Sequence[Rates]) -> None:
        if rates is not self._rates:
            self._words = [word for rate in rates[: self._groups] for word in self._encode(rate)]
            self._rates = rates
        is_cuda = self._device.type == "cuda"
        with self._on_device:
            stream = torch._C._cuda_getCurrentRawStream(self._device.index) if is_cuda else 0
            if is_cuda and torch.cuda.is_current_stream_capturing():
                # each replay reads words of its own, and draws from torch's generator, which gives it new numbers
                source, changing = self._upload.capture(addresses + self._words)
                self.captured += [source, changing, *self._borrowed]
                self._launch(source, changing, stream, None)
            else:
                has_changed = addresses is not self._uploaded[0] or self._words != self._uploaded[1]
                source = self._upload.write(addresses + self._words if has_changed else None)
                self._uploaded = ([], [])  # unknown, should this step fail
                self._launch(source, self._tables.changing, stream, self.generator)
                self._uploaded = (addresses, self._words)

    def _launch(self, source: Tensor, changing: Tensor, stream: int, generator: torch.Generator | None) -> None:
        records, _, step_sizes, sums, counting, launches = self._tables
        tables = [records, source, changing, step_sizes]
        at = [table.data_ptr() for table in (*tables, sums)]
        sizes = [len(self._parameters), len(changing)]
        try:
            counting(stream, [*tables, *sizes], [*at[:4], *sizes])
        finally:
            self._upload.mark(stream)
        noise = changing
        if self._is_stochastic:
            noise = torch.randint(1 << 62, (1,), device=self._device, generator=generator)
        tables, at = [records, changing, step_sizes, sums, noise], [at[0], *at[2:], noise.data_ptr()]
        for launch, owners in launches:
            launch(stream, [owners, *tables], [owners.data_ptr(), *at])

    def _encode(self, rates: Rates) -> tuple[int, int, int, int, int]:
        """Encode the rates of a group.

        The learning rate as the address of a float32, of a float64, and a number to multiply it by; then the shares of
        the old momentum buffer in the step's direction, and in the new buffer beside that direction.
        """
        lr, factor, in_step = rates.lr, 1 / rates.divisor, rates.kept_by_step
        shares = bits(in_step), bits((rates.momentum - in_step) / (1 - in_step))
        if not isinstance(lr, Tensor) or lr.device.type != self._device.type:
            return 0, 0, bits(factor * float(lr)), *shares
        if lr.device != self._device or lr.dtype not in (torch.float32, torch.float64):
            lr = lr.to(self._device, torch.float32, non_blocking=True)
            self._borrowed.append(lr)
        address = lr.data_ptr()
        return (*((address, 0) if lr.dtype == torch.float32 else (0, address)), bits(factor), *shares)


class Upload:
    """Integers that the host gives to a kernel, without waiting for the device.

    The kernel reads them from the host's memory, and keeps them in a table on the device.

    Args:
        table: the table.
    """

    def __init__(self, table: Tensor) -> None:
        self._table, self._is_cuda = table, table.is_cuda
        self._pack = struct.Struct(f"{len(table)}q").pack_into
        self._buffers: deque[tuple[Buffer, Any]] = deque()  # the one in use the longest is first
        # torch does not know that a kernel reads its memory. No call of CUDA: a graph may be in capture when this runs
        weakref.finalize(self, DROPPED.extend, self._buffers).atexit = False
        self._unread: Any = None  # the event of a buffer for which no kernel has been launched yet
        self._stream: tuple[int, Any] = (-1, None)  # kept, since finding it takes time
        self._spare: Buffer | None = None  # for a capture, which cannot allocate pinned memory

    def write(self, words: Sequence[int] | None) -> Tensor:
        """Return where a kernel finds these integers; for ``None``, those of before, which the table has."""
        if self._spare is None:
            self._spare = self._buffer()
        if words is None:
            return self._table
        if not self._is_cuda:
            return self._fill(self._spare, words)
        # the host may be many steps ahead: a buffer is free when the device has read it
        if self._buffers and self._buffers[0][1].query():
            self._buffers.rotate(-1)
        else:
            _forget_read()
            self._buffers.append((self._buffer(), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        buffer, self._unread = self._buffers[-1]
        return self._fill(buffer, words)

    def mark(self, stream: int) -> None:
        """Note that the kernel which reads the integers is launched on a stream, the current one."""
        if self._unread is None:
            return
        if stream != self._stream[0]:
            self._stream = (stream, torch.cuda.current_stream())
        self._unread.record(self._stream[1])
        self._unread = None

    def capture(self, words: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Write integers for a CUDA graph, whose kernel reads them again at each replay.

        Returns:
            The host's memory, and a table for this graph alone. Both must live as long as the graph.
        """
        if self._spare is None:
            raise RuntimeError("take a step outside of the capture between two captures")
        buffer, self._spare, self._unread = self._fill(self._spare, words), None, None
        return buffer, torch.empty_like(self._table)

    @torch.inference_mode(False)  # tensors created in inference mode are read-only outside it
    def _buffer(self) -> Buffer:
        # its own device: inside of torch.device(...), the default may be another
        tensor = torch.empty(self._table.shape, dtype=torch.int64, device="cpu", pin_memory=self._is_cuda)
        return tensor, (ctypes.c_int64 * len(tensor)).from_address(tensor.data_ptr())

    def _fill(self, buffer: Buffer, words: Sequence[int]) -> Tensor:
        tensor, memory = buffer
        self._pack(memory, 0, *words)
        return tensor


def _forget_read() -> None:
    """Let go of dropped buffers that the device has read."""
    for _ in range(len(DROPPED)):
        with suppress(IndexError):  # another thread was faster
            dropped = DROPPED.popleft()
            if not dropped[1].query():
                DROPPED.append(dropped)
