"""A generator and a discriminator like BigGAN's for CIFAR-10, class-conditional, with spectral norm on every layer.

From the paper of Brock, Donahue and Simonyan (2019, Appendix B), as far as it goes. Where it speaks of larger images
only, attention is where it is there: at half the size of the image. One thing differs: features are the mean over
pixels and not the sum, under which scores times ten are so large that SGD at the best rate of the paper's table, 0.01,
ends the game in its first steps (seen on a pair of a quarter of the width).
"""

from functools import reduce
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero.paper.models.spectral import BIAS, spectral

#: Channels of a layer, in the unit that BigGAN counts them in.
WIDTH = 4
#: What a generator starts from, in pixels.
FIRST = 4
#: What the discriminator's scores are multiplied by.
LOUDER = 10.0


class Pair(nn.Module):
    """Two networks that train each other.

    Args:
        base: the unit of channels; all layers have four of them.
        blocks: of the generator, each of which doubles the image from 4 pixels on.
        chunk: numbers of chance that the first layer has, and each block.
        said: numbers that a class is told the blocks by.
        rows: of the tables of classes, of which as many are used as there are classes.
    """

    def __init__(self, base: int = 64, blocks: int = 3, chunk: int = 20, said: int = 80, rows: int = 1000) -> None:
        super().__init__()
        self.generator = Generator(WIDTH * base, blocks, chunk, said, rows)
        self.discriminator = Discriminator(WIDTH * base, rows)


class Generator(nn.Module):
    """Images in (-1, 1) from chance, a chunk of it for the first layer and for each block, and from classes."""

    def __init__(self, channels: int, blocks: int, chunk: int, said: int, rows: int) -> None:
        super().__init__()
        self.chunk, self.noise = chunk, (1 + blocks) * chunk
        self.classes = spectral(nn.Embedding(rows, said))
        self.first = spectral(nn.Linear(chunk, channels * FIRST**2))
        self.blocks = nn.ModuleList(Up(channels, said + chunk) for _ in range(blocks))
        self.attention = Attention(channels)
        norm = nn.BatchNorm2d(channels)
        nn.init.normal_(norm.bias, std=BIAS)
        self.last = nn.Sequential(norm, nn.ReLU(), _three_by_three(channels, 3), nn.Tanh())

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        first, *others = torch.split(noise, self.chunk, dim=1)
        said = self.classes(labels)
        hidden = self.first(first).unflatten(1, (-1, FIRST, FIRST))
        for block, chunk in zip(self.blocks, others, strict=True):
            if block is self.blocks[-1]:
                hidden = self.attention(hidden)
            hidden = block(hidden, torch.cat([said, chunk], dim=1))
        images: Tensor = self.last(hidden)
        return images


class Discriminator(nn.Module):
    """A score for each image and its class: high for a real one, by a network that halves the image twice."""

    def __init__(self, channels: int, rows: int) -> None:
        super().__init__()
        widths = (3, channels, channels, channels, channels)
        halved = (True, True, False, False)
        self.blocks = nn.ModuleList(Down(*ends, half) for ends, half in zip(pairwise(widths), halved, strict=True))
        self.attention = Attention(channels)
        self.last = spectral(nn.Linear(channels, 1))
        self.classes = spectral(nn.Embedding(rows, channels))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        first, *others = self.blocks
        hidden = self.attention(first(images))
        for block in others:
            hidden = block(hidden)
        features = F.relu(hidden).mean((2, 3))
        score: Tensor = self.last(features).squeeze(1) + (self.classes(labels) * features).sum(1)
        return LOUDER * score


class Up(nn.Module):
    """Two convolutions on an image twice as large, and a way around them."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(ConditionalBatchNorm(channels, condition) for _ in range(2))
        self.first, self.second = (_three_by_three(channels, channels) for _ in range(2))
        self.around = spectral(nn.Conv2d(channels, channels, 1))

    def forward(self, inputs: Tensor, condition: Tensor) -> Tensor:
        hidden = _larger_then(self.first, F.relu(self.norms[0](inputs, condition)))
        hidden = self.second(F.relu(self.norms[1](hidden, condition)))
        around = F.interpolate(self.around(inputs), scale_factor=2)  # which commute
        return torch.add(hidden, around)


class Down(nn.Module):
    """Two convolutions, perhaps on to an image half as large, and a way around them."""

    def __init__(self, inputs: int, outputs: int, halved: bool) -> None:
        super().__init__()
        self.of_pixels = inputs == 3
        self.first, self.second = _three_by_three(inputs, outputs), _three_by_three(outputs, outputs)
        self.halved = halved
        changed = halved or inputs != outputs
        self.around = spectral(nn.Conv2d(inputs, outputs, 1)) if changed else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs if self.of_pixels else F.relu(inputs))
        hidden = F.relu(hidden)
        hidden = _then_smaller(self.second, hidden) if self.halved else self.second(hidden)
        around = self.around(F.avg_pool2d(inputs, 2) if self.halved else inputs)  # which commute
        return torch.add(hidden, around)


class Attention(nn.Module):
    """Every pixel looks at every two by two others, and what it sees is added to it, with weight one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few, half = max(1, channels // 8), max(1, channels // 2)
        self.queries, self.keys, self.values = (
            spectral(nn.Conv2d(channels, outputs, 1, bias=False)) for outputs in (few, few, half)
        )
        self.out = spectral(nn.Conv2d(half, channels, 1, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        queries = self.queries(inputs).flatten(2).mT
        keys, values = (F.max_pool2d(look(inputs), 2).flatten(2) for look in (self.keys, self.values))
        seen = torch.softmax(queries @ keys, dim=-1) @ values.mT
        looked: Tensor = self.out(torch.unflatten(seen.mT, 2, inputs.shape[2:]))
        return inputs + looked


class ConditionalBatchNorm(nn.Module):
    """Batch norm whose gains and biases are linear in a condition, the gains as what is added to one."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain, self.bias = (spectral(nn.Linear(condition, channels, bias=False)) for _ in range(2))

    def forward(self, inputs: Tensor, condition: Tensor) -> Tensor:
        gain, bias = (look(condition)[:, :, None, None] for look in (self.gain, self.bias))
        return torch.addcmul(bias, self.norm(inputs), 1 + gain)


def _three_by_three(inputs: int, outputs: int) -> nn.Conv2d:
    return spectral(nn.Conv2d(inputs, outputs, 3, padding=1))


def _larger_then(convolution: nn.Conv2d, images: Tensor) -> Tensor:
    """The convolution of images of twice the size: in one, for four ninths of the multiplications."""
    kernel = _summed(convolution.weight).flip(2, 3).transpose(0, 1)
    return F.conv_transpose2d(images, kernel, convolution.bias, stride=2, padding=1)


def _then_smaller(convolution: nn.Conv2d, images: Tensor) -> Tensor:
    """The convolution, and the mean over every two by two pixels of it: likewise."""
    return F.conv2d(images, _summed(convolution.weight) / 4, convolution.bias, stride=2, padding=1)


def _summed(kernel: Tensor) -> Tensor:
    """Of three by three, the four by four that sums what the kernel says at every two by two places."""
    moved = [F.pad(kernel, (left, 1 - left, top, 1 - top)) for left in (0, 1) for top in (0, 1)]
    return reduce(torch.add, moved)
