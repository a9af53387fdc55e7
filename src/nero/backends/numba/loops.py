"""The compiled loops of the numba backend.

Five sums over a neuron's elements (Σw, Σg, Σw², Σg² and Σwg) determine its turn: the turned and balanced
neuron is a·w + b·g + c, with three numbers that follow from the sums. So a neuron that is a row in memory
is read once, and written while it is still in cache. Where the sums lose precision (a gradient of 1e25 or
NaN, a constant neuron, a turn that cancels the weights), the neuron is turned in float64, as the rule is written.
"""

import math
from typing import NamedTuple

import numba
import numpy as np

from nero.backends.numba.float64 import advance, root, turn_in_float64
from nero.backends.numba.tasks import (
    array,
    compiled,
    fetch,
    narrow,
    pointer,
    radius_of,
    start_of,
    subroutine,
    vector_subroutine,
    widen,
)

#: Elements summed in the weights' own precision; the sums of blocks are added in float64.
BLOCK_ELEMENTS = 1024
#: Columns turned together: their sums, and a few rows, should stay in cache. No piece of work has more neurons.
MAX_COLUMNS = 3072
#: The distance between two kinds of sums of columns; not a power of two, which would collide in cache.
SUMS_PITCH = MAX_COLUMNS + 16
#: The least share of a neuron's square that the turn must leave for the sums to be precise.
MIN_LEFT = 0.1


class Sums(NamedTuple):
    """The five sums over a neuron's elements."""

    w: float
    g: float
    ww: float
    gg: float
    wg: float


class Turn(NamedTuple):
    """A neuron's new ḡ, and its turn: w <- stretch * w + along * g + shift."""

    ordinary: bool
    average: float
    stretch: float
    along: float
    shift: float


@subroutine
def _row(task, at, size, like):
    """Return some weights and their gradients."""
    return array(task.weight, at, size, like), array(task.grad, at, size, like)


@subroutine
def _find_direction(task, at, direction, settings, like):
    """Write the direction of a step with momentum."""
    buffer, grads = array(task.buffer, at, direction.size, like), array(task.grad, at, direction.size, like)
    kept, rounded = settings.kept_by_step, like.dtype.type
    _mix(direction, buffer, grads, rounded(kept), rounded(1 - kept))


@vector_subroutine
def _mix(mixed, buffer, grads, kept, new):
    for i in range(grads.size):
        mixed[i] = kept * buffer[i] + new * grads[i]


@compiled
def do_pieces(tasks, ends, skipped, counter, settings, like, has_columns, keys):
    """Take pieces of work until none is left.

    If ``has_columns`` is ``None``, the loops for columns are not compiled, which most networks do not need. If ``keys``
    are not ``None``, tensors are bf16; each piece is widened to float32, and rounded once by these keys.
    """
    number, options = 0, settings[0]
    sums, block = np.empty(5 * SUMS_PITCH), np.empty(5 * SUMS_PITCH, like.dtype)
    odd, scratch = np.empty(MAX_COLUMNS + 1, np.int64), np.empty(MAX_COLUMNS, like.dtype)
    if keys is not None:
        wide, own = np.empty((3, _largest_piece(tasks)), np.float32), tasks[:1].copy()
    while True:
        piece = fetch(counter.ctypes.data)
        if piece >= ends[-1]:
            return
        while piece >= ends[number]:
            number += 1
        task = tasks[number]
        place = piece - (ends[number - 1] if number > 0 else 0)
        step = numba.carray(pointer(task.step), (1,), np.float32)[0] + np.float32(1)
        correction = math.sqrt(-math.expm1(step * options.log_beta))
        lots = -(-task.inner // task.each) if task.is_columns else place + 1
        first = place // lots * task.inner + place % lots * task.each
        last = min(first + task.each, (place // lots + 1) * task.inner if task.is_columns else task.neurons)
        if keys is not None:
            start, size = first * max(task.run, 1), (last - first) * max(task.run, 1)
            own[0] = task
            task = own[0]
            task.weight = widen(task.weight, start, wide[0, :size])
            task.grad = widen(task.grad, start, wide[1, :size])
            if task.buffer != 0:
                task.buffer = widen(task.buffer, start, wide[2, :size])
        if task.run == 0:
            skipped[piece] = _nudge(task, first, last, correction, options, like)
        else:
            if has_columns is not None and task.is_columns:
                left = _turn_columns(task, first, last, correction, options, like, sums, block, odd, scratch)
            else:
                left = _turn_rows(task, first, last, correction, options, like, odd)
            for i in range(left):
                skipped[piece] += turn_in_float64(task, odd[i], correction, options, like)
        if keys is not None:
            narrow(tasks[number].weight, start, wide[0, :size], keys, 2 * number)
            if task.buffer != 0:
                narrow(tasks[number].buffer, start, wide[2, :size], keys, 2 * number + 1)


@subroutine
def _largest_piece(tasks):
    """Return the number of elements of the largest piece."""
    largest = 0
    for task in tasks:
        largest = max(largest, min(task.each, task.neurons) * max(task.run, 1))
    return largest


@compiled
def count(tasks, ends, skipped):
    """Count every task's step, and its skipped neurons."""
    first = 0
    for number in range(len(tasks)):
        numba.carray(pointer(tasks[number].step), (1,), np.float32)[0] += 1
        total = numba.carray(pointer(tasks[number].skipped), (1,), np.int64)
        for piece in range(first, ends[number]):
            total[0] += skipped[piece]
        first = ends[number]


@subroutine
def _nudge(task, first, last, correction, settings, like):
    gains = array(task.weight, first, last - first, like)
    grads = array(task.grad, first, last - first, like)
    averages = array(task.average, first, last - first, like)
    buffers = array(task.buffer if task.buffer != 0 else task.grad, first, last - first, like)
    kept, kept_by_step = settings.momentum, settings.kept_by_step
    reach = settings.lr * (array(task.size, 0, 1, like)[0] if task.size else settings.scale)
    least, skipped, shortest = settings.least, 0, settings.tiny if task.buffer != 0 else 0.0
    for i in range(gains.size):
        b = np.float64(gains[i])
        g = grads[i] + task.pull * (b - 1) if task.pull != 0 else np.float64(grads[i])
        if task.buffer != 0:
            own_grad, m = g, np.float64(buffers[i])
            g = kept_by_step * m + (1 - kept_by_step) * own_grad
            if abs(g) <= settings.largest:
                buffers[i] = kept * m + (1 - kept) * own_grad
        if not abs(g) <= settings.largest:
            skipped += 1
            continue
        averages[i] = root(averages[i], g, settings)
        corrected = averages[i] / correction
        if abs(g) > shortest and corrected > 0 and reach != 0:
            nudged = b - reach * (g / max(corrected, abs(g) * least))
            if abs(nudged) <= settings.largest:
                gains[i] = nudged
    return skipped


@subroutine
def _turn_rows(task, first, last, correction, settings, like, odd):
    """Turn neurons of contiguous elements; list those that need float64, and return their number.

    Without momentum, each neuron is written while the next is summed, which hides the latency of memory.
    """
    averages, left, fan_in = array(task.average, 0, task.neurons, like), 0, task.segments * task.run
    share, rounded, has_momentum = 1 / fan_in, like.dtype.type, task.buffer != 0
    stretch, along, shift = rounded(0), rounded(0), rounded(0)
    waiting, before = False, 0
    for neuron in range(first, last):
        start = start_of(task, neuron)
        w, g, ww, gg, wg = 0.0, 0.0, 0.0, 0.0, 0.0
        for segment in range(task.segments):
            for begin in range(0, task.run, BLOCK_ELEMENTS):
                size, offset = min(BLOCK_ELEMENTS, task.run - begin), segment * task.segment_stride + begin
                weights, grads = _row(task, start + offset, size, like)
                if waiting:
                    weights_before, grads_before = _row(task, before + offset, size, like)
                    block = _write_and_sum(weights_before, grads_before, stretch, along, shift, weights, grads)
                elif has_momentum:
                    buffer, kept = array(task.buffer, start + offset, size, like), settings.kept_by_step
                    block = _sum_with_momentum(weights, grads, buffer, rounded(kept), rounded(1 - kept))
                else:
                    block = _sum(weights, grads)
                w, g, ww, gg, wg = w + block[0], g + block[1], ww + block[2], gg + block[3], wg + block[4]
        radius, five = radius_of(task, neuron, like), Sums(w, g, ww, gg, wg)
        turn = _turn(five, fan_in, share, averages[neuron], radius, correction, settings)
        waiting, before = turn.ordinary, start
        if waiting:
            averages[neuron] = turn.average
            stretch, along, shift = rounded(turn.stretch), rounded(turn.along), rounded(turn.shift)
        else:
            odd[left] = neuron
            left += 1
        if waiting and (has_momentum or neuron == last - 1):
            _write_row(task, before, stretch, along, shift, settings, like)
            waiting = False
    return left


@subroutine
def _write_row(task, start, stretch, along, shift, settings, like):
    rounded, kept, kept_by_step = like.dtype.type, settings.momentum, settings.kept_by_step
    shares = rounded(kept_by_step), rounded(1 - kept_by_step), rounded(kept), rounded(1 - kept)
    for segment in range(task.segments):
        for begin in range(0, task.run, BLOCK_ELEMENTS):
            size, at = min(BLOCK_ELEMENTS, task.run - begin), start + segment * task.segment_stride + begin
            weights, grads = _row(task, at, size, like)
            if task.buffer == 0:
                _write(weights, grads, stretch, along, shift)
            else:
                buffer = array(task.buffer, at, size, like)
                _write_with_momentum(weights, grads, buffer, stretch, along, shift, shares)


@vector_subroutine
def _sum(weights, grads):
    w = g = ww = gg = wg = weights.dtype.type(0)
    for i in range(weights.size):
        w += weights[i]
        g += grads[i]
        ww += weights[i] * weights[i]
        gg += grads[i] * grads[i]
        wg += weights[i] * grads[i]
    return w, g, ww, gg, wg


@vector_subroutine
def _write(weights, grads, stretch, along, shift):
    for i in range(weights.size):
        weights[i] = stretch * weights[i] + (along * grads[i] + shift)


@vector_subroutine
def _sum_with_momentum(weights, grads, buffer, kept, new):
    w = u = ww = uu = wu = weights.dtype.type(0)
    for i in range(weights.size):
        direction = kept * buffer[i] + new * grads[i]
        w += weights[i]
        u += direction
        ww += weights[i] * weights[i]
        uu += direction * direction
        wu += weights[i] * direction
    return w, u, ww, uu, wu


@vector_subroutine
def _write_with_momentum(weights, grads, buffer, stretch, along, shift, shares):
    kept_by_step, new_by_step, kept, new = shares
    for i in range(weights.size):
        direction = kept_by_step * buffer[i] + new_by_step * grads[i]
        weights[i] = stretch * weights[i] + (along * direction + shift)
        buffer[i] = kept * buffer[i] + new * grads[i]


@vector_subroutine
def _write_and_sum(weights_before, grads_before, stretch, along, shift, weights, grads):
    w = g = ww = gg = wg = weights.dtype.type(0)
    for i in range(weights.size):
        weights_before[i] = stretch * weights_before[i] + (along * grads_before[i] + shift)
        w += weights[i]
        g += grads[i]
        ww += weights[i] * weights[i]
        gg += grads[i] * grads[i]
        wg += weights[i] * grads[i]
    return w, g, ww, gg, wg


@subroutine
def _turn_columns(task, first, last, correction, settings, like, sums, block, odd, scratch):
    """Turn neurons that are columns in memory, row by row; list those that need float64, and return their number."""
    start, width = start_of(task, first), last - first
    averages, share = array(task.average, first, width, like), 1 / task.segments
    for i in range(5 * SUMS_PITCH):
        sums[i] = 0
    for begin in range(0, task.segments, BLOCK_ELEMENTS):
        for i in range(5 * SUMS_PITCH):
            block[i] = 0
        for row in range(begin, min(begin + BLOCK_ELEMENTS, task.segments)):
            at = start + row * task.segment_stride
            weights, grads = _row(task, at, width, like)
            if task.buffer == 0:
                _sum_down(weights, grads, block)
            else:
                _find_direction(task, at, scratch[:width], settings, like)
                _sum_down(weights, scratch[:width], block)
        for i in range(5 * SUMS_PITCH):
            sums[i] += block[i]

    turns, left = block, 0
    for i in range(width):
        five = Sums(
            sums[i], sums[i + SUMS_PITCH], sums[i + 2 * SUMS_PITCH], sums[i + 3 * SUMS_PITCH], sums[i + 4 * SUMS_PITCH]
        )
        radius = radius_of(task, first + i, like)
        turn = _turn(five, task.segments, share, averages[i], radius, correction, settings)
        if turn.ordinary:
            averages[i] = turn.average
            turns[i], turns[i + SUMS_PITCH], turns[i + 2 * SUMS_PITCH] = turn.stretch, turn.along, turn.shift
        else:
            odd[left] = first + i
            left += 1
    odd[left] = last
    for row in range(task.segments):
        begin = 0
        for neuron in odd[: left + 1]:  # write the columns between two that need float64
            size, at = neuron - first - begin, start + row * task.segment_stride + begin
            weights, grads = _row(task, at, size, like)
            if task.buffer == 0:
                _write_down(weights, grads, turns[begin:])
            else:
                _find_direction(task, at, scratch[:size], settings, like)
                _write_down(weights, scratch[:size], turns[begin:])
                advance(task, at, size, settings, like)
            begin = neuron - first + 1
    return left


@vector_subroutine
def _sum_down(weights, grads, sums):
    for i in range(weights.size):
        sums[i] += weights[i]
        sums[i + SUMS_PITCH] += grads[i]
        sums[i + 2 * SUMS_PITCH] += weights[i] * weights[i]
        sums[i + 3 * SUMS_PITCH] += grads[i] * grads[i]
        sums[i + 4 * SUMS_PITCH] += weights[i] * grads[i]


@vector_subroutine
def _write_down(weights, grads, turns):
    for i in range(weights.size):
        weights[i] = turns[i] * weights[i] + (turns[i + SUMS_PITCH] * grads[i] + turns[i + 2 * SUMS_PITCH])


@subroutine
def _turn(sums, fan_in, share, average, radius, correction, settings):
    """Apply the rule to the sums; not ordinary if a value left its range or cancelled.

    ``share`` is one over the fan-in. Roots and quotients are slow, so there are as few of them as possible.
    """
    low, high = settings.low, settings.high
    square = settings.beta * average * average + (1 - settings.beta) * sums.gg
    bound = correction * settings.least
    divisor = max(square, bound * bound * sums.gg)
    if settings.scale != 0 or radius < 0:
        size = settings.scale if settings.scale != 0 else -radius
        factor = settings.lr * correction * math.sqrt(size * size / divisor)
    else:
        factor = settings.lr * correction * math.sqrt(sums.ww / divisor)
    turned = sums.ww + factor * factor * sums.gg
    total = sums.w - factor * sums.g if settings.fix_mean and fan_in != 2 and radius > 0 else 0.0
    mean = total * share
    left = turned - 2 * factor * sums.wg - total * mean
    stretch = math.sqrt(radius * radius / left) if settings.fix_norm else 1.0
    if radius < 0:  # the neuron started at zero: it may be short
        stretch = min(stretch, 1.0)
    # every comparison is false for NaN
    ordinary = (
        min(sums.ww, sums.gg) > fan_in * low
        and max(sums.ww, sums.gg) < high
        and left > MIN_LEFT * turned
        and square < high
        and low < stretch < high
        and 0 < abs(factor * stretch) < high
    )
    return Turn(ordinary, math.sqrt(square), stretch, -factor * stretch, -mean * stretch)


@compiled
def sum_rows(weights, grads, sums):
    """Write the five sums over the local elements of neurons that are cut over processes."""
    for row in range(weights.shape[0]):
        w, g, ww, gg, wg = 0.0, 0.0, 0.0, 0.0, 0.0
        for begin in range(0, weights.shape[1], BLOCK_ELEMENTS):
            end = min(begin + BLOCK_ELEMENTS, weights.shape[1])
            block = _sum(weights[row, begin:end], grads[row, begin:end])
            w, g, ww, gg, wg = w + block[0], g + block[1], ww + block[2], gg + block[3], wg + block[4]
        sums[0, row], sums[1, row], sums[2, row], sums[3, row], sums[4, row] = w, g, ww, gg, wg


@compiled
def write_rows(weights, grads, stretch, along, shift):
    """Turn the local elements of neurons that are cut: w <- stretch * w + along * g + shift."""
    for row in range(weights.shape[0]):
        _write(weights[row], grads[row], stretch[row], along[row], shift[row])
