"""A class-conditional generator and discriminator after BigGAN, for 32 x 32 images, with spectral norm on every layer.

The blocks are those of Brock, Donahue and Simonyan (2019, Appendix B). The widths, the place of attention, and details
that the paper omits follow the code of Nero's authors.
"""

from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import register_parametrization

#: Side of the generator's first feature map, in pixels.
FIRST_SIDE = 4
#: Channels before and after the generator's blocks, as multiples of a base.
GENERATOR_WIDTHS = (4, 4, 2, 1)
#: Channels after the discriminator's blocks, as multiples of the base, and which blocks halve the image.
DISCRIMINATOR_WIDTHS, HALVES = (1, 2, 4, 4), (True, True, True, False)
#: Momentum of the running statistics of conditional batch norms.
MOMENTUM = 0.001
#: Factor of the discriminator's scores.
SCORE_FACTOR = 10.0
#: Standard deviation of initial biases.
BIAS_STD = 0.01

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear, nn.Embedding)


class GANPair(nn.Module):
    """Generator and discriminator.

    Args:
        base: unit of the channels.
        blocks: blocks of the generator, at most three; each doubles the image from 4 pixels on.
        chunk: elements of noise for the first layer, and for each block.
        class_features: elements of a class's embedding in the generator.
        rows: rows of the class tables; only as many are used as there are classes.
    """

    def __init__(
        self, base: int = 64, blocks: int = 3, chunk: int = 20, class_features: int = 80, rows: int = 1000
    ) -> None:
        super().__init__()
        widths = [base * width for width in GENERATOR_WIDTHS[: blocks + 1]]
        self.generator = Generator(widths, chunk, class_features, rows)
        self.discriminator = Discriminator([base * width for width in DISCRIMINATOR_WIDTHS], rows)


class Generator(nn.Module):
    """Network that maps noise and classes to images in (-1, 1). The first layer and each block get a chunk of noise."""

    def __init__(self, widths: list[int], chunk: int, class_features: int, rows: int) -> None:
        super().__init__()
        self.chunk, self.noise = chunk, len(widths) * chunk
        self.classes = with_spectral_norm(nn.Linear(rows, class_features))
        self.first = with_spectral_norm(nn.Linear(chunk, widths[0] * FIRST_SIDE**2))
        self.blocks = nn.ModuleList(Up(*ends, class_features + chunk) for ends in pairwise(widths))
        self.attention = Attention(widths[-2])
        norm = nn.BatchNorm2d(widths[-1])
        nn.init.normal_(norm.bias, std=BIAS_STD)
        self.last = nn.Sequential(norm, nn.ReLU(), _three_by_three(widths[-1], 3), nn.Tanh())

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        first, *others = torch.split(noise, self.chunk, dim=1)
        embedded = F.embedding(labels, self.classes.weight.mT) + self.classes.bias  # the layer on one-hot labels
        shape = (-1, FIRST_SIDE, FIRST_SIDE)
        hidden = self.first(first).unflatten(1, shape).contiguous(memory_format=torch.channels_last)
        for block, chunk in zip(self.blocks, others, strict=True):
            if block is self.blocks[-1]:
                hidden = self.attention(hidden)
            hidden = block(hidden, torch.cat([embedded, chunk], dim=1))
        images: Tensor = self.last(hidden)
        return images


class Discriminator(nn.Module):
    """Network that scores images and their classes, high for real ones. It halves the image three times."""

    def __init__(self, widths: list[int], rows: int) -> None:
        super().__init__()
        ends = pairwise([3, *widths])
        self.blocks = nn.ModuleList(Down(*channels, halves) for channels, halves in zip(ends, HALVES, strict=True))
        self.attention = Attention(widths[1])
        self.last = with_spectral_norm(nn.Linear(widths[-1], 1))
        self.classes = with_spectral_norm(nn.Embedding(rows, widths[-1]))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        first, second, *others = self.blocks
        hidden = self.attention(second(first(images)))
        for block in others:
            hidden = block(hidden)
        features = F.relu(hidden).mean((2, 3))
        score: Tensor = self.last(features).squeeze(1) + (self.classes(labels) * features).sum(1)
        return SCORE_FACTOR * score


class Up(nn.Module):
    """Residual block of the generator: two convolutions on an image of twice the size."""

    def __init__(self, inputs: int, outputs: int, condition: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(ConditionalBatchNorm(width, condition) for width in (inputs, outputs))
        self.first, self.second = _three_by_three(inputs, outputs), _three_by_three(outputs, outputs)
        self.around = with_spectral_norm(nn.Conv2d(inputs, outputs, 1)) if inputs != outputs else nn.Identity()

    def forward(self, inputs: Tensor, condition: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](inputs, condition))
        hidden = self.first(_double(hidden))
        hidden = self.second(F.relu(self.norms[1](hidden, condition)))
        around = _double(self.around(inputs))  # commutes; convolves a quarter of the pixels
        return torch.add(hidden, around)


class Down(nn.Module):
    """Residual block of the discriminator: two convolutions, then optionally an image of half the size."""

    def __init__(self, inputs: int, outputs: int, halved: bool) -> None:
        super().__init__()
        self.of_pixels = inputs == 3
        self.first, self.second = _three_by_three(inputs, outputs), _three_by_three(outputs, outputs)
        self.halved = halved
        changed = halved or inputs != outputs
        self.around = with_spectral_norm(nn.Conv2d(inputs, outputs, 1)) if changed else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs if self.of_pixels else F.relu(inputs))
        hidden = self.second(F.relu(hidden))
        if self.halved:
            hidden, inputs = F.avg_pool2d(hidden, 2), F.avg_pool2d(inputs, 2)
        return torch.add(hidden, self.around(inputs))  # pooling and the 1 x 1 convolution commute


class Attention(nn.Module):
    """Self-attention of every pixel to 2 x 2 max-pooled keys and values, added with weight one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few, half = max(1, channels // 8), max(1, channels // 2)
        self.queries, self.keys, self.values = (
            with_spectral_norm(nn.Conv2d(channels, outputs, 1)) for outputs in (few, few, half)
        )
        self.out = with_spectral_norm(nn.Conv2d(half, channels, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        layers = (self.queries, self.keys, self.values)  # as one convolution
        weights, biases = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        few, half = self.keys.out_channels, self.values.out_channels
        queries, others = torch.split(F.conv2d(inputs, weights, biases), [few, few + half], dim=1)
        keys, values = torch.split(F.max_pool2d(others, 2).flatten(2), [few, half], dim=1)
        attended = torch.softmax(queries.flatten(2).mT @ keys, dim=-1) @ values.mT
        outputs: Tensor = self.out(torch.unflatten(attended.mT, 2, inputs.shape[2:]))
        return inputs + outputs


class ConditionalBatchNorm(nn.Module):
    """Batch norm whose gains and biases are affine functions of a condition; gains are offsets from one."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, momentum=MOMENTUM, affine=False)
        self.gain, self.bias = (with_spectral_norm(nn.Linear(condition, channels)) for _ in range(2))

    def forward(self, inputs: Tensor, condition: Tensor) -> Tensor:
        gain, bias = (layer(condition)[:, :, None, None] for layer in (self.gain, self.bias))
        return torch.addcmul(bias, self.norm(inputs), 1 + gain)


def _double(images: Tensor) -> Tensor:
    """Repeat each pixel along both axes, as F.interpolate does; a compiled gradient is then a sum, not a scatter."""
    rows = images.permute(0, 2, 3, 1)
    count, height, width, channels = rows.shape
    rows = rows[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1).reshape(count, 2 * height, 2 * width, channels)
    return rows.permute(0, 3, 1, 2)


def _three_by_three(inputs: int, outputs: int) -> nn.Conv2d:
    return with_spectral_norm(nn.Conv2d(inputs, outputs, 3, padding=1))


class SpectralNorm(nn.Module):
    """Parametrization that divides a weight by its largest singular value.

    The weight counts as a matrix whose rows are the slices along axis 0. Power iteration finds the singular value: one
    step per forward pass, which starts from the buffer :attr:`u` and updates it in training. Unlike this class, torch's
    own keeps a second vector, makes 15 steps at construction, and none in evaluation.

    Args:
        rows: rows of the matrix.
    """

    u: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("u", F.normalize(torch.randn(rows), dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            # a view in channels-last layout; u does not depend on the column order
            matrix = weight.movedim(1, -1).flatten(1)
            v = matrix.mT @ self.u
            v /= torch.linalg.vector_norm(v)
            stretched = matrix @ v
            # equals u @ matrix @ v, since stretched is parallel to the new u
            largest = torch.linalg.vector_norm(stretched)
            if self.training:
                torch.div(stretched, largest, out=self.u)
        divided: Tensor = _Divided.apply(weight, largest, stretched, v)  # type: ignore[no-untyped-call]
        return divided


class _Divided(torch.autograd.Function):
    """W / (u W v), with u and v constant in the gradient.

    Autograd would compute the same in twice as many kernels, whose number dominates because they are small. The weight
    has no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, largest: Tensor, stretched: Tensor, v: Tensor) -> Tensor:
        divided = weight / largest
        ctx.save_for_backward(divided, largest, stretched, v)
        return divided

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        divided, largest, stretched, v = ctx.saved_tensors
        correction = stretched * ((grad * divided).sum() / largest)
        moved = grad.movedim(1, -1)
        matrix = torch.addr(moved.flatten(1), correction, v, alpha=-1).div_(largest)
        return matrix.view(moved.shape).movedim(-1, 1), None, None, None


def with_spectral_norm(layer: Layer) -> Layer:
    """Initialise a layer with orthogonal weights and small random biases, and add :class:`SpectralNorm` to it."""
    nn.init.orthogonal_(layer.weight)
    bias = getattr(layer, "bias", None)
    if bias is not None:
        nn.init.normal_(bias, std=BIAS_STD)
    register_parametrization(layer, "weight", SpectralNorm(len(layer.weight)))
    return layer
