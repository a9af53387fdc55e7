"""All neurons, gains and biases of a device in a few launches, which read and write every number once.

A :class:`Sweep` is made when its tensors are first seen, and used again step after step: it keeps a
table of where they are on the device. What changes from step to step is looked at each time: the
gradients, which the kernels find by their addresses, and the learning rate.
"""

import math
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nero.backends.job import Job, Settings, state_is_as_made

try:
    from torch._C._dynamo import guards

    TensorGuards: Any = guards.TensorGuards
except (ImportError, AttributeError):  # in some torch to come: then every tensor is looked at closely
    TensorGuards = None

#: Entries that a program holds, its warps, and the registers of a thread where Triton would take too many for enough
#: programs to run side by side. A tensor is given the first that holds its neurons.
TILES: dict[int, tuple[int, int | None]] = {1024: (1, 96), 4096: (4, 128), 8192: (8, None), 16384: (16, None)}
#: Entries in a piece of neurons that are split, because they are longer than that or lie across memory.
PIECE = 8192
#: Neurons side by side in a piece that lies across memory: with float32, a line of it.
ABREAST = 32
#: What the kernels read and write.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_grad = attrgetter("grad")
_are_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def why_not(tensor: Tensor) -> str | None:
    """What keeps a parameter or a gradient from the kernels, in words; ``None`` if nothing does."""
    if tensor.device.type != "cuda" and not (tensor.device.type == "cpu" and _interpreted()):
        return f"on {tensor.device}, and the kernels run on CUDA devices"
    if tensor.layout is not torch.strided:
        return "sparse, and the kernels take dense tensors"
    wrapped: bool = is_traceable_wrapper_subclass(tensor)
    if wrapped:
        return f"a {type(tensor).__name__}, and the kernels take plain tensors"
    if tensor.dtype not in DTYPES:
        return f"{tensor.dtype}, and the kernels do float32, bfloat16 and float16"
    return None


@cache
def works(device: torch.device) -> bool:
    """Whether Triton can compile and launch a kernel here, which takes more than its being installed."""
    from nero.backends import kernels

    table, rates = (torch.zeros(8, dtype=dtype, device=device) for dtype in (torch.int64, torch.float64))
    try:
        with torch.cuda.device(device):
            kernels.count[(1,)](table, table, rates, 2, BLOCK=128)
    except Exception:  # no compiler for its launcher, a GPU that it does not know, ...
        return False
    return True


def _interpreted() -> bool:
    """Whether Triton interprets kernels, which then work on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Line(NamedTuple):
    """A parameter in a sweep: what its step is (its gradient may be a stand-in), and whose learning rate it has."""

    parameter: Tensor
    job: Job
    settings: Settings
    group: int


class Form(NamedTuple):
    """How neurons lie in memory: neuron i at (i // inner, i % inner), entry k of it at (k // run, k % run)."""

    neurons: int
    fan_in: int
    inner: int
    inner_stride: int
    outer_stride: int
    run: int
    stride: int
    leap: int


class _Kind(NamedTuple):
    """What decides in which launch a tensor is."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    stochastic: bool
    tile: int
    split: tuple[int, int, bool] | None
    fix_mean: bool
    fix_norm: int
    scaled: bool


@dataclass(slots=True)
class _Launch:
    """Programs of one kernel that differ in nothing but the tensors they work on."""

    kernel: Any
    programs: int
    constants: dict[str, Any]
    warps: int
    registers: int | None = None
    again: Callable[..., object] | None = None

    def __call__(self, stream: int, tables: Sequence[Tensor | int], addresses: Sequence[int]) -> None:
        """Launch on tables; from the second time on by their addresses, past Triton's look at what does not change."""
        if self.again is None:
            options = {"num_warps": self.warps}
            if self.registers and torch.version.hip is None:
                options["maxnreg"] = self.registers
            compiled = self.kernel[(self.programs,)](*tables, **self.constants, **options)
            self.again = None if compiled is None else compiled[(self.programs, 1, 1)]
        else:
            self.again(*addresses, *self.constants.values(), stream=stream)


class Rate(NamedTuple):
    """The learning rate of a group at a step, and what to multiply it by: less than zero if it goes up."""

    lr: float | Tensor
    factor: float


def form_of(job: Job) -> Form | None:
    """How the neurons of a job lie in memory, if the kernels can follow."""
    weight, axes = job.parameter, job.axes
    across = _merged([(weight.shape[i], weight.stride(i)) for i in range(weight.dim()) if i not in axes])
    # along a neuron any order will do, so take that of memory
    along = _merged(sorted(((weight.shape[i], weight.stride(i)) for i in axes), key=lambda each: -each[1]))
    if len(across) > 2 or len(along) > 2:
        return None
    (outer, outer_stride), (inner, inner_stride) = [(1, 0), (1, 0), *across][-2:]
    (leaps, leap), (run, stride) = [(1, 0), (1, 1), *along][-2:]
    if job.state["grad_norm"].numel() != outer * inner or not state_is_as_made(job):
        return None
    return Form(outer * inner, leaps * run, inner, inner_stride, outer_stride, run, stride, leap)


def _merged(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sizes and strides of axes, with those that are one in memory merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


class Sweep:
    """The steps of many parameters on one device."""

    @torch.inference_mode(False)
    def __init__(self, lines: Sequence[Line]) -> None:
        self.parameters = [line.parameter for line in lines]  # and no line, since those hold gradients
        self.states = [line.job.state for line in lines]
        self._values = [value for state in self.states for value in state.values()]  # which a graph may outlive
        self._averages = [state["grad_norm"] for state in self.states]
        self._averages_at = list(map(Tensor.data_ptr, self._averages))
        self.device = self.parameters[0].device
        self._indices = list(range(len(lines)))
        self._addresses = list(map(Tensor.data_ptr, self.parameters))
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._strides = list(map(Tensor.stride, self.parameters))
        self._grad_dtypes = [line.job.grad.dtype for line in lines]
        self._watch = _watch(self.parameters)
        self._watch_grads: Callable[..., bool] | None = None
        self._stochastic = any(line.settings.rounding == "stochastic" for line in lines)
        self._lay_out(lines)
        groups = 1 + max(line.group for line in lines)
        self._changing = torch.zeros(len(lines) + 3 * groups, dtype=torch.int64, device=self.device)
        self._found: list[int] = []
        self._found_words: list[int] = []
        self._spare: Tensor | None = self._pinned()
        self._borrowed: list[Tensor] = []  # what must live until the kernels are on their way
        self.captured: list[Tensor] = []  # what must live as long as a graph

    def look(self) -> list[int] | None:
        """Where the gradients are, 0 for none; ``None`` if the parameters are no longer those of the sweep."""
        if not (self._are_at(self.parameters, self._addresses) and self._has_its_state()):
            return None
        grads = list(map(_grad, self.parameters))
        with torch.enable_grad():  # without which a watch does not see what requires one
            ordinary = self._watch(*self.parameters) and self._watch_grads is not None and self._watch_grads(*grads)
        if not ordinary:
            return self._look_closely(grads)
        if self._found and self._are_at(grads, self._found):
            return self._found
        addresses = list(map(Tensor.data_ptr, grads))
        return None if self._misaligned(addresses) else addresses

    def _look_closely(self, grads: Sequence[Tensor | None]) -> list[int] | None:
        addresses = []
        known = zip(self.parameters, grads, self._shapes, self._strides, self._grad_dtypes, strict=True)
        for parameter, grad, shape, stride, dtype in known:
            if parameter.shape != shape or parameter.stride() != stride:
                return None
            if grad is None or not parameter.requires_grad:
                addresses.append(0)
                continue
            if why_not(grad) or grad.dtype != dtype:
                return None
            if grad.is_neg() or not _alike(grad, stride):  # in another layout: right, not fast
                grad = torch.empty_strided(shape, stride, dtype=dtype, device=grad.device).copy_(grad)
                self._borrowed.append(grad)
            addresses.append(grad.data_ptr())
        if all(addresses) and not self._borrowed:
            self._watch, self._watch_grads = _watch(self.parameters), _watch(grads)
        return None if self._misaligned(addresses) else addresses

    def _has_its_state(self) -> bool:
        """Whether the state is that of the sweep, entry by entry, and in the same place."""
        return (
            sum(map(len, self.states)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, self.states)), self._values))
            and self._are_at(self._averages, self._averages_at)
        )

    def _are_at(self, tensors: Any, addresses: Any) -> bool:
        if not _are_at:  # a torch without CUDA
            return bool(list(map(Tensor.data_ptr, tensors)) == addresses)
        return bool(_are_at(tensors, addresses, self._indices))

    def _misaligned(self, addresses: list[int]) -> bool:
        return any(address & 15 and aligned for address, aligned in zip(addresses, self._aligned, strict=True))

    def launch(self, addresses: list[int], rates: Sequence[Rate]) -> None:
        """Take the step, with gradients at these addresses and the learning rates of the groups."""
        words = [word for rate in rates for word in self._words(rate)]
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                capturing = torch.cuda.is_current_stream_capturing()
                changing = self._capture(addresses, words) if capturing else self._upload(addresses, words)
                self._launch(changing, torch._C._cuda_getCurrentRawStream(self.device.index))
        else:
            self._launch(self._upload(addresses, words), 0)
        # torch has not seen them change
        moved = [each for each, address in zip(self.parameters, addresses, strict=True) if address]
        torch.autograd.graph.increment_version(moved)
        self._borrowed = []

    def _launch(self, changing: Tensor, stream: int) -> None:
        records, rates, sums = self._tables
        tables: list[Tensor | int] = [records, changing, rates]
        at = [each.data_ptr() for each in (records, changing, rates, sums)]
        self._count(stream, [*tables, len(self.parameters)], [*at[:3], len(self.parameters)])
        noise = torch.randint(1 << 62, (1,), device=self.device) if self._stochastic else changing
        for launch, owners, place in self._launches:
            launch(stream, [owners, *tables, sums, noise], [place, *at, noise.data_ptr()])

    def _words(self, rate: Rate) -> tuple[int, int, int]:
        """A learning rate as the kernels read it: where a float32 is, or a float64, and a number to multiply it by."""
        if not isinstance(rate.lr, Tensor) or rate.lr.device.type != self.device.type:
            return 0, 0, _bits(rate.factor * float(rate.lr))
        lr = rate.lr
        if lr.device != self.device or lr.dtype not in (torch.float32, torch.float64):
            lr = lr.to(self.device, torch.float32, non_blocking=True)
            self._borrowed.append(lr)
        address = lr.data_ptr()
        return (address, 0, _bits(rate.factor)) if lr.dtype == torch.float32 else (0, address, _bits(rate.factor))

    def _upload(self, addresses: list[int], words: list[int]) -> Tensor:
        if addresses is not self._found or words != self._found_words:
            pinned = self._pinned()  # a new one each time: the last may still be on its way
            pinned.copy_(torch.frombuffer(array("q", addresses + words), dtype=torch.int64))
            self._changing.copy_(pinned, non_blocking=True)
            self._found, self._found_words = addresses, words
        self._spare = self._pinned() if self._spare is None else self._spare
        return self._changing

    def _capture(self, addresses: list[int], words: list[int]) -> Tensor:
        """As above for a graph, which will copy them again at each replay: they must outlive it."""
        if self._spare is None:
            raise RuntimeError("take a step outside of the capture between two captures")
        pinned, changing = self._spare, torch.empty_like(self._changing)
        pinned.copy_(torch.frombuffer(array("q", addresses + words), dtype=torch.int64))
        changing.copy_(pinned, non_blocking=True)
        self.captured += [pinned, changing, *self._borrowed]
        self._spare = None
        return changing

    def _pinned(self) -> Tensor:
        return torch.empty(self._changing.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _placed(self, table: Tensor) -> Tensor:
        """A table on the device, without waiting for it."""
        if self.device.type == "cuda":
            return table.pin_memory().to(self.device, non_blocking=True)
        return table.clone()

    def _lay_out(self, lines: Sequence[Line]) -> None:
        """Write the records, and deal the tensors out to launches and programs."""
        from nero.backends import kernels

        forms = [form for line in lines if (form := form_of(line.job)) is not None]
        self._aligned = [_aligned(line, form) for line, form in zip(lines, forms, strict=True)]
        by_kind: dict[_Kind, list[int]] = {}
        for i in sorted(self._indices, key=lambda i: not lines[i].job.axes):  # gains and biases last
            kind = _kind(lines[i], forms[i])
            if not lines[i].job.axes:  # constraints are nothing to them: they join the first who have room
                kind = next((each for each in by_kind if each[:4] == kind[:4] and not each.split), kind)
            by_kind.setdefault(kind, []).append(i)

        fields = [[0] * kernels.FIELDS.value for _ in forms]
        self._count = _Launch(kernels.count, -(-len(forms) // 128), {"BLOCK": 128}, 4)
        self._launches: list[tuple[_Launch, Tensor, int]] = []
        sums = 0
        for kind, members in by_kind.items():
            owners, shapes = array("i"), 0
            for i in members:
                form, job, settings = forms[i], lines[i].job, lines[i].settings
                shape, programs, pieces = 0, -(-form.neurons // (kind.tile // kernels.GAINS.value)), 0
                if kind.split is not None:
                    abreast, length, _ = kind.split
                    pieces = -(-form.fan_in // length)
                    programs = -(-form.neurons // abreast) * pieces
                elif job.axes:
                    log_width = max(2, (form.fan_in - 1).bit_length())
                    shape = 2 * log_width + self._aligned[i]
                    entries = kind.tile if 1 << log_width >= kernels.BROAD.value else kind.tile // 2
                    programs = -(-form.neurons // (entries >> log_width))
                fields[i] = [
                    job.parameter.data_ptr(),
                    *(job.state[key].data_ptr() for key in ("grad_norm", "step", "skipped")),
                    *(job.state[key].data_ptr() if key in job.state else 0 for key in ("scale", "radius")),
                    *form,
                    _bits(settings.beta),
                    _bits(1 - settings.beta),
                    _bits(math.log(settings.beta) if settings.beta else -math.inf),
                    _bits(1 / settings.longest),
                    _bits(settings.scale or 0.0),
                    _bits(job.pull),
                    lines[i].group,
                    shape,
                    len(owners),
                    sums,
                ]
                assert len(fields[i]) == kernels.FIELDS.value
                owners.extend([i] * programs)
                shapes |= 1 << shape
                sums += 6 * form.neurons * pieces
            on_device = self._placed(torch.frombuffer(owners, dtype=torch.int32))
            those = _launches(kind, shapes, len(owners))
            self._launches += [(launch, on_device, on_device.data_ptr()) for launch in those]
        words = array("q", [word for record in fields for word in record])
        records = self._placed(torch.frombuffer(words, dtype=torch.int64))
        rates, room = (torch.empty(size, dtype=torch.float64, device=self.device) for size in (2 * len(forms), sums))
        self._tables = (records, rates, room)


def _launches(kind: _Kind, shapes: int, programs: int) -> list[_Launch]:
    import triton.language as tl

    from nero.backends import kernels

    names = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    dtypes = {"W": names[kind.dtype], "G": names[kind.grad_dtype]}
    options = {
        "FIX_MEAN": kind.fix_mean,
        "FIX_NORM": kind.fix_norm,
        "SCALED": kind.scaled,
        "STOCHASTIC": kind.stochastic,
    }
    warps, registers = TILES[kind.tile]
    if kind.split is None:
        constants = {**dtypes, "TILE": kind.tile, "SHAPES": shapes, **options}
        return [_Launch(kernels.step, programs, constants, warps, registers)]
    pieces = dtypes | dict(zip(("BN", "BK", "DOWN"), kind.split, strict=True))
    return [
        _Launch(kernels.measure, programs, pieces, warps),
        _Launch(kernels.turn, programs, {**pieces, **options}, warps),
    ]


def _alike(grad: Tensor, stride: Sequence[int]) -> bool:
    """Whether a gradient's entries are where its parameter's are; along an axis of one, a stride means nothing."""
    return all(one == other or size == 1 for one, other, size in zip(grad.stride(), stride, grad.shape, strict=True))


def _aligned(line: Line, form: Form) -> bool:
    """Whether a neuron's entries can be read sixteen bytes at a time."""
    addresses = (line.job.parameter.data_ptr(), line.job.grad.data_ptr())
    strides = (form.fan_in, form.inner_stride, form.outer_stride)
    return not any(address % 16 for address in addresses) and not any(stride % 8 for stride in strides)


def _kind(line: Line, form: Form) -> _Kind:
    job, settings = line.job, line.settings
    fix_norm = 2 if settings.fix_norm == "initial" else int(bool(settings.fix_norm))
    tile, split = min(TILES), None
    if job.axes:
        in_one = form.run == form.fan_in and form.stride == 1
        if in_one and form.fan_in <= max(TILES):
            tile = next(each for each in TILES if each >= form.fan_in)
        else:
            tile = PIECE
            if form.inner_stride < form.stride and form.inner > 1:
                split = (ABREAST, PIECE // ABREAST, True)
            else:
                length = min(PIECE, 1 << (form.fan_in - 1).bit_length())
                split = (PIECE // length, length, False)
    stochastic = settings.rounding == "stochastic" and job.parameter.dtype != torch.float32
    return _Kind(
        job.parameter.dtype,
        job.grad.dtype,
        stochastic,
        tile,
        split,
        settings.fix_mean,
        fix_norm,
        settings.scale is not None,
    )


def _watch(tensors: Sequence[Tensor | None]) -> Callable[..., bool]:
    """A quick test whether tensors have the types, dtypes, shapes, strides and requires_grad that these have."""
    if TensorGuards is None:
        return lambda *_: False
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _bits(number: float) -> int:
    """A double's bits, as an int64."""
    (bits,) = struct.unpack("q", struct.pack("d", number))
    return int(bits)
