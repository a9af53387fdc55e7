"""Pooled readings of sharded parameters: each process measures its own part."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nero.groups import Part
from nero.sharding import is_sharded, local_of, sharding_of, totals
from nero.watching.reading import BatchResult, LayerHead

#: The numbers of a row of :attr:`nero.watching.reading.BatchResult.table`.
ROW_LENGTH = 12


def pooled(results: Sequence[BatchResult], parts: Sequence[Part], state: Mapping[Tensor, Any]) -> list[BatchResult]:
    """Replace the rows of sharded parameters by their means over all processes, weighted by the neurons followed.

    Shares become those of all followed neurons. A quantile becomes the mean of the quantiles of the processes.
    """
    sharded = [(place, part) for place, part in enumerate(parts) if is_sharded(part.parameter)]
    if not sharded:
        return list(results)
    measured: dict[int, tuple[int, Tensor | None]] = {
        head.place: (head.followed, row)
        for result in results
        for head, row in zip(result.heads, result.table.unbind(), strict=True)
    }
    nothing: tuple[int, Tensor | None] = (0, None)
    vectors = [_weighted(*measured.get(place, nothing), part, state) for place, part in sharded]
    sums = totals(vectors, [sharding_of(part.parameter, part.role) for _, part in sharded])
    heads, rows, skipped = [], [], []
    for (place, part), (counts, weights, values) in zip(sharded, (_split(total) for total in sums), strict=True):
        followed, missed = counts.long().tolist()
        heads.append(LayerHead(place, part.name, part.role.kind, followed))
        rows.append(values / weights)  # NaN where no process has a number
        skipped.append(missed)
    steps = torch.stack([state[part.parameter]["step"] for _, part in sharded])
    places = {place for place, _ in sharded}
    rest = [_without(result, places) for result in results]
    return [
        *(result for result in rest if result.heads),
        BatchResult(heads, steps, torch.tensor(skipped), torch.stack(rows)),
    ]


def _weighted(followed: int, row: Tensor | None, part: Part, state: Mapping[Tensor, Any]) -> Tensor:
    """Return the number of followed neurons, the skipped updates, and the weights and weighted numbers of a row."""
    local = local_of(part.parameter)
    row = torch.full((ROW_LENGTH,), torch.nan, device=local.device) if row is None else row.double()
    weights = torch.where(row.isnan(), 0.0, float(followed))
    counts = torch.stack(
        [torch.full_like(state[part.parameter]["skipped"], followed), state[part.parameter]["skipped"]]
    )
    return torch.cat([counts.double(), weights.double(), torch.where(row.isnan(), 0.0, row * followed).double()])


def _split(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return total[:2], total[2 : 2 + ROW_LENGTH], total[2 + ROW_LENGTH :]


def _without(result: BatchResult, places: set[int]) -> BatchResult:
    kept = [number for number, head in enumerate(result.heads) if head.place not in places]
    tensors = (tensor[kept] for tensor in (result.steps, result.skipped, result.table))
    return BatchResult([result.heads[number] for number in kept], *tensors)
