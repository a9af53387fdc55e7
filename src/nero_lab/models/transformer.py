"""Transformers: a language model without layer norm, and a translator."""

import math

import torch
from torch import Tensor, nn

from nero_lab.models.attention import Layout, MultiHeadAttention
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


class TranslatorLayer(nn.Module):
    """Attentions, then a feed-forward layer; each residual and followed by layer norm.

    A layer of the encoder attends to its own words; one of the decoder to earlier words, then to the encoder's.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, is_decoder: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([MultiHeadAttention(width, heads, dropout, is_causal=is_decoder)])
        if is_decoder:
            self.attentions.append(MultiHeadAttention(width, heads, dropout))
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)

    def forward(self, words: Tensor, layout: Layout, *encoded: tuple[Tensor, Layout]) -> Tensor:
        for attention, others in zip(self.attentions, (None, *encoded), strict=True):
            words = self.norm(words + self.dropout(attention(words, layout, others)))
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
        self.encoder = nn.ModuleList(TranslatorLayer(width, heads, hidden, dropout, False) for _ in range(layers))
        self.decoder = nn.ModuleList(TranslatorLayer(width, heads, hidden, dropout, True) for _ in range(layers))
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, pairs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Predict each next word of the target.

        Args:
            pairs: (N, 2, L): source and target words, padded with blanks.
            positions: (2, T): positions in the flattened source and target to compute: words in order, then blanks;
                None: all. See :class:`Layout`. The logits of blanks must not enter the loss.

        Returns:
            Logits: (T, words), or (N, L, words) for all positions.
        """
        source, target = pairs.unbind(1)
        source_positions, target_positions = (None, None) if positions is None else positions.unbind()
        logits = self.decode(target, self.encode(source, source_positions), target_positions)
        return logits if positions is not None else logits.view(*target.shape, -1)

    def encode(self, source: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Layout]:
        """Encode (N, L) words into a line; return it with its layout."""
        words, layout = self._embed(source, positions)
        for layer in self.encoder:
            words = layer(words, layout)
        return words, layout

    def decode(self, target: Tensor, encoded: tuple[Tensor, Layout], positions: Tensor | None = None) -> Tensor:
        """Return the logits of the word after each of (N, L) words, in a line, given the encoded source."""
        words, layout = self._embed(target, positions)
        for layer in self.decoder:
            words = layer(words, layout, encoded)
        return nn.functional.linear(words, self.embedding.words.weight)

    def _embed(self, words: Tensor, positions: Tensor | None) -> tuple[Tensor, Layout]:
        if words.shape[1] > (most := len(self.embedding.waves)):
            raise ValueError(
                f"rows must have at most {most} words, with their ends and padding, got {words.shape[1]}: leave out "
                "the longest sentences, or build the translator with a larger max_length"
            )
        layout = Layout(words, positions, self.heads)
        line = self.embedding(words.flatten()[layout.positions], layout.positions % words.shape[1])
        return self.norm(line), layout

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
            likeliest = self.decode(written, encoded).view(*written.shape, -1)[:, -1].argmax(-1, keepdim=True)
            written = torch.cat([written, likeliest], 1)
            if bool((written == end).any(1).all()):
                break
        return written[:, 1:]
