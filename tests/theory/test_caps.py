"""Measures of caps against closed forms, exact fractions, quadrature and sampling, and neurons turned within caps."""

import copy
import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import nero
from nero import theory
from nero.theory.caps import log_incomplete_beta
from nero.theory.layers import layers_of
from nero.theory.rotations import LayerCaps, cap_angles

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


def test_incomplete_beta_matches_binomial_tail():
    for draws, kept, share in itertools.product((5, 40, 900), (1, 3, 5), (0.01, 0.3, 0.5, 0.99)):
        tail = sum(
            math.comb(draws, k) * Fraction(share) ** k * (1 - Fraction(share)) ** (draws - k) for k in range(kept)
        )
        wanted = math.log(1 - tail) if tail < Fraction(1, 2) else math.log(float(1 - tail))
        assert log_incomplete_beta(kept, draws - kept + 1, share) == pytest.approx(wanted, abs=1e-10)
    assert log_incomplete_beta(2.0, 3.0, 0.0) == -math.inf
    assert log_incomplete_beta(2.0, 3.0, 1.0) == 0.0


@pytest.mark.parametrize("angle", [0.01, 1.0, 1.5, math.pi / 2])
@pytest.mark.parametrize("dim", [1, 2, 50, 10_000])
def test_cap_angles_are_uniform_on_the_cap(dim: int, angle: float):
    """Compare the empirical distribution of 20,000 draws with the measure, by Kolmogorov's distance."""
    generator = torch.Generator().manual_seed(dim)
    drawn = cap_angles(dim, angle, torch.zeros(20_000, dtype=torch.float64), generator).sort().values
    assert float(drawn.max()) <= angle
    whole = theory.cap_measure(dim, angle).log_measure
    for index in range(500, 20_000, 500):
        within = math.exp(theory.cap_measure(dim, float(drawn[index])).log_measure - whole)
        assert within == pytest.approx(index / 20_000, abs=0.015)


@pytest.mark.parametrize(
    "layer", [nn.Linear(7, 4), nn.Conv2d(3, 4, 2), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Linear(2, 4)], ids=str
)
def test_turned_neurons_stay_on_their_sphere(layer: nn.Module):
    nero.balance_(layer.double())
    start = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.mul_(3)
    (caps,) = [LayerCaps.around(each, centred=True) for each in layers_of(layer)]
    gradient, generator = torch.randn_like(layer.weight), torch.Generator().manual_seed(0)
    minimum = caps.minimum(gradient, 0.3, layer.weight)
    best = (minimum * gradient).sum()
    for turned in (minimum, *(caps.random(0.3, generator) for _ in range(50))):
        with torch.no_grad():
            layer.weight.copy_(turned / 3)
        assert nero.is_balanced(layer)
        moved = theory.relative_step(start, {"weight": layer.weight.detach() - start.weight.detach()}).neuron
        assert moved <= 2 * math.sin(0.15) + 1e-9
        assert (turned * gradient).sum() >= best


def test_minimum_over_cap_lies_inside_or_on_rim():
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
    caps = LayerCaps.around(layers_of(layer)[0], centred=False)
    gradient = torch.tensor([[-1.0, -1.0, 0.0]]).double()
    torch.testing.assert_close(caps.minimum(gradient, 1.2, layer.weight), -gradient / math.sqrt(2))
    at_rim = caps.minimum(gradient, 0.5, layer.weight)
    torch.testing.assert_close(at_rim, torch.tensor([[math.cos(0.5), math.sin(0.5), 0.0]]).double())
    assert caps.slope(gradient) == pytest.approx(1.0)
    elsewhere = torch.tensor([[math.cos(0.1), 0.0, math.sin(0.1)]]).double()
    assert torch.equal(caps.minimum(torch.zeros(1, 3).double(), 0.5, elsewhere), elsewhere)
    uphill = torch.tensor([[2.0, 0.0, 0.0]]).double()  # from the maximum all ways lead down: it takes the given one
    torch.testing.assert_close(
        caps.minimum(uphill, 0.5, elsewhere), torch.tensor([[math.cos(0.5), 0.0, math.sin(0.5)]]).double()
    )
    assert torch.equal(caps.minimum(-uphill, 0.5, elsewhere), layer.weight)
