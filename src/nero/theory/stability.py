"""Stable descent steps and deep relative trust (Section 3.2, Definitions 3 and 4)."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from nero.preserve import overwrite, preserved
from nero.role import KINDS, Kind
from nero.scalars import as_int
from nero.text import text_table
from nero.theory.layers import (
    NEURONS,
    Layer,
    Perturbation,
    check_gradients_enabled,
    check_perturbation,
    frobenius_norm,
    layers_of,
    ratio,
)

#: A loss as a function of the model, such as ``lambda model: cross_entropy(model(inputs), labels)``.
Loss: TypeAlias = Callable[[nn.Module], Tensor]
#: The share of a perturbation that rounding to the parameters' dtype may change.
MAX_ROUNDING = 0.1


@dataclass(frozen=True)
class LayerChange:
    """The effect on one layer of a perturbation of the whole network.

    Attributes:
        name: the name of the parameter.
        kind: the kind of its role.
        size: ‖ΔW_l‖ / ‖W_l‖, the relative perturbation; infinite if W_l is zero and moves.
        change: ‖∇(W+ΔW) - ∇(W)‖ / ‖∇(W)‖, the relative change of the layer's gradient.
        cosine: the cosine of the angle θ_l between ΔW_l and the negative gradient; NaN if one of them is zero.
    """

    name: str
    kind: Kind
    size: float
    change: float
    cosine: float

    @property
    def stable(self) -> bool:
        """True if Inequality (stable) holds for the layer, or the layer does not move."""
        return self.size == 0 or self.change < self.cosine


@dataclass(frozen=True)
class RelativeChange:
    """The relative change of every layer's gradient; prints as a table.

    Attributes:
        layers: one :class:`LayerChange` for each parameter of the requested kinds.
        others: the parameters of other kinds that move. They are not printed, but count for stability.
    """

    layers: tuple[LayerChange, ...]
    others: tuple[LayerChange, ...] = ()

    @property
    def stable(self) -> bool:
        """True if the step is stable (Definition 3). Every parameter that moves counts."""
        return all(layer.stable for layer in (*self.layers, *self.others))

    def __str__(self) -> str:
        rows = [
            (each.name, f"{each.size:.3g}", f"{each.change:.3g}", f"{each.cosine:.3g}", "yes" if each.stable else "no")
            for each in self.layers
        ]
        lines = text_table(("layer", "|ΔW|/|W|", "|Δ∇|/|∇|", "cos θ", "stable"), rows)
        return f"{lines}\n\n{'a stable' if self.stable else 'not a stable'} step"


@dataclass(frozen=True)
class DeepRelativeTrust:
    """The measured change of every layer's gradient beside the bound of deep relative trust; prints as a table.

    Attributes:
        layers: one :class:`LayerChange` for each layer.
        bound: the right-hand side of Definition 4, the same for all layers.
    """

    layers: tuple[LayerChange, ...]
    bound: float

    @property
    def holds(self) -> bool:
        """True if no gradient changes by more than the bound under this perturbation."""
        return all(layer.change <= self.bound for layer in self.layers)

    def __str__(self) -> str:
        rows = [
            (each.name, f"{each.size:.3g}", f"{each.change:.3g}", f"{self.bound:.3g}", f"{self.share(each):.3g}")
            for each in self.layers
        ]
        lines = text_table(("layer", "|ΔW|/|W|", "|Δ∇|/|∇|", "bound", "share"), rows)
        return f"{lines}\n\ndeep relative trust {'holds' if self.holds else 'does not hold'} for this perturbation"

    def share(self, layer: LayerChange) -> float:
        """Return the change of a layer's gradient as a share of the bound."""
        return ratio(layer.change, self.bound)


def relative_change(
    model: nn.Module, loss: Loss, perturbation: Perturbation, *, points: int = 1, kinds: Collection[Kind] = KINDS
) -> RelativeChange:
    r"""Measure the relative change of each layer's gradient under a perturbation of the weights.

    It is the left-hand side of Definitions 3 and 4,

    .. math::
        \|\nabla_{W_l} L(W + \Delta W) - \nabla_{W_l} L(W)\|_F \,/\, \|\nabla_{W_l} L(W)\|_F ,

    beside the cosine of the angle between :math:`\Delta W_l` and the negative gradient.
    The model, its ``.grad``, its buffers and the random number generators are restored. Both
    gradients see the same random numbers.

    Args:
        model: the network at W.
        loss: a function that returns the loss of a model.
        perturbation: ΔW, by parameter name. Parameters that it does not name stay unchanged.
        points: the number of evenly spaced points on the way from W to W + ΔW, the end included, at which to
            take the gradient. The report holds the largest change.
        kinds: the kinds of parameters to report; by default all that are trained.

    Raises:
        TypeError, ValueError: if the model has no neurons, if the perturbation does not fit or is lost to rounding,
            if the loss is not one finite number, or if a gradient is not finite.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> half = {"weight": -0.5 * model.weight.detach()}
        >>> change = relative_change(model, lambda model: model.weight.square().sum(), half)
        >>> change.layers[0].change, round(change.layers[0].cosine, 6)
        (0.5, 1.0)
    """
    requested = layers_of(model, kinds)
    check_perturbation(model, perturbation)
    others = [each for each in layers_of(model, KINDS) if each.role.kind not in kinds and each.name in perturbation]
    layers = [*requested, *others]
    if not callable(loss):
        raise TypeError(f"loss must be a function of the model, like lambda model: ..., got {loss!r}")
    points = as_int("points", points, 1)
    check_gradients_enabled()
    before = _gradients(model, loss, layers, "is the batch empty?")
    changes = _largest_changes(model, loss, perturbation, layers, before, points)
    found = tuple(
        LayerChange(
            layer.name,
            layer.role.kind,
            _relative_size(layer, perturbation),
            ratio(change, frobenius_norm(gradient)),
            _cosine(perturbation.get(layer.name), gradient),
        )
        for layer, change, gradient in zip(layers, changes, before, strict=True)
    )
    return RelativeChange(found[: len(requested)], found[len(requested) :])


def is_stable_step(model: nn.Module, loss: Loss, perturbation: Perturbation, *, points: int = 1) -> bool:
    r"""Return whether a descent step is stable.

    Definition 3: "Let :math:`\theta_l` denote the angle between :math:`\Delta W_l` and
    :math:`-\nabla_{W_l} L(W)`. A descent step is stable if for all l = 1, ..., L:"

    .. math::
        \frac{\|\nabla_{W_l} L(W + \Delta W) - \nabla_{W_l} L(W)\|_F}{\|\nabla_{W_l} L(W)\|_F} < \cos\theta_l .

    The paper says that a stable step decreases a continuously differentiable loss. The proof it cites
    (Bernstein et al., 2020) needs the inequality on the whole way from W to W + ΔW; the end
    alone, as written, is not enough. Give ``points`` to check the way. Every parameter that moves
    counts, gains and biases included, since all of them change the loss.

    Args:
        model: the network at W.
        loss: as for :func:`relative_change`.
        perturbation: ΔW, as for :func:`relative_change`.
        points: as for :func:`relative_change`. 1, the end alone, is Definition 3 to the letter.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> def loss(model):
        ...     return model.weight.square().sum()
        >>> [is_stable_step(model, loss, {"weight": -size * model.weight.detach()}) for size in (0.9, 1.1)]
        [True, False]
    """
    return relative_change(model, loss, perturbation, points=points).stable


def deep_relative_trust(
    model: nn.Module, loss: Loss, perturbation: Perturbation, *, kinds: Collection[Kind] = NEURONS
) -> DeepRelativeTrust:
    r"""Measure the change of each layer's gradient beside the bound of deep relative trust.

    Definition 4: "The loss function obeys deep relative trust if for all perturbations
    :math:`\Delta W = (\Delta W_1, ..., \Delta W_L)`:"

    .. math::
        \frac{\|\nabla_{W_l} L(W + \Delta W) - \nabla_{W_l} L(W)\|_F}{\|\nabla_{W_l} L(W)\|_F}
        \le \prod_{k=1}^L \left(1 + \frac{\|\Delta W_k\|_F}{\|W_k\|_F}\right) - 1 .

    It is a model of smoothness, not a theorem, so a network may break the bound. The report shows where.

    Args:
        model: the network at W.
        loss: as for :func:`relative_change`.
        perturbation: ΔW, as for :func:`relative_change`. Gains and biases in it move, too.
        kinds: the kinds of parameters that are layers; by default neurons, the weight matrices of the paper.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> tenth = {name: 0.1 * weight.detach() for name, weight in model.named_parameters()}
        >>> print(deep_relative_trust(model, lambda model: model(torch.ones(1, 2)).sum(), tenth))
        layer     |ΔW|/|W|  |Δ∇|/|∇|  bound  share
        --------  --------  --------  -----  -----
        0.weight       0.1       0.1   0.21  0.476
        1.weight       0.1       0.1   0.21  0.476
        <BLANKLINE>
        deep relative trust holds for this perturbation
    """
    layers = relative_change(model, loss, perturbation, kinds=kinds).layers
    log_product = math.fsum(math.log1p(layer.size) for layer in layers)
    bound = torch.tensor(log_product, dtype=torch.float64).expm1().item()  # math.expm1 raises on overflow
    return DeepRelativeTrust(layers, bound)


def _largest_changes(
    model: nn.Module,
    loss: Loss,
    perturbation: Perturbation,
    layers: list[Layer],
    before: list[Tensor],
    points: int,
) -> list[float]:
    """Return the largest ‖∇(W + tΔW) - ∇(W)‖ of each layer over the points t."""
    parameters = dict(model.named_parameters())
    largest = [0.0] * len(layers)
    for point in range(1, points + 1):
        with preserved(model, perturbation):
            for name, change in perturbation.items():
                moved = _moved(name, parameters[name].detach(), change.detach() * (point / points))
                overwrite(parameters[name], moved)
            after = _gradients(model, loss, layers, "is the step too long?")
        largest = [max(most, frobenius_norm(b - a)) for most, a, b in zip(largest, before, after, strict=True)]
    return largest


def _moved(name: str, start: Tensor, change: Tensor) -> Tensor:
    """Return the perturbed weights; raise if rounding loses too much of the change."""
    change = change.to(start.device, torch.float64)
    moved = (start.double() + change).to(start.dtype)
    if frobenius_norm(moved.double() - start.double() - change) > MAX_ROUNDING * frobenius_norm(change):
        raise ValueError(
            f"{start.dtype} is too coarse for the perturbation of {name!r}: measure a copy of the model in float64, "
            "or a longer step"
        )
    return moved


def _relative_size(layer: Layer, perturbation: Perturbation) -> float:
    if layer.name not in perturbation:
        return 0.0
    return ratio(frobenius_norm(perturbation[layer.name]), frobenius_norm(layer.parameter))


def _cosine(change: Tensor | None, gradient: Tensor) -> float:
    if change is None or not (bool(change.any()) and bool(gradient.any())):
        return math.nan
    # divide by the largest elements, so that products neither overflow nor underflow
    one, other = (
        each / each.abs().max() for each in (change.detach().to(gradient.device, torch.float64), gradient.double())
    )
    return max(-1.0, min(1.0, -float((one * other).sum()) / (frobenius_norm(one) * frobenius_norm(other))))


def _gradients(model: nn.Module, loss: Loss, layers: list[Layer], hint: str) -> list[Tensor]:
    parameters = [layer.parameter for layer in layers]
    with preserved(model), torch.enable_grad():
        value = loss(model)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError("the loss must be a tensor of one element, such as cross_entropy(model(inputs), labels)")
        if not bool(value.isfinite()):
            raise ValueError(f"the loss must be finite, got {value.item()} ({hint})")
        made = torch.autograd.grad(value, parameters, allow_unused=True) if value.requires_grad else ()
    found = [None if gradient is None else gradient.to_dense() for gradient in made]
    if not any(gradient is not None for gradient in found):
        raise ValueError("the loss does not depend on the parameters of the model")
    for layer, gradient in zip(layers, found, strict=True):
        if gradient is not None and not bool(gradient.isfinite().all()):
            raise ValueError(
                f"the gradient of {layer.name!r} holds NaN or infinite values: the loss is not smooth there, or "
                "overflows"
            )
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
