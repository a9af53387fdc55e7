"""Transformers: a language model without layer norm, and a translator."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from nero_lab.models.dropout import Dropout


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("later", torch.ones(max_length, max_length, dtype=torch.bool).triu(1), persistent=False)
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
        weights = self.dropout(scores.masked_fill(self.later[:length, :length], -math.inf).softmax(-1))
        return self.out((weights @ values).transpose(1, 2).reshape(inputs.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Residual attention, then a residual feed-forward layer."""

    def __init__(self, width: int, heads: int, hidden: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(Attention(width, heads, max_length, dropout), Dropout(dropout))
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), Dropout(dropout), nn.Linear(hidden, width), Dropout(dropout)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.attention(inputs)
        return inputs + self.feed_forward(inputs)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Learned word embeddings, optionally scaled, plus sinusoidal position embeddings."""

    def __init__(self, words: int, width: int, max_length: int, dropout: float, scaled: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.scale = math.sqrt(width) if scaled else 1.0
        self.dropout = Dropout(dropout)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        angles = torch.arange(max_length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        self.register_buffer("waves", waves, persistent=False)
        self.waves: Tensor

    def forward(self, words: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed words at their positions; None: their indices along the last axis."""
        encoding = self.waves[: words.shape[-1]] if positions is None else self.waves[positions]
        return self.dropout(self.words(words) * self.scale + encoding)  # type: ignore[no-any-return]


def language_model(
    words: int = 33278,
    *,
    width: int = 200,
    heads: int = 2,
    hidden: int = 200,
    layers: int = 2,
    max_length: int = 35,
    dropout: float = 0.2,
) -> nn.Sequential:
    """Build a model that predicts each next word; with 2 layers it has 19 parameter tensors.

    Args:
        words: size of the vocabulary; the default is WikiText-2's.
        width: size of the embeddings.
        heads: heads of each attention.
        hidden: units of the feed-forward layers.
        layers: number of blocks.
        max_length: longest sequence, in words.
        dropout: probability to drop a unit, an attention weight, or an element of an embedding.
    """
    blocks = [Block(width, heads, hidden, max_length, dropout) for _ in range(layers)]
    decoder = nn.Linear(width, words)
    nn.init.uniform_(decoder.weight, -0.1, 0.1)
    nn.init.zeros_(decoder.bias)
    return nn.Sequential(Embedding(words, width, max_length, dropout), *blocks, decoder)


class _Gather(torch.autograd.Function):
    """Row selection whose gradient is a row selection, too, by the inverse index."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, chosen: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class Layout:
    """Conversion between a line, all words of a batch in sequence, and padded rows, one per sentence and head.

    More than half of the rows is padding. So layers that treat each word alone run on the line, and attention on the
    rows. Blanks receive no gradient.

    Args:
        shape: shape of the rows, (N, L).
        positions: positions of the line's words in the flattened rows. Unless these are all positions, the last one is
            a blank, which stands for every blank that is left out.
        heads: number of heads.
    """

    def __init__(self, shape: torch.Size, positions: Tensor, heads: int) -> None:
        self.shape = (heads, *shape)
        line, head = (torch.arange(count, device=positions.device) for count in (len(positions), heads))
        order = line[-1].repeat(shape.numel()).index_copy_(0, positions, line)
        self._rows_from_line = (order * heads + head[:, None]).flatten()
        self._line_from_rows = (positions[:, None] + shape.numel() * head).flatten()

    def rows(self, line: Tensor) -> Tensor:
        """Split a line between heads and lay it out in rows: (heads, N, L, width)."""
        heads = self.shape[0]
        split = line.view(len(line) * heads, -1)
        rows = _Gather.apply(split, self._rows_from_line, self._line_from_rows)  # type: ignore[no-untyped-call]
        return rows.view(*self.shape, -1)  # type: ignore[no-any-return]

    def line(self, rows: Tensor) -> Tensor:
        """Lay rows out in a line and join the heads."""
        line = _Gather.apply(rows.flatten(0, 2), self._line_from_rows, self._rows_from_line)  # type: ignore[no-untyped-call]
        return line.view(-1, self.shape[0] * rows.shape[-1])  # type: ignore[no-any-return]


class MultiHeadAttention(nn.Module):
    """Attention without biases, of one sentence to itself or to another, with a mask."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.scale = math.sqrt(width // heads)
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.dropout = Dropout(dropout)

    def forward(self, words: Tensor, layout: Layout, others: Tensor, other_layout: Layout, mask: Tensor) -> Tensor:
        queries = layout.rows(self.queries(words))
        keys, values = (other_layout.rows(layer(others)) for layer in (self.keys, self.values))
        scores = queries @ keys.mT / self.scale
        weights = self.dropout(scores.masked_fill(mask, -1e9).softmax(-1))  # not -inf: a row may be all blanks
        return self.out(layout.line(weights @ values))  # type: ignore[no-any-return]


class TranslatorLayer(nn.Module):
    """Attentions, then a feed-forward layer; each residual and followed by layer norm."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, attentions: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(MultiHeadAttention(width, heads, dropout) for _ in range(attentions))
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)

    def forward(self, words: Tensor, layout: Layout, mask: Tensor, *others: tuple[Tensor, Layout, Tensor]) -> Tensor:
        """Attend to the words themselves, then to others; each comes with its layout and mask."""
        for attention, attended in zip(self.attentions, (None, *others), strict=True):
            update = attention(words, layout, *((words, layout, mask) if attended is None else attended))
            words = self.norm(words + self.dropout(update))
        return self.norm(words + self.dropout(self.feed_forward(words)))  # type: ignore[no-any-return]


class Translator(nn.Module):
    """Encoder and decoder that share one table of words with the output layer.

    Args:
        words: size of the vocabulary, whose number 0 is a blank; the default is Multi30k's.
        width: size of the embeddings.
        heads: heads of each attention.
        hidden: units of the feed-forward layers.
        layers: layers of the encoder, and of the decoder.
        max_length: longest padded sentence, in words.
        dropout: probability to drop a unit, or an attention weight.
        scaled: whether to multiply word embeddings by √width before positions are added, as the transformer's inventors
            do; the paper's authors do not.
    """

    def __init__(
        self,
        words: int = 9529,
        *,
        width: int = 512,
        heads: int = 8,
        hidden: int = 2048,
        layers: int = 6,
        max_length: int = 128,
        dropout: float = 0.1,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = Embedding(words, width, max_length, dropout, scaled)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.encoder = nn.ModuleList(TranslatorLayer(width, heads, hidden, dropout, 1) for _ in range(layers))
        self.decoder = nn.ModuleList(TranslatorLayer(width, heads, hidden, dropout, 2) for _ in range(layers))
        self.register_buffer("later", torch.ones(max_length, max_length, dtype=torch.bool).triu(1), persistent=False)
        self.later: Tensor
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, pairs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Predict each next word of the target.

        Args:
            pairs: (N, 2, L): source and target words, padded with blanks.
            positions: (2, T): positions in the flattened source and target to compute; None: all. See
                :class:`Layout`. The logits of blanks must not enter the loss.

        Returns:
            Logits: (T, words), or (N, L, words) for all positions.
        """
        source, target = pairs.unbind(1)
        source_positions, target_positions = (None, None) if positions is None else positions.unbind()
        logits = self.decode(target, *self.encode(source, source_positions), target_positions)
        return logits if positions is not None else logits.view(*target.shape, -1)

    def encode(self, source: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Layout, Tensor]:
        """Encode (N, L) words into a line; return it with its layout and the mask of blanks."""
        words, layout = self._embed(source, positions)
        blanks = (source == 0)[:, None]
        for layer in self.encoder:
            words = layer(words, layout, blanks)
        return words, layout, blanks

    def decode(
        self, target: Tensor, encoded: Tensor, layout: Layout, blanks: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Return the logits of the word after each of (N, L) words, in a line, given the encoded source."""
        words, own_layout = self._embed(target, positions)
        causal_mask = self.later[: target.shape[1], : target.shape[1]]
        for layer in self.decoder:
            words = layer(words, own_layout, causal_mask, (encoded, layout, blanks))
        return nn.functional.linear(words, self.embedding.words.weight)

    def _embed(self, words: Tensor, positions: Tensor | None) -> tuple[Tensor, Layout]:
        if words.shape[1] > (most := len(self.embedding.waves)):
            raise ValueError(
                f"rows must have at most {most} words, with their ends and padding, got {words.shape[1]}: leave out "
                "the longest sentences, or build the translator with a larger max_length"
            )
        if positions is None:
            positions = torch.arange(words.numel(), device=words.device)
        line = self.embedding(words.flatten()[positions], positions % words.shape[1])
        return self.norm(line), Layout(words.shape, positions, self.heads)

    @torch.no_grad()
    def translate(self, source: Tensor, begin: int, end: int, max_length: int) -> Tensor:
        """Translate greedily, until all sentences have ended or reached a length.

        Args:
            source: (N, L) words.
            begin: word that starts a sentence.
            end: word that ends a sentence; words after it are meaningless.
            max_length: longest translation, in words.
        """
        encoded = self.encode(source)
        written = torch.full((len(source), 1), begin, device=source.device)
        for _ in range(max_length):
            likeliest = self.decode(written, *encoded).view(*written.shape, -1)[:, -1].argmax(-1, keepdim=True)
            written = torch.cat([written, likeliest], 1)
            if bool((written == end).any(1).all()):
                break
        return written[:, 1:]
