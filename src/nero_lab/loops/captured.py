"""A step that is made over and over: on a GPU, a CUDA graph."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

#: Calls before a graph is captured: libraries choose their kernels, and Nero's are compiled.
WARM_UP = 3


class Captured:
    """A function of tensors, captured when it is first called with some shapes and replayed from then on.

    Args:
        function: what to do; called under the stream.
        changing: all tensors that it changes, which the warm-up before a capture must leave as they were.
        stream: to capture on; without, as on a CPU, the function is called as it is.
        generator: that it draws from, if it does.
        pool: of memory, if it is shared with others that never run at the same time.
        mode: what else the process may do while a graph is captured, as ``torch.cuda.graph`` calls it.

    Attributes:
        graphs: with the tensors that they read, by the kind of call and the inputs' shapes.
    """

    def __init__(
        self,
        function: Callable[..., None],
        changing: Callable[[], list[Tensor]],
        stream: torch.cuda.Stream | None,
        *,
        generator: torch.Generator | None = None,
        pool: Any = None,
        mode: str = "global",
    ) -> None:
        self.function, self.changing, self.stream, self.generator = function, changing, stream, generator
        self.graphs: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if pool is None and stream is not None else pool
        self._mode = mode

    def __call__(self, *inputs: Tensor, kind: Hashable = None) -> None:
        """Do it with these; calls of different kinds have graphs of their own."""
        if self.stream is None:
            self.function(*inputs)
            return
        key = (kind, *(each.shape for each in inputs))
        if key not in self.graphs:
            held = tuple(each.clone() for each in inputs)
            self.graphs[key] = self._capture(held), held
        graph, held = self.graphs[key]
        for place, each in zip(held, inputs, strict=True):
            place.copy_(each)
        graph.replay()

    def _capture(self, held: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        changing = self.changing()
        before = [tensor.clone() for tensor in changing]
        random = None if self.generator is None else self.generator.get_state()
        for _ in range(WARM_UP):
            self.function(*held)
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None and random is not None:
            self.generator.set_state(random)
            graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode=self._mode):
            self.function(*held)
        return graph
