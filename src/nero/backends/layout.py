"""The layout of neurons in memory."""

from functools import lru_cache
from typing import NamedTuple


class Layout(NamedTuple):
    """The layout of a tensor's neurons, in elements from its start.

    Neuron i starts at ``i // inner * outer_stride + i % inner * inner_stride``; its element k lies
    ``k // run * leap + k % run * stride`` further. Gains and biases are neurons of one element.
    """

    neurons: int
    fan_in: int
    inner: int
    inner_stride: int
    outer_stride: int
    run: int
    stride: int
    leap: int


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...]) -> Layout | None:
    """Describe a tensor of this shape and fan-in axes; ``None`` if it needs more than two strides each way."""
    across = _merged([(shape[axis], strides[axis]) for axis in range(len(shape)) if axis not in axes])
    # the order of elements within a neuron is free, so take that of memory
    along = _merged(sorted(((shape[axis], strides[axis]) for axis in axes), key=lambda pair: -pair[1]))
    if len(across) > 2 or len(along) > 2 or _overlap(across + along):
        return None
    (outer, outer_stride), (inner, inner_stride) = [(1, 0), (1, 0), *across][-2:]
    (leaps, leap), (run, stride) = [(1, 0), (1, 1), *along][-2:]
    return Layout(outer * inner, leaps * run, inner, inner_stride, outer_stride, run, stride, leap)


def _merged(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge (size, stride) pairs that are contiguous in memory; drop axes of size one."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def _overlap(axes: list[tuple[int, int]]) -> bool:
    """Return whether two elements may share a memory location."""
    end = 1
    for size, stride in sorted(axes, key=lambda pair: pair[1]):
        if stride < end:
            return True
        end = size * stride
    return False
