"""Generalisation bounds from the measure of solutions (Section 6.2): PAC-Bayes, and its form for balanced networks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from nero.balance import is_balanced, paddings_of
from nero.scalars import as_float, as_int
from nero.text import format_complement, format_upper
from nero.theory.caps import cap_measure, checked_angle
from nero.theory.layers import layers_of

#: Four printed digits would show a larger error bound as 1.
MAX_ERROR = 0.9999


@dataclass(frozen=True)
class PacBayesBound:
    """A bound of the error, averaged over the version space.

    It prints ``error``, rounded up. A vacuous bound prints as such, with ``bound``.

    Attributes:
        bound: the right-hand side of Inequality (pac), an upper bound of both ε and ln 1/(1 - ε).
        log_measure: ln P[V_S], the logarithm of the measure of solutions.
        samples: n, the number of examples.
        delta: δ, the share of draws of the training set for which the bound may fail.
    """

    bound: float
    log_measure: float
    samples: int
    delta: float

    @property
    def error(self) -> float:
        """The bound of ε that follows from ln 1/(1 - ε) ≤ bound: 1 - exp(-bound), the tighter of the two."""
        return -math.expm1(-self.bound)

    @property
    def vacuous(self) -> bool:
        """True if the bound says nothing: ``error`` rounds to one in four digits (``bound`` above 9.2)."""
        return self.error > MAX_ERROR

    def __str__(self) -> str:
        draws = f"for {format_complement(self.delta)} of all draws of {self.samples:,} examples"
        if self.vacuous:
            return f"vacuous: ε ≤ {format_upper(self.bound)}, {draws}"
        return f"ε ≤ {format_upper(self.error)} {draws}"


@dataclass(frozen=True)
class GeneralisationBound:
    """The bound for a balanced network, from the exact measure of caps and from Ball's bound of that measure.

    Attributes:
        exact: the bound from the exact measure of the caps.
        ball: the bound from Ball's lower bound: the paper's closed form, never below ``exact``.
        layers: (neurons, fan-in) of each layer.
        alpha: α, the angle to which solutions are robust.
        log_solutions: ln K.
        taken_as_given: gains, biases, frozen neurons and running statistics of batch norm, which the measure leaves
            out. The bound assumes that they were fixed before the data were seen.
    """

    exact: PacBayesBound
    ball: PacBayesBound
    layers: tuple[tuple[int, int], ...]
    alpha: float
    log_solutions: float
    taken_as_given: tuple[str, ...] = ()

    @property
    def vacuous(self) -> bool:
        """True if even the bound from the exact measure says nothing."""
        return self.exact.vacuous

    def __str__(self) -> str:
        neurons = sum(count for count, _ in self.layers)
        logs = f"ln K = {self.log_solutions:.4g}, ln P[V_S] = {self.exact.log_measure:.4g}"
        lines = [
            str(self.exact),
            f"  by Ball's bound: {self.ball}",
            f"  {neurons:,} neuron{'s' if neurons > 1 else ''}, α = {self.alpha:.4g}, {logs}",
        ]
        if self.taken_as_given:
            lines.append(f"  assumed fixed before the data were seen: {', '.join(self.taken_as_given)}")
        return "\n".join(lines)


def pac_bayes_bound(log_measure: float, samples: int, delta: float = 0.05) -> PacBayesBound:
    r"""Compute the realisable PAC-Bayes bound.

    Theorem 1 of the paper (Valle-Pérez et al., 2019): fix a probability measure P over the weights of a
    classifier. Let S be n iid examples and :math:`V_S` the version space, the classifiers that fit
    them. For a proportion 1 - δ of random draws of S, the average error over the version space satisfies

    .. math::
        \varepsilon(V_S) \le \ln\frac1{1 - \varepsilon(V_S)}
        \le \frac{\ln\frac1{P[V_S]} + \ln\frac{2n}\delta}{n - 1} .

    Args:
        log_measure: ln P[V_S], at most zero. Minus infinity, where nothing fits the data, gives a vacuous bound.
        samples: n, at least 2.
        delta: δ, between 0 and 1.

    Example:
        >>> print(pac_bayes_bound(math.log(1e-6), 1000))  # one classifier in a million fits 1000 examples
        ε ≤ 0.02415 for 0.95 of all draws of 1,000 examples
        >>> print(pac_bayes_bound(-math.inf, 1000))
        vacuous: ε ≤ inf, for 0.95 of all draws of 1,000 examples
    """
    samples = as_int("samples", samples, 2, ", the size of the data set")
    if not 0 < as_float(delta) < 1:
        raise ValueError(f"delta must be between 0 and 1, like 0.05, got {delta!r}")
    if not as_float(log_measure) <= 0:
        raise ValueError(f"log_measure must be the logarithm of a probability, at most 0, got {log_measure!r}")
    delta, log_measure = as_float(delta), as_float(log_measure)
    log_draws = math.log(2 * samples) - math.log(delta)  # the ratio itself may overflow
    return PacBayesBound((log_draws - log_measure) / (samples - 1), log_measure, samples, delta)


def generalisation_bound(
    network: nn.Module | Iterable[tuple[int, int]],
    alpha: float,
    samples: int,
    *,
    delta: float = 0.05,
    log_solutions: float = 0.0,
) -> GeneralisationBound:
    r"""Compute the PAC-Bayes bound for a balanced network.

    Section 6.2: the weights of a balanced network of m neurons of fan-in d form a product of m spheres
    :math:`S^{d-2}`, and P is uniform on it. If the version space consists of K non-intersecting α-robust solutions
    (Definition 6), each a product of m caps, then by Eq. (vol)

    .. math::
        P[V_S] = K \cdot P[\mathrm{cap}_{d-2}(\alpha)]^m \ge \frac K{2^m} \sin^{m(d-2)} \frac\alpha2 ,

    and, with Theorem 1,

    .. math::
        \varepsilon(V_S) \le
        \frac{m \ln 2 + m (d-2) \ln \frac1{\sin(\alpha/2)} + \ln\frac{2n}\delta - \ln K}{n - 1} .

    If layers differ in fan-in, the product runs over all layers. With K = 1 the bound is vacuous for most networks:
    it needs many more examples than weights.

    Args:
        network: a balanced model, of which the trained neurons count, or (m, d) for each layer. ``[(m, d)]`` is the
            network of the paper.
        alpha: α, in (0, π/2].
        samples: n, the number of examples fitted.
        delta: δ.
        log_solutions: ln K. To count only a share of the caps, give ``math.log(share)``.

    Raises:
        ValueError: if the model has no neurons or is not balanced, if α is not in (0, π/2], or if the spheres have no
            room for K solutions.

    Example:
        >>> print(generalisation_bound([(1, 3)], math.pi / 2, 100))  # half of a circle fits
        ε ≤ 0.08679 for 0.95 of all draws of 100 examples
          by Ball's bound: ε ≤ 0.08998 for 0.95 of all draws of 100 examples
          1 neuron, α = 1.571, ln K = 0, ln P[V_S] = -0.6931
    """
    alpha = checked_angle("alpha", alpha)
    if isinstance(network, nn.Module):
        layers, given = _measured_layers(network)
    else:
        layers, given = _checked_layers(network), ()
    if not as_float(log_solutions) < math.inf:
        raise ValueError(f"log_solutions must be a number, 0.0 for one solution, got {log_solutions!r}")
    log_solutions = as_float(log_solutions)
    # a neuron of two elements is held to its norm alone, and so lives on a circle
    caps = [(count, cap_measure(max(fan_in - 2, 1), alpha)) for count, fan_in in layers]
    exact = log_solutions + math.fsum(count * cap.log_measure for count, cap in caps)
    ball = log_solutions + math.fsum(count * cap.log_ball for count, cap in caps)
    if exact > 1e-12 * (1 + abs(log_solutions)):  # tolerates rounding: caps may cover the whole spheres
        raise ValueError(
            f"the spheres have room for at most exp({log_solutions - exact:.4g}) disjoint solutions of "
            f"α = {alpha:.4g}, got exp({log_solutions:.4g})"
        )
    return GeneralisationBound(
        pac_bayes_bound(min(exact, 0.0), samples, delta),
        pac_bayes_bound(ball, samples, delta),
        tuple(layers),
        alpha,
        log_solutions,
        given,
    )


def _measured_layers(model: nn.Module) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
    """Return (neurons, fan-in) of each trained layer, and the names of all values that the measure leaves out."""
    trained = layers_of(model)
    if not is_balanced(model):
        raise ValueError(
            "the bound holds for balanced networks only: initialise neurons that are zero or constant, and call "
            "nero.balance_(model)"
        )
    paddings = paddings_of(model)
    measured = {layer.name for layer in trained}
    others = [name for name, each in model.named_parameters() if each.numel() and name not in measured]
    layers = [(layer.neurons - (layer.parameter in paddings), layer.fan_in) for layer in trained]
    return layers, (*others, *_running_statistics(model))


def _running_statistics(model: nn.Module) -> list[str]:
    """Return the names of the buffers that batch norm estimates from the data."""
    norms = {home for home, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._NormBase)}
    names = (name.rpartition(".") for name, _ in model.named_buffers())
    return [f"{home}{dot}{name}" for home, dot, name in names if home in norms and name.startswith("running_")]


def _checked_layers(network: Any) -> list[tuple[int, int]]:
    try:
        layers = [(as_int("m", count, 1), as_int("d", fan_in, 2)) for count, fan_in in network]
    except (TypeError, ValueError):
        layers = []
    if not layers:
        raise ValueError(
            "network must be a model, or a list of (neurons, fan_in) with neurons of at least 1 and fan_in of at "
            f"least 2, got {network!r}"
        )
    return layers
