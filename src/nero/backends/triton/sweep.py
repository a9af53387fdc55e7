"""All parameters of a device in a few launches.

A :class:`Sweep` is built once for its tensors and used step after step. At each step it checks what users
can change without a call of ours: gradients, shapes, strides, dtypes, storage and ``requires_grad``. The state is
checked by :meth:`Sweep.has_state`, only if someone can have changed it.
"""

import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from itertools import chain
from operator import attrgetter, is_, or_
from typing import Any

import torch
from torch import Tensor

from nero.backends.available import why_not_triton
from nero.backends.job import Rates
from nero.backends.triton.tables import Line, bits, is_aligned, make_tables

try:
    from torch._C._dynamo import guards

    TensorGuards: Any = guards.TensorGuards
except (ImportError, AttributeError):  # a future torch: every tensor is then checked one by one
    TensorGuards = None

_grad = attrgetter("grad")
_END = object()


class Sweep:
    """The steps of many parameters on one device.

    Args:
        lines: the parameters.
        generator: draws the noise of stochastic rounding; ``None`` for torch's own.

    Attributes:
        captured: tensors that a captured CUDA graph reads, which must live as long as the graph.
    """

    @torch.inference_mode(False)
    def __init__(self, lines: Sequence[Line], generator: torch.Generator | None = None) -> None:
        self._generator = generator
        # no reference to a line: a line holds a gradient
        self._parameters = [line.parameter for line in lines]
        self._holders = [line.holder for line in lines]
        states = [line.job.state for line in lines]
        buffers = [line.job.state["momentum_buffer"] for line in lines if line.job.buffer is not None]
        # views follow the changes of their dicts; the end is compared, too, in case that a value is missing
        self._views = [*(state.values() for state in states), (_END,)]
        self._values = list(chain.from_iterable(self._views))
        self._statistics = [*(state["grad_norm"] for state in states), *buffers]
        self._statistics_at = list(map(Tensor.data_ptr, self._statistics))
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._device = self._parameters[0].device
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._strides = list(map(Tensor.stride, self._parameters))
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._grad_dtypes = [line.job.grad.dtype for line in lines]
        self._is_unchanged: Callable[..., bool] = _never
        self._is_stochastic = any(line.settings.rounding == "stochastic" for line in lines)
        self._aligned = list(map(is_aligned, lines))
        self._tables = make_tables(lines, self._aligned, self._device)
        self._groups = 1 + max(line.group for line in lines)  # groups behind these have no parameter here
        self._rates: Sequence[Rates] = ()
        self._words: list[int] = []
        self._upload = Upload(len(lines) + 5 * self._groups, self._device)
        self._uploaded: tuple[list[int], list[int]] = ([], [])
        self._on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        self._borrowed: list[Tensor] = []  # must live until the kernels are queued
        self.captured: list[Tensor] = []

    def look(self) -> list[int] | None:
        """Return the addresses of the gradients, 0 for none; ``None`` if the sweep must be built anew."""
        if list(map(Tensor.data_ptr, self._parameters)) != self._addresses:
            return None
        grads = list(map(_grad, self._holders))
        with torch.enable_grad():  # the guard reads requires_grad
            is_unchanged = self._is_unchanged(*self._parameters, *grads)
        if not is_unchanged:
            return self._look_closely(grads)
        addresses = list(map(Tensor.data_ptr, grads))
        if addresses == self._uploaded[0]:
            return self._uploaded[0]
        return None if self._is_misaligned(addresses) else addresses

    def has_state(self) -> bool:
        """Return whether the state holds the same tensors at the same addresses."""
        return (
            all(map(is_, chain.from_iterable(self._views), self._values))
            and list(map(Tensor.data_ptr, self._statistics)) == self._statistics_at
        )

    def _look_closely(self, grads: Sequence[Tensor | None]) -> list[int] | None:
        addresses = []
        if [parameter.dtype for parameter in self._parameters] != self._dtypes:
            return None
        known = zip(self._parameters, grads, self._shapes, self._strides, self._grad_dtypes, strict=True)
        for parameter, grad, shape, stride, dtype in known:
            if parameter.shape != shape or parameter.stride() != stride:
                return None
            if grad is None or not parameter.requires_grad:
                addresses.append(0)
                continue
            if why_not_triton(grad) or grad.dtype != dtype:
                return None
            if grad.is_neg() or not has_strides(grad, stride):  # another layout: copied, so slower
                grad = torch.empty_strided(shape, stride, dtype=dtype, device=grad.device).copy_(grad)
                self._borrowed.append(grad)
            addresses.append(grad.data_ptr())
        if all(addresses) and not self._borrowed:
            self._is_unchanged = _guard([*self._parameters, *grads])
        return None if self._is_misaligned(addresses) else addresses

    def _is_misaligned(self, addresses: list[int]) -> bool:
        return bool(reduce(or_, addresses) & 15) and any(
            address & 15 and aligned for address, aligned in zip(addresses, self._aligned, strict=True)
        )

    def launch(self, addresses: list[int], rates: Sequence[Rates]) -> None:
        """Step, with gradients at these addresses.

        Args:
            addresses: the answer of :meth:`look`.
            rates: those of each group; the same object as in the last step if no rate has changed.
        """
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
        moved = self._parameters
        if not all(addresses):
            moved = [parameter for parameter, address in zip(self._parameters, addresses, strict=True) if address]
        torch.autograd.graph.increment_version(moved)  # torch did not see the kernels write
        self._borrowed = []

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
        self._host = array("q", bytes(8 * size))
        self._words = torch.frombuffer(self._host, dtype=torch.int64)  # shares the memory of the array
        self._buffers: deque[tuple[Tensor, Any]] = deque()  # the one in use the longest is first
        self._spare: Tensor | None = None  # for a capture, which cannot allocate pinned memory

    def write(self, words: Sequence[int] | None) -> Tensor:
        """Copy integers to the table, and return it; ``None`` leaves the table as it is."""
        if self._is_cuda and self._spare is None:
            self._spare = self._pinned()
        if words is None:
            return self._table
        self._pack(self._host, 0, *words)
        if not self._is_cuda:
            return self._table.copy_(self._words)
        # the host may be many steps ahead: a buffer is free when the device has read it
        if self._buffers and self._buffers[0][1].query():
            self._buffers.rotate(-1)
        else:
            self._buffers.append((self._pinned(), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        buffer, is_read = self._buffers[-1]
        self._table.copy_(buffer.copy_(self._words), non_blocking=True)
        is_read.record()
        return self._table

    def capture(self, words: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copy integers within a CUDA graph, which repeats the copy at each replay.

        Returns:
            A table for this graph alone, and its buffer. Both must live as long as the graph.
        """
        if self._spare is None:
            raise RuntimeError("take a step outside of the capture between two captures")
        self._pack(self._host, 0, *words)
        buffer, table = self._spare.copy_(self._words), torch.empty_like(self._table)
        self._spare = None
        return table.copy_(buffer, non_blocking=True), buffer

    @torch.inference_mode(False)  # tensors created in inference mode are read-only outside it
    def _pinned(self) -> Tensor:
        return torch.empty(self._words.shape, dtype=torch.int64, pin_memory=True)


def has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides; those of axes of size one do not matter."""
    sizes = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return all(own == other or size == 1 for own, other, size in sizes)


def _guard(tensors: Sequence[Tensor | None]) -> Callable[..., bool]:
    """Make a fast check that tensors keep their types, dtypes, shapes, strides and requires_grad."""
    if TensorGuards is None:
        return _never
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _never(*_: object) -> bool:
    return False
