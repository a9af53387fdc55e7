"""How far the neurons of a solution can turn (Section 6.1, Definition 6)."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nero.preserve import keeping
from nero.scalars import as_float, as_int
from nero.theory.caps import checked_angle, log_incomplete_beta
from nero.theory.certificate import certified, chain_of
from nero.theory.classifier import Classifier, classifier
from nero.theory.digits import at_least, at_most
from nero.theory.layers import Layer, check_mode, layers_of

#: Angles below this are taken for zero.
_LEAST = 1e-9


@dataclass(frozen=True)
class Robustness:
    """What is known of the largest α for which a solution is α-robust; prints as sentences.

    Attributes:
        lower: α is at least this, by a proof, but for rounding; ``None`` where there is none, as for all networks
            but plain perceptrons.
        upper: α is at most this, since a rotation by so much makes an error; ``None`` where none was found.
        example: which example that rotation gets wrong.
        witness: that rotation, as a perturbation of the weights by the parameters' names.
        typical: the angle up to which neurons were turned at random. It is no estimate of α, which is about
            the worst rotation, but of how far a rotation can go that is not chosen to do harm.
        rotations: how many of those there were.
        errors: how many of them made an error.
        share: at least this share of all rotations by up to ``typical`` keeps zero error.
        confidence: with this probability over the random rotations, ``share`` is right.
        limit: the largest angle looked at.
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
        lower = "0" if self.lower is None else at_least(self.lower)
        lines = [f"{lower} ≤ α" + (f" ≤ {at_most(self.upper)}" if self.upper is not None else "")]
        proof = "no proof is known for such a network" if self.lower is None else "proved, layer by layer"
        lines.append(f"  at least {lower}: {proof}")
        if self.upper is None:
            lines.append(f"  no rotation by up to {self.limit:.4g} was found that makes an error")
        else:
            lines.append(f"  at most {at_most(self.upper)}: a rotation by so much gets example {self.example} wrong")
        lines.append(
            f"  of {self.rotations:,} random rotations by up to {at_least(self.typical)}, {self.errors:,} made an "
            f"error: with confidence {at_least(self.confidence)}, at least {at_least(self.share)} of all such "
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
    r"""The largest angle to which a solution is robust, from below and from above.

    Definition 6: "A solution that attains zero training error is α-robust if all neurons may be
    simultaneously and arbitrarily rotated by up to angle α without inducing an error."

    Three things are found out about the largest such α:

    - A **lower** bound, proved by following all rotations at once through the layers, for a ``Sequential`` of
      ``Linear`` and monotone activations. It is exact for one layer, and loose for many.
    - An **upper** bound: a rotation that makes an error. A search turns all neurons against an example's
      margin: each to the point of its cap where the margin, taken as linear, is least; from there again, and so on. The
      smallest angle at which that, or a random rotation, makes an error is an upper bound of α, with the
      rotation as its witness; a better search could find a smaller one.
    - What **random** rotations do. All neurons are drawn at once, uniformly from their caps, at the largest angle at
      which a quarter as many draws made no error. How many of N fresh draws make an error bounds, with a confidence,
      the share of rotations that make none. That is no lower bound of α, since in many dimensions the worst
      rotation is rare, but one of the measure of solutions,
      :math:`P[V_S] \ge \text{share} \cdot \prod P[\mathrm{cap}(\text{typical})]`, which is what
      :func:`generalisation_bound` asks for.

    An example is an error unless its label's output is above all others; of a network with one output, unless the
    output has the label's sign. The model is evaluated in evaluation mode and comes back as it was. Gains and
    biases, frozen neurons, and those at the origin stay.

    Args:
        model: a network that gets all of the data right.
        data: (inputs, labels): one example a row; classes from 0, or for one output 1 and 0, or 1 and -1.
        fix_mean: turn neurons among those of zero mean, as balanced ones do; if not, in all directions.
        rotations: how many random rotations to try.
        confidence: that of the statement on random rotations.
        examples: how many examples the search goes for, those with the smallest margins.
        steps: how often the search turns all neurons before it gives an angle up.
        limit: the largest angle to look at, in (0, π/2].
        tolerance: how closely, relative to itself, to narrow down an angle.
        seed: of the random rotations.

    Raises:
        TypeError, ValueError: errors on the data, an empty batch, labels without an output, a model without
            neurons or with neurons that have a mean, margins without a gradient, or with one
            that is not finite.
        RuntimeError: torch.inference_mode(), which has no gradients; a rotation that breaks the proof, which is a bug,
            or rounding where inputs are very large.

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
            raise ValueError(f"{name} must be between 0 and 1, but it is {share!r}")
    confidence, tolerance = as_float(confidence), as_float(tolerance)
    check_mode()
    layers = layers_of(model)
    with keeping(model, [layer.name for layer in layers], evaluating=True):
        solution = classifier(model, layers, data, fix_mean)
        chain = chain_of(model)
        lower = None
        if chain is not None:
            lower = _largest(lambda angle: certified(solution, chain, angle), limit, tolerance)
        search = _Search(solution, limit, tolerance, steps, seed)
        search.turn_against(examples)
        pilot = -(-rotations // 4)
        typical = _largest(lambda angle: not search.try_at_random(angle, pilot, stop=True), limit, tolerance)
        errors = search.try_at_random(typical, rotations)
    _check_order(lower, search.upper, layers)
    return Robustness(
        lower,
        search.upper,
        search.example,
        search.witness(),
        typical,
        rotations,
        errors,
        share_at_least(rotations - errors, rotations, confidence),
        confidence,
        limit,
    )


def share_at_least(kept: int, draws: int, confidence: float) -> float:
    """The lower end, with that confidence, of a share of which so many draws were (Clopper and Pearson, 1934)."""
    if not kept:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        # the probability of so many or more is I_share(kept, draws - kept + 1)
        if log_incomplete_beta(kept, draws - kept + 1, share) < math.log1p(-confidence):
            low = share
        else:
            high = share
    return low


def _check_order(lower: float | None, upper: float | None, layers: Iterable[Layer]) -> None:
    """Raise if a rotation was found by less than what was proved to be safe, beyond rounding."""
    dtype = max((layer.parameter.dtype for layer in layers), key=lambda dtype: torch.finfo(dtype).eps)
    if lower is not None and upper is not None and lower > upper + math.sqrt(torch.finfo(dtype).eps):
        raise RuntimeError(
            f"α is proved to be at least {lower:.4g}, but a rotation by {upper:.4g} makes an error: please report it, "
            f"unless the inputs are too large for the rounding of {dtype}: try model.double()"
        )


class _Search:
    """Looks for rotations that make an error, and keeps the smallest."""

    def __init__(self, solution: Classifier, limit: float, tolerance: float, steps: int, seed: int) -> None:
        self.solution, self.limit, self.tolerance, self.steps = solution, limit, tolerance, steps
        self.generator = torch.Generator(next(iter(solution.poles.values())).device).manual_seed(seed % 2**64)
        self.upper: float | None = None
        self.example: int | None = None
        self.weights: Mapping[str, Tensor] = {}

    def witness(self) -> dict[str, Tensor]:
        """The smallest rotation as a perturbation, once the model has the weights again that it came with."""
        caps = self.solution.caps
        return {name: weights - caps[name].layer.parameter.detach() for name, weights in self.weights.items()}

    def try_at_random(self, angle: float, draws: int, stop: bool = False) -> int:
        """How many random rotations make an error; with stop, whether one does."""
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

    def turn_against(self, examples: int) -> None:
        """Turn against each of the examples with the smallest margins, the most fragile at first order first."""
        margins = self.solution.margins(self.solution.poles)
        closest = margins.topk(min(examples, len(margins)), largest=False).indices.tolist()
        reach = {example: self._first_order(example) for example in closest}
        for example in sorted(reach, key=reach.__getitem__):
            self._narrow(example, reach[example])

    def _first_order(self, example: int) -> float:
        """The angle at which the example would be an error, were its margin linear in the angle."""
        margin, gradients = self.solution.gradients(self.solution.poles, example)
        slope = sum(caps.slope(gradients[name]) for name, caps in self.solution.caps.items())
        return margin / slope if slope else math.inf

    def _narrow(self, example: int, angle: float) -> None:
        """Go up from an angle until the example is an error, and then down to where it is no longer."""
        most = self.limit if self.upper is None else self.upper * (1 - self.tolerance)
        low, angle = 0.0, min(max(_LEAST, angle), most)  # of an angle that is not a number, the least
        while not self._errs(example, angle):
            if angle == most:
                return
            low, angle = angle, min(1.5 * angle, most)
        _bisect(lambda middle: not self._errs(example, middle), low, angle, self.tolerance)

    def _errs(self, example: int, angle: float) -> bool:
        """Whether turning all neurons by up to an angle against the example's margin makes it an error."""
        for weights in (self.solution.poles, self.solution.random(angle, self.generator)):
            last = math.inf
            for _ in range(self.steps + 1):
                margin, gradients = self.solution.gradients(weights, example)
                if margin <= 0:
                    self._keep(angle, example, weights)
                    return True
                if math.isclose(margin, last, rel_tol=1e-6):
                    break
                last, weights = margin, self.solution.least(gradients, angle, weights)
        return False

    def _keep(self, angle: float, example: int, weights: Mapping[str, Tensor]) -> None:
        if self.upper is None or angle < self.upper:
            self.upper, self.example, self.weights = angle, example, weights


def _largest(good: Callable[[float], Any], limit: float, tolerance: float) -> float:
    """The largest angle up to a limit that is good, where all smaller ones are; a little less, if not the limit."""
    return limit if good(limit) else _bisect(good, 0.0, limit, tolerance)


def _bisect(good: Callable[[float], Any], low: float, high: float, tolerance: float) -> float:
    tolerance = max(tolerance, 2 * sys.float_info.epsilon)  # between neighbours there is no middle
    while high - low > tolerance * high and high > _LEAST:
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
