"""A GPT as people train it today: pre-norm with RMSNorm, rotary embeddings, normalised queries and keys, ReLU²."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

#: Elements of each head's queries, keys and values.
HEAD_WIDTH = 64
#: Standard deviation of initial weights.
INITIAL_STD = 0.02
#: Base of the wavelengths of rotary embeddings, in positions.
ROTARY_BASE = 10_000.0


class Rotary(nn.Module):
    """Rotation of pairs of elements by angles that grow with the position."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        speeds = ROTARY_BASE ** -(torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angles = torch.outer(torch.arange(max_length), speeds)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def forward(self, vectors: Tensor) -> Tensor:
        """Rotate vectors, (..., length, head width)."""
        first, second = vectors.chunk(2, -1)
        cos, sin = self.cos[: vectors.shape[-2]], self.sin[: vectors.shape[-2]]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Causal self-attention without biases."""

    def __init__(self, width: int, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        self.into = nn.Linear(width, 3 * width, bias=False)  # queries, keys and values
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        heads = self.into(inputs).unflatten(-1, (3, -1, HEAD_WIDTH))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        # norms and rotations in float32, also under autocast
        queries, keys = (self.rotary(F.rms_norm(part.float(), (HEAD_WIDTH,))).type_as(part) for part in (queries, keys))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two layers, with the squared ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.into(inputs).relu().square())  # type: ignore[no-any-return]


class Block(nn.Module):
    """Residual attention, then a residual feed-forward layer, each on normalised inputs."""

    def __init__(self, width: int, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, rotary)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(width), FeedForward(width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.attention_norm(stream))
        return stream + self.feed_forward(self.feed_forward_norm(stream))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Language model that predicts each next token.

    The first weights are normal with a standard deviation of 0.02, and 0.02 / sqrt(2 x depth) in the layers that add to
    the residual stream, as in GPT-2: its variance then does not grow with depth. Zeros would do so too, but a neuron at
    zero has no direction to turn from. The stream stays float32 under autocast, because embeddings are.

    Args:
        vocabulary: number of tokens.
        depth: number of blocks.
        width: size of the embeddings; a multiple of 64, the size of a head.
        max_length: longest sequence, in tokens.
    """

    def __init__(self, vocabulary: int = 8192, *, depth: int = 6, width: int = 384, max_length: int = 256) -> None:
        super().__init__()
        rotary = Rotary(max_length)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, rotary) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                adds = name.endswith("out.weight")
                nn.init.normal_(weight, std=INITIAL_STD / math.sqrt(2 * depth) if adds else INITIAL_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each of (N, length) tokens."""
        # normalised, so that the scale of the embedding is free, as that of every layer is
        stream = F.rms_norm(self.embedding(tokens), (self.embedding.embedding_dim,))
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))  # type: ignore[no-any-return]
