"""Parameters that compiled code steps by their addresses.

A :class:`Sweep` is built once for its tensors and used step after step. At each step it checks what users
can change without a call of ours: gradients, shapes, strides, dtypes, storage, signs (a view may be negated) and
``requires_grad``. The state is checked by :meth:`Sweep.has_state`, only if someone can have changed it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero.backends.available import check_backend
from nero.backends.job import (
    STATE_DTYPES,
    HasGrad,
    Job,
    Member,
    Rates,
    Settings,
    has_expected_state,
    job_of,
    settings_of,
)
from nero.backends.layout import Layout, layout_of
from nero.rule import statistics_dtype

try:
    from torch._C._dynamo import guards

    TensorGuards: Any = guards.TensorGuards
except (ImportError, AttributeError):  # a future torch: every tensor is then checked one by one
    TensorGuards = None

#: Compares the addresses of many tensors in one call; builds of torch without CUDA lack it.
_ARE_AT: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)

#: A view with wider gaps than this many times its size is left to torch, if there is momentum.
MAX_SPAN = 4

_grad = attrgetter("grad")
_END = object()


class Line(NamedTuple):
    """A parameter in a sweep, and the holder of its gradient; ``group`` selects the learning rate.

    Where there is no gradient yet, the parameter stands in for it in the job.
    """

    parameter: Tensor
    holder: HasGrad
    job: Job
    layout: Layout
    settings: Settings
    group: int


class Sweep(ABC):
    """The steps of many parameters on one device.

    Args:
        lines: the parameters.
        generator: draws the noise of stochastic rounding; ``None`` for torch's own.

    Attributes:
        captured: tensors that a captured CUDA graph reads, which must live as long as the graph; used by Triton only.
    """

    #: Whether gradients are cast to the dtype of their parameter.
    casts_gradients = False

    @torch.inference_mode(False)
    def __init__(self, lines: Sequence[Line], generator: torch.Generator | None = None) -> None:
        self.generator = generator
        # no reference to a line: a line holds a gradient
        self._parameters = [line.parameter for line in lines]
        self._holders = [line.holder for line in lines]
        states = [line.job.state for line in lines]
        own = (*STATE_DTYPES, "momentum_buffer")
        # views follow the changes of their dicts; the end is compared, too, in case a value is missing
        self._views = [*(state.values() for state in states), (_END,)]
        self._values = list(chain.from_iterable(self._views))
        self._tensors = [state[key] for state in states for key in own if key in state]
        self._tensors_at = list(map(Tensor.data_ptr, self._tensors))
        self._buffers = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
        self._buffer_strides = list(map(Tensor.stride, self._buffers))
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._indices = list(range(len(self._parameters)))
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._strides = list(map(Tensor.stride, self._parameters))
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._grad_dtypes = [line.job.grad.dtype for line in lines]
        self._is_unchanged: Callable[..., bool] = _never
        self._known: list[int] = []  # the addresses of the gradients in the last step
        self._grads: list[Tensor | None] = []  # held until the step is taken: another thread may drop them
        self._borrowed: list[Tensor] = []  # must live until the step is taken, or queued
        self.captured: list[Tensor] = []

    @staticmethod
    @abstractmethod
    def takes(tensor: Tensor) -> bool:
        """Return whether the code can read a parameter or a gradient."""

    @staticmethod
    @abstractmethod
    def follows(layout: Layout, axes: tuple[int, ...]) -> bool:
        """Return whether the code can follow the layout of neurons, or of gains, which have no axes."""

    @staticmethod
    @abstractmethod
    def key(line: Line) -> object:
        """Return a key that lines must share to be in one sweep."""

    @abstractmethod
    def _step(self, addresses: list[int], rates: Sequence[Rates]) -> None:
        """Step, with gradients at these addresses."""

    def _accepts(self, addresses: list[int]) -> bool:  # noqa: ARG002
        """Return whether the code is made for such addresses."""
        return True

    def look(self) -> list[int] | None:
        """Return the addresses of the gradients, 0 for none; ``None`` if the sweep must be built anew."""
        if not self._are_at(self._parameters, self._addresses):
            return None
        self._grads = grads = list(map(_grad, self._holders))
        with torch.enable_grad():  # the guard reads requires_grad
            is_unchanged = self._is_unchanged(*self._parameters, *grads)
        if not is_unchanged:
            return self._look_closely(grads)
        if self._known and self._are_at(grads, self._known):
            return self._known
        addresses = list(map(Tensor.data_ptr, grads))
        return addresses if self._accepts(addresses) else None

    def _are_at(self, tensors: Sequence[Tensor], addresses: list[int]) -> bool:
        if _ARE_AT is not None:
            return bool(_ARE_AT(tensors, addresses, self._indices))
        return list(map(Tensor.data_ptr, tensors)) == addresses

    def has_state(self) -> bool:
        """Return whether the state holds the same tensors at the same addresses, with the same strides."""
        return (
            all(map(is_, chain.from_iterable(self._views), self._values))
            and list(map(Tensor.data_ptr, self._tensors)) == self._tensors_at
            and list(map(Tensor.stride, self._buffers)) == self._buffer_strides
        )

    def _look_closely(self, grads: Sequence[Tensor | None]) -> list[int] | None:
        addresses = []
        if [parameter.dtype for parameter in self._parameters] != self._dtypes:
            return None
        known = zip(self._parameters, grads, self._shapes, self._strides, self._grad_dtypes, strict=True)
        for parameter, grad, shape, stride, dtype in known:
            if parameter.shape != shape or parameter.stride() != stride or parameter.is_neg():
                return None
            if grad is None or not parameter.requires_grad:
                addresses.append(0)
                continue
            if not self.takes(grad) or grad.dtype != dtype or grad.shape != shape:
                return None
            read_as = parameter.dtype if self.casts_gradients else dtype
            if dtype != read_as or grad.is_neg() or not has_strides(grad, stride):  # copied, so slower
                grad = torch.empty_strided(shape, stride, dtype=read_as, device=grad.device).copy_(grad)
                self._borrowed.append(grad)
            addresses.append(grad.data_ptr())
        if all(addresses) and not self._borrowed:
            self._is_unchanged = _guard([*self._parameters, *grads])
        return addresses if self._accepts(addresses) else None

    def launch(self, addresses: list[int], rates: Sequence[Rates]) -> None:
        """Step, with gradients at these addresses.

        Args:
            addresses: the answer of :meth:`look`.
            rates: those of each group; the same object as in the last step if no rate has changed.
        """
        self._step(addresses, rates)
        moved = self._parameters
        if not all(addresses):
            moved = [parameter for parameter, address in zip(self._parameters, addresses, strict=True) if address]
        torch.autograd.graph.increment_version(moved)  # torch did not see the compiled code write
        self._known, self._grads, self._borrowed = addresses, [], []


def line_of(member: Member, options: Mapping[str, Any], group: int, kind: type[Sweep]) -> Line | None:
    """Make the line of a member in a sweep; ``None`` if the compiled code cannot step it.

    Raises:
        ValueError: if Triton was chosen by name and cannot step the member's dtype, device or gradient.
    """
    parameter, grad = member.parameter, member.grad
    tensors = [parameter] if grad is None else [parameter, grad]
    if not parameter.numel():
        return None
    if not all(map(kind.takes, tensors)):
        if parameter.requires_grad:
            check_backend(options["backend"], member.name, *tensors)  # raises if this is Triton, by name
        return None
    if parameter.is_neg() or tensors[-1].shape != parameter.shape:  # a wrong shape raises where torch sees it
        return None
    if grad is None and _is_to_be_cast(member):  # what has no gradient keeps its state
        return None
    job = job_of(member, parameter if grad is None else grad, options)
    layout = layout_of(job.parameter.shape, job.parameter.stride(), job.axes)
    if layout is None or layout.neurons != job.state["grad_norm"].numel() or not has_expected_state(job):
        return None
    if not kind.follows(layout, job.axes):
        return None
    if job.buffer is not None:
        if not kind.takes(job.buffer) or job.buffer.device != parameter.device or job.buffer.is_neg():
            return None
        if not has_strides(job.buffer, job.parameter.stride()):
            # a part, whose state shares the memory of the whole; or a view, whose gaps the buffer would have, too
            if member.holder is not parameter or span(parameter) > MAX_SPAN * parameter.numel():
                return None
            job = job._replace(buffer=_move_buffer(member))
    return Line(parameter, member.holder, job, layout, settings_of(options), group)


def _is_to_be_cast(member: Member) -> bool:
    """Return whether a step would cast the state, since the parameter was cast after its last step."""
    dtype, buffer = member.parameter.dtype, member.state.get("momentum_buffer")
    return member.state["grad_norm"].dtype != statistics_dtype(dtype) or (buffer is not None and buffer.dtype != dtype)


@torch.inference_mode(False)  # tensors created in inference mode are read-only outside it
def _move_buffer(member: Member) -> Tensor:
    """Give the momentum buffer the strides of its parameter, which may be a view with gaps, or was transposed."""
    parameter, before = member.parameter, member.state["momentum_buffer"]
    buffer = torch.empty_strided(parameter.shape, parameter.stride(), dtype=before.dtype, device=before.device)
    member.state["momentum_buffer"] = buffer.copy_(before)
    return buffer


def has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides; those of axes of size one do not matter."""
    sizes = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return all(own == other or size == 1 for own, other, size in sizes)


def span(tensor: Tensor) -> int:
    """Return the number of elements from the first of a tensor to its last, with the gaps between them."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _guard(tensors: Sequence[Tensor | None]) -> Callable[..., bool]:
    """Make a fast check that tensors keep their types, dtypes, shapes, strides and requires_grad."""
    if TensorGuards is None:
        return _never
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _never(*_: object) -> bool:
    return False
