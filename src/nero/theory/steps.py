"""Stable descent steps and deep relative trust (Section 3.2, Definitions 3 and 4)."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from nero.preserve import keeping, put
from nero.roles import KINDS, Kind
from nero.scalars import as_int
from nero.text_table import text_table
from nero.theory.layers import NEURONS, Layer, Perturbation, check_mode, check_perturbation, layers_of, length, ratio

#: A loss as a function of the model, such as ``lambda model: cross_entropy(model(inputs), labels)``.
Loss: TypeAlias = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class LayerChange:
    """What a perturbation of the whole network does to one layer.

    Attributes:
        name: the parameter's.
        kind: its role's.
        size: ‖ΔW_l‖ / ‖W_l‖, the relative perturbation; infinite where W_l is zero and moves.
        change: ‖∇(W+ΔW) - ∇(W)‖ / ‖∇(W)‖, the relative change of the layer's gradient.
        cosine: of the angle θ_l between ΔW_l and the negative gradient; NaN where one of them is zero.
    """

    name: str
    kind: Kind
    size: float
    change: float
    cosine: float

    @property
    def stable(self) -> bool:
        """Whether Inequality (stable) holds for the layer. One that does not move asks for nothing."""
        return self.size == 0 or self.change < self.cosine


@dataclass(frozen=True)
class RelativeChange:
    """The relative change of every layer's gradient; prints as a table.

    Attributes:
        layers: one :class:`LayerChange` for each.
        others: those that move and are of no kind that was asked for. They are not printed, but count for stability.
    """

    layers: tuple[LayerChange, ...]
    others: tuple[LayerChange, ...] = ()

    @property
    def stable(self) -> bool:
        """Whether the step is stable (Definition 3): all that moves counts."""
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
    """The measured change of every layer's gradient beside what deep relative trust allows; prints as a table.

    Attributes:
        layers: one :class:`LayerChange` for each.
        bound: the right-hand side of Definition 4, one number for all layers.
    """

    layers: tuple[LayerChange, ...]
    bound: float

    @property
    def holds(self) -> bool:
        """Whether no layer's gradient changes by more than the bound, by this one perturbation."""
        return all(layer.change <= self.bound for layer in self.layers)

    def __str__(self) -> str:
        rows = [
            (each.name, f"{each.size:.3g}", f"{each.change:.3g}", f"{self.bound:.3g}", f"{self.share(each):.3g}")
            for each in self.layers
        ]
        lines = text_table(("layer", "|ΔW|/|W|", "|Δ∇|/|∇|", "bound", "of it"), rows)
        return f"{lines}\n\ndeep relative trust {'holds' if self.holds else 'does not hold'} for this perturbation"

    def share(self, layer: LayerChange) -> float:
        """How much of the bound a layer's change makes up."""
        return ratio(layer.change, self.bound)


def relative_change(
    model: nn.Module, loss: Loss, perturbation: Perturbation, *, points: int = 1, kinds: Collection[Kind] = KINDS
) -> RelativeChange:
    r"""The relative change of each layer's gradient when the weights change by a perturbation.

    It is the left-hand side of Definitions 3 and 4,

    .. math::
        \|\nabla_{W_l} L(W + \Delta W) - \nabla_{W_l} L(W)\|_F \,/\, \|\nabla_{W_l} L(W)\|_F ,

    with the cosine of the angle between :math:`\Delta W_l` and the negative gradient beside it.
    The model, its ``.grad``, its buffers and torch's random numbers are left as they were, and both
    gradients see the same random numbers.

    Args:
        model: at W.
        loss: gives the loss of the model it is given.
        perturbation: ΔW, by the parameters' names; what is not named stays.
        points: at how many points of the way from W to W + ΔW, evenly set and the end among them, to
            take the gradient; the largest change counts.
        kinds: which parameters to report: by default all that are trained.

    Raises:
        TypeError, ValueError: a model without neurons, a perturbation that does not fit or that the parameters'
            precision rounds away, a loss that is not one finite number or has gradients that are not finite.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> half = {"weight": -0.5 * model.weight.detach()}
        >>> change = relative_change(model, lambda model: model.weight.square().sum(), half)
        >>> change.layers[0].change, round(change.layers[0].cosine, 6)
        (0.5, 1.0)
    """
    asked = layers_of(model, kinds)
    check_perturbation(model, perturbation)
    others = [each for each in layers_of(model, KINDS) if each.role.kind not in kinds and each.name in perturbation]
    layers = [*asked, *others]
    if not callable(loss):
        raise TypeError(f"the loss must be a function of the model, like lambda model: ..., but it is {loss!r}")
    points = as_int("points", points, 1)
    parameters = dict(model.named_parameters())
    check_mode()
    before = _gradients(model, loss, layers, "is the batch empty?")
    changes = [0.0] * len(layers)
    for point in range(1, points + 1):
        with keeping(model, perturbation):
            for name, change in perturbation.items():
                put(parameters[name], _moved(name, parameters[name].detach(), change.detach() * (point / points)))
            after = _gradients(model, loss, layers, "is the step too long?")
        changes = [max(most, length(b - a)) for most, a, b in zip(changes, before, after, strict=True)]
    found = tuple(
        LayerChange(
            layer.name,
            layer.role.kind,
            _size(layer, perturbation),
            ratio(change, length(gradient)),
            _cosine(perturbation.get(layer.name), gradient),
        )
        for layer, change, gradient in zip(layers, changes, before, strict=True)
    )
    return RelativeChange(found[: len(asked)], found[len(asked) :])


def is_stable_step(model: nn.Module, loss: Loss, perturbation: Perturbation, *, points: int = 1) -> bool:
    r"""Whether a descent step is stable.

    Definition 3: "Let :math:`\theta_l` denote the angle between :math:`\Delta W_l` and
    :math:`-\nabla_{W_l} L(W)`. A descent step is stable if for all l = 1, ..., L:"

    .. math::
        \frac{\|\nabla_{W_l} L(W + \Delta W) - \nabla_{W_l} L(W)\|_F}{\|\nabla_{W_l} L(W)\|_F} < \cos\theta_l .

    The paper says that a stable step decreases a continuously differentiable loss. The proof it cites
    (Bernstein et al., 2020) asks for the inequality along the whole way from W to W + ΔW, and the end
    alone, as written, is not enough: give ``points`` to look along the way. Every parameter that moves
    counts, gains and biases too, since all of them move the loss.

    Args:
        model: at W.
        loss: as for :func:`relative_change`.
        perturbation: ΔW, as for :func:`relative_change`.
        points: as for :func:`relative_change`; 1, the end alone, is Definition 3 to the letter.

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
    r"""The measured change of each layer's gradient beside the bound of deep relative trust.

    Definition 4: "The loss function obeys deep relative trust if for all perturbations
    :math:`\Delta W = (\Delta W_1, ..., \Delta W_L)`:"

    .. math::
        \frac{\|\nabla_{W_l} L(W + \Delta W) - \nabla_{W_l} L(W)\|_F}{\|\nabla_{W_l} L(W)\|_F}
        \le \prod_{k=1}^L \left(1 + \frac{\|\Delta W_k\|_F}{\|W_k\|_F}\right) - 1 .

    It is a model of smoothness and no theorem, so the bound may be broken; the report says where.

    Args:
        model: at W.
        loss: as for :func:`relative_change`.
        perturbation: ΔW, as for :func:`relative_change`. Gains and biases in it move with the rest.
        kinds: which parameters are layers; by default those of neurons, the paper's weight matrices.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> tenth = {name: 0.1 * weight.detach() for name, weight in model.named_parameters()}
        >>> print(deep_relative_trust(model, lambda model: model(torch.ones(1, 2)).sum(), tenth))
        layer     |ΔW|/|W|  |Δ∇|/|∇|  bound  of it
        --------  --------  --------  -----  -----
        0.weight       0.1       0.1   0.21  0.476
        1.weight       0.1       0.1   0.21  0.476
        <BLANKLINE>
        deep relative trust holds for this perturbation
    """
    layers = relative_change(model, loss, perturbation, kinds=kinds).layers
    log_product = math.fsum(math.log1p(layer.size) for layer in layers)
    bound = torch.tensor(log_product, dtype=torch.float64).expm1().item()  # infinite, where math's would raise
    return DeepRelativeTrust(layers, bound)


def _moved(name: str, start: Tensor, change: Tensor) -> Tensor:
    """The weights after a change; raise if more than a tenth of it is lost to rounding."""
    change = change.to(start.device, torch.float64)
    moved = (start.double() + change).to(start.dtype)
    if length(moved.double() - start.double() - change) > 0.1 * length(change):
        raise ValueError(
            f"the change of {name!r} is finer than {start.dtype} tells apart: measure a copy of the model in float64, "
            "or a longer step"
        )
    return moved


def _size(layer: Layer, perturbation: Perturbation) -> float:
    if layer.name not in perturbation:
        return 0.0
    return ratio(length(perturbation[layer.name]), length(layer.parameter))


def _cosine(change: Tensor | None, gradient: Tensor) -> float:
    if change is None or not (bool(change.any()) and bool(gradient.any())):
        return math.nan
    # of their largest entries, lest a product leave the range
    one, other = (each / each.abs().max() for each in (change.detach().double(), gradient.double()))
    return max(-1.0, min(1.0, -float((one * other).sum()) / (length(one) * length(other))))


def _gradients(model: nn.Module, loss: Loss, layers: list[Layer], doubt: str) -> list[Tensor]:
    parameters = [layer.parameter for layer in layers]
    with keeping(model), torch.enable_grad():
        value = loss(model)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError("the loss must be a tensor of one number, such as cross_entropy(model(inputs), labels)")
        if not bool(value.isfinite()):
            raise ValueError(f"the loss is {value.item()}: it has no gradient ({doubt})")
        made = torch.autograd.grad(value, parameters, allow_unused=True) if value.requires_grad else ()
    found = [None if gradient is None else gradient.to_dense() for gradient in made]
    if not any(gradient is not None for gradient in found):
        raise ValueError("the loss does not depend on the model's parameters")
    for layer, gradient in zip(layers, found, strict=True):
        if gradient is not None and not bool(gradient.isfinite().all()):
            raise ValueError(
                f"the gradient of {layer.name!r} holds values that are infinite or not a number: "
                "the loss is not smooth there, or overflows"
            )
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
