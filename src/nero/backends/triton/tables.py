"""The tables of a sweep: one record per tensor, and the launches that step them."""

import math
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero.backends.layout import Layout
from nero.backends.sweep import Line, span


class Tile(NamedTuple):
    """The warps of a program, and its registers per thread, where Triton's own choice would let too few run at once."""

    warps: int
    registers: int | None
    momentum_registers: int = 128  # the buffer is a third tensor to hold


#: The tiles of contiguous neurons, by bytes and number of elements. A tensor gets the first that holds a neuron.
TILES: dict[int, dict[int, Tile]] = {
    4: {1024: Tile(1, 80), 4096: Tile(4, 128), 8192: Tile(8, None), 16384: Tile(16, None)},
    2: {1024: Tile(1, 96), 2048: Tile(2, 96), 4096: Tile(4, 96), 8192: Tile(8, 80), 16384: Tile(16, None)},
}
#: For longer rows that cannot be read sixteen bytes at a time: with two rows, a program could not load both at once.
UNALIGNED_TILES = {512: Tile(1, 64, 96)}
MIN_UNALIGNED_FAN_IN = 257
#: Words that a program of ``kernels.count`` copies, and tensors that it counts.
COUNT_BLOCK = 128
#: The longest neuron that one program steps, and its warps at most.
MAX_FAN_IN, MAX_WARPS = 16384, 16
#: The most neurons of a tensor, and elements of a neuron: kernels count them by int32, up to a tile beyond the last.
MAX_COUNT = (1 << 31) - 1 - MAX_FAN_IN
#: Elements per program for neurons that are split: longer than the largest tile.
SPLIT_TILE, SPLIT_WARPS = 4096, 8
#: The blocks of neurons that are not contiguous, by bytes per element and longest fan-in: neurons, elements of each
#: that a program holds at once, warps and registers. A block is at least 32 bytes wide, which memory moves at once.
#: Longer neurons are read twice, so all blocks that run at once must fit into the cache.
BLOCKS: dict[int, dict[int, tuple[int, int, int, int]]] = {
    4: {64: (64, 64, 4, 128), 256: (32, 256, 8, 128), 1024: (32, 256, 16, 128), 16384: (16, 256, 16, 128)},
    2: {
        64: (64, 64, 4, 128),
        256: (32, 256, 8, 128),
        2048: (64, 128, 8, 128),
        16384: (16, 1024, 16, 128),
    },
}
#: The fields of a record, in the order of the constants in record_kernels.py.
RECORD_FIELDS = (
    *("weight", "average", "step", "skipped", "scale", "radius", "buffer"),
    *Layout._fields,
    *("beta", "one_minus_beta", "log_beta", "least_divisor", "given_scale", "pull"),
    *("group", "shape", "first_tile", "sums"),
)
#: The width of a split tile of neurons that lie side by side: what memory moves at once. Wider ones have more pieces.
SPLIT_BYTES = 32


class Split(NamedTuple):
    """The shape of a split tile, and whether neurons lie side by side in memory, or are contiguous, and aligned."""

    neurons: int
    elements: int
    is_strided: bool
    is_contiguous: bool
    is_aligned: bool


class Block(NamedTuple):
    """The neurons of a program that are not contiguous, and the elements of each that it holds at once.

    ``fold`` is 0 if it holds all; if not, how many elements of a chunk each thread adds up. ``axis`` is that of the
    elements: 0 for neurons that lie side by side in memory.
    """

    neurons: int
    elements: int
    fold: int
    axis: int
    is_aligned: bool
    warps: int
    registers: int


class Kind(NamedTuple):
    """The properties that tensors must share to be in one launch.

    ``fix_norm`` is 0 for free norms and 1 for norms of one; where neurons have radii, 2 for fixed and 3 for free norms.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    stochastic: bool
    momentum: bool
    tile: int
    split: Split | Block | None
    fix_mean: bool
    fix_norm: int
    scaled: bool


@dataclass(slots=True)
class Launch:
    """Programs of one kernel that differ only in the tensors they work on.

    ``is_early`` if they may start before the launch before has ended.
    """

    kernel: Any
    programs: int
    constants: dict[str, Any]
    warps: int
    registers: int | None = None
    is_early: bool = False
    compiled: Callable[..., object] | None = None

    def __call__(self, stream: int, tables: Sequence[Tensor | int], addresses: Sequence[int]) -> None:
        """Launch on tables; from the second time on by their addresses, without Triton's argument handling."""
        if self.compiled is None:
            options = {"num_warps": self.warps, "enable_fp_fusion": True}  # from Triton 3.10 on not the default
            if self.registers and torch.version.hip is None:
                options["maxnreg"] = self.registers
            if self.is_early:
                options["launch_pdl"] = True
            compiled = self.kernel[(self.programs,)](*tables, **self.constants, **options)
            self.compiled = None if compiled is None else compiled[(self.programs, 1, 1)]
        else:
            self.compiled(*addresses, *self.constants.values(), stream=stream)


class Tables(NamedTuple):
    """The tables of a sweep on its device, and its launches, each with the owners of its programs."""

    records: Tensor
    changing: Tensor
    step_sizes: Tensor
    sums: Tensor
    counting: Launch
    launches: list[tuple[Launch, Tensor]]


def is_aligned(line: Line) -> bool:
    """Return whether a neuron's elements, or neurons that lie side by side, can be read sixteen bytes at a time."""
    tensors, layout = (line.job.parameter, line.job.grad, line.job.buffer), line.layout
    if layout.run < layout.fan_in or 1 not in (layout.stride, layout.inner_stride):
        return False
    strides = (layout.fan_in, layout.inner_stride, layout.outer_stride)
    if _is_strided(layout):
        strides = (layout.inner, layout.stride, layout.outer_stride)
    addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    return not any(address % 16 for address in addresses) and not any(stride % 8 for stride in strides)


def make_tables(lines: Sequence[Line], aligned: Sequence[bool], device: torch.device) -> Tables:
    """Write a record for every tensor, and deal the tensors out to launches and programs."""
    from nero.backends.triton import kernels

    records: list[list[int]] = [[] for _ in lines]
    launches: list[tuple[Launch, Tensor]] = []
    sums = 0
    for kind, members in _by_kind(lines, aligned).items():
        owners, shapes = array("i"), 0
        for i in members:
            line = lines[i]
            shape, programs, pieces = _tiling(line, kind, aligned[i])
            records[i] = _record(line, shape, len(owners), sums)
            owners.extend([i] * programs)
            shapes |= 1 << shape
            sums += 6 * line.layout.neurons * pieces
        on_device = placed(torch.frombuffer(owners, dtype=torch.int32), device)
        launches += [(launch, on_device) for launch in _launches(kind, shapes, len(owners))]
    words = len(lines) + kernels.GROUP_WORDS.value * (1 + max(line.group for line in lines))
    counting = {"BLOCK": COUNT_BLOCK, "MOMENTUM": any(line.job.buffer is not None for line in lines)}
    count = Launch(kernels.count, -(-words // COUNT_BLOCK), counting, 4)
    _overlap([count, *(launch for launch, _ in launches)], _can_overlap(device) and not _share_memory(lines))
    return Tables(
        placed(torch.frombuffer(array("q", chain.from_iterable(records)), dtype=torch.int64), device),
        torch.zeros(words, dtype=torch.int64, device=device),
        torch.empty(kernels.SIZES.value * len(lines), dtype=torch.float64, device=device),
        torch.empty(sums, dtype=torch.float64, device=device),
        count,
        launches,
    )


def _overlap(launches: Sequence[Launch], is_possible: bool) -> None:
    """Say of every launch how it overlaps with its neighbours; see :mod:`nero.backends.triton.record_kernels`."""
    from nero.backends.triton import record_kernels, split_kernels

    for number, launch in enumerate(launches):
        reads_last = number == 1 or launch.kernel is split_kernels.turn
        waits = record_kernels.WAITS_FIRST if reads_last else record_kernels.WAITS_LAST
        overlap = waits.value if number else 0
        if number < len(launches) - 1:
            overlap |= (record_kernels.LETS_NEXT_THEN if number == 1 else record_kernels.LETS_NEXT).value
        launch.constants["OVERLAP"] = overlap if is_possible else 0
        launch.is_early = is_possible and number > 0


def _share_memory(lines: Sequence[Line]) -> bool:
    """Return whether the memory of a parameter reaches into that of another, as of a transposed view of it.

    Overlapping launches would both write there.
    """
    own = (line.job.parameter for line in lines)
    extents = sorted((each.data_ptr(), each.data_ptr() + span(each) * each.element_size()) for each in own)
    return any(end > start for (_, end), (start, _) in pairwise(extents))


def _can_overlap(device: torch.device) -> bool:
    """Return whether a launch may start before the one before has ended: on NVIDIA's GPUs since Hopper."""
    from nero.backends.triton.record_kernels import CAN_OVERLAP

    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return CAN_OVERLAP and torch.cuda.get_device_capability(device) >= (9, 0)


def bits(number: float) -> int:
    """Return the bits of a double as an int64."""
    (word,) = struct.unpack("q", struct.pack("d", number))
    return int(word)


def _is_strided(layout: Layout) -> bool:
    """Return whether neurons are nearer to each other in memory than their elements, as columns are."""
    return layout.inner_stride < layout.stride and layout.inner > 1


def _is_contiguous(layout: Layout) -> bool:
    return layout.run == layout.fan_in and layout.stride == 1


def _by_kind(lines: Sequence[Line], aligned: Sequence[bool]) -> dict[Kind, list[int]]:
    """Group the indices of lines by kind, in the order of their launches.

    Neurons that are split come first: the other launches fill the time that their second waits for their first. Gains
    and biases come last.
    """
    by_kind: dict[Kind, list[int]] = {}
    for i in sorted(range(len(lines)), key=lambda i: (not lines[i].job.axes, lines[i].layout.fan_in <= MAX_FAN_IN)):
        kind = _kind(lines[i], aligned[i])
        if not lines[i].job.axes:  # constraints do not apply to them, so they join the first launch that fits
            kind = next((other for other in by_kind if other[:5] == kind[:5] and not other.split), kind)
        by_kind.setdefault(kind, []).append(i)
    return by_kind


def _kind(line: Line, aligned: bool) -> Kind:
    job, layout, settings = line.job, line.layout, line.settings
    tiles = TILES[job.parameter.element_size()]
    tile: int = min(tiles)
    split: Split | Block | None = None
    if job.axes:
        if layout.fan_in > MAX_FAN_IN:
            tile, split = SPLIT_TILE, _split(layout, aligned, SPLIT_BYTES // job.parameter.element_size())
        elif not _is_contiguous(layout):
            tile, split = 0, _block(line, aligned)
        else:
            if not aligned and layout.fan_in >= MIN_UNALIGNED_FAN_IN:
                tiles = UNALIGNED_TILES | tiles
            tile = next(size for size in tiles if size >= layout.fan_in)
    return Kind(
        job.parameter.dtype,
        job.grad.dtype,
        settings.rounding == "stochastic" and job.parameter.dtype != torch.float32,
        job.buffer is not None,
        tile,
        split,
        settings.fix_mean,
        (2 if settings.fix_norm else 3) if "radius" in job.state else int(bool(settings.fix_norm)),
        settings.scale is not None,
    )


def _split(layout: Layout, aligned: bool, side_by_side: int) -> Split:
    if _is_strided(layout):
        return Split(side_by_side, SPLIT_TILE // side_by_side, True, False, False)
    is_contiguous = _is_contiguous(layout)
    return Split(1, SPLIT_TILE, False, is_contiguous, is_contiguous and aligned)


def _block(line: Line, aligned: bool) -> Block:
    layout, size = line.layout, line.job.parameter.element_size()
    blocks = BLOCKS[size]
    longest = next(longest for longest in blocks if longest >= layout.fan_in)
    neurons, elements, warps, registers = blocks[longest]
    is_strided = _is_strided(layout)
    is_whole = elements == longest
    # what a thread can hold: less of three tensors, of elements that each need an address, and if sums are not folded
    most = 32 if aligned and line.job.buffer is None else 16 if is_strided or is_whole else 8
    while neurons * elements > most * 32 * warps:
        if warps < MAX_WARPS:
            warps *= 2
        elif is_whole:
            break
        else:
            elements //= 2
    fold = 0 if is_whole else max(1, neurons * elements * size // (16 * 32 * warps)) if is_strided else 1
    return Block(neurons, elements, fold, int(not is_strided), aligned, warps, registers)


def _tiling(line: Line, kind: Kind, aligned: bool) -> tuple[int, int, int]:
    """Return the shape code of a tensor's tiles, its number of programs, and its pieces per neuron."""
    from nero.backends.triton import kernels

    layout = line.layout
    if isinstance(kind.split, Block):
        return 0, -(-layout.neurons // kind.split.neurons), 0
    if kind.split is not None:
        pieces = -(-layout.fan_in // kind.split.elements)
        return 0, -(-layout.neurons // kind.split.neurons) * pieces, pieces
    if not line.job.axes:
        return 0, -(-layout.neurons // (kind.tile // kernels.GAIN_SHARE.value)), 0
    log_width, rows = width_and_rows(layout.fan_in, kind.tile)
    return 2 * log_width + aligned, -(-layout.neurons // rows), 0


def width_and_rows(fan_in: int, tile: int) -> tuple[int, int]:
    """Return log2 of the width of a tile of whole neurons, and its number of neurons."""
    from nero.backends.triton import kernels

    log_width = max(2, (fan_in - 1).bit_length())
    elements = tile if 1 << log_width >= kernels.MIN_FULL_WIDTH.value else tile // 2
    return log_width, elements >> log_width


def _record(line: Line, shape: int, first_tile: int, first_sum: int) -> list[int]:
    """Write a tensor's record."""
    job, settings = line.job, line.settings
    record = {
        "weight": job.parameter.data_ptr(),
        "average": job.state["grad_norm"].data_ptr(),
        "step": job.state["step"].data_ptr(),
        "skipped": job.state["skipped"].data_ptr(),
        "scale": job.state["scale"].data_ptr() if "scale" in job.state else 0,
        "radius": job.state["radius"].data_ptr() if "radius" in job.state else 0,
        "buffer": 0 if job.buffer is None else job.buffer.data_ptr(),
        **line.layout._asdict(),
        "beta": bits(settings.beta),
        "one_minus_beta": bits(1 - settings.beta),
        "log_beta": bits(math.log(settings.beta) if settings.beta else -math.inf),
        "least_divisor": bits(1 / settings.longest),
        "given_scale": bits(settings.scale or 0.0),
        "pull": bits(job.pull),
        "group": line.group,
        "shape": shape,
        "first_tile": first_tile,
        "sums": first_sum,
    }
    return [record[field] for field in RECORD_FIELDS]


def _launches(kind: Kind, shapes: int, programs: int) -> list[Launch]:
    from nero.backends.triton import column_kernels, kernels, split_kernels
    from nero.backends.triton.rounding_kernels import DTYPES

    dtypes = {"W": DTYPES[kind.dtype], "G": DTYPES[kind.grad_dtype]}
    options = {
        "FIX_MEAN": kind.fix_mean,
        "FIX_NORM": kind.fix_norm,
        "SCALED": kind.scaled,
        "STOCHASTIC": kind.stochastic,
    }
    if isinstance(kind.split, Block):
        block = dict(zip(("BN", "BK", "FOLD", "AXIS", "ALIGNED"), kind.split[:5], strict=True))
        constants = {**dtypes, **block, **options, "MOMENTUM": kind.momentum}
        return [Launch(column_kernels.turn_block, programs, constants, kind.split.warps, kind.split.registers)]
    if kind.split is None:
        constants = {**dtypes, "TILE": kind.tile, "SHAPES": shapes, **options, "MOMENTUM": kind.momentum}
        tile = (UNALIGNED_TILES | TILES[kind.dtype.itemsize])[kind.tile]
        registers = tile.momentum_registers if kind.momentum else tile.registers
        return [Launch(kernels.step, programs, constants, tile.warps, registers)]
    names_of_split = ("BN", "BK", "STRIDED", "CONTIGUOUS", "ALIGNED")
    constants = {**dtypes, **dict(zip(names_of_split, kind.split, strict=True)), "MOMENTUM": kind.momentum}
    return [
        Launch(split_kernels.measure, programs, constants, SPLIT_WARPS),
        Launch(split_kernels.turn, programs, {**constants, **options}, SPLIT_WARPS),
    ]


def placed(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to the device without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.clone()
