"""The layers of the paper: parameters of a model with their roles."""

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from nero.parameters import check_memory, check_real
from nero.roles import KINDS, Kind, Role, roles_of

NEURONS: tuple[Kind, ...] = ("neuron",)


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
