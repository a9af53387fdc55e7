"""Algorithm 1 of the paper as loops over lists of float64: slow, obvious, and independent of the library.

See "Learning by Turning", Section 4. Quoted comments are the algorithm's own lines. The paragraph below it
describes the bias correction. `mean` and `norm` switch the two projections, as in the ablation of Section 5.1.
`sigma` replaces the norm of w as the scale of a step. `longest` is not in the paper, but from the definition of
the option: it bounds a step to `longest` times eta. Nor is a negative radius: the neuron started at zero, its mean
is free, its norm is at most -radius, and steps are relative to that.

Nor is momentum. :class:`Memory` holds every gradient that a neuron has had, and sums them up anew at each step.
"""

import math


class Memory:
    """All gradients of one neuron, oldest first, and the direction of its next step by momentum `mu`.

    The average of m <- mu m + (1 - mu) g, from m = 0, is the sum of (1 - mu) mu^age g over all gradients, where the
    newest has the age 0. Nesterov's momentum steps along mu m + (1 - mu) g.
    """

    def __init__(self, mu: float, nesterov: bool) -> None:
        self.mu, self.nesterov = mu, nesterov
        self.gradients: list[list[float]] = []

    def average(self) -> list[float]:
        """Return m, the average of the gradients until now."""
        ages = range(len(self.gradients) - 1, -1, -1)
        weights = [(1 - self.mu) * self.mu**age for age in ages]
        return [
            sum(weight * gi for weight, gi in zip(weights, column, strict=True))
            for column in zip(*self.gradients, strict=True)
        ]

    def direction(self, g: list[float]) -> list[float]:
        """Take a gradient and return the direction of the step: the gradient itself without momentum."""
        self.gradients.append(g)
        if self.mu == 0:
            return g
        m = self.average()
        return [self.mu * mi + (1 - self.mu) * gi for mi, gi in zip(m, g, strict=True)] if self.nesterov else m


def corrected(mean_square: float, beta: float, t: int) -> float:
    """Apply: "the running averages are divided by a factor of sqrt(1 - beta^t) before the t-th update"."""
    return math.sqrt(mean_square) / math.sqrt(1 - beta**t)


def turn(
    w: list[float],
    g: list[float],
    mean_square: float,
    t: int,
    eta: float,
    beta: float,
    mean: bool = True,
    norm: bool = True,
    sigma: float | None = None,
    radius: float = 1.0,
    longest: float = math.inf,
) -> tuple[list[float], float]:
    """Update one neuron; return its weights and its running average of the squared gradient norm."""
    # "update running averages"
    mean_square = beta * mean_square + (1 - beta) * sum(gi * gi for gi in g)
    # "update weights": w <- w - eta ||w|| / g_bar * g
    size = math.sqrt(sum(wi * wi for wi in w)) if sigma is None else sigma
    if sigma is None and radius < 0:
        size = -radius
    factor = eta * size / corrected(mean_square, beta, t)
    ratio = math.sqrt(sum(gi * gi for gi in g)) / corrected(mean_square, beta, t)
    if ratio > longest:
        factor = factor / ratio * longest
    w = [wi - factor * gi for wi, gi in zip(w, g, strict=True)]
    return project(w, mean, norm, radius), mean_square


def project(w: list[float], mean: bool = True, norm: bool = True, radius: float = 1.0) -> list[float]:
    """Apply: "project weights back to constraint set"."""
    if radius < 0:
        size = math.sqrt(sum(wi * wi for wi in w))
        return [-radius * wi / size for wi in w] if norm and size > -radius else w
    if mean:
        average = sum(w) / len(w)
        w = [wi - average for wi in w]
    if norm:
        size = math.sqrt(sum(wi * wi for wi in w))
        w = [radius * wi / size for wi in w]
    return w


def nudge(
    b: float, g: float, mean_square: float, t: int, eta: float, beta: float, sigma: float, longest: float = math.inf
) -> tuple[float, float]:
    """Update one gain or bias; return it and its running average of the squared gradient."""
    mean_square = beta * mean_square + (1 - beta) * g * g
    ratio = g / corrected(mean_square, beta, t)
    if abs(ratio) > longest:
        ratio = math.copysign(longest, ratio)
    return b - eta * sigma * ratio, mean_square
