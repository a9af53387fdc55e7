"""The compiled loops of the numba backend.

Five sums over a neuron's elements (Σw, Σg, Σw², Σg² and Σwg) determine its turn: the turned and balanced
neuron is a·w + b·g + c, with three numbers that follow from the sums. So a neuron is read once, and
written while it is still in cache. Where the sums lose precision (a gradient of 1e25 or NaN, a constant
neuron, a turn that cancels the weights), the neuron is turned in float64, as the rule is written.
"""

import math
from typing import NamedTuple

import numba
import numpy as np

from nero.backends.numba.tasks import compiled, compiled_vector, fetch, pointer
from nero.rule import SCALE_AT_ORIGIN

#: Elements summed in the weights' own precision; the sums of blocks are added in float64.
BLOCK_ELEMENTS = 1024
#: Columns turned together: their sums, and a few rows, should stay in cache.
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


@compiled
def _array(address, start, size, like):
    return numba.carray(pointer(address + start * like.itemsize), (size,), like.dtype)


@compiled
def _direction(task, at, size, settings, like, scratch):
    """Return the direction of the step at some elements: the gradient or, with momentum, a part of ``scratch``."""
    grads = _array(task.grad, at, size, like)
    if task.buffer == 0:
        return grads
    rounded, kept, direction = like.dtype.type, settings.kept_by_step, scratch[:size]
    _mix(direction, _array(task.buffer, at, size, like), grads, rounded(kept), rounded(1 - kept))
    return direction


@compiled
def _advance(task, at, size, settings, like):
    """Update the momentum of some elements, if there is any."""
    if task.buffer != 0:
        rounded, kept, buffer = like.dtype.type, settings.momentum, _array(task.buffer, at, size, like)
        _mix(buffer, buffer, _array(task.grad, at, size, like), rounded(kept), rounded(1 - kept))


@compiled_vector
def _mix(mixed, buffer, grads, kept, new):
    for i in range(grads.size):
        mixed[i] = kept * buffer[i] + new * grads[i]


@compiled
def do_pieces(tasks, ends, skipped, counter, settings, like):
    """Take pieces of work until none is left."""
    while True:
        piece = fetch(counter)
        if piece >= ends[-1]:
            return
        number = np.searchsorted(ends, piece, side="right")
        task = tasks[number]
        part = piece - (ends[number - 1] if number else 0)
        step = numba.carray(pointer(task.step), (1,), np.float32)[0] + np.float32(1)
        correction = math.sqrt(-math.expm1(step * settings[0].log_beta))
        if task.run == 1 and task.inner_stride == 1:
            lots = -(-task.inner // task.each)
            first = part // lots * task.inner + part % lots * task.each
            last = min(first + task.each, (part // lots + 1) * task.inner)
            skipped[piece] = _turn_columns(task, first, last, correction, settings[0], like)
            continue
        first, last = part * task.each, min((part + 1) * task.each, task.neurons)
        if task.run:
            skipped[piece] = _turn_rows(task, first, last, correction, settings[0], like)
        else:
            skipped[piece] = _nudge(task, first, last, correction, settings[0], like)


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


@compiled
def _nudge(task, first, last, correction, settings, like):
    gains = _array(task.weight, first, last - first, like)
    grads = _array(task.grad, first, last - first, like)
    averages = _array(task.average, first, last - first, like)
    buffers = _array(task.buffer if task.buffer != 0 else task.grad, first, last - first, like)
    kept, kept_by_step = settings.momentum, settings.kept_by_step
    reach = settings.lr * (_array(task.size, 0, 1, like)[0] if task.size else settings.scale)
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
        averages[i] = _root(averages[i], g, settings)
        corrected = averages[i] / correction
        if abs(g) > shortest and corrected > 0 and reach != 0:
            nudged = b - reach * (g / max(corrected, abs(g) * least))
            if abs(nudged) <= settings.largest:
                gains[i] = nudged
    return skipped


@compiled
def _turn_rows(task, first, last, correction, settings, like):
    """Turn neurons of contiguous elements.

    Each neuron is written while the next is summed, which hides the latency of memory.
    """
    averages = _array(task.average, 0, task.neurons, like)
    rounded = like.dtype.type
    stretch, along, shift = rounded(0), rounded(0), rounded(0)
    waiting, before, skipped = False, 0, 0
    block_elements = BLOCK_ELEMENTS if task.buffer != 0 else task.run
    scratch = np.empty(2 * BLOCK_ELEMENTS if task.buffer != 0 else 0, like.dtype)
    scratch_before = scratch[BLOCK_ELEMENTS:]
    for neuron in range(first, last):
        start = _start(task, neuron)
        w, g, ww, gg, wg = 0.0, 0.0, 0.0, 0.0, 0.0
        for segment in range(task.segments):
            for begin in range(0, task.run, BLOCK_ELEMENTS):
                size, offset = min(BLOCK_ELEMENTS, task.run - begin), segment * task.segment_stride + begin
                weights = _array(task.weight, start + offset, size, like)
                grads = _direction(task, start + offset, size, settings, like, scratch)
                if waiting:
                    weights_before = _array(task.weight, before + offset, size, like)
                    grads_before = _direction(task, before + offset, size, settings, like, scratch_before)
                    block = _write_and_sum(weights_before, grads_before, stretch, along, shift, weights, grads)
                    _advance(task, before + offset, size, settings, like)
                else:
                    block = _sum(weights, grads)
                w, g, ww, gg, wg = w + block[0], g + block[1], ww + block[2], gg + block[3], wg + block[4]
        radius = _radius(task, neuron, like)
        turn = _turn(Sums(w, g, ww, gg, wg), task, averages[neuron], radius, correction, settings)
        waiting, before = turn.ordinary, start
        if waiting:
            averages[neuron] = turn.average
            stretch, along, shift = rounded(turn.stretch), rounded(turn.along), rounded(turn.shift)
        else:
            skipped += _turn_in_float64(task, neuron, correction, settings, like)
    for segment in range(task.segments if waiting else 0):
        for begin in range(0, task.run, block_elements):
            size, at = min(block_elements, task.run - begin), before + segment * task.segment_stride + begin
            grads = _direction(task, at, size, settings, like, scratch)
            _write(_array(task.weight, at, size, like), grads, stretch, along, shift)
            _advance(task, at, size, settings, like)
    return skipped


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
def _write(weights, grads, stretch, along, shift):
    for i in range(weights.size):
        weights[i] = stretch * weights[i] + (along * grads[i] + shift)


@compiled_vector
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


@compiled
def _turn_columns(task, first, last, correction, settings, like):
    """Turn neurons that are columns in memory, row by row."""
    averages = _array(task.average, 0, task.neurons, like)
    start, width = _start(task, first), last - first
    sums, block = np.zeros(5 * SUMS_PITCH), np.empty(5 * SUMS_PITCH, like.dtype)
    scratch = np.empty(width if task.buffer != 0 else 0, like.dtype)
    for begin in range(0, task.segments, BLOCK_ELEMENTS):
        block[:] = 0
        for row in range(begin, min(begin + BLOCK_ELEMENTS, task.segments)):
            at = start + row * task.segment_stride
            grads = _direction(task, at, width, settings, like, scratch)
            _sum_down(_array(task.weight, at, width, like), grads, block)
        sums += block

    turns, odd, count = block, np.empty(width + 1, np.int64), 0
    for i in range(width):
        five = Sums(
            sums[i], sums[i + SUMS_PITCH], sums[i + 2 * SUMS_PITCH], sums[i + 3 * SUMS_PITCH], sums[i + 4 * SUMS_PITCH]
        )
        radius = _radius(task, first + i, like)
        turn = _turn(five, task, averages[first + i], radius, correction, settings)
        if turn.ordinary:
            averages[first + i] = turn.average
            turns[i], turns[i + SUMS_PITCH], turns[i + 2 * SUMS_PITCH] = turn.stretch, turn.along, turn.shift
        else:
            odd[count] = i
            count += 1
    odd[count] = width

    for row in range(task.segments):
        begin, at = 0, start + row * task.segment_stride
        for end in odd[: count + 1]:  # write the columns between two that need float64
            weights = _array(task.weight, at + begin, end - begin, like)
            grads = _direction(task, at + begin, end - begin, settings, like, scratch)
            _write_down(weights, grads, turns[begin:])
            _advance(task, at + begin, end - begin, settings, like)
            begin = end + 1
    skipped = 0
    for i in odd[:count]:
        skipped += _turn_in_float64(task, first + i, correction, settings, like)
    return skipped


@compiled_vector
def _sum_down(weights, grads, sums):
    for i in range(weights.size):
        sums[i] += weights[i]
        sums[i + SUMS_PITCH] += grads[i]
        sums[i + 2 * SUMS_PITCH] += weights[i] * weights[i]
        sums[i + 3 * SUMS_PITCH] += grads[i] * grads[i]
        sums[i + 4 * SUMS_PITCH] += weights[i] * grads[i]


@compiled_vector
def _write_down(weights, grads, turns):
    for i in range(weights.size):
        weights[i] = turns[i] * weights[i] + (turns[i + SUMS_PITCH] * grads[i] + turns[i + 2 * SUMS_PITCH])


@compiled
def _start(task, neuron):
    return neuron // task.inner * task.outer_stride + neuron % task.inner * task.inner_stride


@compiled
def _radius(task, neuron, like):
    return np.float64(_array(task.size, neuron, 1, like)[0]) if task.size else 1.0


@compiled
def _turn(sums, task, average, radius, correction, settings):
    """Apply the rule to the sums; not ordinary if a value left its range or cancelled."""
    fan_in, low, high = task.segments * task.run, settings.low, 1 / settings.low
    average = math.sqrt(settings.beta * average * average + (1 - settings.beta) * sums.gg)
    divisor = max(average, correction * settings.least * math.sqrt(sums.gg))
    size = settings.scale if settings.scale != 0 else (math.sqrt(sums.ww) if radius > 0 else -radius)
    factor = settings.lr * size * correction / divisor
    turned = sums.ww + factor * factor * sums.gg
    mean = (sums.w - factor * sums.g) / fan_in if settings.fix_mean and fan_in != 2 and radius > 0 else 0.0
    left = turned - 2 * factor * sums.wg - fan_in * mean * mean
    stretch = abs(radius) / math.sqrt(left) if settings.fix_norm else 1.0
    if radius < 0:  # the neuron started at zero: it may be short
        stretch = min(stretch, 1.0)
    # every comparison is false for NaN
    ordinary = (
        min(sums.ww, sums.gg) > fan_in * low
        and max(sums.ww, sums.gg) < high
        and left > MIN_LEFT * turned
        and average < high
        and low < stretch < high
        and 0 < abs(factor * stretch) < high
    )
    return Turn(ordinary, average, stretch, -factor * stretch, -mean * stretch)


@compiled
def _turn_in_float64(task, neuron, correction, settings, like):
    """Apply the rule to one neuron in float64; return whether it was skipped."""
    fan_in, start, average = task.segments * task.run, _start(task, neuron), _array(task.average, neuron, 1, like)
    is_idle = task.buffer == 0 or _is_zero(task, task.buffer, start, like)
    if is_idle and _is_zero(task, task.grad, start, like):  # dead units, of which some networks have many
        average[0] = _root(average[0], 0.0, settings)
        return 0
    g = _gather(task, task.grad, start, like)
    if task.buffer != 0:
        g = settings.kept_by_step * _gather(task, task.buffer, start, like) + (1 - settings.kept_by_step) * g
    rounded, length = like.dtype.type, _norm(g)
    if not length <= settings.largest:
        return 1
    for segment in range(task.segments):
        _advance(task, start + segment * task.segment_stride, task.run, settings, like)
    average[0] = _root(average[0], rounded(length), settings)
    corrected = average[0] / correction
    if not (length > (settings.tiny if task.buffer != 0 else 0.0) and corrected > 0 and settings.lr != 0):
        return 0
    divisor = max(corrected, length * settings.least)

    w, radius = _gather(task, task.weight, start, like), _radius(task, neuron, like)
    size = settings.scale if settings.scale != 0 else (_norm(w) if radius > 0 else -radius)
    reach = settings.lr * (size if size != 0 else SCALE_AT_ORIGIN)
    for i in range(fan_in):
        w[i] -= reach * (g[i] / divisor)

    peak = _peak(w)
    if not 0 < peak <= settings.largest:
        return 0
    fix_mean = settings.fix_mean and fan_in != 2 and radius > 0
    stretch = 1.0
    if fix_mean or settings.fix_norm:
        w /= peak
        stretch = peak
        square = (w * w).sum()
        if fix_mean:
            w -= w.sum() / fan_in
            w -= w.sum() / fan_in  # the rounding error of the first, which a nearly constant neuron has
            left = (w * w).sum()
            # the rounding error of a constant neuron is not a direction
            if not left > (16 * settings.eps) ** 2 * square:
                return 0
            square = left
        if settings.fix_norm:
            stretch = abs(radius) / math.sqrt(square)
            if radius < 0:
                stretch = min(stretch, peak)
        elif not peak < settings.largest / 2:
            return 0
    for segment in range(task.segments):
        weights = _array(task.weight, start + segment * task.segment_stride, task.run, like)
        for i in range(task.run):
            weights[i] = w[segment * task.run + i] * stretch
    return 0


@compiled
def _is_zero(task, address, start, like):
    for segment in range(task.segments):
        if _sum_of_sizes(_array(address, start + segment * task.segment_stride, task.run, like)) != 0:
            return False
    return True


@compiled_vector
def _sum_of_sizes(elements):
    total = elements.dtype.type(0)
    for i in range(elements.size):
        total += abs(elements[i])
    return total


@compiled
def _root(average, length, settings):
    """Update the running average; by hypot, which is slow, only if squares leave float64's range."""
    average, length = np.float64(average), np.float64(length)
    square = settings.beta * (average * average) + (1 - settings.beta) * (length * length)
    if 1e-290 < square < 1e290:
        return math.sqrt(square)
    return math.hypot(math.sqrt(settings.beta) * average, math.sqrt(1 - settings.beta) * length)


@compiled
def _gather(task, address, start, like):
    elements = np.empty(task.segments * task.run)
    for segment in range(task.segments):
        run = _array(address, start + segment * task.segment_stride, task.run, like)
        for i in range(task.run):
            elements[segment * task.run + i] = run[i]
    return elements


@compiled
def _norm(elements):
    """Compute a norm without overflow or underflow; infinite if any element is not finite."""
    peak = _peak(elements)
    if not 0 < peak < math.inf:
        return peak
    square = 0.0
    for element in elements:
        square += (element / peak) ** 2
    return peak * math.sqrt(square)


@compiled
def _peak(elements):
    peak = 0.0
    for element in elements:
        if not abs(element) < math.inf:
            return math.inf
        peak = max(peak, abs(element))
    return peak
