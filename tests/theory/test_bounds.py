"""PAC-Bayes bounds against computations by hand, and printed numbers that never claim more than the bounds."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import perceptron
from torch import nn

import nero
from nero import theory

ANGLES = (1e-3, 0.1, 0.5, 1.0, 1.4, 1.55, math.pi / 2)


def test_bound_of_two_neurons_matches_hand_computation():
    """Use two neurons of fan-in 4, with caps of S² of (1 - cos α)/2 each; n = 50, δ = 0.1, K = 3, α = 1."""
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


def test_bound_of_model_is_bound_of_its_layers():
    model = nero.balance_(nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Conv1d(4, 3, 2), nn.BatchNorm1d(3)))
    found = theory.generalisation_bound(model, 0.5, 1000)
    assert found.layers == ((5, 9), (3, 8))
    given = theory.generalisation_bound([(5, 9), (3, 8)], 0.5, 1000)
    assert found.exact == given.exact
    running = ("3.running_mean", "3.running_var")
    assert found.taken_as_given == ("0.bias", "2.bias", "3.weight", "3.bias", *running)
    assert "assumed fixed before the data were seen: 0.bias, 2.bias, 3.weight, 3.bias, 3.running_mean" in str(found)
    one = theory.generalisation_bound([(1, 9)], 0.5, 1000).exact.log_measure
    other = theory.generalisation_bound([(1, 8)], 0.5, 1000).exact.log_measure
    assert found.exact.log_measure == pytest.approx(5 * one + 3 * other)
    model[0].weight.requires_grad_(False)
    assert theory.generalisation_bound(model, 0.5, 1000).layers == ((3, 8),)


def test_frozen_neurons_are_assumed_given():
    """Frozen neurons may have been trained on the same data before."""
    model = nero.balance_(nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)))
    model[0].requires_grad_(False)
    found = theory.generalisation_bound(model, 0.5, 1000)
    assert found.layers == ((3, 5),)
    assert found.taken_as_given == ("0.weight", "0.bias", "2.bias")
    assert "assumed fixed before the data were seen: 0.weight, 0.bias, 2.bias" in str(found)


def test_padding_row_is_not_counted():
    table = nero.balance_(nn.Embedding(10, 8, padding_idx=3))
    assert theory.generalisation_bound(table, 0.5, 1000).layers == ((9, 8),)
    assert theory.generalisation_bound(nero.balance_(nn.Embedding(10, 8)), 0.5, 1000).layers == ((10, 8),)


def test_neuron_of_two_elements_lives_on_circle():
    found = theory.generalisation_bound([(1, 2)], 1.0, 10)
    assert found.exact.log_measure == pytest.approx(math.log(1 / math.pi))


def test_bound_of_large_network_is_vacuous():
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
def test_bound_above_one_still_bounds_the_error(bound: float):
    """Use ln 1/(1 - ε) ≤ bound, the tighter part of Inequality (pac)."""
    found = theory.PacBayesBound(bound, -1.0, 10, 0.05)
    assert not found.vacuous
    printed = float(str(found).removeprefix("ε ≤ ").partition(" ")[0])
    assert 1 - math.exp(-bound) <= printed < 1
    assert theory.PacBayesBound(9.22, -1.0, 10, 0.05).vacuous  # 0.99990099


@pytest.mark.parametrize("dim", [3, 20, 800])
def test_ball_form_is_never_tighter(dim: int):
    for angle in ANGLES:
        found = theory.generalisation_bound([(7, dim)], angle, 500)
        assert found.exact.bound <= found.ball.bound + 1e-15


def test_too_many_solutions_raise():
    half = math.log(2)
    assert theory.generalisation_bound(
        [(1, 5)], math.pi / 2, 100, log_solutions=half
    ).exact.log_measure == pytest.approx(0, abs=1e-12)
    for count in range(2, 50):  # arcs that cover the circle
        whole = theory.generalisation_bound([(1, 3)], math.pi / count, 100, log_solutions=math.log(count))
        assert whole.exact.log_measure == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"room for at most exp\(0\.693.*got exp\(1\)"):
        theory.generalisation_bound([(1, 5)], math.pi / 2, 100, log_solutions=1.0)
    for solutions in (math.nan, math.inf, "x", None, True):
        with pytest.raises(ValueError, match=f"log_solutions must be a number.*got {solutions!r}"):
            theory.generalisation_bound([(1, 5)], 1.0, 100, log_solutions=solutions)


@pytest.mark.parametrize("samples", [1, 0, -5, 10.0, True])
def test_samples_below_two_raise(samples):
    with pytest.raises(ValueError, match="samples must be an integer of at least 2"):
        theory.generalisation_bound([(2, 5)], 1.0, samples)


@pytest.mark.parametrize("delta", [0, 1, -0.1, math.nan, True])
def test_delta_out_of_range_raises(delta):
    with pytest.raises(ValueError, match="delta must be between 0 and 1"):
        theory.pac_bayes_bound(-1.0, 10, delta)


def test_bound_for_smallest_float_delta_is_finite():
    log_delta = -1074 * math.log(2)
    assert theory.pac_bayes_bound(-1.0, 2, 2.0**-1074).bound == pytest.approx(math.log(4) - log_delta + 1, rel=1e-15)


@pytest.mark.parametrize("log_measure", [0.1, math.nan, math.inf, "x", None, False])
def test_log_measure_above_zero_raises(log_measure):
    with pytest.raises(ValueError, match="logarithm of a probability"):
        theory.pac_bayes_bound(log_measure, 10)


@pytest.mark.parametrize("layers", [[], [(0, 5)], [(3, 1)], (3, 5), [(3, 5.0)], [(1, 2, 3)], 3, None])
def test_network_that_is_not_a_list_of_layers_raises(layers):
    with pytest.raises(ValueError, match=r"a list of \(neurons, fan_in\)"):
        theory.generalisation_bound(layers, 1.0, 10)


def test_unbalanced_network_raises():
    with pytest.raises(ValueError, match=r"balanced networks only.*nero\.balance_"):
        theory.generalisation_bound(nn.Linear(5, 3), 1.0, 10)
    zero = nn.Linear(8, 3, bias=False)
    nn.init.zeros_(zero.weight)
    with pytest.raises(ValueError, match="zero or constant"):
        theory.generalisation_bound(zero, 0.1, 100)


@given(st.floats(1e-6, 100), st.floats(1e-12, 1, exclude_max=True))
def test_printed_bound_is_rounded_to_the_safe_side(bound: float, delta: float):
    found = theory.PacBayesBound(bound, -1.0, 10, delta)
    text = re.fullmatch(r"(vacuous: )?ε ≤ (\S+?),? for (\S+) of all draws of 10 examples", str(found))
    least = found.bound if found.vacuous else found.error
    assert least <= float(text[2]) <= least * 1.001
    draws, exact = Fraction(text[3]), 1 - Fraction(delta)
    assert draws - Fraction(1, 10**15) <= exact
    assert exact - draws <= Fraction(1, 1000)


def test_printed_share_of_short_delta_is_exact():
    for delta, share in ((0.05, "0.95"), (0.32, "0.68"), (1e-5, "0.9999"), (1e-40, "0.9999"), (np.float64(0.1), "0.9")):
        assert f" for {share} of all draws" in str(theory.pac_bayes_bound(-1.0, 10, delta))


@pytest.mark.parametrize(
    ("log", "nearest", "below"),
    [
        (math.log(0.12346), "0.1235", "0.1234"),
        (-785 * math.log(10) + math.log(3.8919), "3.892e-785", "3.891e-785"),
        (-785 * math.log(10) - 1e-5, "1e-785", "9.999e-786"),
        (-1e7, "1.517e-4342945", "1.516e-4342945"),
        (-740.0, "4.189e-322", "4.188e-322"),  # a float has two digits here
        (-745.0, "2.822e-324", "2.822e-324"),  # the nearest float is 4.941e-324
    ],
)
def test_printed_cap_below_float_range_keeps_four_digits(log, nearest, below):
    printed = str(theory.CapMeasure(7, 0.1, log, log))
    assert printed == f"a cap of 0.1 rad covers {nearest} of S^7 (Ball: at least {below})"
