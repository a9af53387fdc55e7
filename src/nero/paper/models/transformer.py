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


class Heads(nn.Module):
    """Attention of one sentence to another, without biases; what may not be looked at is told."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.dropout = Dropout(dropout)

    def forward(self, ours: Tensor, theirs: Tensor, hidden: Tensor) -> Tensor:
        queries, keys, values = (
            layer(inputs).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, inputs in ((self.queries, ours), (self.keys, theirs), (self.values, theirs))
        )
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        shares = self.dropout(scores.masked_fill(hidden, -1e9).softmax(-1))  # not -inf: a sentence may be all blanks
        return self.out((shares @ values).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attentions, then a layer of its own for each word; each is added to what it was given, and the sum normed."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, attentions: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Heads(width, heads, dropout) for _ in range(attentions))
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)

    def forward(self, words: Tensor, *others: tuple[Tensor | None, Tensor]) -> Tensor:
        """Each of the others is what an attention looks at, None for the words themselves, and what is hidden of it."""
        for attention, (other, hidden) in zip(self.attentions, others, strict=True):
            found = attention(words, words if other is None else other, hidden)
            words = self.norm(words + self.dropout(found))
        return self.norm(words + self.dropout(self.feed_forward(words)))  # type: ignore[no-any-return]


class Translator(nn.Module):
    """Encoder and decoder, and one table of words for what is read, what is written and what is to be written next.

    Args:
        words: in the vocabulary, of which number 0 is a blank; the default is Multi30k's.
        width: of the vectors that words become.
        heads: of each attention.
        hidden: units of the layer that each word has of its own.
        layers: of the encoder, and of the decoder.
        longest: how many words at most a sentence has.
        dropout: the probability to drop a unit, or a share of attention.
    """

    def __init__(
        self,
        words: int = 9529,
        *,
        width: int = 512,
        heads: int = 8,
        hidden: int = 2048,
        layers: int = 6,
        longest: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(words, width, longest, dropout)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.encoder = nn.ModuleList(Layer(width, heads, hidden, dropout, 1) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, hidden, dropout, 2) for _ in range(layers))
        self.register_buffer("later", torch.ones(longest, longest, dtype=torch.bool).triu(1), persistent=False)
        self.later: Tensor
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, pairs: Tensor) -> Tensor:
        """What is to be written next, of (N, 2, L) words that are read and written."""
        source, target = pairs.unbind(1)
        return self.write(target, self.read(source), source == 0)

    def read(self, source: Tensor) -> Tensor:
        """What is made of the (N, L) words of sentences."""
        words = self.norm(self.embedding(source))
        for layer in self.encoder:
            words = layer(words, (None, (source == 0)[:, None, None]))
        return words  # type: ignore[no-any-return]

    def write(self, target: Tensor, read: Tensor, blanks: Tensor) -> Tensor:
        """What is to be written after each of the (N, L) words, of what was read and where it is blank."""
        words = self.norm(self.embedding(target))
        later = self.later[: target.shape[1], : target.shape[1]]
        for layer in self.decoder:
            words = layer(words, (None, later), (read, blanks[:, None, None]))
        return nn.functional.linear(words, self.embedding.words.weight)

    @torch.no_grad()
    def translate(self, source: Tensor, begin: int, end: int, longest: int) -> Tensor:
        """Write the likeliest word after the likeliest word, until all sentences have ended or are the longest.

        Args:
            source: (N, L) words.
            begin: the word that a sentence begins with.
            end: and ends with; what is behind it means nothing.
            longest: how many words at most.
        """
        read, blanks = self.read(source), source == 0
        written = torch.full((len(source), 1), begin, device=source.device)
        for _ in range(longest):
            likeliest = self.write(written, read, blanks)[:, -1].argmax(-1, keepdim=True)
            written = torch.cat([written, likeliest], 1)
            if bool((written == end).any(1).all()):
                break
        return written[:, 1:]
