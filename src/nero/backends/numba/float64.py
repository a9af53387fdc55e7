"""The turn of one neuron in float64, as the rule is written."""

import math

import numpy as np

from nero.backends.numba.tasks import array, radius_of, start_of, subroutine, vector_subroutine
from nero.rule import SCALE_AT_ORIGIN


@subroutine
def turn_in_float64(task, neuron, correction, settings, like):
    """Apply the rule to one neuron in float64; return whether it was skipped."""
    fan_in, start, average = task.segments * task.run, start_of(task, neuron), array(task.average, neuron, 1, like)
    is_idle = task.buffer == 0 or _is_zero(task, task.buffer, start, like)
    if is_idle and _is_zero(task, task.grad, start, like):  # dead units, of which some networks have many
        average[0] = root(average[0], 0.0, settings)
        return 0
    g = _gather(task, task.grad, start, like)
    if task.buffer != 0:
        g = settings.kept_by_step * _gather(task, task.buffer, start, like) + (1 - settings.kept_by_step) * g
    rounded, length = like.dtype.type, _norm(g)
    if not length <= settings.largest:
        return 1
    for segment in range(task.segments if task.buffer != 0 else 0):
        advance(task, start + segment * task.segment_stride, task.run, settings, like)
    average[0] = root(average[0], rounded(length), settings)
    corrected = average[0] / correction
    if not (length > (settings.tiny if task.buffer != 0 else 0.0) and corrected > 0 and settings.lr != 0):
        return 0
    divisor = max(corrected, length * settings.least)

    w, radius = _gather(task, task.weight, start, like), radius_of(task, neuron, like)
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
        for i in range(fan_in):
            w[i] /= peak
        stretch, square = peak, _square(w)
        if fix_mean:
            _centre(w)
            _centre(w)  # the rounding error of the first, which a nearly constant neuron has
            left = _square(w)
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
        weights = array(task.weight, start + segment * task.segment_stride, task.run, like)
        for i in range(task.run):
            weights[i] = w[segment * task.run + i] * stretch
    return 0


@subroutine
def _square(elements):
    square = 0.0
    for element in elements:
        square += element * element
    return square


@subroutine
def _centre(elements):
    total = 0.0
    for element in elements:
        total += element
    for i in range(elements.size):
        elements[i] -= total / elements.size


@subroutine
def _is_zero(task, address, start, like):
    for segment in range(task.segments):
        if _sum_of_sizes(array(address, start + segment * task.segment_stride, task.run, like)) != 0:
            return False
    return True


@vector_subroutine
def _sum_of_sizes(elements):
    total = elements.dtype.type(0)
    for i in range(elements.size):
        total += abs(elements[i])
    return total


@subroutine
def root(average, length, settings):
    """Update the running average; by hypot, which is slow, only if squares leave float64's range."""
    average, length = np.float64(average), np.float64(length)
    square = settings.beta * (average * average) + (1 - settings.beta) * (length * length)
    if 1e-290 < square < 1e290:
        return math.sqrt(square)
    return math.hypot(math.sqrt(settings.beta) * average, math.sqrt(1 - settings.beta) * length)


@subroutine
def _gather(task, address, start, like):
    elements = np.empty(task.segments * task.run)
    for segment in range(task.segments):
        run = array(address, start + segment * task.segment_stride, task.run, like)
        for i in range(task.run):
            elements[segment * task.run + i] = run[i]
    return elements


@subroutine
def _norm(elements):
    """Compute a norm without overflow or underflow; infinite if any element is not finite."""
    peak = _peak(elements)
    if not 0 < peak < math.inf:
        return peak
    square = 0.0
    for element in elements:
        square += (element / peak) ** 2
    return peak * math.sqrt(square)


@subroutine
def _peak(elements):
    peak = 0.0
    for element in elements:
        if not abs(element) < math.inf:
            return math.inf
        peak = max(peak, abs(element))
    return peak


@subroutine
def advance(task, at, size, settings, like):
    """Update the momentum of some elements."""
    kept, rounded = settings.momentum, like.dtype.type
    _mix_in_place(
        array(task.buffer, at, size, like), array(task.grad, at, size, like), rounded(kept), rounded(1 - kept)
    )


@vector_subroutine
def _mix_in_place(buffer, grads, kept, new):
    for i in range(grads.size):
        buffer[i] = kept * buffer[i] + new * grads[i]
