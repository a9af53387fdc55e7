"""EfficientNet-Lite0 up to its features, by which generated images are compared."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

#: Kernel, stride, expansion, output channels and blocks of each stage.
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
#: Channels of the first and the last convolution; the last are the features.
FIRST, FEATURES = 32, 1280
#: Side of the images that it was trained on, in pixels.
SIDE = 224


class EfficientNetLite0(nn.Module):
    """Network that maps images of any size, uint8 (N, 3, H, W), to features (N, 1280).

    :attr:`classes` maps features to the logits of ImageNet's classes.
    """

    def __init__(self) -> None:
        super().__init__()
        blocks, before = [], FIRST
        for kernel, stride, expansion, channels, count in STAGES:
            for index in range(count):
                blocks.append(Block(before, channels, kernel, stride if index == 0 else 1, expansion))
                before = channels
        self.body = nn.Sequential(*_unit(3, FIRST, 3, 2), *blocks, *_unit(before, FEATURES, 1))
        self.classes = nn.Linear(FEATURES, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        images = F.interpolate((pixels.float() - 127) / 128, size=(SIDE, SIDE), mode="bilinear")
        features: Tensor = self.body(images).mean((2, 3))
        return features

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load weights by position: the names differ, the order of layers is the same."""
        self.load_state_dict(dict(zip(self.state_dict(), weights.values(), strict=True)))


class Block(nn.Module):
    """Inverted residual block: a depthwise convolution between two pointwise ones."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inside = expansion * inputs
        widen = _unit(inputs, inside, 1) if expansion > 1 else []
        *narrow, _ = _unit(inside, outputs, 1)  # without the activation
        self.body = nn.Sequential(*widen, *_unit(inside, inside, kernel, stride, inside), *narrow)
        self.around = stride == 1 and inputs == outputs

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        return inputs + outputs if self.around else outputs


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution with batch norm and ReLU6, padded as TensorFlow pads even sizes: more at the end."""
    before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
    return [
        *([nn.ZeroPad2d((before, after, before, after))] if after else []),
        nn.Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
        nn.ReLU6(inplace=True),
    ]
