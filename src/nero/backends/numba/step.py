"""The numba backend: the step as compiled loops.

Threads take pieces of work from one list for all tensors. The result of a piece does not depend on the
thread that computes it, so the weights do not depend on the number of threads.
"""

import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba.core import event
from torch import Tensor
from torch.nn.parameter import Parameter

from nero.backends import foreach
from nero.backends.job import Job, Settings, has_expected_state
from nero.backends.layout import layout_of
from nero.backends.numba import loops
from nero.backends.numba.loops import MAX_COLUMNS
from nero.backends.numba.tasks import SETTINGS, TASK, Cut

#: Elements per piece: enough to make fetching it cheap, few enough to share the work evenly.
PIECE_ELEMENTS = 1 << 16
#: The cost of a gain in elements: it has a square root and a division of its own.
GAIN_COST = 8
#: The smallest normal float times this, and its inverse, bound the squares of ordinary values.
RANGE_MARGIN = 1e8


@dataclass(slots=True)
class Work:
    """Tensors of one dtype. It keeps them alive, so that their addresses stay valid."""

    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    tasks: list[tuple[float, ...]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # the running total of pieces, task by task
    pieces: int = 0
    has_columns: bool | None = None  # or True


def step(jobs: Sequence[Job], settings: Settings) -> None:
    """Step every job: ordinary CPU tensors by the loops, all others by foreach."""
    rest: list[Job] = []
    works = {torch.float32: Work(), torch.float64: Work()}
    is_scaled = settings.scale is not None
    for job in jobs:
        weight, grad, state, axes, pull, buffer = job
        work, stride = works.get(weight.dtype), weight.stride()
        # the address of a subclass is not that of its elements
        is_plain = type(weight) in (Parameter, Tensor) and weight.is_cpu and grad.layout is torch.strided
        found = cut_of(weight.shape, stride, axes) if is_plain and not weight.is_neg() else None
        if (
            work is None
            or found is None
            or state["grad_norm"].numel() != found[0].neurons
            or not has_expected_state(job)
        ):
            rest.append(job)
            continue
        if buffer is not None and not (type(buffer) is Tensor and buffer.is_cpu and buffer.stride() == stride):
            rest.append(job)
            continue
        cut, pieces = found
        if grad.dtype != weight.dtype or grad.stride() != stride or grad.is_neg():
            grad = torch.empty_strided(weight.shape, stride, dtype=weight.dtype).copy_(grad)
        size = 0  # the address of the radii of neurons, or of the scale of gains
        if axes and "radius" in state:
            size = state["radius"].data_ptr()
        elif not axes and not is_scaled:
            size = state["scale"].data_ptr()
        counts = state["grad_norm"].data_ptr(), state["step"].data_ptr(), state["skipped"].data_ptr()
        others = size, 0 if buffer is None else buffer.data_ptr()
        work.tasks.append((weight.data_ptr(), grad.data_ptr(), *counts, *others, *cut, pull))
        work.weights.append(weight)
        work.grads.append(grad)
        work.pieces += pieces
        work.has_columns = work.has_columns or cut.is_columns or None
        work.ends.append(work.pieces)
    for dtype, work in works.items():
        if work.tasks:
            _do(work, settings, dtype)
    foreach.step(rest, settings)


def _do(work: Work, settings: Settings, dtype: torch.dtype) -> None:
    """Take the step, in as many threads as torch uses."""
    tasks, ends = np.array(work.tasks, TASK), np.array(work.ends)
    skipped, counter = np.zeros(work.pieces, np.int64), np.zeros(1, np.int64)
    arguments: tuple[Any, ...] = (
        tasks,
        ends,
        skipped,
        counter.ctypes.data,
        _settings_array(settings, dtype),
        _like(dtype),
        work.has_columns,
    )
    _announce_compilation()
    threads = torch.get_num_threads()
    pool = _pool(threads, os.getpid())
    helpers = [pool.submit(loops.do_pieces, *arguments) for _ in range(min(threads, work.pieces) - 1)]
    loops.do_pieces(*arguments)
    for helper in helpers:
        helper.result()
    loops.count(tasks, ends, skipped)
    torch.autograd.graph.increment_version(work.weights)  # torch did not see the loops write


class _Notice(event.Listener):  # type: ignore[misc]
    """A message when numba compiles the loops, and does not find them in its cache."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] is loops.do_pieces:
            logging.getLogger("nero").warning(
                "numba compiles Nero's loops for tensors of a new kind: ten seconds or so, then cached"
            )

    def on_end(self, event: Any) -> None:
        pass


@lru_cache(maxsize=1)
def _announce_compilation() -> None:
    event.register("numba:compile", _Notice())


@lru_cache(maxsize=4096)
def cut_of(shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Cut, int] | None:
    """Cut a tensor into pieces; return the cut and their number, or ``None`` if the loops cannot follow it."""
    layout = layout_of(shape, strides, axes)
    if layout is None:
        return None
    if not axes:
        each = PIECE_ELEMENTS // GAIN_COST
        is_contiguous = layout.neurons == 1 or (layout.inner == layout.neurons and layout.inner_stride == 1)
        return (Cut(layout.neurons, 1, 1, 0, 0, 0, 0, each), -(-layout.neurons // each)) if is_contiguous else None
    run, segments, segment_stride = layout.run, layout.fan_in // layout.run, layout.leap
    if layout.stride != 1:
        if segments > 1:
            return None
        run, segments, segment_stride = 1, layout.run, layout.stride
    each = min(MAX_COLUMNS, max(1, PIECE_ELEMENTS // layout.fan_in))
    pieces = -(-layout.neurons // each)
    is_columns = run == 1 and layout.inner_stride == 1
    if is_columns:  # cut as little as possible, so that rows stay whole
        each = -(-layout.inner // -(-layout.inner // MAX_COLUMNS))
        pieces = layout.neurons // layout.inner * -(-layout.inner // each)
    strides_of_neurons = layout.inner, layout.outer_stride, layout.inner_stride
    return Cut(layout.neurons, *strides_of_neurons, segments, segment_stride, run, each, is_columns), pieces


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a fork does not inherit threads
    return ThreadPoolExecutor(threads, "nero")


@lru_cache
def _like(dtype: torch.dtype) -> Any:
    """Make an array that tells a compiled function the dtype."""
    return torch.empty(0, dtype=dtype).numpy()


def _settings_array(settings: Settings, dtype: torch.dtype) -> Any:
    info = torch.finfo(dtype)
    log_beta = math.log(settings.beta) if settings.beta else -math.inf
    options = float(settings.angle), settings.beta, log_beta, settings.scale or 0.0, 1 / settings.longest
    kept = settings.momentum, settings.kept_by_step
    low = RANGE_MARGIN * info.tiny
    limits = info.eps, info.tiny, low, 1 / low, info.max
    return np.array([(*options, *kept, *limits, settings.fix_mean, bool(settings.fix_norm))], SETTINGS)
