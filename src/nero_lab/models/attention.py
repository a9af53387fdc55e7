"""Multi-head attention between sentences whose words lie in one line, without padding."""

import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero_lab.launch import kernels_work, on
from nero_lab.models.dropout import Dropout

#: Longest padded sentence that the kernels hold on chip.
MAX_KERNEL_LENGTH = 64
#: Widest head that they hold on chip.
MAX_KERNEL_WIDTH = 64
#: Smallest side of a matrix that Triton multiplies.
MIN_SIDE = 16


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
    """Sentences as a line, all words of a batch in sequence, and as padded rows, one per sentence and head.

    More than half of the rows is padding. So layers that treat each word alone run on the line. Attention runs on the
    rows, or by kernels on the line. Blanks receive no gradient.

    Args:
        words: (N, L): the rows, padded with 0.
        positions: positions of the line's words in the flattened rows, in order; then, unless these are all positions,
            some blanks. The last one stands for every blank that is left out. None: all positions.
        heads: number of heads.
    """

    def __init__(self, words: Tensor, positions: Tensor | None, heads: int) -> None:
        self.shape = (heads, *words.shape)
        self.is_packed = positions is not None
        self.positions = torch.arange(words.numel(), device=words.device) if positions is None else positions
        self.blanks = (words == 0)[:, None]

    @cached_property
    def later(self) -> Tensor:
        """Mask of the words after each word: (L, L)."""
        length = self.shape[-1]
        return torch.ones(length, length, dtype=torch.bool, device=self.blanks.device).triu(1)

    @cached_property
    def lengths(self) -> Tensor:
        """Words of each sentence."""
        return self.blanks.logical_not().sum((1, 2), dtype=torch.int32)

    @cached_property
    def starts(self) -> Tensor:
        """Index of each sentence's first word in the line, if it is packed."""
        return self.lengths.cumsum(0, dtype=torch.int32) - self.lengths

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor]:
        """The rows' elements in the line, and the line's in the rows."""
        heads, *rows = self.shape
        count, device = math.prod(rows), self.positions.device
        line, head = (torch.arange(each, device=device) for each in (len(self.positions), heads))
        order = line[-1].repeat(count).index_copy_(0, self.positions, line)
        return (order * heads + head[:, None]).flatten(), (self.positions[:, None] + count * head).flatten()

    def rows(self, line: Tensor) -> Tensor:
        """Split a line between heads and lay it out in rows: (heads, N, L, width)."""
        split = line.reshape(len(line) * self.shape[0], -1)
        return _Gather.apply(split, *self._orders).view(*self.shape, -1)  # type: ignore[no-any-return, no-untyped-call]

    def line(self, rows: Tensor) -> Tensor:
        """Lay rows out in a line and join the heads."""
        line = _Gather.apply(rows.flatten(0, 2), *self._orders[::-1])  # type: ignore[no-untyped-call]
        return line.view(-1, self.shape[0] * rows.shape[-1])  # type: ignore[no-any-return]


class MultiHeadAttention(nn.Module):
    """Attention without biases, of one sentence to itself or to another.

    On a GPU with Triton, one kernel does the work between the projections, without padding.

    Args:
        width: elements of a word.
        heads: number of heads.
        dropout: probability to drop an attention weight.
        is_causal: attend to no later words.
    """

    def __init__(self, width: int, heads: int, dropout: float, is_causal: bool = False) -> None:
        super().__init__()
        self.scale, self.is_causal = math.sqrt(width // heads), is_causal
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.dropout = Dropout(dropout)

    def forward(self, words: Tensor, layout: Layout, encoded: tuple[Tensor, Layout] | None = None) -> Tensor:
        """Attend from words in a line to themselves, or to other words with a layout of their own."""
        others, within = encoded or (words, layout)
        if encoded is None:
            own = other = _project(words, self.queries, self.keys, self.values)
        else:
            own, other = _project(words, self.queries), _project(others, self.keys, self.values)
        if _fits_kernels(own, self.out.in_features // layout.shape[0], layout, within):
            return self.out(self._attend_on_line(own, layout, other, within))  # type: ignore[no-any-return]
        queries = layout.rows(own[:, : words.shape[1]])
        keys, values = map(within.rows, torch.split(other, words.shape[1], 1)[-2:])
        mask = layout.later if self.is_causal else within.blanks
        scores = (queries @ keys.mT / self.scale).masked_fill(mask, -1e9)  # not -inf: a row may be all blanks
        return self.out(layout.line(self.dropout(scores.softmax(-1)) @ values))  # type: ignore[no-any-return]

    def _attend_on_line(self, own: Tensor, layout: Layout, other: Tensor, within: Layout) -> Tensor:
        """Attend by a kernel, whose dropout is seeded by the generator."""
        keep = self.dropout.keep if self.dropout.training else 1.0
        seed = torch.zeros((), dtype=torch.int64, device=own.device)
        if keep < 1:
            seed.random_(generator=self.dropout.generator)
        bounds = layout.starts, layout.lengths, within.starts, within.lengths
        width, heads = self.out.in_features, layout.shape[0]
        constants = {
            "WIDTH": width // heads,
            "LENGTH": _power_of_two(max(layout.shape[-1], within.shape[-1])),
            "BLOCK": _power_of_two(width // heads),
            "IS_CAUSAL": self.is_causal,
            "IS_DROPPED": keep < 1,
            "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
            "enable_fp_fusion": True,
        }
        return _Attend.apply(own, None if other is own else other, seed, bounds, heads, self.scale, keep, constants)  # type: ignore[no-any-return, no-untyped-call]


def _project(words: Tensor, *layers: nn.Linear) -> Tensor:
    """Apply several linear layers without bias by one matrix product; hooks on the layers do not run."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    return F.linear(words, weights[0] if len(weights) == 1 else torch.cat(weights))


def _fits_kernels(line: Tensor, head_width: int, *layouts: Layout) -> bool:
    return (
        all(layout.is_packed and layout.shape[-1] <= MAX_KERNEL_LENGTH for layout in layouts)
        and head_width <= MAX_KERNEL_WIDTH
        and line.dtype == torch.float32
        and torch._C._len_torch_dispatch_stack() == 0  # the count of the depth, for instance, traces operations
        and kernels_work(line.device)
    )


def _power_of_two(size: int) -> int:
    return max(MIN_SIDE, 1 << (size - 1).bit_length())


class _Attend(torch.autograd.Function):
    """Attention by kernels. ``own`` is queries, keys and values side by side, or queries if ``other`` has the rest."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, other: Tensor | None, seed: Tensor, bounds: tuple[Tensor, ...], *options: Any
    ) -> Tensor:
        from nero_lab import kernels

        heads, scale, keep, constants = options
        ctx.save_for_backward(own, other, seed, *bounds)
        ctx.options = options
        queries, keys, values = _split(own, other)
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format)  # a blank's row stays zero
        with on(own.device):
            kernels.attend[(len(bounds[0]) * heads,)](
                queries, keys, values, out, seed, *bounds, queries.stride(0), keys.stride(0), out.stride(0),
                heads, scale, keep, **constants,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from nero_lab import kernels

        if torch.is_grad_enabled():
            raise RuntimeError("attention in float32 on a GPU has no second derivative: use float64 with create_graph")
        heads, scale, keep, constants = ctx.options
        own, other, seed, *bounds = ctx.saved_tensors
        sources, grad = _split(own, other), grad.contiguous()
        grads = torch.zeros_like(own), None if other is None else torch.zeros_like(other)
        with on(own.device):
            kernels.attend_back[(len(bounds[0]) * heads,)](
                *sources, grad, *_split(*grads), seed, *bounds, sources[0].stride(0), sources[1].stride(0),
                grad.stride(0), heads, scale, keep, **constants,
            )  # fmt: skip
        return (*grads, *[None] * 6)


def _split(own: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values."""
    if other is None:
        queries, keys, values = own.chunk(3, 1)
    else:
        queries, (keys, values) = own, other.chunk(2, 1)
    return queries, keys, values
