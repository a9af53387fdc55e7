"""Per-neuron relative steps (Section 3.2, Definition 5 and Eq. (pnpl))."""

from dataclasses import dataclass

import torch
from torch import nn

from nero.role import KINDS, Kind
from nero.rule import norm, statistics_dtype
from nero.scalars import as_float, checked_tolerance
from nero.text import text_table
from nero.theory.layers import Layer, Perturbation, check_perturbation, frobenius_norm, layers_of, ratio


@dataclass(frozen=True)
class LayerStep:
    r"""The relative size of a step in one parameter.

    Attributes:
        name: the name of the parameter.
        kind: the kind of its role.
        neuron: the largest ‖Δw‖ / ‖w‖ over its neurons, or \|Δb\| / \|b\| over its elements.
        layer: ‖ΔW‖_F / ‖W‖_F, which is never larger than ``neuron``.
    """

    name: str
    kind: Kind
    neuron: float
    layer: float


@dataclass(frozen=True)
class RelativeStep:
    """The relative size of a step in every parameter; prints as a table.

    Attributes:
        layers: one :class:`LayerStep` for each trained parameter.
    """

    layers: tuple[LayerStep, ...]

    @property
    def neuron(self) -> float:
        """The smallest η for which the step is per-neuron relative (Definition 5)."""
        return max(layer.neuron for layer in self.layers)

    @property
    def layer(self) -> float:
        """The smallest η for which the step is per-layer relative; at most ``neuron``, by Eq. (pnpl)."""
        return max(layer.layer for layer in self.layers)

    def __str__(self) -> str:
        rows = [(each.name, each.kind, f"{each.neuron:.3g}", f"{each.layer:.3g}") for each in self.layers]
        return text_table(("parameter", "role", "per neuron", "per layer"), rows)


def relative_step(model: nn.Module, perturbation: Perturbation) -> RelativeStep:
    r"""Measure the relative size of a step per neuron and per layer: both sides of Equation (pnpl).

    "A per-neuron relative update is automatically per-layer relative": for a weight matrix W with the
    neurons :math:`w^{(i)}` as rows,

    .. math::
        \frac{\|\Delta W\|_F}{\|W\|_F} = \sqrt{\frac{\sum_i \|\Delta w^{(i)}\|^2}{\sum_i \|w^{(i)}\|^2}}
        \le \max_i \frac{\|\Delta w^{(i)}\|}{\|w^{(i)}\|} .

    Args:
        model: the network at W.
        perturbation: ΔW, by parameter name. Parameters that it does not name stay unchanged.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.copy_(torch.tensor([[3.0, 4.0], [5.0, 12.0]]))
        >>> print(relative_step(model, {"weight": torch.tensor([[0.0, 0.5], [0.0, 0.0]])}))
        parameter    role  per neuron  per layer
        ---------  ------  ----------  ---------
        weight     neuron         0.1     0.0359
    """
    layers = layers_of(model, KINDS)
    check_perturbation(model, perturbation)
    return RelativeStep(tuple(_layer_step(layer, perturbation) for layer in layers))


def is_per_neuron_relative(
    model: nn.Module, perturbation: Perturbation, eta: float, *, tolerance: float | None = None
) -> bool:
    r"""Return whether no neuron moves by more than a share η of its own norm.

    Definition 5: "A step of size η > 0 is said to be per-neuron relative if for any neuron with
    weights w and bias b, the perturbations satisfy
    :math:`\|\Delta w\|_2 / \|w\|_2 \le \eta` and :math:`|\Delta b| / |b| \le \eta`."

    Gains are measured like biases. A bias of zero that moves has an infinite relative size. Nero measures biases
    against their initial scale instead, and so departs from the definition there.

    Args:
        model: the network at W.
        perturbation: ΔW, by parameter name. Parameters that it does not name stay unchanged.
        eta: η.
        tolerance: how far the ratio may exceed η; by default the rounding error of the parameters' dtype.

    Example:
        >>> model = nn.Linear(4, 2, bias=False)
        >>> step = {"weight": 0.01 * model.weight.detach()}
        >>> is_per_neuron_relative(model, step, 0.01), is_per_neuron_relative(model, step, 0.009)
        (True, False)
    """
    if not as_float(eta) > 0:
        raise ValueError(f"eta must be a positive number, like 0.01, got {eta!r}")
    given = None if tolerance is None else checked_tolerance(tolerance)
    layers = relative_step(model, perturbation).layers
    parameters = dict(model.named_parameters())
    eps = {layer.name: torch.finfo(parameters[layer.name].dtype).eps for layer in layers}
    return all(layer.neuron <= as_float(eta) + (2 * eps[layer.name] if given is None else given) for layer in layers)


def _layer_step(layer: Layer, perturbation: Perturbation) -> LayerStep:
    if layer.name not in perturbation:
        return LayerStep(layer.name, layer.role.kind, 0.0, 0.0)
    weights, change = layer.parameter.detach(), perturbation[layer.name].detach().to(layer.parameter.device)
    dtype = statistics_dtype(weights.dtype)
    sizes, moves = (norm(layer.role.view(each).to(dtype), layer.role.axes) for each in (weights, change))
    largest = torch.where(moves > 0, moves / sizes, 0.0).max()  # infinite for a neuron at the origin that moves
    return LayerStep(
        layer.name, layer.role.kind, float(largest), ratio(frobenius_norm(change), frobenius_norm(weights))
    )
