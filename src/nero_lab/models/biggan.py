"""A generator and a discriminator after BigGAN for 32 x 32, class-conditional, with spectral norm on every layer.

The blocks are those of Brock, Donahue and Simonyan (2019, Appendix B); the widths, where attention is, and what the
paper does not say are as the authors of Nero ran it.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero_lab.models.spectral import BIAS, spectral

#: What a generator starts from, in pixels.
FIRST = 4
#: Channels of the generator, from the first layer to behind its last block, and of the discriminator's blocks, as
#: multiples of a unit; and which of these blocks halve the image.
MAKING, TELLING, HALVED = (4, 4, 2, 1), (1, 2, 4, 4), (True, True, True, False)
#: How fast statistics of conditional batch norms follow those of batches.
MOMENTUM = 0.001
#: What the discriminator's scores are multiplied by.
LOUDER = 10.0


class Pair(nn.Module):
    """Two networks that train each other.

    Args:
        base: the unit of channels.
        blocks: of the generator, each of which doubles the image from 4 pixels on; three at most.
        chunk: numbers of chance that the first layer has, and each block.
        said: numbers that a class is told the blocks by.
        rows: of the tables of classes, of which as many are used as there are classes.
    """

    def __init__(self, base: int = 64, blocks: int = 3, chunk: int = 20, said: int = 80, rows: int = 1000) -> None:
        super().__init__()
        self.generator = Generator([base * each for each in MAKING[: blocks + 1]], chunk, said, rows)
        self.discriminator = Discriminator([base * each for each in TELLING], rows)


class Generator(nn.Module):
    """Images in (-1, 1) from chance, a chunk of it for the first layer and for each block, and from classes."""

    def __init__(self, widths: list[int], chunk: int, said: int, rows: int) -> None:
        super().__init__()
        self.chunk, self.noise = chunk, len(widths) * chunk
        self.classes = spectral(nn.Linear(rows, said))
        self.first = spectral(nn.Linear(chunk, widths[0] * FIRST**2))
        self.blocks = nn.ModuleList(Up(*ends, said + chunk) for ends in pairwise(widths))
        self.attention = Attention(widths[-2])
        norm = nn.BatchNorm2d(widths[-1])
        nn.init.normal_(norm.bias, std=BIAS)
        self.last = nn.Sequential(norm, nn.ReLU(), _three_by_three(widths[-1], 3), nn.Tanh())

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        first, *others = torch.split(noise, self.chunk, dim=1)
        said = F.embedding(labels, self.classes.weight.mT) + self.classes.bias  # of a one and many zeros
        hidden = self.first(first).unflatten(1, (-1, FIRST, FIRST)).contiguous(memory_format=torch.channels_last)
        for block, chunk in zip(self.blocks, others, strict=True):
            if block is self.blocks[-1]:
                hidden = self.attention(hidden)
            hidden = block(hidden, torch.cat([said, chunk], dim=1))
        images: Tensor = self.last(hidden)
        return images


class Discriminator(nn.Module):
    """A score for each image and its class: high for a real one, by a network that halves the image three times."""

    def __init__(self, widths: list[int], rows: int) -> None:
        super().__init__()
        ends = pairwise([3, *widths])
        self.blocks = nn.ModuleList(Down(*each, half) for each, half in zip(ends, HALVED, strict=True))
        self.attention = Attention(widths[1])
        self.last = spectral(nn.Linear(widths[-1], 1))
        self.classes = spectral(nn.Embedding(rows, widths[-1]))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        first, second, *others = self.blocks
        hidden = self.attention(second(first(images)))
        for block in others:
            hidden = block(hidden)
        features = F.relu(hidden).mean((2, 3))
        score: Tensor = self.last(features).squeeze(1) + (self.classes(labels) * features).sum(1)
        return LOUDER * score


class Up(nn.Module):
    """Two convolutions on an image twice as large, and a way around them."""

    def __init__(self, inputs: int, outputs: int, condition: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(ConditionalBatchNorm(width, condition) for width in (inputs, outputs))
        self.first, self.second = _three_by_three(inputs, outputs), _three_by_three(outputs, outputs)
        self.around = spectral(nn.Conv2d(inputs, outputs, 1)) if inputs != outputs else nn.Identity()

    def forward(self, inputs: Tensor, condition: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](inputs, condition))
        hidden = self.first(F.interpolate(hidden, scale_factor=2))
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
        hidden = self.second(F.relu(hidden))
        if self.halved:
            hidden, inputs = F.avg_pool2d(hidden, 2), F.avg_pool2d(inputs, 2)
        return torch.add(hidden, self.around(inputs))  # the mean and the way around commute


class Attention(nn.Module):
    """Every pixel looks at every two by two others, and what it sees is added to it, with weight one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few, half = max(1, channels // 8), max(1, channels // 2)
        self.queries, self.keys, self.values = (
            spectral(nn.Conv2d(channels, outputs, 1)) for outputs in (few, few, half)
        )
        self.out = spectral(nn.Conv2d(half, channels, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        looks = (self.queries, self.keys, self.values)  # all at once
        weights, biases = (torch.cat([getattr(look, name) for look in looks]) for name in ("weight", "bias"))
        few, half = self.keys.out_channels, self.values.out_channels
        queries, others = torch.split(F.conv2d(inputs, weights, biases), [few, few + half], dim=1)
        keys, values = torch.split(F.max_pool2d(others, 2).flatten(2), [few, half], dim=1)
        seen = torch.softmax(queries.flatten(2).mT @ keys, dim=-1) @ values.mT
        looked: Tensor = self.out(torch.unflatten(seen.mT, 2, inputs.shape[2:]))
        return inputs + looked


class ConditionalBatchNorm(nn.Module):
    """Batch norm whose gains and biases are affine in a condition, the gains as what is added to one."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, momentum=MOMENTUM, affine=False)
        self.gain, self.bias = (spectral(nn.Linear(condition, channels)) for _ in range(2))

    def forward(self, inputs: Tensor, condition: Tensor) -> Tensor:
        gain, bias = (look(condition)[:, :, None, None] for look in (self.gain, self.bias))
        return torch.addcmul(bias, self.norm(inputs), 1 + gain)


def _three_by_three(inputs: int, outputs: int) -> nn.Conv2d:
    return spectral(nn.Conv2d(inputs, outputs, 3, padding=1))
