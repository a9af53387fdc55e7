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

    def forward(
        self, words: Tensor, layout: Layout, others: Tensor | None = None, within: Layout | None = None
    ) -> Tensor:
        """Attend from words in a line to themselves, or to others with a layout of their own."""
        if others is None or within is None:
            own = other = _project(words, self.queries, self.keys, self.values)
            within = layout
        else:
            own, other = _project(words, self.queries), _project(others, self.keys, self.values)
        if _fits_kernels(own, layout, within):
            return self.out(self._attend_on_line(own, layout, other, within))  # type: ignore[no-any-return]
        queries = layout.rows(own[:, : words.shape[1]])
        keys, values = map(within.rows, torch.split(other, words.shape[1], 1)[-2:])
        mask = layout.later if self.is_causal else within.blanks
        scores = (queries @ keys.mT / self.scale).masked_fill(mask, -1e9)  # not -inf: a row may be all blanks
        return self.out(layout.line(self.dropout(scores.softmax(-1)) @ values))  # type: ignore[no-any-return]

    def _attend_on_line(self, own: Tensor, layout: Layout, other: Tensor, within: Layout) -> Tensor:
        """Attend by a kernel, whose dropout is seeded by the generator."""
        keep = self.dropout.keep if self.training else 1.0
        seed = torch.zeros((), dtype=torch.int64, device=own.device)
        if keep < 1:
            seed.random_(generator=self.dropout.generator)
        is_exact = torch.get_float32_matmul_precision() == "highest"
        bounds = layout.starts, layout.lengths, within.starts, within.lengths
        attended: Tensor = _attend(
            own, None if other is own else other, seed, *bounds,
            layout.shape[0], max(layout.shape[-1], within.shape[-1]), self.scale, keep, self.is_causal, is_exact,
        )  # fmt: skip
        return attended


def _project(words: Tensor, *layers: nn.Module) -> Tensor:
    """Apply several linear layers without bias by one matrix product."""
    weights: list[Tensor] = [layer.get_parameter("weight") for layer in layers]
    return F.linear(words, weights[0] if len(weights) == 1 else torch.cat(weights))


def _fits_kernels(line: Tensor, *layouts: Layout) -> bool:
    return (
        all(layout.is_packed and layout.shape[-1] <= MAX_KERNEL_LENGTH for layout in layouts)
        and line.dtype == torch.float32
        and kernels_work(line.device)
    )


@torch.library.custom_op("nero_lab::attend", mutates_args=())
def _attend(
    own: Tensor, other: Tensor | None, seed: Tensor, own_starts: Tensor, own_lengths: Tensor, other_starts: Tensor,
    other_lengths: Tensor, heads: int, length: int, scale: float, keep: float, is_causal: bool, is_exact: bool,
) -> Tensor:  # fmt: skip
    """Attend by a kernel. ``own`` is queries, keys and values side by side, or queries if ``other`` has the others.

    An operator of torch, unlike a plain function, is seen by the count of the depth.
    """
    from nero_lab import kernels

    sources, width, constants = _sources(own, other, heads, length, keep, is_causal, is_exact)
    out = own.new_zeros(len(own), width)  # a blank's row stays zero
    bounds = own_starts, own_lengths, other_starts, other_lengths
    with on(own.device):
        kernels.attend[(len(own_starts) * heads,)](
            *sources, out, seed, *bounds, sources[0].stride(0), sources[1].stride(0), width, heads, scale, keep,
            **constants,
        )  # fmt: skip
    return out


def _sources(
    own: Tensor, other: Tensor | None, heads: int, length: int, keep: float, is_causal: bool, is_exact: bool
) -> tuple[tuple[Tensor, ...], int, dict[str, Any]]:
    """Return queries, keys and values; their width; and the constants of the kernels."""
    width = own.shape[1] if other is not None else own.shape[1] // 3
    sources = own[:, :width], *torch.split(own if other is None else other, width, 1)[-2:]
    constants = {
        "WIDTH": width // heads,
        "LENGTH": max(MIN_SIDE, 1 << (length - 1).bit_length()),
        "BLOCK": max(MIN_SIDE, 1 << (width // heads - 1).bit_length()),
        "IS_CAUSAL": is_causal,
        "IS_DROPPED": keep < 1,
        "PRECISION": "ieee" if is_exact else "tf32",
        "enable_fp_fusion": True,
    }
    return sources, width, constants


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _attend_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    from nero_lab import kernels

    own, other, seed, *bounds = ctx.saved_tensors
    heads, length, scale, keep, *flags = ctx.options
    sources, _, constants = _sources(own, other, heads, length, keep, *flags)
    grad = grad.contiguous()
    grads = torch.zeros_like(own), None if other is None else torch.zeros_like(other)
    with on(own.device):
        kernels.attend_back[(len(bounds[0]) * heads,)](
            *sources, grad, *_sources(*grads, heads, length, keep, *flags)[0], seed, *bounds,
            sources[0].stride(0), sources[1].stride(0), grad.stride(0), heads, scale, keep, **constants,
        )  # fmt: skip
    return (*grads, *[None] * 11)


_attend.register_autograd(_attend_back, setup_context=_save)
