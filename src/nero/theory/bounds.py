"""Generalisation from the measure of solutions (Section 6.2): PAC-Bayes, and its form for balanced networks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from nero.balance import is_balanced, paddings_of
from nero.scalars import as_float, as_int
from nero.theory.caps import cap_measure, checked_angle
from nero.theory.digits import at_most, rest
from nero.theory.layers import layers_of


@dataclass(frozen=True)
class PacBayesBound:
    """A bound of the error, averaged over the version space.

    It prints ``error``, rounded up, or that it is vacuous, with ``bound``.

    Attributes:
        bound: the right-hand side of Inequality (pac): both ε and ln 1/(1 - ε) are at most this.
        log_measure: ln P[V_S], the logarithm of the measure of solutions that it comes from.
        samples: n, how many examples there are.
        delta: δ, the share of draws of the training set for which it may fail.
    """

    bound: float
    log_measure: float
    samples: int
    delta: float

    @property
    def error(self) -> float:
        """What ln 1/(1 - ε) ≤ bound says of ε: at most 1 - exp(-bound), the tighter of the two."""
        return -math.expm1(-self.bound)

    @property
    def vacuous(self) -> bool:
        """Whether it says nothing: ``error`` is one, in the four digits that are told, or bound more than 9.2."""
        return self.error > 0.9999

    def __str__(self) -> str:
        of = f"for {rest(self.delta)} of all draws of {self.samples:,} examples"
        if self.vacuous:
            return f"vacuous: ε ≤ {at_most(self.bound)}, {of}"
        return f"ε ≤ {at_most(self.error)} {of}"


@dataclass(frozen=True)
class GeneralisationBound:
    """The bound for a balanced network, by the exact measure of its caps and by Ball's bound of it.

    Attributes:
        exact: from the caps' exact measure.
        ball: from Ball's lower bound of it: the paper's closed form, never less than ``exact``.
        layers: (neurons, fan-in) of each layer.
        alpha: α, the angle to which solutions are robust.
        log_solutions: ln K.
        taken_as_given: gains, biases, frozen neurons, and running statistics of batch norm, which have no part in
            the measure: the bound holds for a network in which they were fixed before the data were seen.
    """

    exact: PacBayesBound
    ball: PacBayesBound
    layers: tuple[tuple[int, int], ...]
    alpha: float
    log_solutions: float
    taken_as_given: tuple[str, ...] = ()

    @property
    def vacuous(self) -> bool:
        """Whether even the exact measure gives a bound that says nothing."""
        return self.exact.vacuous

    def __str__(self) -> str:
        neurons = sum(count for count, _ in self.layers)
        measured = f"ln K = {self.log_solutions:.4g}, ln P[V_S] = {self.exact.log_measure:.4g}"
        lines = [
            str(self.exact),
            f"  by Ball's bound: {self.ball}",
            f"  {neurons:,} neuron{'s' if neurons > 1 else ''}, α = {self.alpha:.4g}, {measured}",
        ]
        if self.taken_as_given:
            lines.append(f"  taken as fixed before the data were seen: {', '.join(self.taken_as_given)}")
        return "\n".join(lines)


def pac_bayes_bound(log_measure: float, samples: int, delta: float = 0.05) -> PacBayesBound:
    r"""The realisable PAC-Bayes bound.

    Theorem 1 of the paper (Valle-Pérez et al., 2019): fix a probability measure P over the weights of a
    classifier. Let S be n iid examples and :math:`V_S` the version space, the classifiers that fit
    them. For a proportion 1 - δ of random draws of S, the average error over the version space satisfies

    .. math::
        \varepsilon(V_S) \le \ln\frac1{1 - \varepsilon(V_S)}
        \le \frac{\ln\frac1{P[V_S]} + \ln\frac{2n}\delta}{n - 1} .

    Args:
        log_measure: ln P[V_S], zero or less; minus infinity, where nothing fits the data, gives a vacuous bound.
        samples: n, two or more.
        delta: δ, between 0 and 1.

    Example:
        >>> print(pac_bayes_bound(math.log(1e-6), 1000))  # one classifier in a million fits 1000 examples
        ε ≤ 0.02415 for 0.95 of all draws of 1,000 examples
        >>> print(pac_bayes_bound(-math.inf, 1000))
        vacuous: ε ≤ inf, for 0.95 of all draws of 1,000 examples
    """
    samples = as_int("samples", samples, 2, ", the size of the data set")
    if not 0 < as_float(delta) < 1:
        raise ValueError(f"delta must be between 0 and 1, like 0.05, but it is {delta!r}")
    if not as_float(log_measure) <= 0:
        raise ValueError(f"log_measure is the logarithm of a probability, zero or less, but it is {log_measure!r}")
    delta, log_measure = as_float(delta), as_float(log_measure)
    log_draws = math.log(2 * samples) - math.log(delta)  # their ratio may be too large for a float
    return PacBayesBound((log_draws - log_measure) / (samples - 1), log_measure, samples, delta)


def generalisation_bound(
    network: nn.Module | Iterable[tuple[int, int]],
    alpha: float,
    samples: int,
    *,
    delta: float = 0.05,
    log_solutions: float = 0.0,
) -> GeneralisationBound:
    r"""The PAC-Bayes bound for a balanced network.

    Section 6.2: the weights of a balanced network of m neurons of fan-in d form a product of m spheres
    :math:`S^{d-2}`, and P is uniform on it. If the version space consists of K non-intersecting α-robust solutions
    (Definition 6), each a product of m caps, then by Eq. (vol)

    .. math::
        P[V_S] = K \cdot P[\mathrm{cap}_{d-2}(\alpha)]^m \ge \frac K{2^m} \sin^{m(d-2)} \frac\alpha2 ,

    and, with Theorem 1,

    .. math::
        \varepsilon(V_S) \le
        \frac{m \ln 2 + m (d-2) \ln \frac1{\sin(\alpha/2)} + \ln\frac{2n}\delta - \ln K}{n - 1} .

    Where layers differ in their fan-in, the product runs over all of them. It comes out as it comes out:
    with K = 1, few networks of interest have so many more examples than weights that it says anything.

    Args:
        network: a balanced model, whose trained neurons count; or (m, d) for each layer: ``[(m, d)]`` is the paper's.
        alpha: α, in (0, π/2].
        samples: n, how many examples were fitted.
        delta: δ.
        log_solutions: ln K. A share of the caps, less than one, can be given in the same way: ``math.log(share)``.

    Raises:
        ValueError: a model without neurons or not balanced, an α outside of (0, π/2], more solutions than
            have room on the spheres.

    Example:
        >>> print(generalisation_bound([(1, 3)], math.pi / 2, 100))  # half of a circle fits
        ε ≤ 0.08679 for 0.95 of all draws of 100 examples
          by Ball's bound: ε ≤ 0.08998 for 0.95 of all draws of 100 examples
          1 neuron, α = 1.571, ln K = 0, ln P[V_S] = -0.6931
    """
    alpha = checked_angle("alpha", alpha)
    if isinstance(network, nn.Module):
        trained = layers_of(network)
        if not is_balanced(network):
            raise ValueError(
                "the network is not balanced, and the bound is of balanced ones: give neurons that are zero or "
                "constant other weights, and call nero.balance_(model)"
            )
        paddings = paddings_of(network)
        layers = [(layer.neurons - (layer.parameter in paddings), layer.fan_in) for layer in trained]
        measured = {layer.name for layer in trained}
        parameters = [name for name, each in network.named_parameters() if each.numel() and name not in measured]
        given = parameters + _running(network)
    else:
        layers, given = _layers(network), []
    if not as_float(log_solutions) < math.inf:
        raise ValueError(f"log_solutions must be a number, 0.0 for one solution, but it is {log_solutions!r}")
    log_solutions = as_float(log_solutions)
    # a neuron of two entries is held to its norm alone, and so lives on a circle
    caps = [(count, cap_measure(max(fan_in - 2, 1), alpha)) for count, fan_in in layers]
    exact = log_solutions + math.fsum(count * cap.log_measure for count, cap in caps)
    ball = log_solutions + math.fsum(count * cap.log_ball for count, cap in caps)
    if exact > 1e-12 * (1 + abs(log_solutions)):  # beyond rounding: caps may cover all of the spheres
        raise ValueError(
            f"exp({log_solutions:.4g}) solutions of α = {alpha:.4g} do not fit side by side: "
            f"their caps have room for exp({log_solutions - exact:.4g}) at most"
        )
    return GeneralisationBound(
        pac_bayes_bound(min(exact, 0.0), samples, delta),
        pac_bayes_bound(ball, samples, delta),
        tuple(layers),
        alpha,
        log_solutions,
        tuple(given),
    )


def _running(network: nn.Module) -> list[str]:
    """The names of what batch norm has learned of the data without training it."""
    norms = {home for home, each in network.named_modules() if isinstance(each, nn.modules.batchnorm._NormBase)}
    names = (name.rpartition(".") for name, _ in network.named_buffers())
    return [f"{home}{dot}{name}" for home, dot, name in names if home in norms and name.startswith("running_")]


def _layers(network: Any) -> list[tuple[int, int]]:
    try:
        layers = [(as_int("m", count, 1), as_int("d", fan_in, 2)) for count, fan_in in network]
    except (TypeError, ValueError):
        layers = []
    if not layers:
        raise ValueError(
            "a network is a model, or a list of (neurons, fan_in), with 1 or more neurons of 2 or more entries, "
            f"not {network!r}"
        )
    return layers
