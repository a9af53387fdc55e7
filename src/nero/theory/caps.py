"""How much of a sphere a cap covers (Section 6.2), by an incomplete beta function of our own, on a log scale."""

import math
from dataclasses import dataclass

from nero.scalars import as_float, as_int
from nero.theory.digits import at_least, nearest, power

#: From here on the error of Stirling's series, as far as it is taken, is less than float64's rounding.
_STIRLING = 20.0
_ROUNDS = 100_000


@dataclass(frozen=True)
class CapMeasure:
    """The share of a sphere that a cap covers, and Ball's lower bound of it.

    Attributes:
        dim: the sphere's dimension: S^dim lies in R^(dim + 1).
        angle: between the cap's pole and its rim, in radians.
        log_measure: the logarithm of the share; it is good where the share is too small for a float.
        log_ball: the logarithm of Ball's lower bound.
    """

    dim: int
    angle: float
    log_measure: float
    log_ball: float

    @property
    def measure(self) -> float:
        """The share itself; zero where it is less than a float can hold."""
        return math.exp(self.log_measure)

    @property
    def ball(self) -> float:
        """Ball's lower bound itself; zero where it is less than a float can hold."""
        return math.exp(self.log_ball)

    def __str__(self) -> str:
        return (
            f"a cap of {self.angle:.4g} rad covers {nearest(power(self.log_measure))} of S^{self.dim} "
            f"(Ball: at least {at_least(power(self.log_ball))})"
        )


def cap_measure(dim: int, angle: float) -> CapMeasure:
    r"""The share of the sphere S^dim within an angle of a pole, exactly, and Ball's lower bound.

    The paper's Eq. (vol) measures the weights of a neuron of fan-in d that lie within an angle α of
    a solution, as a cap of :math:`S^{d-2}`, for which

    .. math::
        P[\mathrm{cap}_{k}(\alpha)] = \tfrac12 I_{\sin^2\alpha}(\tfrac k2, \tfrac12)
        \;\ge\; \tfrac12 \sin^{k}\tfrac\alpha2,

    where I is the regularised incomplete beta function and the inequality is Lemma 2.3 of Ball's
    "An elementary introduction to modern convex geometry" (1997), which puts a cap's radius as the chord 2 sin(α/2).

    Args:
        dim: k, the sphere's dimension, 1 or more; that of a balanced neuron is its fan-in less two.
        angle: α, in (0, π/2].

    Raises:
        ValueError: an angle or a dimension outside of that.

    Example:
        >>> print(cap_measure(2, 1.0))  # (1 - cos 1) / 2 of a ball's surface
        a cap of 1 rad covers 0.2298 of S^2 (Ball: at least 0.1149)
        >>> print(cap_measure(782, 0.1))
        a cap of 0.1 rad covers 3.892e-785 of S^782 (Ball: at least 1.419e-1018)
    """
    dim = as_int("dim", dim, 1, ", the dimension of a sphere")
    angle = checked_angle("angle", angle)
    sine, cosine = math.sin(angle), math.cos(angle)
    log_sine = math.log(sine)  # the square of the sine, or half of it, may be too small for a float
    log_measure = math.log(0.5) + log_incomplete_beta(dim / 2, 0.5, sine**2, cosine**2, 2 * log_sine)
    log_half = log_sine - math.log(2 * math.cos(angle / 2))  # of sin(α/2)
    return CapMeasure(dim, angle, log_measure, math.log(0.5) + dim * log_half)


def checked_angle(name: str, angle: float) -> float:
    """An angle as Python's own number; raise unless it is in (0, π/2]."""
    if not 0 < as_float(angle) <= math.pi / 2:
        raise ValueError(f"{name} must be an angle in (0, π/2], in radians, but it is {angle!r}")
    return as_float(angle)


def log_incomplete_beta(a: float, b: float, x: float, rest: float | None = None, log_x: float | None = None) -> float:
    """The logarithm of I_x(a, b), the regularised incomplete beta function.

    Args:
        a: positive.
        b: positive.
        x: from 0 to 1.
        rest: 1 - x, for who knows it better than the subtraction.
        log_x: the logarithm of x, for who knows it better than x tells.
    """
    rest = 1 - x if rest is None else rest
    if log_x is None:
        log_x = math.log(x) if x > 0 else -math.inf
    if log_x == -math.inf or rest <= 0:
        return 0.0 if rest <= 0 else -math.inf
    log_rest = math.log1p(-x) if x < rest else math.log(rest)
    log_x = log_x if x < rest else math.log1p(-rest)
    # the fraction converges fast on this side of the mean; beyond it, I_x(a, b) = 1 - I_(1-x)(b, a)
    if rest < (b + 1) / (a + b + 2):
        return math.log1p(-math.exp(_log_tail(b, a, rest, log_rest, log_x)))
    return _log_tail(a, b, x, log_x, log_rest)


def _log_tail(a: float, b: float, x: float, log_x: float, log_rest: float) -> float:
    """The same by its continued fraction, where that converges."""
    return a * log_x + b * log_rest - math.log(a) - _log_beta(a, b) - math.log(_fraction(a, b, x))


def _fraction(a: float, b: float, x: float) -> float:
    """1 + d₁/(1 + d₂/(1 + ...)), the continued fraction of the incomplete beta function (DLMF 8.17.22).

    It is taken from the front by Lentz's method: as products of the ratios of two recurrences.
    """
    value = upper = 1.0
    lower = 0.0
    for n in range(1, _ROUNDS):
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
    """The logarithm of B(a, b), without the cancellation of lgamma(a) against lgamma(a + b) where a is large."""
    a, b = max(a, b), min(a, b)
    if a < _STIRLING:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    grown = (a - 0.5) * math.log1p(b / a) + b * math.log(a + b) - b + _stirling(a + b) - _stirling(a)
    return math.lgamma(b) - grown


def _stirling(z: float) -> float:
    """What Stirling's formula for ln Γ(z) leaves."""
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / z**2) / z**2) / z**2) / z
