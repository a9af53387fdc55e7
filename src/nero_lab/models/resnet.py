"""Residual networks with affine batch norm: ResNet-18 for 32 x 32 images, and ResNet-50 for ImageNet."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Block(nn.Module):
    """Residual block.

    Args:
        body: the convolutions, each with its batch norm.
        inputs: input channels.
        outputs: output channels.
        stride: stride of the body, and of its shortcut.
    """

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body, self.outputs = body, outputs
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.body(inputs) + self.around(inputs), inplace=True)


def basic_block(inputs: int, channels: int, stride: int) -> Block:
    """Build a block of two 3 x 3 convolutions."""
    first = _convolution(inputs, channels, 3, stride)
    body = nn.Sequential(*first, nn.ReLU(inplace=True), *_convolution(channels, channels, 3))
    return Block(body, inputs, channels, stride)


def bottleneck(inputs: int, channels: int, stride: int) -> Block:
    """Build a block of a 3 x 3 convolution between two of 1 x 1, the last with four times the channels."""
    body = nn.Sequential(
        *_convolution(inputs, channels, 1),
        nn.ReLU(inplace=True),
        *_convolution(channels, channels, 3, stride),
        nn.ReLU(inplace=True),
        *_convolution(channels, 4 * channels, 1),
    )
    return Block(body, inputs, 4 * channels, stride)


def resnet18(classes: int = 10, *, width: float = 1.0) -> nn.Sequential:
    """Build four stages of two blocks, with 64 to 512 channels times the width, and a linear layer with bias."""
    stem = int(64 * width)
    layers: list[nn.Module] = [*_convolution(3, stem, 3), nn.ReLU(inplace=True)]
    return _network(layers, stem, basic_block, (2, 2, 2, 2), classes, width)


def resnet50(classes: int = 1000, *, width: float = 1.0) -> nn.Sequential:
    """Build torchvision's ResNet-50: a stem that quarters the image, then 3 + 4 + 6 + 3 bottlenecks.

    Convolutions start Kaiming normal, by fan-out.

    Args:
        classes: number of classes.
        width: width of every layer, relative to the paper's.
    """
    stem = int(64 * width)
    layers = [*_convolution(3, stem, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    model = _network(layers, stem, bottleneck, (3, 4, 6, 3), classes, width)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _network(
    layers: list[nn.Module],
    before: int,
    make: Callable[[int, int, int], Block],
    blocks: Sequence[int],
    classes: int,
    width: float,
) -> nn.Sequential:
    """Append stages of blocks to a stem; each stage but the first halves the image and doubles the channels."""
    for stage, count in enumerate(blocks):
        for index in range(count):
            block = make(before, int(64 * 2**stage * width), 2 if stage and not index else 1)
            layers.append(block)
            before = block.outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Build a convolution without bias that keeps or halves the image's size, and its batch norm."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]
