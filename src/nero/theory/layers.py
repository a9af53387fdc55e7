"""The layers of the paper: parameters of a model with their roles, and perturbations of them."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from nero.parameters import check_memory, check_real
from nero.role import KINDS, Kind, Role
from nero.roles import roles_of
from nero.rule import norm

NEURONS: tuple[Kind, ...] = ("neuron",)

#: A change of weights, ΔW, by parameter name. Parameters that it does not name stay unchanged.
Perturbation: TypeAlias = Mapping[str, Tensor]


class Layer(NamedTuple):
    """A parameter with its name and role."""

    name: str
    parameter: nn.Parameter
    role: Role

    @property
    def fan_in(self) -> int:
        """The number of elements of a neuron."""
        return self.role.fan_in(self.parameter.shape)

    @property
    def neurons(self) -> int:
        """The number of neurons."""
        return self.parameter.numel() // self.fan_in


def layers_of(model: nn.Module, kinds: Collection[Kind] = NEURONS, frozen: bool = False) -> list[Layer]:
    """Return the parameters of some kinds, in the order of the model.

    Args:
        model: the network.
        kinds: the kinds of role to return.
        frozen: whether to return frozen parameters, too.

    Raises:
        TypeError: if ``model`` is not a module, or a parameter is complex.
        ValueError: if the model has no neurons or no parameter of these kinds, if it is on the meta device, or if a
            kind is unknown.
    """
    known = isinstance(kinds, Collection) and not isinstance(kinds, str) and all(kind in KINDS for kind in kinds)
    if not known or not kinds:
        raise ValueError(f"kinds must be a collection of some of {KINDS}, got {kinds!r}")
    roles = roles_of(model)
    layers = [
        Layer(name, parameter, roles[name])
        for name, parameter in model.named_parameters()
        if (frozen or parameter.requires_grad) and parameter.numel()
    ]
    _check_any(model, [layer for layer in layers if layer.role.kind == "neuron"], "neurons")
    for layer in layers:
        check_real(repr(layer.name), layer.parameter)
        check_memory(repr(layer.name), layer.parameter)
    found = [layer for layer in layers if layer.role.kind in kinds]
    _check_any(model, found, " or ".join(kinds))
    return found


def _check_any(model: nn.Module, layers: list[Layer], kind: str) -> None:
    if not layers:
        raise ValueError(f"{type(model).__name__} has no trainable {kind}; nero.describe(model) lists what it has")


def check_perturbation(model: nn.Module, perturbation: Perturbation) -> None:
    """Raise unless a perturbation fits the trained parameters of a model and moves at least one of them.

    Raises:
        TypeError: if it is not a mapping from names to dense floating-point tensors.
        ValueError: if a parameter is unknown or frozen, a shape differs, a value is not finite, or all are zero.
    """
    if not isinstance(perturbation, Mapping) or not all(isinstance(each, Tensor) for each in perturbation.values()):
        raise TypeError("a perturbation must be a dict from parameter names to tensors of the parameters' shapes")
    parameters = dict(model.named_parameters())
    for name, change in perturbation.items():
        if name not in parameters or not parameters[name].requires_grad:
            known = ", ".join(list(parameters)[:4])
            raise ValueError(f"{name!r} is not a trained parameter of the model, which has {known}")
        if not change.is_floating_point() or change.layout != torch.strided:
            raise TypeError(
                f"the perturbation of {name!r} must be a dense floating-point tensor, got {change.dtype} with layout "
                f"{change.layout}"
            )
        if change.shape != parameters[name].shape:
            raise ValueError(
                f"the perturbation of {name!r} must have shape {tuple(parameters[name].shape)}, "
                f"got {tuple(change.shape)}"
            )
        if not bool(change.isfinite().all()):
            raise ValueError(f"the perturbation of {name!r} holds NaN or infinite values")
    if not any(bool(change.any()) for change in perturbation.values()):
        raise ValueError("the perturbation is zero everywhere: it has neither a direction nor a size")


def check_gradients_enabled() -> None:
    """Raise in inference mode, where no gradient can be computed."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("torch.inference_mode() records no gradients: call this outside of it")


def frobenius_norm(tensor: Tensor) -> float:
    """Return the Frobenius norm in float64, without overflow or underflow of the squares."""
    wide = tensor.detach().double().flatten()
    return float(norm(wide, (0,))) if wide.numel() else 0.0


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, with 0 / 0 = 0 and x / 0 = inf."""
    if whole == 0:
        return math.inf if part > 0 else 0.0
    return part / whole
