"""Measures of caps against closed forms, exact fractions, quadrature and sampling."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from nero import theory

ANGLES = (1e-3, 0.1, 0.5, 1.0, 1.4, 1.55, math.pi / 2)


@pytest.mark.parametrize("angle", ANGLES)
@pytest.mark.parametrize(
    ("dim", "exact"),
    [
        (1, lambda a: a / math.pi),
        (2, lambda a: math.sin(a / 2) ** 2),
        (3, lambda a: (a - math.sin(a) * math.cos(a)) / math.pi if a > 0.01 else 2 * a**3 / (3 * math.pi)),
        (4, lambda a: math.sin(a / 2) ** 4 * (2 + math.cos(a))),
    ],
    ids=["circle", "sphere", "S^3", "S^4"],
)
def test_cap_in_low_dimension_matches_closed_form(dim: int, exact, angle: float):
    cap = theory.cap_measure(dim, angle)
    accuracy = 1e-12 if dim != 3 or angle > 0.01 else 1e-6  # the closed form cancels: its series is used
    assert cap.measure == pytest.approx(exact(angle), rel=accuracy)
    assert cap.measure == pytest.approx(exact(angle), abs=1e-10)


def integrate_sine_power(sine: Fraction, cosine: Fraction, power: int) -> Fraction:
    """Integrate sin^power from 0 to α exactly, by parts, for an odd power and rational sine and cosine."""
    total = 1 - cosine
    for n in range(3, power + 1, 2):
        total = (-cosine * sine ** (n - 1) + (n - 1) * total) / n
    return total


@pytest.mark.parametrize(
    ("sine", "cosine"), [((3, 5), (4, 5)), ((4, 5), (3, 5)), ((9, 41), (40, 41)), ((40, 41), (9, 41))]
)
@pytest.mark.parametrize("dim", [2, 10, 38, 40, 42, 400, 2000])
def test_cap_in_even_dimension_matches_exact_fraction(dim: int, sine: tuple[int, int], cosine: tuple[int, int]):
    whole = 2 * integrate_sine_power(Fraction(1), Fraction(0), dim - 1)
    share = integrate_sine_power(Fraction(*sine), Fraction(*cosine), dim - 1) / whole
    log_share = math.log(share.numerator) - math.log(share.denominator)
    found = theory.cap_measure(dim, math.atan2(sine[0] / sine[1], cosine[0] / cosine[1]))
    # the rounding of the angle contributes dim · eps / tan(angle)
    assert found.log_measure == pytest.approx(log_share, abs=1e-11, rel=1e-14 * 8)


@pytest.mark.parametrize("dim", [7, 101, 5001, 1_000_001])
@pytest.mark.parametrize("angle", [0.01, 0.7, 1.5, 1.57])
def test_cap_in_odd_dimension_matches_quadrature(dim: int, angle: float):
    """Integrate sin^(k-1) by Simpson's rule, over the cap and over the hemisphere."""

    def log_integral(end: float) -> float:
        width = min(
            end, 60 / max((dim - 1) / math.tan(end), math.sqrt(dim - 1)) if end < 1.5 else 12 / math.sqrt(dim - 1)
        )
        theta = end - width + width * torch.arange(40_001, dtype=torch.float64) / 40_000
        logs = (dim - 1) * torch.sin(theta).log()
        simpson = torch.tensor([2.0, 4.0], dtype=torch.float64).repeat(20_001)[:40_001].clone()
        simpson[[0, -1]] = 1.0
        return float((logs + simpson.log()).logsumexp(0)) + math.log(width / 120_000)

    wanted = log_integral(angle) - log_integral(math.pi / 2) - math.log(2)
    assert theory.cap_measure(dim, angle).log_measure == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("dim", [1, 2, 5, 30])
def test_cap_matches_sampled_share(dim: int):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(200_000, dim + 1, generator=generator, dtype=torch.float64)
    angles = torch.atan2(points[:, 1:].norm(dim=1), points[:, 0])
    for angle in (0.4, 1.0, 1.3, 1.5):
        share = theory.cap_measure(dim, angle).measure
        inside = int((angles <= angle).sum())
        assert abs(inside - 200_000 * share) <= 5 * math.sqrt(200_000 * share * (1 - share)) + 1e-9


@pytest.mark.parametrize("dim", [1, 2, 3, 10, 782, 4606, 10**6])
@pytest.mark.parametrize("angle", ANGLES)
def test_ball_bound_is_below_cap_measure(dim: int, angle: float):
    """Check Lemma 2.3 of Ball: a cap of chord radius r has a measure of at least ½ (r/2)^dim."""
    cap = theory.cap_measure(dim, angle)
    assert math.isfinite(cap.log_measure)
    assert cap.log_ball == pytest.approx(math.log(0.5) + dim * math.log(2 * math.sin(angle / 2) / 2))
    assert cap.log_ball <= cap.log_measure <= math.log(0.5) + 1e-12
    assert cap.ball <= cap.measure <= 0.5 + 1e-12


@pytest.mark.parametrize("angle", [1e-8, 1e-150, 1e-161, 1e-170, 1e-308, 5e-324])
@pytest.mark.parametrize("dim", [1, 2, 10, 782])
def test_cap_of_tiny_angle_is_flat(dim: int, angle: float):
    """Compare with a ball in the tangent space: π^(k/2) α^k / Γ(k/2 + 1) of 2 π^((k+1)/2) / Γ((k+1)/2)."""
    cap = theory.cap_measure(dim, angle)
    ball = dim / 2 * math.log(math.pi) + dim * math.log(angle) - math.lgamma(dim / 2 + 1)
    sphere = math.log(2) + (dim + 1) / 2 * math.log(math.pi) - math.lgamma((dim + 1) / 2)
    assert cap.log_measure == pytest.approx(ball - sphere, rel=1e-12)
    assert cap.log_ball < cap.log_measure
    assert "e-" in str(cap)


@pytest.mark.parametrize("dim", [1, 10**6, 10**16, 10**18])
def test_cap_of_hemisphere_is_half(dim: int):
    assert theory.cap_measure(dim, math.pi / 2).measure == pytest.approx(0.5, rel=1e-6)


def test_cap_is_smooth_where_the_method_changes():
    """Check for jumps along a fine grid of angles and of dimensions."""
    at = [theory.cap_measure(50, 1.2 + 1e-4 * step).log_measure for step in range(3600)]
    rises = [b - a for a, b in itertools.pairwise(at)]
    assert min(rises) > 0
    assert max(abs(b - a) for a, b in itertools.pairwise(rises)) < 2e-6
    by_dim = [theory.cap_measure(dim, 1.0).log_measure for dim in range(1, 200)]
    assert all(b < a for a, b in itertools.pairwise(by_dim))


@pytest.mark.parametrize("angle", [0, -0.1, 1.6, math.pi, math.nan, math.inf, "1", None, True])
def test_angle_out_of_range_raises(angle):
    with pytest.raises(ValueError, match=r"angle in \(0, π/2\], in radians, got"):
        theory.cap_measure(10, angle)
    with pytest.raises(ValueError, match=r"alpha must be an angle in \(0, π/2\]"):
        theory.generalisation_bound([(2, 5)], angle, 100)


@pytest.mark.parametrize("dim", [0, -3, 2.5, True, "2"])
def test_dimension_below_one_raises(dim):
    with pytest.raises(ValueError, match="dim must be an integer of at least 1"):
        theory.cap_measure(dim, 1.0)
