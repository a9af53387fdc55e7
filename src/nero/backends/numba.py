"""The step as compiled loops for the CPU: weights and gradients come from memory once, as in plain SGD.

Five sums over a neuron's entries (of w, g, w², g² and wg) say all that its turn needs: the turned
and balanced neuron is a·w + b·g + c, with three numbers that follow from the sums. So a neuron is
read, and written while it is still in cache. The sums are only good for ordinary numbers. Where
they are not (a gradient of 1e25 or NaN, a constant neuron, a turn that cancels the weights), the
neuron is turned as the rule has it, in float64.

Threads fetch pieces of work from one list for all tensors. What comes of a piece does not depend on
who does it, so the weights do not depend on the number of threads.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn.parameter import Parameter

from nero.backends import foreach
from nero.backends.job import Job, Settings, state_is_as_made
from nero.balance import SCALE_AT_ORIGIN

#: Entries in a piece of work: enough to make fetching it cheap, few enough to share the work evenly.
PIECE = 1 << 16
#: A gain costs as much as this many weights, since it has a root and a division of its own.
GAIN = 8
#: Entries that are summed in the weights' own precision; the sums of these are added in float64.
BLOCK = 1024
#: Columns that are turned together: their sums, and a few rows, should stay near the processor.
COLUMNS = 3072
#: From one kind of sum to the next, for columns; not a power of two, which would share places in cache.
PITCH = COLUMNS + 16
#: From the smallest normal number times this to the inverse, squares are ordinary.
MARGIN = 1e8
#: What must be left of a neuron's square after the turn, of all that went into it.
CANCELLED = 0.1

RATES = np.dtype(
    [
        *((name, np.float64) for name in ("lr", "beta", "log_beta", "scale", "least", "eps", "low", "largest")),
        *((name, np.bool_) for name in ("fix_mean", "fix_norm")),
    ]
)


class Layout(NamedTuple):
    """Where a tensor's neurons lie, in entries from its start, and how the work on them is cut.

    Neuron j begins at ``j // inner * outer_stride + j % inner * inner_stride``, and has
    ``segments`` runs of ``run`` neighbours each. Gains have no runs.
    """

    neurons: int
    inner: int
    outer_stride: int
    inner_stride: int
    segments: int
    segment_stride: int
    run: int
    each: int


TASK = np.dtype(
    [
        *((name, np.int64) for name in ("weight", "grad", "average", "step", "skipped")),  # addresses
        ("held", np.int64),  # address of the radii, or of the scale of gains; 0 if the rates have it
        *((name, np.int64) for name in Layout._fields),
        ("pull", np.float64),
    ]
)


@dataclass(slots=True)
class Work:
    """Tensors of one dtype. It holds them, so that their addresses stay true."""

    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    tasks: list[tuple[float, ...]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # of each task's pieces, in the list of all
    pieces: int = 0


def step(jobs: Sequence[Job], settings: Settings) -> None:
    """Take one step with every job: those that are plain memory here, the others by foreach."""
    rest: list[Job] = []
    works = {torch.float32: Work(), torch.float64: Work()}
    initial, scaled = settings.fix_norm == "initial", settings.scale is not None
    for job in jobs:
        weight, grad, state, axes, pull = job
        work, stride = works.get(weight.dtype), weight.stride()
        # of a sharded tensor and the like, pointers are not what they seem
        plain = type(weight) in (Parameter, Tensor) and weight.is_cpu and grad.layout is torch.strided
        cut = _layout(weight.shape, stride, axes) if plain and not weight.is_neg() else None
        if work is None or cut is None or state["grad_norm"].numel() != cut[0].neurons or not state_is_as_made(job):
            rest.append(job)
            continue
        layout, pieces = cut
        if grad.dtype != weight.dtype or grad.stride() != stride or grad.is_neg():
            grad = torch.empty_strided(weight.shape, stride, dtype=weight.dtype).copy_(grad)
        held = 0  # the address of the radii, or of the scale of gains
        if initial if axes else not scaled:
            held = state["radius" if axes else "scale"].data_ptr()
        counts = state["grad_norm"].data_ptr(), state["step"].data_ptr(), state["skipped"].data_ptr()
        work.tasks.append((weight.data_ptr(), grad.data_ptr(), *counts, held, *layout, pull))
        work.weights.append(weight)
        work.grads.append(grad)
        work.pieces += pieces
        work.ends.append(work.pieces)
    for dtype, work in works.items():
        if work.tasks:
            _do(work, settings, dtype)
    foreach.step(rest, settings)


def _do(work: Work, settings: Settings, dtype: torch.dtype) -> None:
    """Take the step, in as many threads as torch uses."""
    tasks, ends = np.array(work.tasks, TASK), np.array(work.ends)
    sat_out, counter = np.zeros(work.pieces, np.int64), np.zeros(1, np.int64)
    all_of_it: tuple[Any, ...] = (tasks, ends, sat_out, counter.ctypes.data, _rates(settings, dtype), _like(dtype))
    threads = torch.get_num_threads()
    helpers = [_pool(threads, os.getpid()).submit(_share, *all_of_it) for _ in range(min(threads, work.pieces) - 1)]
    _share(*all_of_it)
    for helper in helpers:
        helper.result()
    _count(tasks, ends, sat_out)
    torch.autograd.graph.increment_version(work.weights)  # torch has not seen them change


@lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], stride: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Layout, int] | None:
    """The layout of a tensor, if its neurons have one, and the number of pieces it is cut into."""
    fan_in = _merged(sorted([(stride[i], shape[i]) for i in axes], reverse=True))
    neurons = _merged([(stride[i], shape[i]) for i in range(len(shape)) if i not in axes])  # as the averages are
    if _overlap(fan_in + neurons) or len(neurons) > 2:
        return None
    (outer_stride, outer), (inner_stride, inner) = [(0, 1), *neurons][-2:]
    count = outer * inner
    if not axes:
        each = PIECE // GAIN
        return (Layout(count, 1, 1, 0, 0, 0, 0, each), -(-count // each)) if neurons == [(1, count)] else None
    run = fan_in.pop()[1] if fan_in[-1][0] == 1 else 1
    if len(fan_in) > 1:
        return None
    segment_stride, segments = fan_in[0] if fan_in else (0, 1)
    each = max(1, PIECE // (segments * run))
    pieces = -(-count // each)
    if run == 1 and inner_stride == 1:  # columns, not cut unless they must be: memory likes whole rows
        each = -(-inner // -(-inner // COLUMNS))
        pieces = outer * -(-inner // each)
    return Layout(count, inner, outer_stride, inner_stride, segments, segment_stride, run, each), pieces


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, size) of axes from the outer to the inner, as few as memory allows."""
    merged: list[tuple[int, int]] = []
    for stride, size in dims:
        if size == 1:
            continue
        if merged and merged[-1][0] == stride * size:
            merged[-1] = (stride, merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged or [(1, 1)]


def _overlap(dims: list[tuple[int, int]]) -> bool:
    """Whether two entries may share a place."""
    end = 1
    for stride, size in sorted(dims):
        if size > 1 and stride < end:
            return True
        end = stride * size
    return False


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a fork does not inherit its threads
    return ThreadPoolExecutor(threads, "nero")


@lru_cache
def _like(dtype: torch.dtype) -> Any:
    """An array that tells a compiled function the dtype."""
    return torch.empty(0, dtype=dtype).numpy()


def _rates(settings: Settings, dtype: torch.dtype) -> Any:
    info = torch.finfo(dtype)
    log_beta = math.log(settings.beta) if settings.beta else -math.inf
    options = float(settings.lr), settings.beta, log_beta, settings.scale or 0.0, 1 / settings.longest
    range_of_it = info.eps, MARGIN * info.tiny, info.max
    return np.array([(*options, *range_of_it, settings.fix_mean, bool(settings.fix_norm))], RATES)


# -- compiled from here on ---------------------------------------------------------------------

compiled = numba.njit(nogil=True, cache=True, error_model="numpy")
# sums in any order make vectors; NaN and infinity stay what they are
compiled_vector = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


class Sums(NamedTuple):
    """What a neuron's turn needs to know of it."""

    w: float
    g: float
    ww: float
    gg: float
    wg: float


class Turn(NamedTuple):
    """A neuron's new average, and its turn: w <- stretch * w + along * g + shift."""

    ordinary: bool
    average: float
    stretch: float
    along: float
    shift: float


@intrinsic
def _pointer(context: Any, address: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def _fetch(context: Any, address: Any) -> Any:  # noqa: ARG001
    """The number at an address, which is counted up; no two threads get the same."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        number = context.get_value_type(types.int64)
        return builder.atomic_rmw("add", builder.inttoptr(args[0], number.as_pointer()), number(1), "seq_cst")

    return types.int64(types.int64), generate


@compiled
def _array(address, start, size, like):
    return numba.carray(_pointer(address + start * like.itemsize), (size,), like.dtype)


@compiled
def _share(tasks, ends, sat_out, counter, rates, like):
    """Do pieces of work until none is left."""
    while True:
        piece = _fetch(counter)
        if piece >= ends[-1]:
            return
        number = np.searchsorted(ends, piece, side="right")
        task = tasks[number]
        part = piece - (ends[number - 1] if number else 0)
        step = numba.carray(_pointer(task.step), (1,), np.float32)[0] + np.float32(1)
        correction = math.sqrt(-math.expm1(step * rates[0].log_beta))
        if task.run == 1 and task.inner_stride == 1:
            lots = -(-task.inner // task.each)
            first = part // lots * task.inner + part % lots * task.each
            last = min(first + task.each, (part // lots + 1) * task.inner)
            sat_out[piece] = _turn_columns(task, first, last, correction, rates[0], like)
            continue
        first, last = part * task.each, min((part + 1) * task.each, task.neurons)
        if task.run:
            sat_out[piece] = _turn_rows(task, first, last, correction, rates[0], like)
        else:
            sat_out[piece] = _nudge(task, first, last, correction, rates[0], like)


@compiled
def _count(tasks, ends, sat_out):
    """Count every task's step, and its neurons that sat out."""
    first = 0
    for number in range(len(tasks)):
        numba.carray(_pointer(tasks[number].step), (1,), np.float32)[0] += 1
        skipped = numba.carray(_pointer(tasks[number].skipped), (1,), np.int64)
        for piece in range(first, ends[number]):
            skipped[0] += sat_out[piece]
        first = ends[number]


@compiled
def _nudge(task, first, last, correction, rates, like):
    gains = _array(task.weight, first, last - first, like)
    grads = _array(task.grad, first, last - first, like)
    averages = _array(task.average, first, last - first, like)
    reach = rates.lr * (_array(task.held, 0, 1, like)[0] if task.held else rates.scale)
    least, sat_out = rates.least, 0
    for i in range(gains.size):
        b = np.float64(gains[i])
        g = grads[i] + task.pull * (b - 1) if task.pull != 0 else np.float64(grads[i])
        if not abs(g) <= rates.largest:
            sat_out += 1
            continue
        averages[i] = _root(averages[i], g, rates)
        corrected = averages[i] / correction
        if g != 0 and corrected > 0 and reach != 0:
            nudged = b - reach * (g / max(corrected, abs(g) * least))
            if abs(nudged) <= rates.largest:
                gains[i] = nudged
    return sat_out


@compiled
def _turn_rows(task, first, last, correction, rates, like):
    """Turn neurons whose entries are neighbours in memory.

    While one is summed, the one before it is written: memory is waited for with something to do.
    """
    averages = _array(task.average, 0, task.neurons, like)
    rounded = like.dtype.type
    stretch, along, shift = rounded(0), rounded(0), rounded(0)
    waiting, before, sat_out = False, 0, 0
    for neuron in range(first, last):
        start = _start(task, neuron)
        w, g, ww, gg, wg = 0.0, 0.0, 0.0, 0.0, 0.0
        for segment in range(task.segments):
            for begin in range(0, task.run, BLOCK):
                size, offset = min(BLOCK, task.run - begin), segment * task.segment_stride + begin
                weights = _array(task.weight, start + offset, size, like)
                grads = _array(task.grad, start + offset, size, like)
                if waiting:
                    weights_before = _array(task.weight, before + offset, size, like)
                    grads_before = _array(task.grad, before + offset, size, like)
                    block = _sweep_and_sum(weights_before, grads_before, stretch, along, shift, weights, grads)
                else:
                    block = _sum(weights, grads)
                w, g, ww, gg, wg = w + block[0], g + block[1], ww + block[2], gg + block[3], wg + block[4]
        radius = _radius(task, neuron, like)
        turn = _turn(Sums(w, g, ww, gg, wg), task, averages[neuron], radius, correction, rates)
        waiting, before = turn.ordinary, start
        if waiting:
            averages[neuron] = turn.average
            stretch, along, shift = rounded(turn.stretch), rounded(turn.along), rounded(turn.shift)
        else:
            sat_out += _turn_carefully(task, neuron, correction, rates, like)
    for segment in range(task.segments if waiting else 0):
        at = before + segment * task.segment_stride
        _sweep(_array(task.weight, at, task.run, like), _array(task.grad, at, task.run, like), stretch, along, shift)
    return sat_out


@compiled_vector
def _sum(weights, grads):
    w = g = ww = gg = wg = weights.dtype.type(0)
    for i in range(weights.size):
        w += weights[i]
        g += grads[i]
        ww += weights[i] * weights[i]
        gg += grads[i] * grads[i]
        wg += weights[i] * grads[i]
    return w, g, ww, gg, wg


@compiled_vector
def _sweep(weights, grads, stretch, along, shift):
    for i in range(weights.size):
        weights[i] = stretch * weights[i] + (along * grads[i] + shift)


@compiled_vector
def _sweep_and_sum(weights_before, grads_before, stretch, along, shift, weights, grads):
    w = g = ww = gg = wg = weights.dtype.type(0)
    for i in range(weights.size):
        weights_before[i] = stretch * weights_before[i] + (along * grads_before[i] + shift)
        w += weights[i]
        g += grads[i]
        ww += weights[i] * weights[i]
        gg += grads[i] * grads[i]
        wg += weights[i] * grads[i]
    return w, g, ww, gg, wg


@compiled
def _turn_columns(task, first, last, correction, rates, like):
    """Turn neurons that lie side by side in memory, row by row of it."""
    averages = _array(task.average, 0, task.neurons, like)
    start, width = _start(task, first), last - first
    sums, block = np.zeros(5 * PITCH), np.empty(5 * PITCH, like.dtype)
    for begin in range(0, task.segments, BLOCK):
        block[:] = 0
        for row in range(begin, min(begin + BLOCK, task.segments)):
            at = start + row * task.segment_stride
            _sum_down(_array(task.weight, at, width, like), _array(task.grad, at, width, like), block)
        sums += block

    turns, odd, count = block, np.empty(width + 1, np.int64), 0
    for i in range(width):
        five = Sums(sums[i], sums[i + PITCH], sums[i + 2 * PITCH], sums[i + 3 * PITCH], sums[i + 4 * PITCH])
        radius = _radius(task, first + i, like)
        turn = _turn(five, task, averages[first + i], radius, correction, rates)
        if turn.ordinary:
            averages[first + i] = turn.average
            turns[i], turns[i + PITCH], turns[i + 2 * PITCH] = turn.stretch, turn.along, turn.shift
        else:
            odd[count] = i
            count += 1
    odd[count] = width

    for row in range(task.segments):
        begin, at = 0, start + row * task.segment_stride
        for end in odd[: count + 1]:  # sweep the columns between one that is odd and the next
            weights = _array(task.weight, at + begin, end - begin, like)
            _sweep_down(weights, _array(task.grad, at + begin, end - begin, like), turns[begin:])
            begin = end + 1
    sat_out = 0
    for i in odd[:count]:
        sat_out += _turn_carefully(task, first + i, correction, rates, like)
    return sat_out


@compiled_vector
def _sum_down(weights, grads, sums):
    for i in range(weights.size):
        sums[i] += weights[i]
        sums[i + PITCH] += grads[i]
        sums[i + 2 * PITCH] += weights[i] * weights[i]
        sums[i + 3 * PITCH] += grads[i] * grads[i]
        sums[i + 4 * PITCH] += weights[i] * grads[i]


@compiled_vector
def _sweep_down(weights, grads, turns):
    for i in range(weights.size):
        weights[i] = turns[i] * weights[i] + (turns[i + PITCH] * grads[i] + turns[i + 2 * PITCH])


@compiled
def _start(task, neuron):
    return neuron // task.inner * task.outer_stride + neuron % task.inner * task.inner_stride


@compiled
def _radius(task, neuron, like):
    return np.float64(_array(task.held, neuron, 1, like)[0]) if task.held else 1.0


@compiled
def _turn(sums, task, average, radius, correction, rates):
    """The rule, from the sums; ordinary only if no number has left its range and none has cancelled."""
    fan_in, low, high = task.segments * task.run, rates.low, 1 / rates.low
    average = math.sqrt(rates.beta * average * average + (1 - rates.beta) * sums.gg)
    divisor = max(average, correction * rates.least * math.sqrt(sums.gg))
    factor = rates.lr * (rates.scale if rates.scale != 0 else math.sqrt(sums.ww)) * correction / divisor
    turned = sums.ww + factor * factor * sums.gg
    mean = (sums.w - factor * sums.g) / fan_in if rates.fix_mean and fan_in != 2 else 0.0
    left = turned - 2 * factor * sums.wg - fan_in * mean * mean
    stretch = radius / math.sqrt(left) if rates.fix_norm else 1.0
    # every comparison is false for NaN
    ordinary = (
        min(sums.ww, sums.gg) > fan_in * low
        and max(sums.ww, sums.gg) < high
        and left > CANCELLED * turned
        and average < high
        and low < stretch < high
        and 0 < abs(factor * stretch) < high
    )
    return Turn(ordinary, average, stretch, -factor * stretch, -mean * stretch)


@compiled
def _turn_carefully(task, neuron, correction, rates, like):
    """The rule on one neuron, in float64; returns whether it sat out."""
    fan_in, start, average = task.segments * task.run, _start(task, neuron), _array(task.average, neuron, 1, like)
    if _is_zero(task, start, like):  # as in units that are dead, which are many in some networks
        average[0] = _root(average[0], 0.0, rates)
        return 0
    g = _gathered(task, task.grad, start, like)
    rounded, length = like.dtype.type, _norm(g)
    if not length <= rates.largest:
        return 1
    average[0] = _root(average[0], rounded(length), rates)
    corrected = average[0] / correction
    if not (length > 0 and corrected > 0 and rates.lr != 0):
        return 0
    divisor = max(corrected, length * rates.least)

    w = _gathered(task, task.weight, start, like)
    size = rates.scale if rates.scale != 0 else _norm(w)
    reach = rates.lr * (size if size != 0 else SCALE_AT_ORIGIN)
    for i in range(fan_in):
        w[i] -= reach * (g[i] / divisor)

    peak = _peak(w)
    if not 0 < peak <= rates.largest:
        return 0
    fix_mean = rates.fix_mean and fan_in != 2
    stretch = 1.0
    if fix_mean or rates.fix_norm:
        w /= peak
        stretch = peak
        square = (w * w).sum()
        if fix_mean:
            w -= w.sum() / fan_in
            left = (w * w).sum()
            # what rounding leaves of a constant neuron is no direction
            if not left > (16 * rates.eps) ** 2 * square:
                return 0
            square = left
        if rates.fix_norm:
            stretch = _radius(task, neuron, like) / math.sqrt(square)
        elif not peak < rates.largest / 2:
            return 0
    for segment in range(task.segments):
        weights = _array(task.weight, start + segment * task.segment_stride, task.run, like)
        for i in range(task.run):
            weights[i] = w[segment * task.run + i] * stretch
    return 0


@compiled
def _is_zero(task, start, like):
    for segment in range(task.segments):
        if _extent(_array(task.grad, start + segment * task.segment_stride, task.run, like)) != 0:
            return False
    return True


@compiled_vector
def _extent(entries):
    total = entries.dtype.type(0)
    for i in range(entries.size):
        total += abs(entries[i])
    return total


@compiled
def _root(average, length, rates):
    """The running average after a gradient, as the rule's; by hypot, which is slow, if squares leave float64."""
    average, length = np.float64(average), np.float64(length)
    square = rates.beta * (average * average) + (1 - rates.beta) * (length * length)
    if 1e-290 < square < 1e290:
        return math.sqrt(square)
    return math.hypot(math.sqrt(rates.beta) * average, math.sqrt(1 - rates.beta) * length)


@compiled
def _gathered(task, address, start, like):
    entries = np.empty(task.segments * task.run)
    for segment in range(task.segments):
        run = _array(address, start + segment * task.segment_stride, task.run, like)
        for i in range(task.run):
            entries[segment * task.run + i] = run[i]
    return entries


@compiled
def _norm(entries):
    """The norm, right from the smallest number to the largest; infinite if any entry is not finite."""
    peak = _peak(entries)
    if not 0 < peak < math.inf:
        return peak
    square = 0.0
    for entry in entries:
        square += (entry / peak) ** 2
    return peak * math.sqrt(square)


@compiled
def _peak(entries):
    peak = 0.0
    for entry in entries:
        if not abs(entry) < math.inf:
            return math.inf
        peak = max(peak, abs(entry))
    return peak
