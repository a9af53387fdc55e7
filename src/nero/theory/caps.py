"""The measure of spherical caps (Section 6.2)."""

import math
from dataclasses import dataclass

from nero.scalars import as_float, as_int
from nero.theory.incomplete_beta import log_incomplete_beta
from nero.theory.number_format import exp_decimal, format_lower, format_nearest


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
