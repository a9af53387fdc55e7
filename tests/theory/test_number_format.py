"""Printed numbers never claim more than the numbers themselves."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nero import theory


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
