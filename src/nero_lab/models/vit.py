"""A small vision transformer for 32 x 32 images."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Attention of every patch to all patches, with queries and keys of root-mean-square one (QK-norm)."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.into = nn.Linear(width, 3 * width, bias=False)  # queries, keys and values
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, width = inputs.shape
        shape = (batch, length, 3, width // self.head_width, self.head_width)
        queries, keys, values = self.into(inputs).view(shape).permute(2, 0, 3, 1, 4)
        queries, keys = (F.rms_norm(each, (self.head_width,)) for each in (queries, keys))
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return self.out(attended.transpose(1, 2).reshape(inputs.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Residual attention, then a residual feed-forward layer, each behind a norm (pre-norm)."""

    def __init__(self, width: int, head_width: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.RMSNorm(width), SelfAttention(width, head_width))
        self.feed_forward = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.attention(inputs)
        return inputs + self.feed_forward(inputs)  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches with learnt positions, blocks, and a linear classifier on the mean of all patches.

    Linear layers start with standard deviation 1 / sqrt(fan-in), positions with 0.02. The blocks have no biases.

    Args:
        classes: number of classes.
        width: size of a patch's embedding.
        layers: number of blocks.
        head_width: width of an attention head.
        patch: side of a patch, in pixels.
        side: side of an image, in pixels.
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        width: int = 256,
        layers: int = 6,
        head_width: int = 64,
        patch: int = 4,
        side: int = 32,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, (side // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, head_width, 4 * width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))  # type: ignore[no-any-return]
