"""The incomplete beta function against exact binomial sums."""

import itertools
import math
from fractions import Fraction

import pytest

from nero.theory.incomplete_beta import log_incomplete_beta


def test_incomplete_beta_matches_binomial_tail():
    for draws, kept, share in itertools.product((5, 40, 900), (1, 3, 5), (0.01, 0.3, 0.5, 0.99)):
        tail = sum(
            math.comb(draws, k) * Fraction(share) ** k * (1 - Fraction(share)) ** (draws - k) for k in range(kept)
        )
        wanted = math.log(1 - tail) if tail < Fraction(1, 2) else math.log(float(1 - tail))
        assert log_incomplete_beta(kept, draws - kept + 1, share) == pytest.approx(wanted, abs=1e-10)
    assert log_incomplete_beta(2.0, 3.0, 0.0) == -math.inf
    assert log_incomplete_beta(2.0, 3.0, 1.0) == 0.0
