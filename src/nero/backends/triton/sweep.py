"""All parameters of a device in a few launches of Triton kernels."""

import ctypes
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
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
        self._upload = Upload(len(lines) + 5 * self._groups, self._device)
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
            self._rates = rates
            self._words = [word for rate in rates[: self._groups] for word in self._encode(rate)]
        is_cuda = self._device.type == "cuda"
        with self._on_device:
            is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
            changing = self._capture(addresses) if is_captured else self._write(addresses)
            stream = torch._C._cuda_getCurrentRawStream(self._device.index) if is_cuda else 0
            # torch's own generator is the one that replays draw new numbers from
            self._launch(changing, stream, None if is_captured else self._generator)

    def _launch(self, changing: Tensor, stream: int, generator: torch.Generator | None) -> None:
        records, step_sizes, sums, counting, launches = self._tables
        tables: list[Tensor | int] = [records, changing, step_sizes]
        at = [table.data_ptr() for table in (records, changing, step_sizes, sums)]
        counting(stream, [*tables, len(self._parameters)], [*at[:3], len(self._parameters)])
        noise = changing
        if self._is_stochastic:
            noise = torch.randint(1 << 62, (1,), device=self._device, generator=generator)
        for launch, owners in launches:
            launch(stream, [owners, *tables, sums, noise], [owners.data_ptr(), *at, noise.data_ptr()])

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

    def _write(self, addresses: list[int]) -> Tensor:
        """Copy the addresses and rates to the device, if they have changed."""
        if addresses is self._uploaded[0] and self._words == self._uploaded[1]:
            return self._upload.write(None)
        table = self._upload.write(addresses + self._words)
        self._uploaded = (addresses, self._words)
        return table

    def _capture(self, addresses: list[int]) -> Tensor:
        """Copy the addresses and rates within a graph, which keeps what it reads."""
        table, buffer = self._upload.capture(addresses + self._words)
        self.captured += [table, buffer, *self._borrowed]
        return table


class Upload:
    """A table of integers on a device, which the host rewrites between steps without waiting for the device.

    Args:
        size: the number of integers.
        device: the device of the table.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._table = torch.zeros(size, dtype=torch.int64, device=device)
        self._pack = struct.Struct(f"{size}q").pack_into
        self._buffers: deque[tuple[Buffer, Any]] = deque()  # the one in use the longest is first
        self._spare: Buffer | None = None  # for a capture, which cannot allocate pinned memory

    def write(self, words: Sequence[int] | None) -> Tensor:
        """Copy integers to the table, and return it; ``None`` leaves the table as it is."""
        if self._spare is None:
            self._spare = self._buffer()
        if words is None:
            return self._table
        if not self._is_cuda:
            return self._table.copy_(self._fill(self._spare, words))
        # the host may be many steps ahead: a buffer is free when the device has read it
        if self._buffers and self._buffers[0][1].query():
            self._buffers.rotate(-1)
        else:
            self._buffers.append((self._buffer(), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        buffer, is_read = self._buffers[-1]
        self._table.copy_(self._fill(buffer, words), non_blocking=True)
        is_read.record()
        return self._table

    def capture(self, words: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copy integers within a CUDA graph, which repeats the copy at each replay.

        Returns:
            A table for this graph alone, and its buffer. Both must live as long as the graph.
        """
        if self._spare is None:
            raise RuntimeError("take a step outside of the capture between two captures")
        buffer, table = self._fill(self._spare, words), torch.empty_like(self._table)
        self._spare = None
        return table.copy_(buffer, non_blocking=True), buffer

    @torch.inference_mode(False)  # tensors created in inference mode are read-only outside it
    def _buffer(self) -> Buffer:
        # its own device: inside of torch.device(...), the default may be another
        tensor = torch.empty(self._table.shape, dtype=torch.int64, device="cpu", pin_memory=self._is_cuda)
        return tensor, (ctypes.c_int64 * len(tensor)).from_address(tensor.data_ptr())

    def _fill(self, buffer: Buffer, words: Sequence[int]) -> Tensor:
        tensor, memory = buffer
        self._pack(memory, 0, *words)
        return tensor
