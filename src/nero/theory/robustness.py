"""The angle by which the neurons of a solution can turn (Section 6.1, Definition 6)."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nero.preserve import preserved
from nero.scalars import as_float, as_int
from nero.text import format_lower, format_upper
from nero.theory.caps import checked_angle, log_incomplete_beta
from nero.theory.certificate import is_certified, perceptron_layers
from nero.theory.classifier import Classifier, make_classifier
from nero.theory.layers import Layer, check_gradients_enabled, layers_of

#: Smaller angles, in radians, count as zero.
_MIN_ANGLE = 1e-9


@dataclass(frozen=True)
class Robustness:
    """Bounds of the largest α for which a solution is α-robust; prints as sentences.

    Attributes:
        lower: a proved lower bound of α, up to rounding; ``None`` for networks other than plain perceptrons.
        upper: an upper bound of α: a rotation by this angle makes an error. ``None`` if none was found.
        example: the index of the example that this rotation gets wrong.
        witness: this rotation, as a perturbation of the weights by parameter name.
        typical: the largest angle of the random rotations. It does not estimate α, which is about
            the worst rotation; it shows how far neurons can turn at random.
        rotations: the number of random rotations.
        errors: the number of random rotations that made an error.
        share: a lower bound of the share of all rotations by up to ``typical`` that make no error.
        confidence: the probability, over the random rotations, that ``share`` is right.
        limit: the largest angle tried.
    """

    lower: float | None
    upper: float | None
    example: int | None
    witness: dict[str, Tensor] = field(repr=False, compare=False)
    typical: float
    rotations: int
    errors: int
    share: float
    confidence: float
    limit: float

    def __str__(self) -> str:
        lower = "0" if self.lower is None else format_lower(self.lower)
        lines = [f"{lower} ≤ α" + (f" ≤ {format_upper(self.upper)}" if self.upper is not None else "")]
        proof = "no proof is known for such a network" if self.lower is None else "proved, layer by layer"
        lines.append(f"  at least {lower}: {proof}")
        if self.upper is None:
            lines.append(f"  no rotation by up to {self.limit:.4g} was found that makes an error")
        else:
            lines.append(
                f"  at most {format_upper(self.upper)}: a rotation by this angle gets example {self.example} wrong"
            )
        lines.append(
            f"  of {self.rotations:,} random rotations by up to {format_lower(self.typical)}, {self.errors:,} made an "
            f"error: with confidence {format_lower(self.confidence)}, at least {format_lower(self.share)} of all such "
            "rotations make none"
        )
        return "\n".join(lines)


def robustness(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    fix_mean: bool = True,
    rotations: int = 300,
    confidence: float = 0.95,
    examples: int = 32,
    steps: int = 10,
    limit: float = math.pi / 2,
    tolerance: float = 0.01,
    seed: int = 0,
) -> Robustness:
    r"""Bound the largest angle to which a solution is robust, from below and from above.

    Definition 6: "A solution that attains zero training error is α-robust if all neurons may be
    simultaneously and arbitrarily rotated by up to angle α without inducing an error."

    The report has three statements on the largest such α:

    - A **lower** bound, proved by following all rotations at once through the layers, for a ``Sequential`` of
      ``Linear`` and monotone activations. It is exact for one layer, and loose for many.
    - An **upper** bound: a rotation that makes an error. A search turns all neurons against the margin of an example.
      Each neuron moves to the point of its cap where the margin, linearised, is smallest, and again from there. The
      smallest angle at which the search or a random rotation makes an error is an upper bound of α, with the
      rotation as its witness. A better search could find a smaller angle.
    - The effect of **random** rotations. All neurons are drawn at once, uniformly from their caps, at the largest
      angle at which a pilot of a quarter as many draws made no error. The number of errors of N fresh draws bounds,
      with a confidence, the share of rotations that make none. This is not a lower bound of α, since in many
      dimensions the worst rotation is rare. It bounds the measure of solutions,
      :math:`P[V_S] \ge \text{share} \cdot \prod P[\mathrm{cap}(\text{typical})]`, which
      :func:`generalisation_bound` needs.

    An example is an error unless the output of its label exceeds all others; for a network with one output, unless
    the output has the sign of the label. The model runs in evaluation mode and is restored. Gains, biases, frozen
    neurons and neurons at the origin do not turn.

    Args:
        model: a network that makes no error on the data.
        data: (inputs, labels), one example per row. Labels are classes from 0; for one output 1 and 0, or 1 and -1.
        fix_mean: whether neurons keep a mean of zero, as balanced ones do; if not, they turn in all directions.
        rotations: the number of random rotations.
        confidence: the confidence of the statement on random rotations.
        examples: the number of examples the search attacks, those with the smallest margins.
        steps: the number of times the search turns all neurons before it gives up on an angle.
        limit: the largest angle to try, in (0, π/2].
        tolerance: the relative precision of the angles.
        seed: the seed of the random rotations.

    Raises:
        TypeError, ValueError: if the model makes errors on the data, the data are empty, a label has no output, the
            model has no neurons or neurons that are not centred, or a margin has no finite gradient.
        RuntimeError: under torch.inference_mode(), which has no gradients; or if a rotation contradicts the proof,
            which is a bug, or rounding of very large inputs.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.copy_(torch.tensor([[1.0, 0.0]]))
        >>> data = torch.tensor([[1.0, 1.0], [-1.0, 0.0]]), torch.tensor([1, -1])
        >>> found = robustness(model, data, fix_mean=False)  # the first is π/4 from the hyperplane
        >>> f"{found.lower:.1f} to {found.upper:.1f}, by example {found.example}"
        '0.8 to 0.8, by example 0'
    """
    limit = checked_angle("limit", limit)
    rotations = as_int("rotations", rotations, 1)
    examples, steps, seed = as_int("examples", examples, 1), as_int("steps", steps, 1), as_int("seed", seed)
    for name, share in (("confidence", confidence), ("tolerance", tolerance)):
        if not 0 < as_float(share) < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {share!r}")
    confidence, tolerance = as_float(confidence), as_float(tolerance)
    check_gradients_enabled()
    layers = layers_of(model)
    with preserved(model, [layer.name for layer in layers], evaluating=True):
        solution = make_classifier(model, layers, data, fix_mean)
        perceptron = perceptron_layers(model)
        lower = None
        if perceptron is not None:
            lower = _largest_good(lambda angle: is_certified(solution, perceptron, angle), limit, tolerance)
        search = _Search(solution, limit, tolerance, steps, seed)
        search.attack_closest(examples)
        pilot = -(-rotations // 4)
        typical = _largest_good(lambda angle: not search.count_errors(angle, pilot, stop=True), limit, tolerance)
        errors = search.count_errors(typical, rotations)
    _check_consistent(lower, search.upper, layers)
    return Robustness(
        lower,
        search.upper,
        search.example,
        search.witness(),
        typical,
        rotations,
        errors,
        binomial_lower_bound(rotations - errors, rotations, confidence),
        confidence,
        limit,
    )


def binomial_lower_bound(kept: int, draws: int, confidence: float) -> float:
    """Return the lower confidence bound of a probability from ``kept`` successes (Clopper and Pearson, 1934)."""
    if not kept:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        # I_share(kept, draws - kept + 1) is the probability of at least ``kept`` successes
        if log_incomplete_beta(kept, draws - kept + 1, share) < math.log1p(-confidence):
            low = share
        else:
            high = share
    return low


def _check_consistent(lower: float | None, upper: float | None, layers: Iterable[Layer]) -> None:
    """Raise if the witness contradicts the proof, beyond rounding."""
    dtype = max((layer.parameter.dtype for layer in layers), key=lambda dtype: torch.finfo(dtype).eps)
    if lower is not None and upper is not None and lower > upper + math.sqrt(torch.finfo(dtype).eps):
        raise RuntimeError(
            f"α is proved to be at least {lower:.4g}, but a rotation by {upper:.4g} makes an error: if the inputs are "
            f"too large for {dtype}, call model.double(); otherwise please report a bug"
        )


class _Search:
    """A search for rotations that make an error; it keeps the smallest."""

    def __init__(self, solution: Classifier, limit: float, tolerance: float, steps: int, seed: int) -> None:
        self.solution, self.limit, self.tolerance, self.steps = solution, limit, tolerance, steps
        self.generator = torch.Generator(next(iter(solution.poles.values())).device).manual_seed(seed % 2**64)
        self.upper: float | None = None
        self.example: int | None = None
        self.weights: Mapping[str, Tensor] = {}

    def witness(self) -> dict[str, Tensor]:
        """Return the smallest rotation as a perturbation of the model, which must have its own weights again."""
        caps = self.solution.caps
        return {name: weights - caps[name].layer.parameter.detach() for name, weights in self.weights.items()}

    def count_errors(self, angle: float, draws: int, stop: bool = False) -> int:
        """Return the number of random rotations that make an error; with ``stop``, end at the first."""
        errors = 0
        for _ in range(draws):
            weights = self.solution.random(angle, self.generator)
            example = self.solution.first_error(weights)
            if example is not None:
                errors += 1
                self._keep(angle, example, weights)
                if stop:
                    break
        return errors

    def attack_closest(self, examples: int) -> None:
        """Attack the examples with the smallest margins, those that are the most fragile to first order first."""
        margins = self.solution.margins(self.solution.poles)
        closest = margins.topk(min(examples, len(margins)), largest=False).indices.tolist()
        reach = {example: self._first_order(example) for example in closest}
        for example in sorted(reach, key=reach.__getitem__):
            self._narrow(example, reach[example])

    def _first_order(self, example: int) -> float:
        """Return the angle at which the margin of an example, linearised, is zero."""
        margin, gradients = self.solution.gradients(self.solution.poles, example)
        slope = sum(caps.slope(gradients[name]) for name, caps in self.solution.caps.items())
        return margin / slope if slope else math.inf

    def _narrow(self, example: int, angle: float) -> None:
        """Raise the angle until the example is an error, then bisect down to the smallest such angle."""
        most = self.limit if self.upper is None else self.upper * (1 - self.tolerance)
        low, angle = 0.0, min(max(_MIN_ANGLE, angle), most)  # max() turns NaN into the smallest angle
        while not self._makes_error(example, angle):
            if angle == most:
                return
            low, angle = angle, min(1.5 * angle, most)
        _bisect(lambda middle: not self._makes_error(example, middle), low, angle, self.tolerance)

    def _makes_error(self, example: int, angle: float) -> bool:
        """Turn all neurons by up to an angle against the margin of an example; return whether it becomes an error."""
        for weights in (self.solution.poles, self.solution.random(angle, self.generator)):
            last = math.inf
            for _ in range(self.steps + 1):
                margin, gradients = self.solution.gradients(weights, example)
                if margin <= 0:
                    self._keep(angle, example, weights)
                    return True
                if math.isclose(margin, last, rel_tol=1e-6):
                    break
                last, weights = margin, self.solution.minimum(gradients, angle, weights)
        return False

    def _keep(self, angle: float, example: int, weights: Mapping[str, Tensor]) -> None:
        if self.upper is None or angle < self.upper:
            self.upper, self.example, self.weights = angle, example, weights


def _largest_good(is_good: Callable[[float], Any], limit: float, tolerance: float) -> float:
    """Return the largest good angle up to a limit, rounded down, if all smaller angles are good."""
    return limit if is_good(limit) else _bisect(is_good, 0.0, limit, tolerance)


def _bisect(is_good: Callable[[float], Any], low: float, high: float, tolerance: float) -> float:
    tolerance = max(tolerance, 2 * sys.float_info.epsilon)  # neighbouring floats have no middle
    while high - low > tolerance * high and high > _MIN_ANGLE:
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low
