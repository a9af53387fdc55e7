"""The paper's layers: the tensors of a model that hold neurons, and its gains and biases where they are asked for."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from nero.parameters import check_memory
from nero.roles import KINDS, Kind, Role, roles_of
from nero.rule import norm

#: A change of weights, ΔW, by the parameters' names; what it does not name stays.
Perturbation: TypeAlias = Mapping[str, Tensor]

NEURONS: tuple[Kind, ...] = ("neuron",)


class Layer(NamedTuple):
    """A parameter with its role."""

    name: str
    parameter: nn.Parameter
    role: Role

    @property
    def fan_in(self) -> int:
        """How many entries a neuron has."""
        return self.role.fan_in(self.parameter.shape)

    @property
    def neurons(self) -> int:
        """How many neurons there are."""
        return self.parameter.numel() // self.fan_in


def layers_of(model: nn.Module, kinds: Collection[Kind] = NEURONS, frozen: bool = False) -> list[Layer]:
    """The trained parameters of those kinds, in order; with frozen, those that are not trained as well.

    Raises:
        TypeError: something that is not a module, a complex parameter.
        ValueError: a model without neurons, or with none of those kinds; one on the meta device; an unknown kind.
    """
    known = isinstance(kinds, Collection) and not isinstance(kinds, str) and all(kind in KINDS for kind in kinds)
    if not known or not kinds:
        raise ValueError(f"kinds must be some of {KINDS}, but it is {kinds!r}")
    roles = roles_of(model)
    layers = [
        Layer(name, parameter, roles[name])
        for name, parameter in model.named_parameters()
        if (frozen or parameter.requires_grad) and parameter.numel()
    ]
    if not any(layer.role.kind == "neuron" for layer in layers):
        raise ValueError(f"{type(model).__name__} has no neurons to train; nero.describe(model) says what it has")
    for layer in layers:
        if layer.parameter.is_complex():
            raise TypeError(
                f"{layer.name!r} is complex: hold it as a real parameter of twice the size (torch.view_as_real)"
            )
        check_memory(repr(layer.name), layer.parameter)
    found = [layer for layer in layers if layer.role.kind in kinds]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no {' or '.join(kinds)} to train; nero.describe(model) says what it has"
        )
    return found


def check_mode() -> None:
    """Raise where torch makes no gradients, whoever asks for them."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("in torch.inference_mode() there are no gradients: call this outside of it")


def check_perturbation(model: nn.Module, perturbation: Perturbation) -> None:
    """Raise unless a perturbation is of trained parameters of the model, and moves one of them.

    Raises:
        TypeError: not a mapping of names to dense tensors of real numbers.
        ValueError: an unknown or frozen parameter, another shape, values that are not finite, zeros alone.
    """
    if not isinstance(perturbation, Mapping) or not all(isinstance(each, Tensor) for each in perturbation.values()):
        raise TypeError("a perturbation is a dict from parameters' names to tensors of their shapes")
    parameters = dict(model.named_parameters())
    for name, change in perturbation.items():
        if name not in parameters or not parameters[name].requires_grad:
            known = ", ".join(list(parameters)[:4])
            raise ValueError(f"{name!r} is no trained parameter of the model, whose names are like {known}")
        if not change.is_floating_point() or change.layout != torch.strided:
            raise TypeError(
                f"the change of {name!r} is {change.dtype}, laid out as {change.layout}: give it in floating point, "
                "and dense"
            )
        if change.shape != parameters[name].shape:
            raise ValueError(
                f"the change of {name!r} is shaped {tuple(change.shape)}, the parameter {tuple(parameters[name].shape)}"
            )
        if not bool(change.isfinite().all()):
            raise ValueError(f"the change of {name!r} holds values that are infinite or not a number")
    if not any(bool(change.any()) for change in perturbation.values()):
        raise ValueError("the perturbation moves nothing: it has no angle to the gradient, and no size to bound")


def length(tensor: Tensor) -> float:
    """The Frobenius norm, summed in float64 and right where its square would leave the range."""
    wide = tensor.detach().double().flatten()
    return float(norm(wide, (0,))) if wide.numel() else 0.0


def ratio(part: float, whole: float) -> float:
    """How large a part is of a whole: nothing of nothing is 0, something of nothing is infinite."""
    if whole == 0:
        return math.inf if part > 0 else 0.0
    return part / whole
