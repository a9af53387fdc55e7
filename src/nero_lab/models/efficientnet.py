"""EfficientNet-Lite0 up to its features, to compare images by: what ImageNet's classes are told from."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

#: Of each stage: kernel, stride, how much wider a block is inside, channels, blocks.
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
#: The first and last convolutions' channels; the latter are the features.
FIRST, FEATURES = 32, 1280
#: The size of the images that it was trained on.
SIZE = 224


class EfficientNetLite0(nn.Module):
    """Features (N, 1280) of images of any size, which are uint8 (N, 3, H, W), and the logits of ImageNet's classes."""

    def __init__(self) -> None:
        super().__init__()
        blocks, before = [], FIRST
        for kernel, stride, wider, channels, count in STAGES:
            for index in range(count):
                blocks.append(Block(before, channels, kernel, stride if index == 0 else 1, wider))
                before = channels
        self.body = nn.Sequential(*_unit(3, FIRST, 3, 2), *blocks, *_unit(before, FEATURES, 1))
        self.classes = nn.Linear(FEATURES, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        images = F.interpolate((pixels.float() - 127) / 128, size=(SIZE, SIZE), mode="bilinear")
        features: Tensor = self.body(images).mean((2, 3))
        return features

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take weights with other names in the same order, that of the layers."""
        self.load_state_dict(dict(zip(self.state_dict(), weights.values(), strict=True)))


class Block(nn.Module):
    """A convolution of each channel by itself, between two that mix them: wide inside, narrow at the ends."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, wider: int) -> None:
        super().__init__()
        inside = wider * inputs
        widen = _unit(inputs, inside, 1) if wider > 1 else []
        *narrow, _ = _unit(inside, outputs, 1)  # linear: without what cuts off
        self.body = nn.Sequential(*widen, *_unit(inside, inside, kernel, stride, inside), *narrow)
        self.around = stride == 1 and inputs == outputs

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        return inputs + outputs if self.around else outputs


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Padding as TensorFlow has it for images of even size, which puts more of it behind than in front."""
    front, behind = (kernel - stride) // 2, (kernel - stride + 1) // 2
    return [
        *([nn.ZeroPad2d((front, behind, front, behind))] if behind else []),
        nn.Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
        nn.ReLU6(inplace=True),
    ]
