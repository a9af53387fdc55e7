"""All parameters of a device in a few launches.

A :class:`Sweep` is built once for its tensors and used step after step. At each step it checks what users
can change without a call of ours: gradients, shapes, strides, storage and ``requires_grad``.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
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
_are_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


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
        self._states = [line.job.state for line in lines]
        self._values = [value for state in self._states for value in state.values()]
        self._statistics = [state["grad_norm"] for state in self._states]
        self._statistics += [line.job.state["momentum_buffer"] for line in lines if line.job.buffer is not None]
        self._statistics_at = list(map(Tensor.data_ptr, self._statistics))
        self._device = self._parameters[0].device
        self._indices = {count: list(range(count)) for count in (len(lines), len(self._statistics))}
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._strides = list(map(Tensor.stride, self._parameters))
        self._grad_dtypes = [line.job.grad.dtype for line in lines]
        self._is_unchanged = _guard(self._parameters)
        self._grads_unchanged: Callable[..., bool] | None = None
        self._is_stochastic = any(line.settings.rounding == "stochastic" for line in lines)
        self._aligned = list(map(is_aligned, lines))
        self._tables = make_tables(lines, self._aligned, self._device)
        self._groups = 1 + max(line.group for line in lines)  # groups behind these have no parameter here
        self._changing = torch.zeros(len(lines) + 5 * self._groups, dtype=torch.int64, device=self._device)
        self._uploaded: tuple[list[int], list[int]] = ([], [])
        self._spare: Tensor | None = self._pinned()
        self._borrowed: list[Tensor] = []  # must live until the kernels are queued
        self.captured: list[Tensor] = []

    def look(self) -> list[int] | None:
        """Return the addresses of the gradients, 0 for none; ``None`` if the sweep must be built anew."""
        if not (self._lie_at(self._parameters, self._addresses) and self._has_its_state()):
            return None
        grads = list(map(_grad, self._holders))
        with torch.enable_grad():  # the guards read requires_grad
            unchanged = (
                self._is_unchanged(*self._parameters)
                and self._grads_unchanged is not None
                and self._grads_unchanged(*grads)
            )
        if not unchanged:
            return self._look_closely(grads)
        if self._uploaded[0] and self._lie_at(grads, self._uploaded[0]):
            return self._uploaded[0]
        addresses = list(map(Tensor.data_ptr, grads))
        return None if self._is_misaligned(addresses) else addresses

    def _look_closely(self, grads: Sequence[Tensor | None]) -> list[int] | None:
        addresses = []
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
            self._is_unchanged, self._grads_unchanged = _guard(self._parameters), _guard(grads)
        return None if self._is_misaligned(addresses) else addresses

    def _has_its_state(self) -> bool:
        """Return whether the state holds the same tensors at the same addresses."""
        return (
            sum(map(len, self._states)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, self._states)), self._values))
            and self._lie_at(self._statistics, self._statistics_at)
        )

    def _lie_at(self, tensors: Any, addresses: Any) -> bool:
        if not _are_at:  # a torch without CUDA
            return bool(list(map(Tensor.data_ptr, tensors)) == addresses)
        return bool(_are_at(tensors, addresses, self._indices[len(addresses)]))

    def _is_misaligned(self, addresses: list[int]) -> bool:
        return any(address & 15 and aligned for address, aligned in zip(addresses, self._aligned, strict=True))

    def launch(self, addresses: list[int], rates: Sequence[Rates]) -> None:
        """Step, with gradients at these addresses.

        Args:
            addresses: the answer of :meth:`look`.
            rates: those of each group.
        """
        words = [word for rate in rates[: self._groups] for word in self._words(rate)]
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                capturing = torch.cuda.is_current_stream_capturing()
                changing = self._capture(addresses, words) if capturing else self._upload(addresses, words)
                # torch's own generator is the one that replays draw new numbers from
                generator = None if capturing else self._generator
                self._launch(changing, torch._C._cuda_getCurrentRawStream(self._device.index), generator)
        else:
            self._launch(self._upload(addresses, words), 0, self._generator)
        # torch did not see the kernels write
        moved = [parameter for parameter, address in zip(self._parameters, addresses, strict=True) if address]
        torch.autograd.graph.increment_version(moved)
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

    def _words(self, rates: Rates) -> tuple[int, int, int, int, int]:
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

    def _upload(self, addresses: list[int], words: list[int]) -> Tensor:
        """Copy the addresses and rates to the device, if they have changed."""
        if addresses is not self._uploaded[0] or words != self._uploaded[1]:
            pinned = self._pinned()  # a new buffer each time: the last copy may still be under way
            pinned.copy_(torch.frombuffer(array("q", addresses + words), dtype=torch.int64))
            self._changing.copy_(pinned, non_blocking=True)
            self._uploaded = (addresses, words)
        self._spare = self._pinned() if self._spare is None else self._spare
        return self._changing

    def _capture(self, addresses: list[int], words: list[int]) -> Tensor:
        """Copy them within a graph, which repeats the copy at each replay: the buffers must outlive it."""
        if self._spare is None:
            raise RuntimeError("take a step outside of the capture between two captures")
        pinned, changing = self._spare, torch.empty_like(self._changing)
        pinned.copy_(torch.frombuffer(array("q", addresses + words), dtype=torch.int64))
        changing.copy_(pinned, non_blocking=True)
        self.captured += [pinned, changing, *self._borrowed]
        self._spare = None
        return changing

    def _pinned(self) -> Tensor:
        return torch.empty(self._changing.shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")


def has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides; those of axes of size one do not matter."""
    sizes = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return all(own == other or size == 1 for own, other, size in sizes)


def _guard(tensors: Sequence[Tensor | None]) -> Callable[..., bool]:
    """Make a fast check that tensors keep their types, dtypes, shapes, strides and requires_grad."""
    if TensorGuards is None:
        return lambda *_: False
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check
