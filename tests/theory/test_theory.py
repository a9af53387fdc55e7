"""The theory's tools against computations of their own: closed forms, exact sums, quadrature, chance, brute force."""

import copy
import itertools
import math
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm

import nero
import nero.theory
from nero import theory
from nero.theory.caps import log_incomplete_beta
from nero.theory.layers import layers_of
from nero.theory.robustness import share_at_least
from nero.theory.rotations import Caps, cap_angles

PAGE = (Path(__file__).parents[2] / "docs/theory.md").read_text()
ANGLES = (1e-3, 0.1, 0.5, 1.0, 1.4, 1.55, math.pi / 2)


def perceptron(*widths: int, bias: bool = False) -> nn.Sequential:
    layers = [nn.Linear(a, b, bias=bias, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[each for layer in layers for each in (layer, nn.ReLU())][:-1])


def linear_network(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=torch.float64) for a, b in itertools.pairwise(widths)))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# -- caps --------------------------------------------------------------------------------------


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
def test_caps_of_low_dimensions_are_the_closed_forms(dim: int, exact, angle: float):
    cap = theory.cap_measure(dim, angle)
    accuracy = 1e-12 if dim != 3 or angle > 0.01 else 1e-6  # the closed form cancels there: its series is used instead
    assert cap.measure == pytest.approx(exact(angle), rel=accuracy)
    assert cap.measure == pytest.approx(exact(angle), abs=1e-10)


def sine_powers(sine: Fraction, cosine: Fraction, power: int) -> Fraction:
    """∫₀^α sin^power, for an odd power and a rational sine and cosine: exact, by parts."""
    total = 1 - cosine
    for n in range(3, power + 1, 2):
        total = (-cosine * sine ** (n - 1) + (n - 1) * total) / n
    return total


@pytest.mark.parametrize(
    ("sine", "cosine"), [((3, 5), (4, 5)), ((4, 5), (3, 5)), ((9, 41), (40, 41)), ((40, 41), (9, 41))]
)
@pytest.mark.parametrize("dim", [2, 10, 38, 40, 42, 400, 2000])
def test_caps_of_many_dimensions_are_the_exact_fractions(dim: int, sine: tuple[int, int], cosine: tuple[int, int]):
    whole = 2 * sine_powers(Fraction(1), Fraction(0), dim - 1)
    share = sine_powers(Fraction(*sine), Fraction(*cosine), dim - 1) / whole
    log_share = math.log(share.numerator) - math.log(share.denominator)
    found = theory.cap_measure(dim, math.atan2(sine[0] / sine[1], cosine[0] / cosine[1]))
    # an angle's own rounding is worth dim · eps / tan(angle)
    assert found.log_measure == pytest.approx(log_share, abs=1e-11, rel=1e-14 * 8)


@pytest.mark.parametrize("dim", [7, 101, 5001, 1_000_001])
@pytest.mark.parametrize("angle", [0.01, 0.7, 1.5, 1.57])
def test_caps_of_odd_dimensions_are_the_integral(dim: int, angle: float):
    """Simpson's rule for ∫ sin^(k-1), over its peak at the rim, against that over the whole sphere."""

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
def test_caps_are_what_chance_finds(dim: int):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(200_000, dim + 1, generator=generator, dtype=torch.float64)
    angles = torch.atan2(points[:, 1:].norm(dim=1), points[:, 0])
    for angle in (0.4, 1.0, 1.3, 1.5):
        share = theory.cap_measure(dim, angle).measure
        inside = int((angles <= angle).sum())
        assert abs(inside - 200_000 * share) <= 5 * math.sqrt(200_000 * share * (1 - share)) + 1e-9


@pytest.mark.parametrize("dim", [1, 2, 3, 10, 782, 4606, 10**6])
@pytest.mark.parametrize("angle", ANGLES)
def test_balls_bound_is_one(dim: int, angle: float):
    """Lemma 2.3 of Ball: a cap of chord radius r has at least ½ (r/2)^dim."""
    cap = theory.cap_measure(dim, angle)
    assert math.isfinite(cap.log_measure)
    assert cap.log_ball == pytest.approx(math.log(0.5) + dim * math.log(2 * math.sin(angle / 2) / 2))
    assert cap.log_ball <= cap.log_measure <= math.log(0.5) + 1e-12
    assert cap.ball <= cap.measure <= 0.5 + 1e-12


@pytest.mark.parametrize("angle", [1e-8, 1e-150, 1e-161, 1e-170, 1e-308, 5e-324])
@pytest.mark.parametrize("dim", [1, 2, 10, 782])
def test_caps_of_tiny_angles_are_flat(dim: int, angle: float):
    """A ball in the tangent space, of volume π^(k/2) α^k / Γ(k/2 + 1), of 2 π^((k+1)/2) / Γ((k+1)/2)."""
    cap = theory.cap_measure(dim, angle)
    ball = dim / 2 * math.log(math.pi) + dim * math.log(angle) - math.lgamma(dim / 2 + 1)
    sphere = math.log(2) + (dim + 1) / 2 * math.log(math.pi) - math.lgamma((dim + 1) / 2)
    assert cap.log_measure == pytest.approx(ball - sphere, rel=1e-12)
    assert cap.log_ball < cap.log_measure
    assert "e-" in str(cap)


@pytest.mark.parametrize("dim", [1, 10**6, 10**16, 10**18])
def test_half_of_any_sphere_is_half(dim: int):
    assert theory.cap_measure(dim, math.pi / 2).measure == pytest.approx(0.5, rel=1e-6)


def test_caps_grow_smoothly_where_the_method_changes():
    """Along a fine row of angles and of dimensions, the logarithm rises and falls without a jump."""
    at = [theory.cap_measure(50, 1.2 + 1e-4 * step).log_measure for step in range(3600)]
    rises = [b - a for a, b in itertools.pairwise(at)]
    assert min(rises) > 0
    assert max(abs(b - a) for a, b in itertools.pairwise(rises)) < 2e-6
    by_dim = [theory.cap_measure(dim, 1.0).log_measure for dim in range(1, 200)]
    assert all(b < a for a, b in itertools.pairwise(by_dim))


@pytest.mark.parametrize("angle", [0, -0.1, 1.6, math.pi, math.nan, math.inf, "1", None, True])
def test_angles_have_a_range(angle):
    with pytest.raises(ValueError, match=r"angle in \(0, π/2\], in radians, but it is"):
        theory.cap_measure(10, angle)
    with pytest.raises(ValueError, match=r"alpha must be an angle in \(0, π/2\]"):
        theory.generalisation_bound([(2, 5)], angle, 100)


@pytest.mark.parametrize("dim", [0, -3, 2.5, True, "2"])
def test_spheres_have_a_dimension(dim):
    with pytest.raises(ValueError, match="dim must be a whole number of 1 or more"):
        theory.cap_measure(dim, 1.0)


def test_whole_numbers_that_no_float_holds_are_refused_by_name():
    huge = 10**400
    with pytest.raises(ValueError, match="angle must be an angle"):
        theory.cap_measure(10, huge)
    with pytest.raises(ValueError, match="delta must be between 0 and 1"):
        theory.pac_bayes_bound(-1.0, 10, -huge)
    with pytest.raises(ValueError, match="log_solutions must be a number"):
        theory.generalisation_bound([(3, 5)], 0.5, 10, log_solutions=huge)
    assert theory.pac_bayes_bound(-huge, 10).vacuous


def test_real_numbers_may_be_numpys():
    half = np.float32(0.5)
    assert theory.cap_measure(10, half) == theory.cap_measure(10, 0.5)
    assert theory.pac_bayes_bound(-half, 10, half) == theory.pac_bayes_bound(-0.5, 10, 0.5)
    one, other = (
        theory.generalisation_bound([(3, 5)], alpha, 10, delta=alpha, log_solutions=-alpha) for alpha in (half, 0.5)
    )
    assert one == other
    model, inputs, labels = robust_case()
    asked = {"confidence": half, "tolerance": half, "limit": half}
    one, other = (
        theory.robustness(model, (inputs, labels), rotations=4, **options)
        for options in (asked, dict.fromkeys(asked, 0.5))
    )
    assert one == other
    layer = torch.nn.Linear(4, 3)
    assert theory.is_per_neuron_relative(layer, {"weight": 0.25 * layer.weight.detach()}, half)


def test_real_numbers_may_be_tensors():
    assert theory.cap_measure(torch.tensor(3), torch.tensor(1.0)) == theory.cap_measure(3, 1.0)
    assert theory.cap_measure(3, torch.tensor([0.5], requires_grad=True)) == theory.cap_measure(3, 0.5)
    for other in (torch.tensor([0.5, 0.5]), torch.tensor(True), torch.tensor(0.5j)):
        with pytest.raises(ValueError, match=r"angle must be an angle in \(0, π/2\], in radians, but it is tensor"):
            theory.cap_measure(3, other)


def test_whole_numbers_may_be_numpys():
    assert theory.cap_measure(np.int64(10), 0.3) == theory.cap_measure(10, 0.3)
    assert theory.pac_bayes_bound(-1.0, np.int32(10)) == theory.pac_bayes_bound(-1.0, 10)
    assert theory.generalisation_bound(np.array([[3, 5]]), 1.0, 10) == theory.generalisation_bound([(3, 5)], 1.0, 10)
    model, inputs, labels = robust_case()
    asked = {"rotations": 4, "examples": 1, "steps": 2}
    one, other = (
        theory.robustness(model, (inputs, labels), **{name: kind(value) for name, value in asked.items()})
        for kind in (int, np.int64)
    )
    assert one == other
    step = {"weight": torch.ones(3, 4)}
    one, other = (
        theory.is_stable_step(model, lambda model: model(inputs).square().sum(), step, points=kind(2))
        for kind in (int, np.int64)
    )
    assert one == other


def test_the_incomplete_beta_function_is_the_binomials_tail():
    for draws, kept, share in itertools.product((5, 40, 900), (1, 3, 5), (0.01, 0.3, 0.5, 0.99)):
        tail = sum(
            math.comb(draws, k) * Fraction(share) ** k * (1 - Fraction(share)) ** (draws - k) for k in range(kept)
        )
        wanted = math.log(1 - tail) if tail < Fraction(1, 2) else math.log(float(1 - tail))
        assert log_incomplete_beta(kept, draws - kept + 1, share) == pytest.approx(wanted, abs=1e-10)
    assert log_incomplete_beta(2.0, 3.0, 0.0) == -math.inf
    assert log_incomplete_beta(2.0, 3.0, 1.0) == 0.0


# -- the bound ---------------------------------------------------------------------------------


def test_the_bound_by_hand():
    """Two neurons of fan-in 4: caps of the sphere S², of (1 - cos α)/2 each; n = 50, δ = 0.1, K = 3, α = 1."""
    found = theory.generalisation_bound([(2, 4)], 1.0, 50, delta=0.1, log_solutions=math.log(3))
    share = 3 * ((1 - math.cos(1)) / 2) ** 2  # 0.158491...
    assert share == pytest.approx(0.15849148, abs=1e-8)
    assert found.exact.bound == pytest.approx((math.log(1 / share) + math.log(1000)) / 49, rel=1e-12)
    # m ln 2 + m(d-2) ln 1/sin(α/2) + ln 2n/δ - ln K = 1.386294 + 4 · 0.735167 + 6.907755 - 1.098612 = 10.136104
    assert found.ball.bound == pytest.approx(10.136104 / 49, rel=1e-6)
    assert found.exact.error == pytest.approx(1 - math.exp(-found.exact.bound))
    assert not found.vacuous
    # the exact one is 1 - exp(-(ln 1/0.158491 + ln 1000) / 49) = 0.163532...
    assert str(found).startswith("ε ≤ 0.1636 for 0.9 of all draws of 50 examples\n")
    assert "2 neurons, α = 1, ln K = 1.099" in str(found)


def test_the_bound_of_a_model_is_that_of_its_layers():
    model = nero.balance_(nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Conv1d(4, 3, 2), nn.BatchNorm1d(3)))
    found = theory.generalisation_bound(model, 0.5, 1000)
    assert found.layers == ((5, 9), (3, 8))
    given = theory.generalisation_bound([(5, 9), (3, 8)], 0.5, 1000)
    assert found.exact == given.exact
    running = ("3.running_mean", "3.running_var")
    assert found.taken_as_given == ("0.bias", "2.bias", "3.weight", "3.bias", *running)
    assert "taken as fixed before the data were seen: 0.bias, 2.bias, 3.weight, 3.bias, 3.running_mean" in str(found)
    one = theory.generalisation_bound([(1, 9)], 0.5, 1000).exact.log_measure
    other = theory.generalisation_bound([(1, 8)], 0.5, 1000).exact.log_measure
    assert found.exact.log_measure == pytest.approx(5 * one + 3 * other)
    model[0].weight.requires_grad_(False)
    assert theory.generalisation_bound(model, 0.5, 1000).layers == ((3, 8),)


def test_what_is_frozen_is_taken_as_given():
    """It may have been trained on the same data before, as when a last layer is tuned."""
    model = nero.balance_(nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)))
    model[0].requires_grad_(False)
    found = theory.generalisation_bound(model, 0.5, 1000)
    assert found.layers == ((3, 5),)
    assert found.taken_as_given == ("0.weight", "0.bias", "2.bias")
    assert "taken as fixed before the data were seen: 0.weight, 0.bias, 2.bias" in str(found)


def test_padding_is_no_neuron_of_the_bound():
    table = nero.balance_(nn.Embedding(10, 8, padding_idx=3))
    assert theory.generalisation_bound(table, 0.5, 1000).layers == ((9, 8),)
    assert theory.generalisation_bound(nero.balance_(nn.Embedding(10, 8)), 0.5, 1000).layers == ((10, 8),)


def test_neurons_of_two_entries_live_on_a_circle():
    found = theory.generalisation_bound([(1, 2)], 1.0, 10)
    assert found.exact.log_measure == pytest.approx(math.log(1 / math.pi))


def test_the_bound_is_vacuous_where_it_is():
    model = nero.balance_(perceptron(784, 784, 784, 10))
    found = theory.generalisation_bound(model, 0.01, 60_000)
    assert found.vacuous
    assert str(found).startswith("vacuous: ε ≤ ")
    assert found.exact.bound < found.ball.bound < math.inf
    nothing = theory.generalisation_bound([(2, 5)], 1.0, 100, log_solutions=-math.inf)
    assert nothing.vacuous
    assert nothing.exact.bound == math.inf
    assert nothing.exact.error == 1.0


@pytest.mark.parametrize("bound", [1.0, 1.2, 5.0, 9.2])
def test_a_right_hand_side_of_one_or_more_still_bounds_the_error(bound: float):
    """By ln 1/(1 - ε) ≤ bound, which is the tighter part of Inequality (pac)."""
    found = theory.PacBayesBound(bound, -1.0, 10, 0.05)
    assert not found.vacuous
    told = float(str(found).removeprefix("ε ≤ ").partition(" ")[0])
    assert 1 - math.exp(-bound) <= told < 1
    assert theory.PacBayesBound(9.22, -1.0, 10, 0.05).vacuous  # 0.99990099


@given(st.floats(1e-6, 100), st.floats(1e-12, 1, exclude_max=True))
def test_a_bound_is_told_as_no_better_than_it_is(bound: float, delta: float):
    found = theory.PacBayesBound(bound, -1.0, 10, delta)
    text = re.fullmatch(r"(vacuous: )?ε ≤ (\S+?),? for (\S+) of all draws of 10 examples", str(found))
    least = found.bound if found.vacuous else found.error
    assert least <= float(text[2]) <= least * 1.001
    draws, exact = Fraction(text[3]), 1 - Fraction(delta)
    assert draws - Fraction(1, 10**15) <= exact
    assert exact - draws <= Fraction(1, 1000)


def test_shares_that_are_given_are_told_as_they_are():
    for delta, share in ((0.05, "0.95"), (0.32, "0.68"), (1e-5, "0.9999"), (1e-40, "0.9999"), (np.float64(0.1), "0.9")):
        assert f" for {share} of all draws" in str(theory.pac_bayes_bound(-1.0, 10, delta))


@pytest.mark.parametrize("dim", [3, 20, 800])
def test_balls_form_is_never_better(dim: int):
    for angle in ANGLES:
        found = theory.generalisation_bound([(7, dim)], angle, 500)
        assert found.exact.bound <= found.ball.bound + 1e-15


def test_solutions_have_room():
    half = math.log(2)
    assert theory.generalisation_bound(
        [(1, 5)], math.pi / 2, 100, log_solutions=half
    ).exact.log_measure == pytest.approx(0, abs=1e-12)
    for count in range(2, 50):  # arcs that cover a circle
        whole = theory.generalisation_bound([(1, 3)], math.pi / count, 100, log_solutions=math.log(count))
        assert whole.exact.log_measure == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"do not fit side by side.*at most"):
        theory.generalisation_bound([(1, 5)], math.pi / 2, 100, log_solutions=1.0)
    for solutions in (math.nan, math.inf, "x", None, True):
        with pytest.raises(ValueError, match=f"log_solutions must be a number.*but it is {solutions!r}"):
            theory.generalisation_bound([(1, 5)], 1.0, 100, log_solutions=solutions)


@pytest.mark.parametrize("samples", [1, 0, -5, 10.0, True])
def test_the_bound_wants_samples(samples):
    with pytest.raises(ValueError, match="samples must be a whole number of 2 or more"):
        theory.generalisation_bound([(2, 5)], 1.0, samples)


@pytest.mark.parametrize(
    "call",
    [
        lambda many: theory.pac_bayes_bound(-1.0, many),
        lambda many: theory.generalisation_bound([(2, 5)], 1.0, many),
        lambda many: theory.cap_measure(many, 1.0),
    ],
)
def test_counts_have_64_bits(call):
    assert call(2**64 - 1)
    for many in (2**64, 10**400, 10**5000):
        with pytest.raises(ValueError, match=r"(samples|dim) must be a whole number of 64 bits at most, the "):
            call(many)


@pytest.mark.parametrize("delta", [0, 1, -0.1, math.nan, True])
def test_the_bound_wants_a_delta(delta):
    with pytest.raises(ValueError, match="delta must be between 0 and 1"):
        theory.pac_bayes_bound(-1.0, 10, delta)


def test_the_bound_is_told_for_the_least_delta_that_a_float_holds():
    """Of two examples, so that nothing is divided by more than one."""
    log_delta = -1074 * math.log(2)
    assert theory.pac_bayes_bound(-1.0, 2, 2.0**-1074).bound == pytest.approx(math.log(4) - log_delta + 1, rel=1e-15)


@pytest.mark.parametrize("log_measure", [0.1, math.nan, math.inf, "x", None, False])
def test_the_bound_wants_a_probability(log_measure):
    with pytest.raises(ValueError, match="logarithm of a probability"):
        theory.pac_bayes_bound(log_measure, 10)


@pytest.mark.parametrize("layers", [[], [(0, 5)], [(3, 1)], (3, 5), [(3, 5.0)], [(1, 2, 3)], 3, None])
def test_the_bound_wants_layers(layers):
    with pytest.raises(ValueError, match=r"a list of \(neurons, fan_in\)"):
        theory.generalisation_bound(layers, 1.0, 10)


def test_the_bound_wants_a_balanced_network():
    with pytest.raises(ValueError, match=r"not balanced.*nero\.balance_"):
        theory.generalisation_bound(nn.Linear(5, 3), 1.0, 10)
    nought = nn.Linear(8, 3, bias=False)
    nn.init.zeros_(nought.weight)
    with pytest.raises(ValueError, match="zero or constant"):
        theory.generalisation_bound(nought, 0.1, 100)


# -- pre-activations ---------------------------------------------------------------------------


def whitened(count: int, width: int, mean: float) -> Tensor:
    """Inputs that are on this batch exactly uncorrelated, of that mean and of variance one."""
    raw = torch.randn(count, width, dtype=torch.float64)
    raw = raw - raw.mean(0)
    return mean + torch.linalg.qr(raw).Q * math.sqrt(count)


def test_balanced_neurons_standardise():
    """Section 3.1 to the letter: uncorrelated inputs of mean μ and variance 1 give mean 0 and variance 1."""
    inputs = whitened(200, 30, mean=7.0)
    layer = nn.Linear(30, 12, bias=False, dtype=torch.float64)
    (before,) = theory.preactivations(layer, inputs).layers
    assert before.spread > 0.1
    (after,) = theory.preactivations(nero.balance_(layer), inputs).layers
    torch.testing.assert_close(after.means, torch.zeros(12, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(after.variances, torch.ones(12, dtype=torch.float64), atol=1e-12, rtol=0)
    assert (after.samples, after.layer) == (200, "Linear")


def test_statistics_are_those_of_each_neuron_whatever_the_layer():
    torch.manual_seed(0)
    conv, up, head = nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(6, 5)
    model = nn.Sequential(conv, nn.ReLU(), up, nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), head)
    batch = torch.randn(8, 2, 6, 6)
    found = theory.preactivations(model, batch)
    assert [each.name for each in found.layers] == ["0", "2", "6"]
    assert [each.samples for each in found.layers] == [8 * 16, 8 * 36, 8]
    sums = conv(batch)
    for row, wanted in zip(found.layers, (sums, up(sums.relu()), model(batch)), strict=True):
        by_neuron = wanted.detach().transpose(0, 1).flatten(1).double()
        torch.testing.assert_close(row.means, by_neuron.mean(1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(row.variances, by_neuron.var(1, correction=0), atol=1e-6, rtol=1e-5)
        assert row.mean == pytest.approx(float(by_neuron.mean()), abs=1e-6)
        assert row.spread == pytest.approx(float(by_neuron.mean(1).square().mean().sqrt()), abs=1e-6)
        assert row.variance == pytest.approx(float(by_neuron.var(1, correction=0).mean()), abs=1e-6)
    lines = str(found).splitlines()
    assert lines[0].split()[:4] == ["layer", "class", "neurons", "mean"]
    assert lines[3].split()[:3] == ["2", "ConvTranspose2d", "6"]


class Adding(nn.Module):
    """Adds in place, as many a residual network does."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs += 3
        return inputs


@pytest.mark.parametrize("after", [nn.ReLU(inplace=True), Adding()], ids=["relu", "sum"])
def test_what_works_in_place_changes_no_statistics(after: nn.Module):
    torch.manual_seed(0)
    layer, batch = nero.balance_(nn.Linear(100, 50, bias=False)), torch.randn(1000, 100)
    (wanted,) = theory.preactivations(layer, batch).layers
    found, _ = theory.preactivations(nn.Sequential(layer, after, nn.Linear(50, 10)), batch).layers
    assert torch.equal(found.means, wanted.means)
    assert torch.equal(found.variances, wanted.variances)


def test_the_report_changes_nothing():
    model = nn.Sequential(Adding(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    batch = torch.zeros(9, 6)
    theory.preactivations(model, batch)
    assert not batch.any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_run_twice_or_cannot_be_seen():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.layer = nero.centred_weight_norm(nn.Linear(4, 4))
            self.rnn = nn.RNN(4, 3, batch_first=True)

        def forward(self, tokens: Tensor, shift: float) -> Tensor:
            return self.rnn(self.layer(self.layer(self.table(tokens) + shift)))[0]

    model = Twice()
    found = theory.preactivations(model, (torch.randint(7, (5, 6)), 0.5))
    (row,) = found.layers
    assert (row.name, row.layer, row.samples) == ("layer", "Linear", 2 * 30)
    assert found.left_out == ("table.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0")
    assert str(found).endswith("not seen: table.weight, rnn.weight_ih_l0, rnn.weight_hh_l0")


def test_tied_and_frozen_layers_are_layers_too():
    table, encoder, decoder, frozen = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    head, unseen = nn.Linear(4, 7, bias=False), nn.Embedding(3, 4)
    decoder.weight, head.weight = encoder.weight, table.weight
    model = nn.Sequential(table, encoder, decoder, frozen, encoder, head)
    model.add_module("unseen", unseen.requires_grad_(False))
    frozen.requires_grad_(False)
    model.forward = lambda tokens: nn.Sequential(*list(model)[:-1])(tokens)
    found = theory.preactivations(model, torch.randint(7, (9,)))
    assert [(row.name, row.samples) for row in found.layers] == [("1", 18), ("2", 9), ("3", 9), ("5", 9)]
    assert found.left_out == ("0.weight", "unseen.weight")
    evaluated = nero.balance_(nn.Linear(4, 3)).requires_grad_(False)
    assert theory.preactivations(evaluated, torch.randn(5, 4)).layers[0].samples == 5


def test_a_layer_that_gives_no_tensor_is_left_out():
    class Pair(nn.Linear):
        def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
            return super().forward(inputs), None

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, None]) -> Tensor:
            return pair[0]

    found = theory.preactivations(nn.Sequential(Pair(4, 4), First(), nn.Linear(4, 3)), torch.randn(5, 4))
    assert [row.name for row in found.layers] == ["2"]
    assert found.left_out == ("0.weight",)


def compiled_in_part(model: nn.Sequential) -> nn.Module:
    model[2] = torch.compile(model[2], backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled", [lambda model: torch.compile(model, backend="eager"), compiled_in_part], ids=["whole", "in part"]
)
def test_what_is_compiled_is_seen_too(compiled):
    inputs = torch.randn(9, 4, dtype=torch.float64)
    plain = perceptron(4, 6, 3)
    model = compiled(copy.deepcopy(plain))
    with torch.no_grad():
        model(inputs)  # from here on it has code that knows of no hooks
    for row, wanted in zip(*(theory.preactivations(each, inputs).layers for each in (model, plain)), strict=True):
        assert row.name.replace("_orig_mod", "").strip(".") == wanted.name
        torch.testing.assert_close(row.means, wanted.means)


@pytest.mark.parametrize("norm", [weight_norm, nero.centred_weight_norm])
def test_a_model_may_be_a_parametrised_layer(norm):
    layer, inputs = norm(nn.Linear(8, 4)), torch.randn(9, 8)
    (row,) = theory.preactivations(layer, inputs).layers
    assert (row.name, row.layer, row.samples) == ("", "Linear", 9)
    torch.testing.assert_close(row.means.float(), layer(inputs).mean(0))


def test_one_unbatched_image_has_places():
    (row,) = theory.preactivations(nn.Conv2d(2, 4, 3), torch.randn(2, 6, 6)).layers
    assert (row.samples, row.means.numel()) == (16, 4)


@pytest.mark.parametrize("batch", [torch.zeros(0, 4), ()])
def test_an_empty_batch_has_no_statistics(batch):
    with pytest.raises(ValueError, match="the batch is empty"):
        theory.preactivations(nn.Linear(4, 3), batch)


@pytest.mark.parametrize("batch", [torch.zeros(1, 4), torch.zeros(4)])
def test_one_example_has_no_variance(batch):
    with pytest.raises(ValueError, match="one example, which has no variance"):
        theory.preactivations(nn.Linear(4, 3), batch)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_has_no_statistics(bad):
    batch = torch.ones(3, 4)
    batch[1, 2] = bad
    with pytest.raises(ValueError, match="layer '0' gives values that are infinite or not a number: look for them in"):
        theory.preactivations(nn.Sequential(nn.Linear(4, 3)), batch)


def test_sums_that_nobody_sees():
    with pytest.raises(ValueError, match="no layer's sums can be seen"):
        theory.preactivations(nn.Embedding(4, 3), torch.tensor([1, 2]))


# -- steps -------------------------------------------------------------------------------------


def product(matrices: list[Tensor]) -> Tensor:
    """The last times ... times the first; the unit matrix if there are none."""
    return torch.linalg.multi_dot(matrices[::-1]) if len(matrices) > 1 else matrices[0]


def gradients_by_hand(weights: list[Tensor], slope: Tensor, inputs: Tensor) -> list[Tensor]:
    """Of the loss ⟨slope, W_L ... W_1 x⟩ in each W_l: (W_L ... W_{l+1})ᵀ slope (W_{l-1} ... W_1 x)ᵀ."""
    found = []
    for index in range(len(weights)):
        after = product([*weights[index + 1 :]]) if index + 1 < len(weights) else torch.eye(len(weights[-1])).double()
        before = product([*weights[:index]]) @ inputs if index else inputs
        found.append(after.T @ slope @ before.T)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_trust_of_linear_networks_is_the_product_of_matrices(seed: int):
    torch.manual_seed(seed)
    model = linear_network(4, 5, 3, 6, 2)
    inputs, slope = torch.randn(4, 7, dtype=torch.float64), torch.randn(2, 7, dtype=torch.float64)
    step = {name: 0.2 * torch.randn_like(weight) for name, weight in weights_of(model).items()}
    found = theory.deep_relative_trust(model, lambda model: (model(inputs.T).T * slope).sum(), step)
    weights = list(weights_of(model).values())
    before = gradients_by_hand(weights, slope, inputs)
    after = gradients_by_hand([w + d for w, d in zip(weights, step.values(), strict=True)], slope, inputs)
    bound = 1.0
    for row, w, d, a, b in zip(found.layers, weights, step.values(), before, after, strict=True):
        assert row.change == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-10)
        assert row.cosine == pytest.approx(float(-(d * a).sum() / d.norm() / a.norm()), rel=1e-10)
        bound *= 1 + float(d.norm() / w.norm())
    assert found.bound == pytest.approx(bound - 1, rel=1e-10)
    assert found.holds == all(row.change <= bound - 1 for row in found.layers)


@pytest.mark.parametrize("depth", [2, 5, 20])
@pytest.mark.parametrize("eta", [0.001, 0.01, 0.1])
def test_trust_where_every_layer_grows(depth: int, eta: float):
    """ΔW = η W grows each gradient by the other layers: by (1+η)^(L-1) - 1, just below the bound (1+η)^L - 1."""
    model = linear_network(*[3] * (depth + 1))
    grown = {name: eta * weight for name, weight in weights_of(model).items()}
    found = theory.deep_relative_trust(model, lambda model: model(torch.ones(2, 3).double()).sum(), grown)
    assert found.bound == pytest.approx((1 + eta) ** depth - 1, rel=1e-10)
    assert [row.change for row in found.layers] == pytest.approx([(1 + eta) ** (depth - 1) - 1] * depth, rel=1e-6)
    assert found.holds
    assert found.share(found.layers[0]) < 1
    assert "deep relative trust holds" in str(found)


def test_trust_is_a_model_and_can_be_broken():
    """W = diag(1, ε) and ΔW = diag(0, δ): little of the matrix, but all of what the gradient passes through."""
    model = linear_network(2, 2, 2)
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.diag(torch.tensor([1.0, 0.01])))
    step = {f"{index}.weight": torch.diag(torch.tensor([0.0, 0.1])).double() for index in range(2)}
    blind = torch.tensor([[0.0, 1.0]]).double()
    found = theory.deep_relative_trust(model, lambda model: model(blind)[0, 1], step)
    assert [row.change for row in found.layers] == pytest.approx([10.0, 10.0])
    assert found.bound == pytest.approx((1 + 0.1 / math.hypot(1, 0.01)) ** 2 - 1)
    assert not found.holds
    assert str(found).endswith("deep relative trust does not hold for this perturbation")


def test_biases_move_but_are_no_layers_of_trust():
    model = perceptron(4, 5, 3, bias=True)
    step = {name: 0.1 * torch.ones_like(weight) for name, weight in weights_of(model).items()}

    def loss(model: nn.Module) -> Tensor:
        return model(torch.ones(2, 4).double()).square().sum()

    found = theory.deep_relative_trust(model, loss, step)
    assert [row.name for row in found.layers] == ["0.weight", "2.weight"]
    still = {name: change for name, change in step.items() if "weight" in name}
    assert theory.deep_relative_trust(model, loss, still).layers[0].change != found.layers[0].change
    counted = theory.deep_relative_trust(model, loss, step, kinds=("neuron", "bias"))
    assert len(counted.layers) == 4
    assert counted.bound > found.bound


def quadratic(model: nn.Module) -> Tensor:
    return 0.5 * model.weight.square().sum()


def test_a_bound_beyond_all_numbers_is_infinite():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(50)]).double()
    step = {name: 1e8 * torch.randn_like(weight) for name, weight in weights_of(model).items()}
    found = theory.deep_relative_trust(model, lambda model: model(torch.ones(3, 4).double()).square().sum(), step)
    assert found.bound == math.inf
    assert found.holds
    assert str(found).splitlines()[2].split()[3:] == ["inf", "0"]


@pytest.mark.parametrize(("size", "stable"), [(0.1, True), (0.999, True), (1.001, False), (1.9, False), (-0.1, False)])
def test_a_quadratics_steps_are_stable_up_to_its_minimum(size: float, stable: bool):
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    step = {"weight": -size * model.weight.detach()}
    (row,) = theory.relative_change(model, quadratic, step).layers
    assert row.change == pytest.approx(abs(size))
    assert row.size == pytest.approx(abs(size))
    assert row.cosine == pytest.approx(math.copysign(1, size))
    assert theory.is_stable_step(model, quadratic, step) == stable


def test_stable_steps_descend():
    """Along the way, the inequality makes the loss fall; tried on steps of all sizes down a network's gradient."""
    torch.manual_seed(0)
    model = perceptron(6, 8, 3, bias=True)
    inputs, labels = torch.randn(20, 6, dtype=torch.float64), torch.randint(3, (20,))

    def loss(model: nn.Module) -> Tensor:
        return cross_entropy(model(inputs), labels)

    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss(model), parameters)
    seen = set()
    for size in (0.01, 0.1, 1.0, 10.0, 100.0):
        step = {name: -size * gradient for name, gradient in zip(names, gradients, strict=True)}
        stable = theory.is_stable_step(model, loss, step, points=20)
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                parameter.add_(step[name])
        if stable:
            assert loss(moved) < loss(model)
        seen.add(stable)
    assert seen == {True, False}


def test_the_end_alone_does_not_make_a_step_descend():
    """A loss that climbs on the way, as steep at the end as at the start: stable by the letter, and up it goes."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)

    def loss(model: nn.Module) -> Tensor:
        x = model.weight[0, 0]
        return 3 * x**2 - 2 * x**3 - 0.1 * x  # its slope is -0.1 at 0 and at 1

    step = {"weight": torch.tensor([[1.0, 0.0]], dtype=torch.float64)}
    assert theory.is_stable_step(model, loss, step)
    assert not theory.is_stable_step(model, loss, step, points=4)
    nn.init.ones_(model.weight)
    assert loss(model).item() == pytest.approx(0.9)


def test_what_does_not_move_asks_for_nothing_and_what_has_no_gradient_is_not_stable():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False))
    first = {"0.weight": -1e-4 * torch.randn(3, 3)}
    rows = theory.relative_change(model, lambda model: model[0].weight.square().sum(), first).layers
    assert (rows[1].size, rows[1].change) == (0.0, 0.0)
    assert math.isnan(rows[1].cosine)
    assert rows[1].stable
    both = {**first, "1.weight": torch.ones(2, 3)}
    rows = theory.relative_change(model, lambda model: model[0].weight.square().sum(), both).layers
    assert not rows[1].stable
    printed = str(theory.relative_change(model, lambda model: model[0].weight.square().sum(), both))
    assert printed.endswith("not a stable step")
    assert printed.splitlines()[0].split() == ["layer", "|ΔW|/|W|", "|Δ∇|/|∇|", "cos", "θ", "stable"]


def test_a_step_is_not_stable_because_nobody_asks():
    model = nn.Linear(3, 2)
    step = {"weight": -0.1 * model.weight.detach(), "bias": -1.5 * model.bias.detach()}  # the bias goes too far

    def loss(model: nn.Module) -> Tensor:
        return model.weight.square().sum() + model.bias.square().sum()

    found = theory.relative_change(model, loss, step, kinds=("neuron",))
    assert [layer.name for layer in found.layers] == ["weight"]
    assert found.layers[0].stable
    assert not found.stable
    assert str(found).endswith("not a stable step")
    assert found.stable == theory.is_stable_step(model, loss, step)
    assert theory.relative_change(model, loss, {"weight": step["weight"]}, kinds=("bias",)).stable


def test_measuring_leaves_all_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    inputs = torch.randn(9, 6)
    model(inputs).sum().backward()
    before, grads = copy.deepcopy(model.state_dict()), [each.grad.clone() for each in model.parameters()]
    state = torch.get_rng_state()
    step = {name: torch.randn_like(weight) for name, weight in weights_of(model).items()}
    torch.set_rng_state(state)
    theory.relative_change(model, lambda model: model(inputs).square().sum(), step, points=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(each.grad, grad) for each, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)

    def stumbles(model: nn.Module) -> Tensor:
        if not torch.equal(model[0].weight, before["0.weight"]):
            raise KeyError("on the way")
        return model(inputs).sum()

    with pytest.raises(KeyError, match="on the way"):
        theory.relative_change(model, stumbles, step)
    assert torch.equal(model[0].weight, before["0.weight"])


class Counting(nn.Module):
    """A layer with buffers that a run writes to, replaces, fills and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("filled", None)
        self.register_buffer("wide", torch.ones(1).expand(5))  # to which nobody can write

    def forward(self, inputs: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        self.filled = torch.ones(3)
        self.register_buffer("added", torch.ones(3))
        return self.layer(inputs)


MEASURES = [
    lambda model, x: theory.relative_change(model, lambda model: model(x).square().sum(), {"layer.weight": x[:1]}),
    lambda model, x: theory.preactivations(model, x),
    lambda model, x: theory.robustness(model, (x, (x[:, 0] > 0).long()), fix_mean=False, rotations=2, examples=1),
    lambda model, x: nero.depth_of(model, x),
]


@pytest.mark.parametrize("measure", MEASURES)
def test_buffers_are_put_back_whatever_a_run_does_to_them(measure):
    model = Counting()
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    before = dict(model.named_buffers())
    measure(model, torch.tensor([[1.0, 1.0], [-1.0, 0.0]]))
    after = dict(model.named_buffers())
    assert list(after) == list(before) == ["written", "replaced", "wide"]
    assert all(after[name] is buffer for name, buffer in before.items())
    assert (model.written, model.replaced, model.filled) == (0, 0, None)


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, x, _: theory.relative_change(model, lambda model: model(x).square().sum(), weights_of(model)),
        lambda model, x, y: theory.robustness(model, (x, y), rotations=2, examples=1),
        lambda model, x, _: theory.preactivations(model, x),
    ],
)
def test_a_backward_that_is_due_takes_no_notice(measure):
    model = nero.balance_(perceptron(4, 5, 3))
    inputs = torch.randn(6, 4, dtype=torch.float64)
    outputs = model(inputs)
    measure(model, inputs, outputs.argmax(1))
    outputs.square().sum().backward()
    found = [each.grad for each in model.parameters()]
    wanted = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class Wide(nn.Linear):
    """Gives float32, whatever it is run in."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).float()


def test_a_step_that_rounding_would_swallow_is_no_step():
    """In bfloat16 a thousandth of a weight is mostly nothing; what was made in bfloat16 is measured as it is."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).bfloat16()
    weights = model.weight.detach().clone()

    def loss(model):
        return model.weight.float().square().sum()

    with pytest.raises(ValueError, match=r"'weight' is finer than torch\.bfloat16 tells apart: measure a copy"):
        theory.relative_change(model, loss, {"weight": 0.001 * weights})
    assert torch.equal(model.weight, weights)
    rounded = (weights * 1.05).float() - weights.float()
    [found] = theory.relative_change(model, loss, {"weight": rounded}).layers
    assert found.change == pytest.approx((rounded.norm() / weights.float().norm()).item(), rel=1e-2)
    [found] = theory.relative_change(model.float(), loss, {"weight": 0.001 * weights.float()}).layers
    assert found.change == pytest.approx(0.001, rel=1e-3)
    with pytest.raises(
        ValueError, match=r"finer than torch\.float32 tells apart: measure a copy .* in float64, or a lon"
    ):
        theory.relative_change(model, loss, {"weight": 1e-9 * weights.float()})


def test_autocast_sees_the_weights_that_are_tried():
    torch.manual_seed(0)
    model = nero.balance_(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Wide(16, 3)))
    inputs = torch.randn(20, 8)

    def loss(model: nn.Module) -> Tensor:
        return model(inputs)[:, 0].square().mean()

    step = {"0.weight": 0.3 * model[0].weight.detach()}
    apart = theory.relative_change(model, loss, step).layers
    with torch.autocast("cpu", torch.bfloat16):
        labels = model(inputs).argmax(1)  # from here on the weights are cast, and kept so
        together = theory.relative_change(model, loss, step).layers
        found = theory.robustness(model, (inputs, labels), rotations=4, examples=4)
        again = model(inputs).argmax(1)
    assert [row.change for row in together] == pytest.approx([row.change for row in apart], rel=0.1, abs=0.02)
    assert found.upper is not None
    assert found.upper < 0.5
    assert torch.equal(again, labels)


def test_a_perturbation_may_have_a_history():
    model = linear_network(3, 2)
    step = {"0.weight": 0.1 * model[0].weight}  # as somebody makes it who does not think of gradients
    found = theory.relative_change(model, lambda model: model[0].weight.square().sum(), step)
    assert (found.layers[0].change, found.layers[0].cosine) == pytest.approx((0.1, -1.0))


class Graph(nn.Module):
    """A layer over a graph, whose edges are a sparse buffer; a run may write to it."""

    def __init__(self, edges: Tensor, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(2, 1, bias=False), writes
        self.register_buffer("edges", edges)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.writes:
            self.edges.mul_(0.5)
        return self.layer(inputs + (self.edges @ torch.ones(2, 1)).sum())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("layout", "writes"), [("to_sparse", False), ("to_sparse", True), ("to_sparse_csr", False)])
@pytest.mark.parametrize("measure", MEASURES)
def test_sparse_buffers_are_kept_too(measure, layout: str, writes: bool):
    model = Graph(getattr(torch.eye(2), layout)(), writes)
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    measure(model, torch.tensor([[9.0, 1.0], [-9.0, 0.0]]))
    assert torch.equal(model.edges.to_dense(), torch.eye(2))
    assert torch.equal(model.layer.weight, torch.tensor([[1.0, 0.0]]))
    assert model.training


@pytest.mark.parametrize(("weight", "scale"), [(1e-165, 1.0), (1e160, 1.0), (1.0, 1e-170), (1.0, 1e160)])
def test_steps_are_measured_where_their_squares_leave_the_range(weight: float, scale: float):
    """All of it is relative, so that neither the unit of the weights nor that of the loss matters."""
    torch.manual_seed(0)
    plain, step = nn.Linear(4, 3, bias=False, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    model = copy.deepcopy(plain)
    with torch.no_grad():
        model.weight.mul_(weight)

    def loss(model: nn.Module) -> Tensor:
        return scale * (model.weight / weight).pow(3).sum()

    def same(model: nn.Module) -> Tensor:
        return model.weight.pow(3).sum()

    for size in (0.01, 1.0):
        small, large = {"weight": weight * size * step}, {"weight": size * step}
        [found] = theory.relative_change(model, loss, small).layers
        [wanted] = theory.relative_change(plain, same, large).layers
        assert (found.size, found.change) == pytest.approx((wanted.size, wanted.change), rel=1e-12)
        assert found.cosine == pytest.approx(wanted.cosine, rel=1e-12)
        assert theory.relative_step(model, small).layer == pytest.approx(theory.relative_step(plain, large).layer)
    down = {"weight": -0.1 * model.weight.detach() * model.weight.detach().sign()}
    assert theory.is_stable_step(model, loss, down)
    assert not theory.is_stable_step(model, loss, {"weight": -down["weight"]})


def test_both_gradients_see_the_same_dropout():
    model = nn.Sequential(nn.Linear(50, 50), nn.Dropout(), nn.Linear(50, 1))
    step = {"0.weight": 1e-6 * torch.randn(50, 50)}
    rows = theory.relative_change(model, lambda model: model(torch.ones(4, 50)).sum(), step).layers
    assert max(row.change for row in rows) < 1e-3


# -- per-neuron relative steps -----------------------------------------------------------------


def test_relative_steps_by_hand():
    """Neurons of length 5 and 13 that move by 0.5 and 0.13, of a matrix of length √194."""
    model = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0], [5.0, 12.0]]))
        model.bias.copy_(torch.tensor([2.0, -4.0]))
    step = {
        "weight": torch.tensor([[0.3, 0.4], [0.13, 0.0]], dtype=torch.float64),
        "bias": torch.tensor([-0.1, 0.1], dtype=torch.float64),
    }
    found = theory.relative_step(model, step)
    weight, bias = found.layers
    assert (weight.neuron, weight.layer) == (pytest.approx(0.1), pytest.approx(math.hypot(0.5, 0.13) / math.sqrt(194)))
    assert (bias.neuron, bias.layer) == (pytest.approx(0.05), pytest.approx(math.sqrt(0.02 / 20)))
    assert found.neuron == pytest.approx(0.1)
    assert found.layer == weight.layer
    assert theory.is_per_neuron_relative(model, step, 0.1)
    assert not theory.is_per_neuron_relative(model, step, 0.0999)
    assert theory.is_per_neuron_relative(model, step, 0.0999, tolerance=0.001)
    assert theory.relative_step(model, {"bias": step["bias"]}).layers[0] == theory.LayerStep("weight", "neuron", 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_per_neuron_is_per_layer(seed: int):
    """Eq. (pnpl), on neurons of every layout."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(5, 3), nn.BatchNorm2d(6))
    with torch.no_grad():
        model[3].bias.add_(1)
    step = {name: torch.rand(()) * torch.randn_like(weight) for name, weight in weights_of(model).items()}
    found = theory.relative_step(model, step)
    assert all(0 < row.layer <= row.neuron for row in found.layers)
    assert theory.is_per_neuron_relative(model, step, found.neuron)
    grouped = step["1.weight"].unflatten(0, (2, 2)).transpose(1, 2).flatten(2).norm(dim=2)
    sizes = model[1].weight.detach().unflatten(0, (2, 2)).transpose(1, 2).flatten(2).norm(dim=2)
    (row,) = [row for row in found.layers if row.name == "1.weight"]
    assert row.neuron == pytest.approx(float((grouped / sizes).max()), rel=1e-5)


def test_neros_first_step_is_per_neuron_relative():
    """At the first step ḡ is |g|, so a neuron moves by η before it is projected, and a little less or as much after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 5, bias=False))
    optimiser = nero.Nero(model, lr=0.01)
    before = copy.deepcopy(model)
    model(torch.randn(8, 20)).square().sum().backward()
    optimiser.step()
    step = {name: weight - weights_of(before)[name] for name, weight in weights_of(model).items()}
    assert theory.is_per_neuron_relative(before, step, 0.0101)
    assert not theory.is_per_neuron_relative(before, step, 0.008)


def test_a_bias_of_zero_has_no_relative_step():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    assert theory.is_per_neuron_relative(model, {"weight": 1e-3 * model.weight.detach()}, 0.01)
    step = {"bias": torch.tensor([0.0, 1e-9])}
    assert theory.relative_step(model, step).neuron == math.inf
    assert not theory.is_per_neuron_relative(model, step, 1e6)


@pytest.mark.parametrize("eta", [0, -1, math.nan, True, "0.1"])
def test_steps_have_a_size(eta):
    with pytest.raises(ValueError, match="eta must be a positive number"):
        theory.is_per_neuron_relative(nn.Linear(3, 2), {"bias": torch.ones(2)}, eta)


@pytest.mark.parametrize("tolerance", ["a", math.nan, -1, True, torch.tensor([0.1, 0.1])])
def test_tolerances_are_numbers(tolerance):
    layer = nero.balance_(nn.Linear(3, 2))
    for call in (
        lambda: theory.is_balanced(layer, tolerance=tolerance),
        lambda: theory.is_per_neuron_relative(layer, {"bias": torch.ones(2)}, 0.1, tolerance=tolerance),
    ):
        with pytest.raises(ValueError, match="tolerance must be a number of 0 or more, like 1e-6, or None, but it is"):
            call()
    for exact in (Fraction(1, 10), np.float32(0.1), torch.tensor(0.1)):
        assert theory.is_balanced(layer, tolerance=exact)


# -- turning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("angle", [0.01, 1.0, 1.5, math.pi / 2])
@pytest.mark.parametrize("dim", [1, 2, 50, 10_000])
def test_points_of_a_cap_are_uniform(dim: int, angle: float):
    """The share of a cap within an angle, of 20,000 draws, against the measure (Kolmogorov's distance)."""
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
    (caps,) = [Caps.around(each, centred=True) for each in layers_of(layer)]
    gradient, generator = torch.randn_like(layer.weight), torch.Generator().manual_seed(0)
    least = caps.least(gradient, 0.3, layer.weight)
    best = (least * gradient).sum()
    for turned in (least, *(caps.random(0.3, generator) for _ in range(50))):
        with torch.no_grad():
            layer.weight.copy_(turned / 3)
        assert nero.is_balanced(layer)
        moved = theory.relative_step(start, {"weight": layer.weight.detach() - start.weight.detach()}).neuron
        assert moved <= 2 * math.sin(0.15) + 1e-9
        assert (turned * gradient).sum() >= best


def test_the_least_point_of_a_cap_can_lie_inside():
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
    caps = Caps.around(layers_of(layer)[0], centred=False)
    gradient = torch.tensor([[-1.0, -1.0, 0.0]]).double()
    torch.testing.assert_close(caps.least(gradient, 1.2, layer.weight), -gradient / math.sqrt(2))
    at_rim = caps.least(gradient, 0.5, layer.weight)
    torch.testing.assert_close(at_rim, torch.tensor([[math.cos(0.5), math.sin(0.5), 0.0]]).double())
    assert caps.slope(gradient) == pytest.approx(1.0)
    elsewhere = torch.tensor([[math.cos(0.1), 0.0, math.sin(0.1)]]).double()
    assert torch.equal(caps.least(torch.zeros(1, 3).double(), 0.5, elsewhere), elsewhere)
    uphill = torch.tensor([[2.0, 0.0, 0.0]]).double()  # from the top all ways lead down: it takes the given one
    torch.testing.assert_close(
        caps.least(uphill, 0.5, elsewhere), torch.tensor([[math.cos(0.5), 0.0, math.sin(0.5)]]).double()
    )
    assert torch.equal(caps.least(-uphill, 0.5, elsewhere), layer.weight)


# -- robustness --------------------------------------------------------------------------------


def separable(count: int, width: int, seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(seed)
    neuron = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    inputs = torch.randn(count, width, dtype=torch.float64) * torch.rand(count, 1, dtype=torch.float64) * 5
    return neuron, inputs, neuron(inputs)[:, 0].sign().long()


@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("signs", [True, False])
def test_a_single_neurons_robustness_is_its_angular_margin(fix_mean: bool, signs: bool):
    """The hyperplane is asin(w·x / |w||x|) away from x; for a neuron of zero mean, of x without its mean."""
    neuron, inputs, _ = separable(30, 6)
    if fix_mean:
        nero.balance_(neuron)
    w = neuron.weight.detach()[0]
    labels = (inputs @ w).sign().long()
    seen = inputs - inputs.mean(1, keepdim=True) if fix_mean else inputs
    angles = (labels * (seen @ w) / w.norm() / seen.norm(dim=1)).asin()
    found = theory.robustness(
        neuron, (inputs, labels if signs else labels.clamp(min=0)), fix_mean=fix_mean, tolerance=1e-4, rotations=20
    )
    assert found.lower <= float(angles.min()) <= found.upper
    assert found.lower == pytest.approx(float(angles.min()), rel=2e-4)
    assert found.upper == pytest.approx(float(angles.min()), rel=2e-4)
    assert found.example == int(angles.argmin())
    with torch.no_grad():
        neuron.weight.add_(found.witness["weight"])
    assert int(((neuron(inputs)[:, 0] * labels) <= 0).sum()) >= 1


def test_a_bias_moves_the_angle():
    """w·x + b falls to zero where |x| cos(φ + α) = -b."""
    neuron = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        neuron.weight.copy_(torch.tensor([[1.0, 0.0]]))
        neuron.bias.fill_(0.5)
    data = torch.tensor([[2.0, 0.0]]).double(), torch.tensor([1])
    found = theory.robustness(neuron, data, fix_mean=False, tolerance=1e-4, rotations=10)
    assert found.upper is None, "cos α = -1/4 is beyond π/2"
    assert found.lower == found.typical == found.limit == math.pi / 2
    assert "no rotation by up to 1.571 was found" in str(found)
    with torch.no_grad():
        neuron.bias.fill_(-0.5)
    found = theory.robustness(neuron, data, fix_mean=False, tolerance=1e-4, rotations=10)
    assert found.lower == pytest.approx(math.acos(0.25), rel=2e-4)
    assert found.upper == pytest.approx(math.acos(0.25), rel=2e-4)


def test_a_linear_classifiers_robustness_is_where_two_cones_meet():
    """Two classes of unit neurons at φ₁ and φ₂ from x tie where both have turned: cos(φ₁ + α) = cos(φ₂ - α)."""
    model = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[math.cos(0.2), math.sin(0.2)], [math.cos(1.0), math.sin(1.0)]]))
    data = torch.tensor([[3.0, 0.0]]).double(), torch.tensor([0])
    found = theory.robustness(model, data, fix_mean=False, tolerance=1e-4, rotations=10)
    assert found.lower == pytest.approx(0.4, rel=2e-4)
    assert found.upper == pytest.approx(0.4, rel=2e-4)
    assert found.typical >= found.lower


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.ELU(), nn.LeakyReLU()], ids=str)
def test_two_layers_are_bracketed_by_a_proof_and_a_witness(activation: nn.Module):
    """Brute force over all rotations of three neurons in the plane lies between the two."""
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False, dtype=torch.float64), activation, nn.Linear(2, 1, bias=False, dtype=torch.float64)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.2], [0.1, 1.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, -0.4]]))
    inputs = torch.tensor([[1.0, 0.2], [0.3, 1.4], [1.0, 1.2]]).double()
    labels = model(inputs)[:, 0].detach().sign().long()
    found = theory.robustness(model, (inputs, labels), fix_mean=False, tolerance=1e-3, rotations=50)
    assert 0 < found.lower <= found.upper < math.pi / 2

    def turned(neuron: Tensor, angle: float) -> Tensor:
        turns = torch.linspace(-angle, angle, 41).double()
        return torch.stack([turns.cos(), -turns.sin(), turns.sin(), turns.cos()], 1).view(-1, 2, 2) @ neuron

    def errs(angle: float) -> bool:
        one, other = (activation(inputs @ turned(neuron, angle).T) for neuron in model[0].weight.detach())
        last = turned(model[2].weight.detach()[0], angle)
        outputs = one[:, :, None, None] * last[:, 0] + other[:, None, :, None] * last[:, 1]
        return bool((outputs * labels[:, None, None, None] <= 0).any())

    assert not errs(found.lower)
    assert errs(found.upper * 1.01)
    least = next(angle for angle in torch.linspace(0.5, 1.02, 105).tolist() if errs(angle * found.upper)) * found.upper
    assert found.lower <= least
    assert found.upper <= 1.03 * least, "brute force finds no much smaller rotation than the search"


def test_a_deep_network_is_bracketed_too():
    torch.manual_seed(0)
    inputs = torch.randn(40, 8, dtype=torch.float64)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    model = perceptron(8, 32, 32, 2)
    optimiser = nero.Nero(model, lr=0.02)
    for _ in range(300):
        optimiser.zero_grad()
        cross_entropy(5 * model(inputs), labels).backward()
        optimiser.step()
    before = weights_of(model)
    model.train()
    found = theory.robustness(model, (inputs, labels), rotations=20, examples=4)
    assert 0 < found.lower <= found.upper <= found.limit
    assert found.upper < found.typical, "the worst rotation is rare"
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    again = theory.robustness(model, (inputs, labels), rotations=20, examples=4)
    assert again == found, "one seed, one answer"
    # the witness turns no neuron by more than it says, keeps them balanced, and makes an error
    steps = theory.relative_step(model, found.witness)
    assert steps.neuron <= 2 * math.sin(found.upper / 2) + 1e-9
    turned = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in turned.named_parameters():
            parameter.add_(found.witness[name])
    assert nero.is_balanced(turned)
    assert int(turned(inputs)[found.example].argmax()) != int(labels[found.example])
    lines = str(found).splitlines()
    lower, upper = map(float, lines[0].split(" ≤ α ≤ "))
    assert lower <= found.lower <= found.upper <= upper
    assert re.search(r"with confidence 0\.95, at least 0\.\d+ of all such rotations make none$", lines[3])
    bound = theory.generalisation_bound(model, found.typical, 40, log_solutions=math.log(found.share))
    assert bound.exact.bound < theory.generalisation_bound(model, found.upper, 40).exact.bound
    assert bound.vacuous


def test_robustness_is_told_as_no_more_than_it_is():
    found = theory.Robustness(0.123456, 0.234512, 3, {}, 0.987654, 100, 3, 0.924379, 0.95, 1.0)
    assert str(found) == (
        "0.1234 ≤ α ≤ 0.2346\n"
        "  at least 0.1234: proved, layer by layer\n"
        "  at most 0.2346: a rotation by so much gets example 3 wrong\n"
        "  of 100 random rotations by up to 0.9876, 3 made an error: "
        "with confidence 0.95, at least 0.9243 of all such rotations make none"
    )


@pytest.mark.parametrize("seed", range(8))
def test_no_rotation_breaks_a_proof(seed: int):
    """On networks of all sorts: the search, which is free to look anywhere, finds nothing below what was proved."""
    torch.manual_seed(seed)
    fix_mean, bias, outputs = bool(seed % 2), seed % 3 == 0, (1, 2, 4)[seed % 3]
    model = perceptron(5, *[7] * (seed % 4), outputs, bias=bias)
    if fix_mean:
        nero.balance_(model)
    inputs = torch.randn(15, 5, dtype=torch.float64)
    with torch.no_grad():
        made = model(inputs)
    labels = made.argmax(1) if outputs > 1 else (made[:, 0] > 0).long()
    found = theory.robustness(model, (inputs, labels), fix_mean=fix_mean, rotations=8, examples=3, tolerance=0.02)
    assert 0 < found.lower <= found.upper * (1 + 1e-9)
    assert found.upper <= found.lower * 1.03 or seed % 4, "of one layer, the proof is exact"


@pytest.mark.parametrize("fix_mean", [False, True])
@pytest.mark.parametrize(("shape", "width"), [((2, 1, 3), 3), ((6, 3, 8), 5), ((4, 2, 3, 4), 3)], ids=str)
def test_neurons_act_on_the_last_axis(shape: tuple[int, ...], width: int, fix_mean: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[-1], width, bias=False), nn.Flatten()).double()
    nero.balance_(model, fix_mean=fix_mean)
    inputs = torch.randn(shape, dtype=torch.float64)
    data = inputs, model(inputs).argmax(1)
    found = theory.robustness(model, data, rotations=20, fix_mean=fix_mean, tolerance=1e-3)
    assert 0 < found.lower <= found.upper
    # one layer, and neurons that turn alone: the example that gives way first does so between two of them
    if shape[1] == 1 and not fix_mean:
        cones = [
            math.acos(float(inputs[row, 0] @ neuron / inputs[row, 0].norm()))
            for row in range(shape[0])
            for neuron in model[0].weight.detach()
        ]
        gaps = [sorted(cones[row * width : (row + 1) * width]) for row in range(shape[0])]
        assert found.lower == pytest.approx(min((second - first) / 2 for first, second, *_ in gaps), rel=2e-3)


@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU(),
        nn.ReLU6(),
        nn.Hardtanh(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.Softplus(),
        nn.Softsign(),
        nn.ELU(),
        nn.ELU(2.0, inplace=True),
        nn.LeakyReLU(),
        nn.LeakyReLU(0.0),
        nn.LeakyReLU(1.5, inplace=True),
        nn.SELU(),
        nn.CELU(0.3),
        nn.CELU(-0.3),
        nn.LogSigmoid(),
        nn.Hardsigmoid(),
        nn.Hardshrink(0.01),
        nn.Softshrink(0.01),
        nn.Tanhshrink(),
    ],
    ids=str,
)
def test_monotone_activations_have_a_proof(activation: nn.Module):
    torch.manual_seed(0)
    points = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    assert float(activation(points.clone()).diff().min()) > -1e-8, "it is one"
    model = perceptron(4, 6, 3)
    model[1] = activation
    nero.balance_(model)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    found = theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=8, examples=3)
    assert 0 < found.lower <= found.upper


@pytest.mark.parametrize(
    "activation",
    [
        nn.ELU(-1.0),
        nn.LeakyReLU(-0.1),
        nn.Softplus(threshold=0.1),
        nn.Softplus(beta=-1.0),
        nn.SiLU(),
        nn.GELU(),
        nn.Mish(),
    ],
    ids=str,
)
def test_activations_that_turn_back_have_none(activation: nn.Module):
    torch.manual_seed(0)
    model = perceptron(4, 6, 3)
    model[1] = activation
    nero.balance_(model)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    found = theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=4, examples=1)
    assert found.lower is None


def test_a_first_layer_that_works_in_place_sees_the_data_as_they_are():
    torch.manual_seed(0)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    found, before = [], inputs.clone()
    model = nero.balance_(linear_network(4, 3))
    for inplace in (False, True):
        whole = nn.Sequential(nn.LeakyReLU(0.5, inplace=inplace), model)
        labels = whole(before.clone()).argmax(1)
        found.append(theory.robustness(whole, (inputs, labels), rotations=8, examples=3))
        assert torch.equal(inputs, before)
    assert found[0] == found[1]


def test_what_is_left_of_a_mean_has_no_part_in_a_proof():
    """Neurons are taken at zero mean: an input's mean, large as it is, neither makes an error nor prevents one."""
    torch.manual_seed(0)
    model = nero.balance_(nn.Linear(4, 1, bias=False, dtype=torch.float64))
    inputs = torch.randn(6, 4, dtype=torch.float64)
    labels = (model(inputs)[:, 0] > 0).long()
    exact = theory.robustness(model, (inputs, labels), rotations=20, tolerance=1e-4)
    with torch.no_grad():
        model.weight += 2e-6
    came = model.weight.detach().clone()
    shifted = inputs + torch.where(labels > 0, 1e4, -1e4)[:, None]  # the mean is on the label's side
    found = theory.robustness(model, (shifted, labels), rotations=20, tolerance=1e-4)
    assert (found.lower, found.upper) == pytest.approx((exact.lower, exact.upper), rel=1e-3)
    assert float((came + found.witness["weight"]).mean()) == pytest.approx(0, abs=1e-15)
    against = inputs - torch.where(labels > 0, 1e6, -1e6)[:, None]
    with pytest.raises(ValueError, match="makes 6 errors on 6 examples"):
        theory.robustness(model, (against, labels))
    with pytest.raises(ValueError, match=r"decides examples: balance the model first \(nero\.balance_\)"):
        theory.robustness(model, (against, 1 - labels))


def test_a_proof_that_is_broken_is_no_result(monkeypatch: pytest.MonkeyPatch):
    model, inputs, labels = robust_case()
    monkeypatch.setattr(sys.modules[theory.robustness.__module__], "certified", lambda *_: True)
    with pytest.raises(RuntimeError, match=r"proved to be at least 1\.571, but a rotation by .* makes an error"):
        theory.robustness(model, (inputs, labels), rotations=8, examples=2)


class Merging(nn.Linear):
    """A layer that does more in train() and eval() than to set a mode."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        if self.merged == mode:
            self.weight.data.mul_(2 if self.merged else 0.5)
            self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("mode", [True, False])
def test_modes_are_kept_without_a_change_of_mode(mode: bool):
    torch.manual_seed(0)
    model = nero.balance_(nn.Sequential(Merging(4, 3, bias=False), nn.Dropout(0.9)).double()).train(mode)
    model[1].training = True  # a mode of its own
    inputs, before = torch.randn(6, 4, dtype=torch.float64), weights_of(model)
    theory.robustness(model, (inputs, model[0](inputs).argmax(1)), rotations=8, examples=2)
    assert [each.training for each in model.modules()] == [mode, mode, True]
    assert model[0].merged is not mode
    assert torch.equal(model[0].weight, before["0.weight"])


def test_networks_without_a_proof_have_a_witness():
    torch.manual_seed(0)
    convolutional = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    nero.balance_(convolutional)
    inputs = torch.randn(20, 1, 8)
    convolutional.eval()
    labels = convolutional(inputs).argmax(1)
    found = theory.robustness(convolutional, (inputs, labels), rotations=20, examples=4)
    assert found.lower is None
    assert 0 < found.upper < math.pi / 2
    assert "no proof is known for such a network" in str(found)


def test_a_layer_that_runs_twice_turns_twice():
    torch.manual_seed(0)
    layer, norm = nn.Linear(6, 6, bias=False).double(), nn.BatchNorm1d(6).double()
    model = nn.Sequential(layer, norm, nn.ReLU(), layer, norm, nn.Linear(6, 3).double())
    nero.balance_(model)
    inputs = torch.randn(10, 6, dtype=torch.float64)
    before, weight, mean = copy.deepcopy(model.state_dict()), layer.weight, norm.running_mean
    theory.preactivations(model, inputs)
    labels = model.eval()(inputs).argmax(1)
    found = theory.robustness(model.train(), (inputs, labels), rotations=8, examples=2)
    assert layer.weight is weight
    assert norm.running_mean is mean
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            parameter.add_(found.witness.get(name, 0.0))
    assert int(model(inputs)[found.example].argmax()) != int(labels[found.example])


def test_hooks_and_frozen_layers_in_a_proof():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), perceptron(4, 6, 3, bias=True))
    nero.balance_(model)
    inputs = torch.randn(10, 2, 2, dtype=torch.float64)
    data = inputs, model(inputs).argmax(1)
    whole = theory.robustness(model, data, rotations=10, examples=2)
    model[1][0].weight.requires_grad_(False)
    frozen = theory.robustness(model, data, rotations=10, examples=2)
    assert frozen.lower > whole.lower, "fewer neurons turn"
    assert set(frozen.witness) == {"1.2.weight"}
    handle = model[1][1].register_forward_hook(lambda *_: None)
    assert theory.robustness(model, data, rotations=10, examples=2).lower is None
    handle.remove()
    waiting = nero.Nero(model, lr="auto")  # its hook, which counts the depth, has no part in what the model gives
    assert theory.robustness(model, data, rotations=10, examples=2).lower == frozen.lower
    assert waiting.param_groups[0]["depth"] == "auto"


def decoding(model: nn.Sequential) -> None:
    """Let the last layer's weight be the first one's, seen the other way."""
    first, last = model[0], model[2]
    del last.weight
    last.weight = first.weight.T


def shifting(model: nn.Sequential) -> None:
    """Let the last layer's bias be a column of the first one's weight."""
    first, last = model[0], model[2]
    del last.bias
    last.bias = first.weight.detach()[:4, 0]


@pytest.mark.parametrize(
    "alter",
    [
        lambda model: setattr(model[1], "forward", torch.sin),
        lambda model: setattr(model[0], "forward", lambda inputs: inputs @ model[0].weight.detach().T),
        lambda model: setattr(model, "forward", lambda inputs: model[2](model[0](inputs).sin())),
        decoding,
        shifting,
    ],
    ids=["activation", "layer", "model", "weight", "bias"],
)
def test_what_was_set_on_a_module_alone_has_no_proof(alter):
    torch.manual_seed(0)
    model = nero.balance_(perceptron(4, 6, 4))
    alter(model)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    found = theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=10, examples=2)
    assert found.lower is None


def test_neurons_at_the_origin_do_not_turn():
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    data = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0])
    found = theory.robustness(model, data, fix_mean=False, rotations=10, tolerance=1e-3)
    assert found.lower == pytest.approx(math.pi / 2, rel=1e-3)


@pytest.mark.parametrize(("kept", "draws"), [(300, 300), (295, 300), (10, 300), (1, 5)])
def test_the_confidence_is_that_of_clopper_and_pearson(kept: int, draws: int):
    """At the lower end, so many or more happen with probability 0.05; found by the binomial's sum."""
    share = share_at_least(kept, draws, 0.95)
    tail = sum(math.comb(draws, k) * share**k * (1 - share) ** (draws - k) for k in range(kept, draws + 1))
    assert tail == pytest.approx(0.05, rel=1e-6)
    assert share_at_least(0, draws, 0.95) == 0
    if kept == draws:
        assert share == pytest.approx(0.05 ** (1 / draws))


@pytest.mark.parametrize(
    ("log", "nearest", "below"),
    [
        (math.log(0.12346), "0.1235", "0.1234"),
        (-785 * math.log(10) + math.log(3.8919), "3.892e-785", "3.891e-785"),
        (-785 * math.log(10) - 1e-5, "1e-785", "9.999e-786"),
        (-1e7, "1.517e-4342945", "1.516e-4342945"),
        (-740.0, "4.189e-322", "4.188e-322"),  # of which a float has two digits
        (-745.0, "2.822e-324", "2.822e-324"),  # which a float has as 4.941e-324
    ],
)
def test_caps_are_told_however_small_and_balls_bound_is_rounded_down(log, nearest, below):
    told = str(nero.theory.CapMeasure(7, 0.1, log, log))
    assert told == f"a cap of 0.1 rad covers {nearest} of S^7 (Ball: at least {below})"


def test_the_confidence_covers():
    """Of intervals from 4,000 experiments with a true share of 0.9, at least 95 % are below it."""
    kept = torch.distributions.Binomial(40, torch.tensor(0.9)).sample((4000,)).long().tolist()
    ends = {count: share_at_least(count, 40, 0.95) for count in set(kept)}
    assert sum(ends[count] <= 0.9 for count in kept) >= 0.95 * 4000 - 3 * math.sqrt(0.05 * 0.95 * 4000)


# -- bad input ---------------------------------------------------------------------------------


def no_loss(model: nn.Module) -> Tensor:
    return sum(parameter.sum() for parameter in model.parameters())


OF_A_MODEL = pytest.mark.parametrize(
    "call",
    [
        lambda model: theory.is_balanced(model),
        lambda model: theory.preactivations(model, torch.ones(3, 4)),
        lambda model: theory.relative_change(model, no_loss, {"weight": torch.ones(4)}),
        lambda model: theory.is_stable_step(model, no_loss, {"weight": torch.ones(4)}),
        lambda model: theory.deep_relative_trust(model, no_loss, {"weight": torch.ones(4)}),
        lambda model: theory.relative_step(model, {"weight": torch.ones(4)}),
        lambda model: theory.is_per_neuron_relative(model, {"weight": torch.ones(4)}, 0.1),
        lambda model: theory.robustness(model, (torch.ones(3, 4), torch.zeros(3).long())),
        lambda model: theory.generalisation_bound(model, 1.0, 10),
    ],
)


@OF_A_MODEL
def test_a_model_on_the_meta_device_has_no_values(call):
    with pytest.raises(ValueError, match=r"'weight' is on the meta device: give it memory \(module\.to_empty\)"):
        call(nn.Linear(4, 3, device="meta"))


@OF_A_MODEL
def test_a_model_without_neurons(call):
    with pytest.raises(ValueError, match=r"LayerNorm has no neurons to train; nero\.describe"):
        call(nn.LayerNorm(4))


def test_a_list_is_no_model():
    for call in (theory.preactivations, theory.relative_step, theory.robustness):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not list"):
            call([nn.Linear(3, 2)], {})
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not NoneType"):
        theory.is_per_neuron_relative(None, {}, 0.1)


def test_frozen_whole_numbers_have_no_say_in_a_step():
    model = nn.Linear(3, 2)
    model.table = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)
    assert theory.is_per_neuron_relative(model, {"weight": 0.1 * model.weight.detach()}, 0.1)


def test_complex_neurons_are_refused():
    with pytest.raises(TypeError, match=r"complex.*view_as_real"):
        theory.preactivations(nn.Linear(3, 2, dtype=torch.complex64), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("perturbation", "error", "message"),
    [
        ([torch.ones(2, 3)], TypeError, "a dict from parameters' names"),
        ({"weight": 1.0}, TypeError, "a dict from parameters' names"),
        ({"wait": torch.ones(2, 3)}, ValueError, "'wait' is no trained parameter.*names are like weight, bias"),
        ({"weight": torch.ones(3, 2)}, ValueError, r"shaped \(3, 2\), the parameter \(2, 3\)"),
        ({"weight": torch.full((2, 3), math.nan)}, ValueError, "infinite or not a number"),
        *(
            ({"weight": torch.ones(2, 3, dtype=dtype)}, TypeError, f"is {dtype}, .*: give it in floating point")
            for dtype in (torch.int64, torch.bool, torch.complex64)
        ),
        ({"weight": torch.ones(2, 3).to_sparse()}, TypeError, r"laid out as torch\.sparse_coo: .* dense"),
        ({"weight": torch.zeros(2, 3)}, ValueError, "moves nothing"),
        ({}, ValueError, "moves nothing"),
    ],
)
def test_perturbations_must_fit(perturbation, error, message):
    with pytest.raises(error, match=message):
        theory.relative_step(nn.Linear(3, 2), perturbation)
    with pytest.raises(error, match=message):
        theory.is_stable_step(nn.Linear(3, 2), no_loss, perturbation)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model: model(torch.ones(2, 3)), "a tensor of one number"),
        (lambda _: 1.0, "a tensor of one number"),
        (lambda model: model(torch.ones(0, 3)).mean(), "the loss is nan.*is the batch empty"),
        (lambda model: torch.where(model.weight == 1, math.inf, model.weight).sum(), "inf: .*is the step too long"),
        (lambda _: torch.ones((), requires_grad=True), "does not depend on the model's parameters"),
        (lambda _: torch.ones(()), "does not depend on the model's parameters"),
        (lambda model: (0 * model.weight).sqrt().sum(), "gradient of 'weight' holds values that are infinite or not"),
    ],
)
def test_losses_must_be_losses(loss, message):
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    with pytest.raises(ValueError, match=message):
        theory.relative_change(model, loss, {"weight": torch.ones(2, 3)})


def test_sparse_gradients_are_the_dense_ones():
    table = nn.Embedding(5, 4)
    sparse = nn.Embedding(5, 4, sparse=True, _weight=table.weight.detach().clone())
    one, other = (
        theory.relative_change(
            each, lambda model: model(torch.tensor([1, 2])).square().sum(), {"weight": torch.ones(5, 4)}
        )
        for each in (table, sparse)
    )
    assert one == other


def test_inference_mode_has_no_gradients():
    model, inputs, labels = robust_case()
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"in torch\.inference_mode\(\) there are no gradients"):
            theory.robustness(model, (inputs, labels))
        with pytest.raises(RuntimeError, match=r"in torch\.inference_mode\(\) there are no gradients"):
            theory.relative_change(model, lambda model: model(inputs).sum(), {"weight": torch.ones(3, 4)})


def test_a_step_to_where_there_is_no_gradient_is_refused():
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    step = {"weight": -model.weight.detach().clone()}
    with pytest.raises(ValueError, match="gradient of 'weight' holds values that are infinite or not a number"):
        theory.is_stable_step(model, lambda model: (model.weight * model.weight).sqrt().sum(), step)
    assert torch.equal(model.weight, torch.ones(1, 2)), "and the model is as it was"


def test_a_number_is_no_loss():
    with pytest.raises(TypeError, match=r"the loss must be a function of the model.*but it is 3"):
        theory.relative_change(nn.Linear(3, 2), 3, {"weight": torch.ones(2, 3)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 0}, "points must be"),
        *(({"kinds": kinds}, "kinds must be some of") for kinds in ("neuron", (), None, 3, [["gain"]], ["neurons"])),
        ({"kinds": ("gain",)}, r"Linear has no gain to train; nero\.describe"),
    ],
)
def test_options_of_changes(options, message):
    with pytest.raises(ValueError, match=message):
        theory.relative_change(nn.Linear(3, 2), no_loss, {"weight": torch.ones(2, 3)}, **options)


def robust_case() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nero.balance_(nn.Linear(4, 3))
    inputs = torch.randn(6, 4)
    return model, inputs, model(inputs).argmax(1)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda x, y: (x[:0], y[:0]), ValueError, "0 inputs and 0 labels: the batch is empty"),
        (lambda x, y: (x[:3], y), ValueError, "3 inputs and 6 labels, and must be as many"),
        (lambda x, _: x, TypeError, "a pair of tensors"),
        (lambda x, y: (x.sum(), y), TypeError, "inputs must be one example a row"),
        (lambda x, y: (x.double(), y), ValueError, r"does not run on an example of torch\.float64, shaped \(1, 4\): "),
        (lambda x, y: (x[:, :3], y), ValueError, r"does not run on an example of torch\.float32, shaped \(1, 3\): "),
        (lambda x, y: (x, y.tolist()), TypeError, "a pair of tensors"),
        (lambda x, y: (x, y.float()), TypeError, "labels must be whole numbers"),
        (lambda x, y: (x, y + 2), ValueError, "but the model has 3 outputs: classes are 0 to 2"),
        (lambda x, y: (x, y - 1), ValueError, "but the model has 3 outputs: classes are 0 to 2"),
        (lambda x, y: (x, (y + 1) % 3), ValueError, "makes 6 errors on 6 examples, .*Definition 6.$"),
        (
            lambda x, y: (torch.cat([x, x[:1]]), torch.cat([y, (y[:1] + 1) % 3])),
            ValueError,
            "1 errors on 7 examples.*equal inputs with different labels, which no network fits",
        ),
    ],
)
def test_data_must_be_solved(data, error, message):
    model, inputs, labels = robust_case()
    with pytest.raises(error, match=message):
        theory.robustness(model, data(inputs, labels))


def test_an_example_may_be_one_number():
    torch.manual_seed(0)
    model = nero.balance_(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
    tokens = torch.arange(5)
    labels = model(tokens).argmax(1)
    assert theory.robustness(model, (tokens, labels), rotations=2, examples=1).upper is not None
    with pytest.raises(ValueError, match=r"makes 5 errors on 5 examples, .*Definition 6.$"):
        theory.robustness(model, (tokens, 1 - labels))
    with pytest.raises(ValueError, match="equal inputs with different labels"):
        theory.robustness(model, (tokens[[0, 0]], torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=r"torch\.int64, shaped \(1,\): index out of range"):
        theory.robustness(model, (tokens + 5, labels))


def test_more_classes_than_neurons():
    for labels in ([0, 1, 2], [0, 1, -1]):
        with pytest.raises(ValueError, match=r"labels run from .* one output, whose sign .* an output for each class"):
            theory.robustness(nero.balance_(nn.Linear(4, 1)), (torch.randn(3, 4), torch.tensor(labels)))


def test_classifiers_give_a_row_an_example():
    with pytest.raises(TypeError, match="one row of outputs an example"):
        theory.robustness(nero.balance_(nn.Conv1d(2, 3, 2)), (torch.randn(4, 2, 5), torch.zeros(4).long()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, r"limit must be an angle in \(0, π/2\]"),
        ({"limit": 2.0}, r"limit must be an angle in \(0, π/2\]"),
        ({"rotations": 0}, "rotations must be a whole number"),
        ({"examples": 1.5}, "examples must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        *(({"seed": seed}, "seed must be a whole number, but it is") for seed in ("a", 1.5, True, None)),
        ({"seed": 2**64}, "seed must be a whole number of 64 bits at most"),
        ({"confidence": 1.0}, "confidence must be between 0 and 1"),
        ({"tolerance": 0}, "tolerance must be between 0 and 1"),
    ],
)
def test_options_of_robustness(options, message):
    model, inputs, labels = robust_case()
    with pytest.raises(ValueError, match=message):
        theory.robustness(model, (inputs, labels), **options)


def ends(model: nn.Module) -> None:
    """Have the model refuse to run for ever."""
    runs = itertools.count()

    def count(*_):
        assert next(runs) < 3000, "it does not come to an end"

    model.register_forward_hook(count)


def test_no_tolerance_is_too_fine():
    model, inputs, labels = robust_case()
    ends(model)
    fine = theory.robustness(model, (inputs, labels), rotations=1, examples=1, tolerance=1e-300)
    coarse = theory.robustness(model, (inputs, labels), rotations=1, examples=1)
    assert fine.upper == pytest.approx(coarse.upper, rel=0.01)


class SignedRoot(nn.Module):
    """Its gradient is not a number: the root that is not taken has none."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.where(inputs > 0, inputs.sqrt(), -(-inputs).sqrt())


@pytest.mark.parametrize(("activation", "scale"), [(SignedRoot(), 1.0), (nn.ReLU(), 2e38)], ids=["root", "overflow"])
def test_margins_without_a_gradient_are_refused(activation: nn.Module, scale: float):
    """The angle to start from was not a number, and grew to no limit for ever."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), activation, nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    data = torch.tensor([[scale, scale], [scale, -scale]]), torch.zeros(2).long()
    ends(model)
    with pytest.raises(ValueError, match=r"gradient of '0\.weight', in the margin of example \d, .* or not a number"):
        theory.robustness(model, data, fix_mean=False, rotations=4, examples=2, steps=2)


@pytest.mark.parametrize("closed", [torch.no_grad(), torch.inference_mode()], ids=["no_grad", "inference_mode"])
def test_models_that_run_without_gradients_are_refused(closed):
    class Closed(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            with closed:
                return super().forward(inputs)

    model = nero.balance_(Closed(4, 3))
    inputs = torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"has no gradient, .*: let it run without torch\.no_grad"):
        theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=4)


def test_the_search_ends_where_the_slope_is_not_a_number():
    """Along inputs that are finite, the neuron's gradient is more than float32 holds."""
    model = nn.Linear(40, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(0.5, 1, 40))
    data = torch.full((3, 40), 3e38), torch.ones(3).long()
    ends(model)
    found = theory.robustness(model, data, fix_mean=False, rotations=4, examples=2, steps=2)
    assert found.upper is None or 0 < found.upper <= found.limit


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1, np.int64(7)])
def test_seeds_are_torchs(seed):
    model, inputs, labels = robust_case()
    found = theory.robustness(model, (inputs, labels), rotations=4, examples=1, seed=seed)
    same = torch.Generator().manual_seed(int(seed)).initial_seed()
    assert found == theory.robustness(model, (inputs, labels), rotations=4, examples=1, seed=same)


def test_robustness_wants_neurons_it_can_turn():
    _, inputs, labels = robust_case()
    with pytest.raises(ValueError, match=r"means are not zero.*nero\.balance_.*fix_mean=False"):
        theory.robustness(nn.Linear(4, 3), (inputs, labels))
    with pytest.raises(TypeError, match=r"bfloat16, too coarse for angles: model\.float\(\)"):
        theory.robustness(nn.Linear(4, 3).bfloat16(), (inputs, labels))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"bfloat16, too coarse .* autocast"):
        theory.robustness(nero.balance_(nn.Linear(4, 3)), (inputs, labels))


# -- the page ----------------------------------------------------------------------------------


def test_public_names_are_documented():
    for name in theory.__all__:
        assert getattr(theory, name).__doc__, f"{name} has no docstring"
        if name[0].islower():
            assert f"{name}(" in PAGE, f"docs/theory.md does not call {name}"


def alike(printed: str, shown: str) -> bool:
    """Whether two texts have the same words, and numbers within 2 %, whatever the spaces and rules between."""
    number = r"(?<![\w^])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|-{2,}|\s+"
    if re.sub(number, " ", printed) != re.sub(number, " ", shown):
        return False
    pairs = zip(re.findall(number, printed), re.findall(number, shown), strict=False)
    values = [[float(each.replace(",", "")) for each in pair] for pair in pairs if pair[0].strip(" -\n")]
    return all(math.isclose(a, b, rel_tol=0.02, abs_tol=1e-9) for a, b in values)


def test_texts_are_alike():
    assert alike("of 10 at  1.001e-7, S^2", "of 10 at 1e-7, S^2")
    assert not alike("of 10 at 1.1e-7", "of 10 at 1e-7")
    assert not alike("10 of 3", "10 for 3")
    assert not alike("of 1", "of 1, 2")


def test_every_block_of_the_page_runs(capsys: pytest.CaptureFixture):
    """In order, each after the last; what a block prints is shown in the block that follows it."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    ran = 0
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, "docs/theory.md", "exec"), names)
            ran += 1
        else:
            printed = capsys.readouterr().out
            assert alike(printed, block), printed
    assert not capsys.readouterr().out
    assert ran == PAGE.count("```python") >= 8
