"""The role of one parameter: neurons, gains or biases, and the axes along which a neuron's fan-in runs.

This module imports no torch, so that :mod:`nero.jax` has the same roles.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Kind: TypeAlias = Literal["neuron", "gain", "bias"]
KINDS: tuple[Kind, ...] = ("neuron", "gain", "bias")


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a parameter in its network.

    Args:
        kind: ``"neuron"``, ``"gain"`` or ``"bias"``.
        fan_in_axes: the axes along which a neuron's elements run; empty for gains and biases. ``None`` stands for
            all axes but the first.
        fan_in_groups: the number of blocks into which axis 0 is split before the fan-in is taken. Grouped transposed
            convolutions need it: their weight holds the groups along its fan-in.
        why: the source of the role, for display; comparisons ignore it.
        has_offset: whether a gain is the w of a layer that scales by 1 + w, as Gemma's norms do. Such a gain is meant
            to be zero, so ``gain_penalty``, which pulls to one, leaves it out.
        is_weight: whether a gain is a gate, or the only weight of a neuron, whose fan-in is 1. ``gain_penalty`` leaves
            it out, too; comparisons ignore it.
    """

    kind: Kind
    fan_in_axes: tuple[int, ...] | None = None
    fan_in_groups: int = 1
    why: str = field(default="given", compare=False)
    has_offset: bool = False
    is_weight: bool = field(default=False, compare=False)

    def on(self, shape: Iterable[int]) -> "Role":
        """Return the role for a parameter of a shape: with its axes filled in, and a gain if its fan-in is 1.

        Raises:
            ValueError: if the kind is unknown, or the axes or groups do not fit the shape.
        """
        shape = tuple(shape)
        if self.kind not in KINDS:
            raise ValueError(f"role must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.kind != "neuron":
            if self.fan_in_axes:
                raise ValueError(f"a {self.kind} has no fan_in_axes, got {self.fan_in_axes}")
            return replace(self, fan_in_axes=(), fan_in_groups=1)
        role = replace(self, fan_in_axes=_checked_axes(self.fan_in_axes, shape))
        _check_groups(role, shape)
        if role.fan_in(shape) == 1:
            return Role("gain", (), why=f"{self.why}, fan-in 1", is_weight=True)
        return role

    def fan_in(self, shape: Iterable[int]) -> int:
        """Return the number of elements of a neuron in a parameter of a shape; 1 for gains and biases."""
        shape = tuple(shape)
        return math.prod(shape[axis] for axis in self.fan_in_axes or ()) // self.fan_in_groups

    def state_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Return the shape of the statistics of a parameter of a shape: one number per neuron, or per element."""
        sizes, groups = tuple(shape), self.fan_in_groups
        if groups > 1:
            sizes = (groups, sizes[0] // groups, *sizes[1:])
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(sizes))

    def view(self, tensor: "Tensor") -> "Tensor":
        """View a tensor with its fan-in groups, if any, on an axis of their own."""
        groups = self.fan_in_groups
        return tensor if groups == 1 else tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])

    @property
    def axes(self) -> tuple[int, ...]:
        """The fan-in axes of :meth:`view`."""
        axes = self.fan_in_axes or ()
        return axes if self.fan_in_groups == 1 else tuple(axis + 1 for axis in axes)

    @property
    def is_pulled(self) -> bool:
        """True if ``gain_penalty`` pulls the parameter to one."""
        return self.kind == "gain" and not (self.has_offset or self.is_weight)

    def __str__(self) -> str:
        if self.kind != "neuron":
            return ("gains of 1 + w" if self.has_offset else "gains") if self.kind == "gain" else "biases"
        groups = f" in {self.fan_in_groups} groups" if self.fan_in_groups > 1 else ""
        return f"neurons along axes {self.fan_in_axes}{groups}"


Override: TypeAlias = Role | Kind | tuple[int, ...]


def overridden(name: str, shape: tuple[int, ...], override: Override) -> Role:
    """Return the role of a parameter that an override gives; raise if it does not fit."""
    if isinstance(override, Role):
        role = override
    elif isinstance(override, str):
        role = Role(override)
    elif isinstance(override, tuple):
        role = Role("neuron", override)
    else:
        raise TypeError(f"the override of {name!r} must be a Role, a kind or a tuple of axes, got {override!r}")
    try:
        return role.on(shape)
    except ValueError as error:
        raise ValueError(f"the override of {name!r} does not fit: {error}") from error


def _checked_axes(given: tuple[int, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return fan-in axes in ascending order and without negative numbers; raise if they do not fit the shape."""
    axes = tuple(range(1, len(shape))) if given is None else given
    if not isinstance(axes, tuple | list) or not axes or not all(_is_axis(axis, len(shape)) for axis in axes):
        remedy = f"use a tuple of axes from 0 to {len(shape) - 1}" if shape else "a scalar is a gain or a bias"
        raise ValueError(f"fan_in_axes {axes} do not fit the shape {shape}: {remedy}")
    axes = tuple(sorted(axis % len(shape) for axis in axes))
    if len(set(axes)) != len(axes):
        raise ValueError(f"fan_in_axes must name each axis of {shape} at most once, got {given}")
    return axes


def _is_axis(axis: object, count: int) -> bool:
    return isinstance(axis, int) and not isinstance(axis, bool) and -count <= axis < count


def _check_groups(role: Role, shape: tuple[int, ...]) -> None:
    groups = role.fan_in_groups
    if (
        not isinstance(groups, int)
        or groups < 1
        or shape[0] % groups
        or (groups > 1 and 0 not in (role.fan_in_axes or ()))
    ):
        raise ValueError(
            f"fan_in_groups={groups} does not fit: axis 0 of {shape} must be a fan-in axis and divide into the groups"
        )
