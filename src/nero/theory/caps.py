"""The measure of spherical caps (Section 6.2), and the incomplete beta function that gives it."""

import math
from dataclasses import dataclass

from nero.scalars import as_float, as_int
from nero.text import exp_decimal, format_lower, format_nearest

#: Above this, the error of the truncated Stirling series is below the rounding of float64.
_MIN_STIRLING = 20.0
_MAX_TERMS = 100_000


@dataclass(frozen=True)
class CapMeasure:
    """The share of a sphere that a cap covers, and Ball's lower bound.

    Attributes:
        dim: the dimension of the sphere: S^dim lies in R^(dim + 1).
        angle: the angle between the pole of the cap and its rim, in radians.
        log_measure: the logarithm of the share, which is accurate even where the share underflows.
        log_ball: the logarithm of Ball's lower bound.
    """

    dim: int
    angle: float
    log_measure: float
    log_ball: float

    @property
    def measure(self) -> float:
        """The share; zero where it underflows."""
        return math.exp(self.log_measure)

    @property
    def ball(self) -> float:
        """Ball's lower bound of the share; zero where it underflows."""
        return math.exp(self.log_ball)

    def __str__(self) -> str:
        return (
            f"a cap of {self.angle:.4g} rad covers {format_nearest(exp_decimal(self.log_measure))} of S^{self.dim} "
            f"(Ball: at least {format_lower(exp_decimal(self.log_ball))})"
        )


def cap_measure(dim: int, angle: float) -> CapMeasure:
    r"""Compute the share of the sphere S^dim within an angle of a pole, and Ball's lower bound.

    The paper's Eq. (vol) measures the weights of a neuron of fan-in d that lie within an angle α of
    a solution, as a cap of :math:`S^{d-2}`, for which

    .. math::
        P[\mathrm{cap}_{k}(\alpha)] = \tfrac12 I_{\sin^2\alpha}(\tfrac k2, \tfrac12)
        \;\ge\; \tfrac12 \sin^{k}\tfrac\alpha2,

    where I is the regularised incomplete beta function. The inequality is Lemma 2.3 of Ball's
    "An elementary introduction to modern convex geometry" (1997), where the radius of a cap is the chord 2 sin(α/2).

    Args:
        dim: k, the dimension of the sphere, at least 1. For a balanced neuron it is the fan-in minus two.
        angle: α, in (0, π/2].

    Raises:
        ValueError: if the dimension or the angle is out of range.

    Example:
        >>> print(cap_measure(2, 1.0))  # (1 - cos 1) / 2 of a ball's surface
        a cap of 1 rad covers 0.2298 of S^2 (Ball: at least 0.1149)
        >>> print(cap_measure(782, 0.1))
        a cap of 0.1 rad covers 3.892e-785 of S^782 (Ball: at least 1.419e-1018)
    """
    dim = as_int("dim", dim, 1, ", the dimension of a sphere")
    angle = checked_angle("angle", angle)
    sine, cosine = math.sin(angle), math.cos(angle)
    log_sine = math.log(sine)  # sin² of a tiny angle underflows
    log_measure = math.log(0.5) + log_incomplete_beta(dim / 2, 0.5, sine**2, cosine**2, 2 * log_sine)
    log_sine_of_half = log_sine - math.log(2 * math.cos(angle / 2))
    return CapMeasure(dim, angle, log_measure, math.log(0.5) + dim * log_sine_of_half)


def checked_angle(name: str, angle: float) -> float:
    """Convert an angle to a Python float; raise unless it is in (0, π/2]."""
    if not 0 < as_float(angle) <= math.pi / 2:
        raise ValueError(f"{name} must be an angle in (0, π/2], in radians, got {angle!r}")
    return as_float(angle)


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
