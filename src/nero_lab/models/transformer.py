"""Transformers: one that continues a text, without layer norm, and one that translates sentences."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from nero_lab.models.dropout import Dropout


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
    """Words and their places as vectors: words are learned, and may be scaled; places are sines and cosines."""

    def __init__(self, words: int, width: int, longest: int, dropout: float, scaled: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.scale = math.sqrt(width) if scaled else 1.0
        self.dropout = Dropout(dropout)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        places = torch.arange(longest)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        waves = torch.stack([places.sin(), places.cos()], -1).flatten(1)
        self.register_buffer("waves", waves, persistent=False)
        self.waves: Tensor

    def forward(self, words: Tensor, places: Tensor | None = None) -> Tensor:
        """Of words, and their places; without, these are counted along the last axis."""
        waves = self.waves[: words.shape[-1]] if places is None else self.waves[places]
        return self.dropout(self.words(words) * self.scale + waves)  # type: ignore[no-any-return]


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


class Taken(torch.autograd.Function):
    """A choice of rows whose gradient is one too: by where everything that has a gradient was put."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, chosen: Tensor, put: Tensor) -> Tensor:
        ctx.save_for_backward(put)
        return values.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class Layout:
    """How the words of some sentences lie: in a line, all behind each other, or in a row for each sentence and head.

    Rows are filled up with blanks, more than half of all: so what is done to each word by itself is done in the line,
    and words look at each other in rows. No gradient comes to blanks, nor to what they are in the line.

    Args:
        shape: of the rows, (N, L).
        places: of the words in the line, as places in all rows behind each other. Unless all are among them, the
            last is a blank's, and stands for all that are not.
        heads: that a word is split between.
    """

    def __init__(self, shape: torch.Size, places: Tensor, heads: int) -> None:
        self.shape = (heads, *shape)
        line, head = (torch.arange(count, device=places.device) for count in (len(places), heads))
        order = line[-1].repeat(shape.numel()).index_copy_(0, places, line)
        self._in_rows = (order * heads + head[:, None]).flatten()  # where it is in the line that comes there
        self._in_line = (places[:, None] + shape.numel() * head).flatten()  # and the other way round

    def rows(self, line: Tensor) -> Tensor:
        """What belongs to the words of a line, split between heads, in rows: (heads, N, L, width)."""
        heads = self.shape[0]
        found = Taken.apply(line.view(len(line) * heads, -1), self._in_rows, self._in_line)  # type: ignore[no-untyped-call]
        return found.view(*self.shape, -1)  # type: ignore[no-any-return]

    def line(self, rows: Tensor) -> Tensor:
        """Back to the line, what belongs to all heads together."""
        found = Taken.apply(rows.flatten(0, 2), self._in_line, self._in_rows)  # type: ignore[no-untyped-call]
        return found.view(-1, self.shape[0] * rows.shape[-1])  # type: ignore[no-any-return]


class Heads(nn.Module):
    """Attention of one sentence to another, without biases; what may not be looked at is told."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.scale = math.sqrt(width // heads)
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.dropout = Dropout(dropout)

    def forward(self, ours: Tensor, our_layout: Layout, theirs: Tensor, layout: Layout, hidden: Tensor) -> Tensor:
        queries = our_layout.rows(self.queries(ours))
        keys, values = (layout.rows(layer(theirs)) for layer in (self.keys, self.values))
        scores = queries @ keys.mT / self.scale
        shares = self.dropout(scores.masked_fill(hidden, -1e9).softmax(-1))  # not -inf: a sentence may be all blanks
        return self.out(our_layout.line(shares @ values))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attentions, then a layer of its own for each word; each is added to what it was given, and the sum normed."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, attentions: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Heads(width, heads, dropout) for _ in range(attentions))
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)

    def forward(self, words: Tensor, layout: Layout, later: Tensor, *others: tuple[Tensor, Layout, Tensor]) -> Tensor:
        """Words look at themselves, then at others; what is hidden of either is told."""
        for attention, seen in zip(self.attentions, (None, *others), strict=True):
            found = attention(words, layout, *((words, layout, later) if seen is None else seen))
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
        scaled: whether words are multiplied by the root of the width before places are added, as by those who
            invented it; the paper's authors do not.
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
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = Embedding(words, width, longest, dropout, scaled)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.encoder = nn.ModuleList(Layer(width, heads, hidden, dropout, 1) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, hidden, dropout, 2) for _ in range(layers))
        self.register_buffer("later", torch.ones(longest, longest, dtype=torch.bool).triu(1), persistent=False)
        self.later: Tensor
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, pairs: Tensor, places: Tensor | None = None) -> Tensor:
        """What is to be written next.

        Args:
            pairs: (N, 2, L) words that are read and written, filled up with blanks.
            places: (2, T): which of them matter, of either side as one line; without, all do. See :class:`Layout`: of
                what is told of a blank, no loss may be made.

        Returns:
            (T, words) logits, or (N, L, words) of all.
        """
        source, target = pairs.unbind(1)
        ours, theirs = (None, None) if places is None else places.unbind()
        found = self.write(target, *self.read(source, ours), theirs)
        return found if places is not None else found.view(*target.shape, -1)

    def read(self, source: Tensor, places: Tensor | None = None) -> tuple[Tensor, Layout, Tensor]:
        """What is made of (N, L) words: a line, its layout, and what of its rows is blank."""
        words, layout = self._laid(source, places)
        blanks = (source == 0)[:, None]
        for layer in self.encoder:
            words = layer(words, layout, blanks)
        return words, layout, blanks

    def write(
        self, target: Tensor, read: Tensor, layout: Layout, blanks: Tensor, places: Tensor | None = None
    ) -> Tensor:
        """What is to be written after each of (N, L) words, in a line, given what was read."""
        words, own = self._laid(target, places)
        later = self.later[: target.shape[1], : target.shape[1]]
        for layer in self.decoder:
            words = layer(words, own, later, (read, layout, blanks))
        return nn.functional.linear(words, self.embedding.words.weight)

    def _laid(self, words: Tensor, places: Tensor | None) -> tuple[Tensor, Layout]:
        if words.shape[1] > (longest := len(self.embedding.waves)):
            raise ValueError(
                f"rows of {words.shape[1]} words, with the ends of a sentence and what fills it up, where {longest} are"
                " the most: leave out the longest sentences, or make the translator with a larger longest"
            )
        if places is None:
            places = torch.arange(words.numel(), device=words.device)
        line = self.embedding(words.flatten()[places], places % words.shape[1])
        return self.norm(line), Layout(words.shape, places, self.heads)

    @torch.no_grad()
    def translate(self, source: Tensor, begin: int, end: int, longest: int) -> Tensor:
        """Write the likeliest word after the likeliest word, until all sentences have ended or are the longest.

        Args:
            source: (N, L) words.
            begin: the word that a sentence begins with.
            end: and ends with; what is behind it means nothing.
            longest: how many words at most.
        """
        read = self.read(source)
        written = torch.full((len(source), 1), begin, device=source.device)
        for _ in range(longest):
            likeliest = self.write(written, *read).view(*written.shape, -1)[:, -1].argmax(-1, keepdim=True)
            written = torch.cat([written, likeliest], 1)
            if bool((written == end).any(1).all()):
                break
        return written[:, 1:]
