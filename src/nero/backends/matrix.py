"""Sums over neurons that are the rows or columns of a matrix on a CPU, in float32 where values are ordinary."""

import torch
from torch import Tensor

from nero.rule import Number

#: Norms in this range have squares within float32's range.
ORDINARY = (1e-15, 1e15)
#: Above this fan-in, the fast sums lose too much precision in float32.
MAX_FAN_IN = 1 << 15
#: Elements of a neuron in one fast sum, along columns and along rows. Longer sums lose precision in float32.
COLUMN_BLOCK = 1024
ROW_BLOCK = 4096


def is_ordinary(lengths: Number) -> bool:
    """Return whether the squares of all lengths are within float32's range; a NaN is not."""
    if not isinstance(lengths, Tensor):
        return ORDINARY[0] < lengths < ORDINARY[1]
    low, high = torch.stack(torch.aminmax(lengths)).tolist()
    return bool(low > ORDINARY[0] and high < ORDINARY[1])


def norm_along(matrix: Tensor, axis: int, scratch: Tensor) -> Tensor:
    """Compute the norm of each neuron of a matrix; ``scratch`` holds as many elements, for neurons along axis 0."""
    if axis == 0:
        # torch's norm is not vectorised along columns; a product with ones is
        return sum_along(torch.mul(matrix, matrix, out=scratch[: matrix.numel()].view(matrix.shape)), axis).sqrt_()
    blocks, rest = divmod(matrix.shape[1], ROW_BLOCK)
    if blocks == 0 or (blocks == 1 and not rest):
        size: Tensor = torch.linalg.vector_norm(matrix, dim=1, keepdim=True)
        return size
    cut = blocks * ROW_BLOCK
    sizes: Tensor = torch.linalg.vector_norm(matrix[:, :cut].unflatten(1, (blocks, ROW_BLOCK)), dim=2)  # type: ignore[no-untyped-call]
    if rest:
        sizes = torch.cat([sizes, torch.linalg.vector_norm(matrix[:, cut:], dim=1, keepdim=True)], 1)
    total: Tensor = torch.linalg.vector_norm(sizes, dim=1, keepdim=True)
    return total


def sum_along(matrix: Tensor, axis: int) -> Tensor:
    """Sum each neuron of a matrix."""
    if axis == 1:
        return matrix.sum(1, keepdim=True)
    ones = matrix.new_ones(1, min(matrix.shape[0], COLUMN_BLOCK))
    if matrix.shape[0] <= COLUMN_BLOCK:
        return torch.mm(ones, matrix)
    blocks, rest = matrix.shape[0] // COLUMN_BLOCK, matrix.shape[0] % COLUMN_BLOCK
    total = torch.matmul(ones, matrix[: blocks * COLUMN_BLOCK].view(blocks, COLUMN_BLOCK, -1)).sum(0)
    return total + torch.mm(ones[:, :rest], matrix[blocks * COLUMN_BLOCK :]) if rest else total
