"""The numba backend: the step as compiled loops.

Threads take pieces of work from one list for all tensors. The result of a piece does not depend on the
thread that computes it, so the weights do not depend on the number of threads.
"""

import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba.core import event
from torch import Tensor
from torch.nn.parameter import Parameter

from nero.backends.job import Rates, Settings
from nero.backends.layout import Layout
from nero.backends.numba import loops
from nero.backends.numba.loops import MAX_COLUMNS
from nero.backends.numba.tasks import SETTINGS, TASK, Pieces
from nero.backends.sweep import Line, Sweep
from nero.rule import statistics_dtype

#: Elements per piece: enough to make fetching it cheap, few enough to share the work evenly.
PIECE_ELEMENTS = 1 << 16
#: The cost of a gain in elements: it has a square root and a division of its own.
GAIN_COST = 8
#: The smallest normal float times this, and its inverse, bound the squares of ordinary values.
RANGE_MARGIN = 1e8


class NumbaSweep(Sweep):
    """The steps of the parameters of one group and dtype by compiled loops."""

    casts_gradients = True

    @torch.inference_mode(False)
    def __init__(self, lines: Sequence[Line], generator: torch.Generator | None = None) -> None:
        super().__init__(lines, generator)
        found = (pieces_of(line.layout, is_neuron=bool(line.job.axes)) for line in lines)
        pieces = [each for each in found if each is not None]  # all: follows() has said so
        self._tasks = np.array(list(map(_task, lines, pieces)), TASK)
        self._pieces = np.array([each.number for each in pieces])
        self._has_columns = any(each.is_columns for each in pieces) or None  # None: their loops are not compiled
        self._dtype = statistics_dtype(self._dtypes[0])
        self._like = torch.empty(0, dtype=self._dtype, device="cpu").numpy()  # tells a compiled function the dtype
        self._settings, self._group = lines[0].settings, lines[0].group
        self._rates: Sequence[Rates] = ()
        self._options: Any = None

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Return whether the loops can read a parameter or a gradient."""
        # the address of a subclass is not that of its elements
        return type(tensor) in (Parameter, Tensor) and tensor.is_cpu and tensor.layout is torch.strided

    @staticmethod
    def follows(layout: Layout, axes: tuple[int, ...]) -> bool:
        """Return whether the loops can follow the layout of neurons, or of gains, which have no axes."""
        return pieces_of(layout, is_neuron=bool(axes)) is not None

    @staticmethod
    def key(line: Line) -> object:
        """Return the group, whose settings the loops read once, and the dtype that they are compiled for."""
        return line.group, line.parameter.dtype

    def _step(self, addresses: list[int], rates: Sequence[Rates]) -> None:
        """Take the step, in as many threads as torch uses."""
        if rates is not self._rates:
            self._rates, self._options = rates, _settings_array(self._settings, rates[self._group], self._dtype)
        tasks, pieces = self._tasks, self._pieces
        tasks["grad"] = addresses
        if not all(addresses):
            has_grad = tasks["grad"] != 0
            tasks, pieces = tasks[has_grad], pieces[has_grad]
        if not len(tasks):
            return
        ends = np.cumsum(pieces)  # the running total of pieces, task by task
        skipped, counter = np.zeros(ends[-1], np.int64), np.zeros(1, np.int64)
        arguments: Any = tasks, ends, skipped, counter, self._options, self._like, self._has_columns, self._keys()
        _announce_compilation()
        threads = torch.get_num_threads()
        pool = _pool(threads, os.getpid())
        helpers = [pool.submit(loops.do_pieces, *arguments) for _ in range(min(threads, ends[-1]) - 1)]
        loops.do_pieces(*arguments)
        for helper in helpers:
            helper.result()
        loops.count(tasks, ends, skipped)

    def _keys(self) -> Any:
        """Return the keys of the noise, if tensors are bf16: for each task, those of its weights and its momentum."""
        return None


class HalfSweep(NumbaSweep):
    """The steps of the parameters of one group in bf16."""

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Return whether the loops can read a parameter or a gradient."""
        return NumbaSweep.takes(tensor) and tensor.dtype == torch.bfloat16

    @staticmethod
    def follows(layout: Layout, axes: tuple[int, ...]) -> bool:  # noqa: ARG004
        """Return whether neurons, or gains, are contiguous."""
        is_one_run = layout.run == layout.fan_in and layout.stride == 1 and layout.inner == layout.neurons
        return is_one_run and (layout.inner_stride == layout.fan_in or layout.neurons == 1)

    def _keys(self) -> Any:
        count = 2 * len(self._tasks) if self._settings.rounding == "stochastic" else 0
        return torch.randint(1 << 32, (count,), generator=self.generator, device="cpu").numpy().astype(np.uint32)


def _task(line: Line, pieces: Pieces) -> tuple[float, ...]:
    """Return the task of a line, without the address of its gradient."""
    job, state = line.job, line.job.state
    size = 0  # the address of the radii of neurons, or of the scale of gains
    if job.axes and "radius" in state:
        size = state["radius"].data_ptr()
    elif not job.axes and line.settings.scale is None:
        size = state["scale"].data_ptr()
    counts = state["grad_norm"].data_ptr(), state["step"].data_ptr(), state["skipped"].data_ptr()
    buffer = 0 if job.buffer is None else job.buffer.data_ptr()
    return (job.parameter.data_ptr(), 0, *counts, size, buffer, *pieces, job.pull)


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
def pieces_of(layout: Layout, is_neuron: bool) -> Pieces | None:
    """Divide a tensor into pieces; ``None`` if the loops cannot follow its layout."""
    if not is_neuron:
        is_contiguous = layout.neurons == 1 or (layout.inner == layout.neurons and layout.inner_stride == 1)
        return Pieces(layout.neurons, 1, 1, 0, 0, 0, 0, PIECE_ELEMENTS // GAIN_COST) if is_contiguous else None
    run, segments, segment_stride = layout.run, layout.fan_in // layout.run, layout.leap
    if layout.stride != 1:
        if segments > 1:
            return None
        run, segments, segment_stride = 1, layout.run, layout.stride
    each = min(MAX_COLUMNS, max(1, PIECE_ELEMENTS // layout.fan_in))
    is_columns = run == 1 and layout.inner_stride == 1
    if is_columns:  # as few pieces as possible, so that rows stay whole
        each = -(-layout.inner // -(-layout.inner // MAX_COLUMNS))
    strides_of_neurons = layout.inner, layout.outer_stride, layout.inner_stride
    return Pieces(layout.neurons, *strides_of_neurons, segments, segment_stride, run, each, is_columns)


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a fork does not inherit threads
    return ThreadPoolExecutor(threads, "nero")


def _settings_array(settings: Settings, rates: Rates, dtype: torch.dtype) -> Any:
    info = torch.finfo(dtype)
    log_beta = math.log(settings.beta) if settings.beta else -math.inf
    options = float(rates.angle), settings.beta, log_beta, settings.scale or 0.0, 1 / settings.longest
    kept = rates.momentum, rates.kept_by_step
    low = RANGE_MARGIN * info.tiny
    limits = info.eps, info.tiny, low, 1 / low, info.max
    return np.array([(*options, *kept, *limits, settings.fix_mean, bool(settings.fix_norm))], SETTINGS)
