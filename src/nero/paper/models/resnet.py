"""ResNet-18 for 32 x 32 images: a 3 x 3 stem, affine batch norm."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.body(inputs) + self.around(inputs), inplace=True)


def resnet18(classes: int = 10, *, width: float = 1.0) -> nn.Sequential:
    """Four stages of two blocks, 64 to 512 channels (times the width), then one linear layer with bias."""
    stages = [int(channels * width) for channels in (64, 128, 256, 512)]
    layers: list[nn.Module] = [
        nn.Conv2d(3, stages[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(stages[0]),
        nn.ReLU(inplace=True),
    ]
    before = stages[0]
    for stage, channels in enumerate(stages):
        layers += [Block(before, channels, 1 if stage == 0 else 2), Block(channels, channels, 1)]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
