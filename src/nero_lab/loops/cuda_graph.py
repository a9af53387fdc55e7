"""Steps that are captured as CUDA graphs and replayed."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Calls before a capture, in which libraries choose kernels and Nero compiles its own.
WARM_UP_CALLS = 3


class CapturedStep:
    """Function of tensors that is captured at the first call with given shapes, and replayed from then on.

    Args:
        function: the function; called under the stream. What it returns must be the same at every call, except for the
            values of tensors.
        changing: returns all tensors that the function changes, which the warm-up must restore.
        stream: stream to capture on; None, as on a CPU: call the function directly.
        generator: random generator that the function draws from, if any.
        pool: memory pool, if shared with graphs that never run at the same time.

    Attributes:
        graphs: each graph with its input tensors and what the function returned, by the input shapes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        changing: Callable[[], list[Tensor]],
        stream: torch.cuda.Stream | None,
        *,
        generator: torch.Generator | None = None,
        pool: Any = None,
    ) -> None:
        self.function, self.changing, self.stream, self.generator = function, changing, stream, generator
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Any]] = {}
        self._pool = torch.cuda.graph_pool_handle() if pool is None and stream is not None else pool

    def __call__(self, *inputs: Tensor) -> Any:
        """Call the function, or replay it. Return what it returned: after a replay, the tensors of that graph."""
        if self.stream is None:
            return self.function(*inputs)
        graph, held, result = self.prepare(*inputs)
        for static, value in zip(held, inputs, strict=True):
            static.copy_(value)
        graph.replay()
        return result

    def prepare(self, *inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Any]:
        """Capture the function for inputs of these shapes, unless that is done. Return the entry of the graph."""
        key = tuple(value.shape for value in inputs)
        if key not in self.graphs:
            held = tuple(value.clone() for value in inputs)
            graph, result = self._capture(held)
            self.graphs[key] = graph, held, result
        return self.graphs[key]

    def _capture(self, held: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, Any]:
        changing = self.changing()
        before = [tensor.clone() for tensor in changing]
        random = None if self.generator is None else self.generator.get_state()
        for _ in range(WARM_UP_CALLS):
            self.function(*held)
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None and random is not None:
            self.generator.set_state(random)
            graph.register_generator_state(self.generator)
        gc.collect()  # a graph of an earlier run that is freed during the capture would break it
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            result = self.function(*held)
        return graph, result
