"""The regularised incomplete beta function on a log scale."""

import math

#: Above this, the error of the truncated Stirling series is below the rounding of float64.
_MIN_STIRLING = 20.0
_MAX_TERMS = 100_000


def log_incomplete_beta(
    a: float, b: float, x: float, complement: float | None = None, log_x: float | None = None
) -> float:
    """Compute ln I_x(a, b), the logarithm of the regularised incomplete beta function.

    Args:
        a: a positive number.
        b: a positive number.
        x: a number from 0 to 1.
        complement: 1 - x, if it is known more accurately than the subtraction gives it.
        log_x: ln x, if it is known more accurately than from ``x``.
    """
    complement = 1 - x if complement is None else complement
    if log_x is None:
        log_x = math.log(x) if x > 0 else -math.inf
    if log_x == -math.inf or complement <= 0:
        return 0.0 if complement <= 0 else -math.inf
    log_complement = math.log1p(-x) if x < complement else math.log(complement)
    log_x = log_x if x < complement else math.log1p(-complement)
    # the fraction converges fast below the mean; above it, use I_x(a, b) = 1 - I_(1-x)(b, a)
    if complement < (b + 1) / (a + b + 2):
        return math.log1p(-math.exp(_log_below_mean(b, a, complement, log_complement, log_x)))
    return _log_below_mean(a, b, x, log_x, log_complement)


def _log_below_mean(a: float, b: float, x: float, log_x: float, log_complement: float) -> float:
    return a * log_x + b * log_complement - math.log(a) - _log_beta(a, b) - math.log(_continued_fraction(a, b, x))


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Evaluate 1 + d₁/(1 + d₂/(1 + ...)) of DLMF 8.17.22 by Lentz's method."""
    value = upper = 1.0
    lower = 0.0
    for n in range(1, _MAX_TERMS):
        half = n // 2
        if n % 2:
            term = -(a + half) * (a + b + half) * x / ((a + n - 1) * (a + n))
        else:
            term = half * (b - half) * x / ((a + n - 1) * (a + n))
        upper = 1 + term / upper
        lower = 1 / (1 + term * lower)
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            break
    return value


def _log_beta(a: float, b: float) -> float:
    """Compute ln B(a, b), without the cancellation of lgamma(a) against lgamma(a + b) where a is large."""
    a, b = max(a, b), min(a, b)
    if a < _MIN_STIRLING:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    difference = (a - 0.5) * math.log1p(b / a) + b * math.log(a + b) - b
    return math.lgamma(b) - (difference + _stirling_remainder(a + b) - _stirling_remainder(a))


def _stirling_remainder(z: float) -> float:
    """Return ln Γ(z) minus Stirling's formula."""
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / z**2) / z**2) / z**2) / z
