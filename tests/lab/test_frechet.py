"""The Fréchet distance, against closed forms and SciPy."""

import pytest
import scipy.linalg
import torch

from nero_lab.image_metrics.frechet import Gaussian, Moments


def sample(count, width, seed, *, rank=None):
    generator = torch.Generator().manual_seed(seed)
    rank = width if rank is None else rank
    mixed = torch.randn(rank, width, generator=generator, dtype=torch.float64)
    return torch.randn(count, rank, generator=generator, dtype=torch.float64) @ mixed + torch.randn(
        width, generator=generator, dtype=torch.float64
    )


def gaussian(vectors, batch=7):
    moments = Moments()
    for part in vectors.split(batch):
        moments.add(part)
    return moments.gaussian()


def test_moments_in_batches_match_torch():
    vectors = sample(50, 4, 0) + 1e4  # far from zero, where sums of squares cancel
    moments = Moments()
    for batch in vectors.split([1, 20, 29]):
        moments.add(batch)
    torch.testing.assert_close(moments.mean, vectors.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(moments.covariance, vectors.T.cov(), rtol=1e-9, atol=1e-9)


def test_distance_of_known_gaussians():
    """With common axes, it is the squared distance of the means plus that of the deviations."""
    axes, _ = torch.linalg.qr(sample(6, 6, 3))
    deviations = torch.tensor([[3.0, 2, 1, 0.5, 0, 0], [1.0, 2, 4, 0, 0.3, 0]], dtype=torch.float64)
    means = sample(2, 6, 4)
    ends = [Gaussian.from_covariance(mean, axes * one**2 @ axes.T) for mean, one in zip(means, deviations, strict=True)]
    expected = (means[0] - means[1]).square().sum() + (deviations[0] - deviations[1]).square().sum()
    assert ends[0].distance(ends[1]) == pytest.approx(expected.item(), rel=1e-12)
    assert ends[1].distance(ends[0]) == pytest.approx(expected.item(), rel=1e-12)


def test_distance_matches_scipy_root():
    one, two = sample(40, 5, 0), sample(30, 5, 1)
    root = scipy.linalg.sqrtm(one.T.cov().numpy() @ two.T.cov().numpy()).real
    expected = (one.mean(0) - two.mean(0)).square().sum() + (one.T.cov() + two.T.cov()).trace() - 2 * root.trace()
    assert gaussian(one).distance(gaussian(two)) == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize(("count", "rank"), [(200, 30), (20, 30), (200, 3)])
def test_distance_of_a_set_to_itself_is_zero(count, rank):
    """Includes covariances of low rank."""
    vectors = sample(count, 30, 5, rank=rank)
    variance = vectors.var(0).sum().item()
    assert gaussian(vectors).distance(gaussian(vectors.flip(0), batch=11)) < 1e-12 * variance
    assert gaussian(vectors).distance(gaussian(vectors + 1)) == pytest.approx(30, rel=1e-9)
