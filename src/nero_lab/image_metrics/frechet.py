"""The Fréchet distance between two sets of vectors, each modelled as a Gaussian."""

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self


class Gaussian(NamedTuple):
    """Mean (D,) and symmetric square root of the covariance (D, D), in float64."""

    mean: Tensor
    root: Tensor

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor) -> Self:
        """Build from a covariance of any rank, on its device."""
        values, vectors = torch.linalg.eigh(covariance.double())
        rounding = len(values) * torch.finfo(values.dtype).eps * values[-1]
        values = torch.where(values > rounding, values, 0)  # the root would magnify the rounding of a zero
        return cls(mean.double(), (vectors * values.sqrt()) @ vectors.mT)

    def distance(self, other: "Gaussian") -> float:
        r"""Compute the squared Fréchet distance.

        It is :math:`\|m - m'\|^2 + \mathrm{tr}(C + C' - 2 (C^{1/2} C' C^{1/2})^{1/2})`. The last trace is the sum of
        the singular values of :math:`C^{1/2} C'^{1/2}`. These are the positive eigenvalues of a symmetric matrix of
        twice the width, which a GPU computes faster and as exactly.

        Example:
            >>> one = Gaussian.from_covariance(torch.zeros(2), torch.eye(2))
            >>> two = Gaussian.from_covariance(torch.ones(2), 4 * torch.eye(2))
            >>> round(one.distance(two), 12)
            4.0
        """
        width = 2 * len(self.mean)
        both = self.root.new_zeros(width, width)
        both[width // 2 :, : width // 2] = self.root @ other.root  # eigvalsh reads the lower triangle only
        shared = torch.linalg.eigvalsh(both).clamp(min=0).sum()
        between_means = (self.mean - other.mean).square().sum()
        variances = self.root.square().sum() + other.root.square().sum()
        return float((between_means + variances - 2 * shared).clamp(min=0))  # clamp keeps NaN


class Moments:
    """Running mean and covariance of vectors that arrive in batches; in float64, on the vectors' device."""

    mean: Tensor
    scatter: Tensor

    def __init__(self) -> None:
        self.count = 0

    def add(self, vectors: Tensor) -> None:
        """Add a batch (N, D)."""
        vectors = vectors.double()
        mean = vectors.mean(0)
        scatter = (vectors - mean).mT @ (vectors - mean)
        if self.count:
            share = len(vectors) / (self.count + len(vectors))
            shift = mean - self.mean
            scatter += self.scatter + self.count * share * shift.outer(shift)
            mean = self.mean + share * shift
        self.mean, self.scatter = mean, scatter
        self.count += len(vectors)

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance of the sample."""
        return self.scatter / max(1, self.count - 1)

    def gaussian(self) -> Gaussian:
        """Return the Gaussian with these moments."""
        return Gaussian.from_covariance(self.mean, self.covariance)
