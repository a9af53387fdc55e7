"""Metrics of generated images and their weights, and the Fréchet distance against closed forms and SciPy."""

import hashlib
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn

pytest.importorskip("typer")

import distances
import scipy.linalg
from lab.loop_cases import CPU, noise_images, tiny_metrics

from nero_lab import image_metrics
from nero_lab.data import DataError
from nero_lab.image_metrics import Gaussian, Moments


@pytest.fixture(scope="module")
def lite0():
    return image_metrics.efficientnet_metric(CPU)


def waves(count, seed):
    """Make smooth images: waves of random colours, directions and lengths."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.linspace(0, 1, 32)
    down, right, phase = (8 * torch.rand(3, count, 3, 1, 1, generator=generator)).unbind()
    return ((down * place[:, None] + right * place + phase).sin() * 127 + 128).byte()


def test_lite0_separates_noise_from_images(lite0):
    assert lite0.name == "Fréchet distance, EfficientNet-Lite0"
    assert lite0.features(waves(1, 0)).shape == (1, 1280)
    every_tenth = replace(lite0, features=lambda pixels: lite0.features(pixels)[:, ::10])  # fast
    noise = torch.randint(256, (12, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    some, others, far = (every_tenth.gaussian(each.split(6)) for each in (waves(12, 0), waves(12, 1), noise))
    assert some.distance(some) < 1e-9
    assert 3 * some.distance(others) < some.distance(far)


def test_lite0_recognises_a_ping_pong_ball(lite0):
    """An orange ball on white is of class 722 only if every weight is in its place."""
    place = torch.linspace(-1, 1, 224)
    ball = (place[:, None] ** 2 + place**2 < 0.6)[None, None]
    orange = torch.tensor([245, 130, 20]).view(1, 3, 1, 1) * (1 - 0.3 * (place[:, None] ** 2 + place**2))
    pixels = torch.where(ball, orange, torch.full_like(orange, 235)).byte()
    with torch.no_grad():
        likeliest = lite0.features.classes(lite0.features(pixels)).argmax(1).item()
    assert likeliest == 722


def test_fid_is_available_if_its_weights_are_named(tmp_path, monkeypatch, lite0):
    monkeypatch.setattr(image_metrics, "efficientnet_metric", lambda _: lite0)
    assert [metric.key for metric in image_metrics.available_metrics(CPU)] == ["distance"]
    path = tmp_path / "weights.pth"
    monkeypatch.setenv("NERO_INCEPTION", str(path))
    with pytest.raises(DataError, match=r"cannot read .*weights.pth \(No such file.*NERO_INCEPTION"):
        image_metrics.available_metrics(CPU)
    path.write_bytes(b"weights")
    with pytest.raises(DataError, match=r"weights.pth is damaged.*6726825d0af5"):
        image_metrics.available_metrics(CPU)
    monkeypatch.setattr(image_metrics, "INCEPTION_CHECKSUM", "sha256:" + hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(DataError, match=r"torch-fidelity .*\.\[fid\]"):
        image_metrics.available_metrics(CPU)

    class Extractor(nn.Module):
        def __init__(self, _, wanted, feature_extractor_weights_path):
            super().__init__()
            assert (wanted, feature_extractor_weights_path) == (["2048"], str(path))

        def forward(self, pixels):
            return (pixels.float().mean((2, 3)),)

    module = ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    module.FeatureExtractorInceptionV3 = Extractor
    monkeypatch.setitem(sys.modules, "torch_fidelity", ModuleType("torch_fidelity"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(image_metrics, "version", lambda _: "0.4.0")
    _, fid = image_metrics.available_metrics(CPU)
    assert (fid.name, fid.key) == ("FID, Inception by torch-fidelity 0.4.0", "fid")
    assert fid.gaussian([waves(5, 0)]).mean.shape == (3,)


def test_distances_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(distances, "load", lambda *_: noise_images(40, 40))
    monkeypatch.setattr(distances, "available_metrics", tiny_metrics)
    assert distances.main(["--images", "20", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert "noise" in path.read_text()


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
