"""The projection of many tensors on a GPU, in a few launches: every contiguous neuron is read and written once."""

from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from nero.backends.available import TRITON_DTYPES, triton_works
from nero.backends.job import Neurons
from nero.backends.layout import Layout, layout_of
from nero.backends.triton.tables import MAX_COUNT, MAX_FAN_IN, TILES, Launch, bits, placed, width_and_rows
from nero.process import is_capturing
from nero.rule import rounding_error


class Target(NamedTuple):
    """A tensor of neurons, the norm that each is held to, and where they lie in memory."""

    tensor: Tensor
    radius: float | Tensor
    layout: Layout


class Launches:
    """The projection of many tensors on one device, in one launch per dtype and size of tile.

    Args:
        by_number: the tensors by number; their neurons are contiguous and at most ``MAX_FAN_IN`` elements long.
        fix_mean: project to zero mean.
        fix_norm: project to the radius.

    Attributes:
        numbers: the numbers of the tensors.
    """

    def __init__(self, by_number: Mapping[int, Target], *, fix_mean: bool, fix_norm: bool) -> None:
        from nero.backends.triton import project_kernel, rounding_kernels

        self.numbers, targets = list(by_number), list(by_number.values())
        self._device = targets[0].tensor.device
        self._flags: list[bool] = []
        self._active: Tensor | None = None
        self._radii = [target.radius for target in targets]  # the records hold their addresses
        kinds: dict[tuple[torch.dtype, int], list[int]] = {}
        for number, target in enumerate(targets):
            tiles = TILES[target.tensor.element_size()]
            tile = next(size for size in tiles if size >= target.layout.fan_in)
            kinds.setdefault((target.tensor.dtype, tile), []).append(number)
        records: list[list[int]] = [[] for _ in targets]
        self._launches: list[tuple[Launch, Tensor]] = []
        for (dtype, tile), members in kinds.items():
            owners, shapes = array("i"), 0
            for number in members:
                log_width, rows = width_and_rows(targets[number].layout.fan_in, tile)
                shape = 2 * log_width + _is_aligned(targets[number])
                records[number] = [*_fields(targets[number]), shape, len(owners)]
                owners.extend([number] * -(-targets[number].layout.neurons // rows))
                shapes |= 1 << shape
            warps, registers, _ = TILES[dtype.itemsize][tile]
            constants = {
                "W": rounding_kernels.DTYPES[dtype],
                "TILE": tile,
                "SHAPES": shapes,
                "FIX_MEAN": fix_mean,
                "FIX_NORM": fix_norm,
                "ROUNDING_ERROR": rounding_error(dtype),
            }
            on_device = placed(torch.frombuffer(owners, dtype=torch.int32), self._device)
            self._launches.append((Launch(project_kernel.project, len(owners), constants, warps, registers), on_device))
        words = array("q", [word for record in records for word in record])
        self._records = placed(torch.frombuffer(words, dtype=torch.int64), self._device)

    def __call__(self, flags: list[bool], captured: list[object]) -> bool:
        """Project the tensors with a flag, unless a graph captures a change of flags; return whether it was done."""
        is_cuda = self._device.type == "cuda"
        with torch.cuda.device(self._device) if is_cuda else nullcontext():
            if self._active is None or flags != self._flags:
                if is_capturing():
                    return False
                # a new table each time: a graph may still read the last one
                active = torch.tensor(flags, dtype=torch.int32, device="cpu")  # whatever the default device is
                self._active, self._flags = placed(active, self._device), flags
            if is_capturing():
                captured += [self, self._active]
            stream = torch._C._cuda_getCurrentRawStream(self._device.index) if is_cuda else 0
            for launch, owners in self._launches:
                tables = [owners, self._records, self._active]
                launch(stream, tables, [table.data_ptr() for table in tables])
        return True


class Kernels:
    """The projection kernels over a list of tensors. Tables are made at the first call, and when a tensor has moved.

    Args:
        fix_mean: project to zero mean.
        fix_norm: project to the radius.
    """

    def __init__(self, *, fix_mean: bool, fix_norm: bool) -> None:
        self._fix_mean, self._fix_norm = fix_mean, fix_norm
        self._places: list[object] = []
        self._launches: list[Launches] = []  # one for each device
        self._captured: list[object] = []  # tables that a CUDA graph reads at each replay

    def __call__(self, neurons: Sequence[Neurons], active: Sequence[bool]) -> set[int]:
        """Project active tensors in place, and return the numbers of those that the kernels could project.

        Args:
            neurons: plain tensors; the same at each call, unless a parameter has changed.
            active: whether to project each of them.
        """
        places = [_place(each.tensor) for each in neurons]
        if places != self._places:
            if is_capturing():  # a graph would repeat the upload of its tables from memory that is gone
                return set()
            self._launches, self._places = self._made(neurons), places
        done: set[int] = set()
        for launches in self._launches:
            wanted = [number for number in launches.numbers if active[number]]
            if wanted and launches([active[number] for number in launches.numbers], self._captured):
                # torch did not see the kernels write
                torch.autograd.graph.increment_version([neurons[number].tensor for number in wanted])
                done.update(wanted)
        return done

    def _made(self, neurons: Sequence[Neurons]) -> list[Launches]:
        by_device: dict[torch.device, dict[int, Target]] = {}
        for number, each in enumerate(neurons):
            layout = _layout(each)
            if layout is not None:
                by_device.setdefault(each.tensor.device, {})[number] = Target(each.tensor, _radius(each), layout)
        return [Launches(targets, fix_mean=self._fix_mean, fix_norm=self._fix_norm) for targets in by_device.values()]


def _fields(target: Target) -> list[int]:
    """Return a record without its last two fields."""
    tensor, radius, layout = target
    return [
        tensor.data_ptr(),
        *((radius.data_ptr(), 0) if isinstance(radius, Tensor) else (0, bits(radius))),
        layout.neurons,
        layout.fan_in,
        layout.inner,
        layout.inner_stride,
        layout.outer_stride,
    ]


def _is_aligned(target: Target) -> bool:
    """Return whether a neuron's elements can be read sixteen bytes at a time."""
    strides = (target.layout.fan_in, target.layout.inner_stride, target.layout.outer_stride)
    return target.tensor.data_ptr() % 16 == 0 and not any(stride % 8 for stride in strides)


def _place(tensor: Tensor) -> object:
    if not triton_works(tensor.device):
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()


def _radius(neurons: Neurons) -> float | Tensor:
    radius = neurons.radius
    return radius.reshape(-1).to(torch.float32) if isinstance(radius, Tensor) else float(radius)


def _layout(neurons: Neurons) -> Layout | None:
    """Return where the neurons lie; ``None`` if the kernels do not support them."""
    tensor = neurons.tensor
    if not tensor.numel() or tensor.is_neg() or tensor.dtype not in TRITON_DTYPES or not triton_works(tensor.device):
        return None
    layout = layout_of(tensor.shape, tensor.stride(), neurons.axes)
    if layout is None or layout.run != layout.fan_in or layout.stride != 1 or layout.fan_in > MAX_FAN_IN:
        return None
    if layout.neurons > MAX_COUNT:
        return None
    if isinstance(neurons.radius, Tensor) and neurons.radius.numel() != layout.neurons:
        return None
    return layout
