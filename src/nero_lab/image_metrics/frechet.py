"""The Fréchet distance between two sets of vectors, each taken for a Gaussian with the set's mean and covariance."""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """A mean (D,) and a square root of a covariance (D, D), in float64."""

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> Self:
        """From a covariance, of any rank, on whose device all of it stays."""
        values, vectors = torch.linalg.eigh(covariance.double())
        rounding = len(values) * torch.finfo(values.dtype).eps * values[-1]
        values = torch.where(values > rounding, values, 0)  # the root of what rounding left of a zero would be large
        return cls(mean.double(), (vectors * values.sqrt()) @ vectors.mT)

    def distance(self, other: "Gaussian") -> float:
        r"""The (squared) Fréchet distance.

        It is :math:`\|m - m'\|^2 + \mathrm{tr}(C + C' - 2 (C^{1/2} C' C^{1/2})^{1/2})`, whose last trace is the sum of
        the singular values of :math:`C^{1/2} C'^{1/2}`, and is taken so: of that no second root need be taken. They are
        the positive eigenvalues of a symmetric matrix twice as wide, which a GPU finds sooner, and as exactly.

        Example:
            >>> one, two = Gaussian.of(torch.zeros(2), torch.eye(2)), Gaussian.of(torch.ones(2), 4 * torch.eye(2))
            >>> round(one.distance(two), 12)
            4.0
        """
        wide = 2 * len(self.mean)
        both = self.root.new_zeros(wide, wide)
        both[wide // 2 :, : wide // 2] = self.root @ other.root  # eigvalsh reads what is below the diagonal
        shared = torch.linalg.eigvalsh(both).clamp(min=0).sum()
        apart = (self.mean - other.mean).square().sum()
        spread = self.root.square().sum() + other.root.square().sum()
        return float((apart + spread - 2 * shared).clamp(min=0))  # what is not a number stays so


class Moments:
    """The mean and the covariance of vectors that come batch by batch; in float64, on the vectors' device."""

    mean: Tensor
    scatter: Tensor

    def __init__(self) -> None:
        self.count = 0

    def add(self, vectors: Tensor) -> None:
        """Take in a batch (N, D)."""
        vectors = vectors.double()
        mean = vectors.mean(0)
        scatter = (vectors - mean).mT @ (vectors - mean)
        if self.count:
            more = len(vectors) / (self.count + len(vectors))
            apart = mean - self.mean
            scatter += self.scatter + self.count * more * apart.outer(apart)
            mean = self.mean + more * apart
        self.mean, self.scatter = mean, scatter
        self.count += len(vectors)

    @property
    def covariance(self) -> Tensor:
        """As of a sample: the scatter over one less than there are vectors."""
        return self.scatter / max(1, self.count - 1)

    def gaussian(self) -> Gaussian:
        """What has come, as a Gaussian."""
        return Gaussian.of(self.mean, self.covariance)
