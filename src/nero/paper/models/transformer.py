"""Transformers without layer norm, for words in the order of a text."""

import math

import torch
from torch import Tensor, nn

from nero.paper.models.dropout import Dropout


class Attention(nn.Module):
    """Each word looks at itself and at those before it."""

    def __init__(self, width: int, heads: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("later", torch.ones(longest, longest, dtype=torch.bool).triu(1), persistent=False)
        self.later: Tensor
        self.into = nn.Linear(width, 3 * width)  # queries, keys and values
        self.out = nn.Linear(width, width)
        self.dropout = Dropout(dropout)
        nn.init.xavier_uniform_(self.into.weight)
        nn.init.zeros_(self.into.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, width = inputs.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = self.into(inputs).view(shape).permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(width // self.heads)
        shares = self.dropout(scores.masked_fill(self.later[:length, :length], -math.inf).softmax(-1))
        return self.out((shares @ values).transpose(1, 2).reshape(inputs.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a layer of its own for each word; each is added to what it was given."""

    def __init__(self, width: int, heads: int, hidden: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(Attention(width, heads, longest, dropout), Dropout(dropout))
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), Dropout(dropout), nn.Linear(hidden, width), Dropout(dropout)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.attention(inputs)
        return inputs + self.feed_forward(inputs)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Words and their places as vectors: words are learned, places are sines and cosines."""

    def __init__(self, words: int, width: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.dropout = Dropout(dropout)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        places = torch.arange(longest)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        waves = torch.stack([places.sin(), places.cos()], -1).flatten(1)
        self.register_buffer("waves", waves, persistent=False)
        self.waves: Tensor

    def forward(self, words: Tensor) -> Tensor:
        scaled = self.words(words) * math.sqrt(self.words.embedding_dim)
        return self.dropout(scaled + self.waves[: words.shape[1]])  # type: ignore[no-any-return]


def language_model(
    words: int = 33278,
    *,
    width: int = 200,
    heads: int = 2,
    hidden: int = 200,
    layers: int = 2,
    longest: int = 35,
    dropout: float = 0.2,
) -> nn.Sequential:
    """What the next word is, from those before it: of 2 layers, 19 tensors.

    Args:
        words: in the vocabulary; the default is WikiText-2's.
        width: of the vectors that words become.
        heads: of each attention.
        hidden: units of the layer that each word has of its own.
        layers: how many blocks.
        longest: how many words at most at a time.
        dropout: the probability to drop a unit, a share of attention, or an entry of an embedding.
    """
    blocks = [Block(width, heads, hidden, longest, dropout) for _ in range(layers)]
    decoder = nn.Linear(width, words)
    nn.init.uniform_(decoder.weight, -0.1, 0.1)
    nn.init.zeros_(decoder.bias)
    return nn.Sequential(Embedding(words, width, longest, dropout), *blocks, decoder)
