"""A step that is made over and over: on a GPU, a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

#: Steps before a graph is captured: libraries choose their kernels, and Nero's are compiled.
WARM_UP = 3


class Captured:
    """A function of tensors of always the same shapes, which is captured at its first call and replayed from then on.

    Args:
        function: what to do; called under the stream.
        changing: all tensors that it changes, which the warm-up before the capture must leave as they were.
        generator: that it draws from.
        stream: to capture on; without, as on a CPU, the function is called as it is.
    """

    def __init__(
        self,
        function: Callable[..., None],
        changing: Callable[[], list[Tensor]],
        generator: torch.Generator,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.function, self.changing, self.generator, self.stream = function, changing, generator, stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._held: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> None:
        if self.stream is None:
            self.function(*inputs)
            return
        if self._graph is None:
            self._held = tuple(each.clone() for each in inputs)
            self._graph = self._capture()
        for held, each in zip(self._held, inputs, strict=True):
            held.copy_(each)
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        changing = self.changing()
        before, random = [tensor.clone() for tensor in changing], self.generator.get_state()
        for _ in range(WARM_UP):
            self.function(*self._held)
        for tensor, value in zip(changing, before, strict=True):
            tensor.copy_(value)
        self.generator.set_state(random)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=self.stream):
            self.function(*self._held)
        return graph
