"""Parameter shapes of known networks: what a step of an optimiser sees of them."""

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

Parameters: TypeAlias = dict[tuple[int, ...] | None, list[nn.Parameter]]


class Shapes(NamedTuple):
    """Shapes by fan-in axes; ``None`` stands for the shape rule."""

    name: str
    by_axes: dict[tuple[int, ...] | None, list[tuple[int, ...]]]
    dtype: torch.dtype = torch.float32

    def parameters(self, device: torch.device) -> Parameters:
        """Make random parameters of these shapes, with random gradients."""
        generator = torch.Generator(device).manual_seed(0)

        def random(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

        made = {axes: [nn.Parameter(random(shape)) for shape in shapes] for axes, shapes in self.by_axes.items()}
        for parameters in made.values():
            for parameter in parameters:
                parameter.grad = random(tuple(parameter.shape))
        return made

    @property
    def total(self) -> int:
        """The number of elements of all tensors."""
        return sum(math.prod(shape) for shapes in self.by_axes.values() for shape in shapes)

    @property
    def distinct(self) -> "Shapes":
        """Every shape once."""
        return self._replace(by_axes={axes: list(dict.fromkeys(shapes)) for axes, shapes in self.by_axes.items()})


def flat(parameters: Parameters) -> list[nn.Parameter]:
    """List all parameters."""
    return [parameter for alike in parameters.values() for parameter in alike]


def groups(parameters: Parameters) -> list[dict[str, Any]]:
    """Make Nero's parameter groups."""
    return [{"params": alike, "fan_in_axes": axes} for axes, alike in parameters.items()]


def twin(parameters: Parameters, dtype: torch.dtype = torch.float32) -> Parameters:
    """Copy parameters to a dtype; gradients of that dtype are shared, not copied."""
    made: Parameters = {}
    for axes, alike in parameters.items():
        made[axes] = [nn.Parameter(parameter.detach().to(dtype, copy=True)) for parameter in alike]
        for copied, parameter in zip(made[axes], alike, strict=True):
            copied.grad = None if parameter.grad is None else parameter.grad.to(dtype)
    return made


def deep_mlp(depth: int = 100, width: int = 784, classes: int = 10) -> Shapes:
    """Return the shapes of the 100-layer perceptron of Section 5.3."""
    hidden: list[tuple[int, ...]] = [(width, width), (width,)]
    return Shapes(f"{depth}-layer MLP", {None: hidden * (depth - 1) + [(classes, width), (classes,)]})


def resnet50() -> Shapes:
    """Return the shapes of ResNet-50, with the gains and biases of batch norm."""
    shapes: list[tuple[int, ...]] = []

    def convolution(out: int, channels: int, kernel: int) -> None:
        shapes.extend([(out, channels, kernel, kernel), (out,), (out,)])

    convolution(64, 3, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, channels, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, channels, 1)
            channels = 4 * width
    return Shapes("ResNet-50", {None: [*shapes, (1000, 2048), (1000,)]})


def gpt2(
    transposed: bool = False,
    layers: int = 12,
    width: int = 768,
    vocabulary: int = 50257,
    name: str = "GPT-2 small",
) -> Shapes:
    """Return the shapes of GPT-2 with ``nn.Linear``, or transposed with Hugging Face's ``Conv1D``."""
    rows: list[tuple[int, ...]] = [(vocabulary, width), (1024, width), (width,), (width,)]
    matrices: list[tuple[int, ...]] = []
    for _ in range(layers):
        rows += [(width,), (width,)] * 2 + [(3 * width,), (width,), (4 * width,), (width,)]
        for out, fan_in in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
            matrices.append((fan_in, out) if transposed else (out, fan_in))
    if transposed:
        return Shapes(f"{name}, transposed", {None: rows, (0,): matrices})
    return Shapes(name, {None: rows + matrices})


def gpt2_xl() -> Shapes:
    """Return the shapes of GPT-2 XL."""
    return gpt2(layers=48, width=1600, name="GPT-2 XL")


def vit(layers: int = 24, width: int = 1024, classes: int = 1000) -> Shapes:
    """Return the shapes of ViT-L/16."""
    shapes: list[tuple[int, ...]] = [(width,), (197, width), (width, 3, 16, 16), (width,)]
    for _ in range(layers):
        shapes += [(width,)] * 4 + [(3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return Shapes("ViT-L", {None: [*shapes, (width,), (width,), (classes, width), (classes,)]})


def llama(layers: int = 16, width: int = 2048, hidden: int = 8192, vocabulary: int = 128_256) -> Shapes:
    """Return the shapes of Llama 3.2 1B with a head of its own: 1.5 billion parameters."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (width,), (vocabulary, width)]
    for _ in range(layers):
        shapes += [(width,), (width, width), (width // 4, width), (width // 4, width), (width, width)]
        shapes += [(width,), (hidden, width), (hidden, width), (width, hidden)]
    return Shapes("Llama 1.5 B", {None: shapes})


def efficientnet(classes: int = 1000) -> Shapes:
    """Return the shapes of EfficientNet-B0: many small tensors."""
    shapes: list[tuple[int, ...]] = []

    def convolution(out: int, channels: int, kernel: int) -> None:
        shapes.extend([(out, channels, kernel, kernel), (out,), (out,)])

    convolution(32, 3, 3)
    channels = 32
    for expand, out, blocks, kernel in (
        (1, 16, 1, 3), (6, 24, 2, 3), (6, 40, 2, 5), (6, 80, 3, 3), (6, 112, 3, 5), (6, 192, 4, 5), (6, 320, 1, 3)
    ):  # fmt: skip
        for _ in range(blocks):
            wide, squeezed = expand * channels, channels // 4
            if expand > 1:
                convolution(wide, channels, 1)
            convolution(wide, 1, kernel)
            shapes.extend([(squeezed, wide, 1, 1), (squeezed,), (wide, squeezed, 1, 1), (wide,)])
            convolution(out, wide, 1)
            channels = out
    convolution(1280, channels, 1)
    return Shapes("EfficientNet-B0", {None: [*shapes, (classes, 1280), (classes,)]})


def convnext(classes: int = 1000) -> Shapes:
    """Return the shapes of ConvNeXt-B: depthwise filters of 49 elements among large matrices."""
    shapes: list[tuple[int, ...]] = [(128, 3, 4, 4), (128,), (128,), (128,)]
    for width, blocks in ((128, 3), (256, 3), (512, 27), (1024, 3)):
        if width > 128:
            shapes += [(width // 2,), (width // 2,), (width, width // 2, 2, 2), (width,)]
        for _ in range(blocks):
            shapes += [(width,), (width, 1, 7, 7), (width,), (width,), (width,)]
            shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return Shapes("ConvNeXt-B", {None: [*shapes, (1024,), (1024,), (classes, 1024), (classes,)]})


def small(tensors: int = 1000) -> Shapes:
    """Return small matrices, each with a bias: the host's work counts."""
    return Shapes(f"{tensors:,} small tensors", {None: [(32, 32), (32,)] * (tensors // 2)})


def odd(largest: int = 100_003) -> Shapes:
    """Return rows that are not a multiple of 16 bytes, rows that are very long, and rows that are very short."""
    long, many = largest, largest // 2
    shapes = [(1000, 1001), (1001, 999), (333, 7, 3, 3), (many + 256, 511), (3, long), (long, 3)]
    return Shapes("odd shapes", {None: [(min(shape[0], largest), *shape[1:]) for shape in shapes]})


def matrices(total: int, tensors: int) -> Shapes:
    """Return equal, nearly square matrices of about ``total`` elements; their fan-in is a multiple of eight."""
    fan_in = max(8, 8 * round(math.sqrt(total / tensors) / 8))
    return Shapes(f"{tensors} matrices", {None: [(max(1, round(total / tensors / fan_in)), fan_in)] * tensors})
