"""The table to read before training: the role of each parameter, its cost, and what will not be balanced."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nero.parameters import COMPLEX
from nero.roles import Override, Role, roles_of
from nero.rule import norm, project, statistics_dtype
from nero.text_table import text_table

HEADER = ("name", "shape", "role", "neurons x fan-in", "state / Adam's", "why")
#: Longer lists of parameter names are cut.
MAX_NAMES = 3


class Row(NamedTuple):
    """One parameter: its role, its cost, and why it is not balanced, or an empty string if it is."""

    name: str
    shape: tuple[int, ...]
    role: Role
    neurons: int
    fan_in: int
    state_bytes: int
    adam_bytes: int
    unbalanced: str

    def cells(self) -> tuple[str, ...]:
        """Return the text of each column."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        neurons = f"{self.neurons:,} x {self.fan_in:,}" if self.role.kind == "neuron" else "-"
        state = f"{_bytes(self.state_bytes)} / {_bytes(self.adam_bytes)}" if self.state_bytes else "-"
        return self.name, shape, self.role.kind, neurons, state, self.role.why


@dataclass(frozen=True, repr=False)
class Description:
    """The roles of a model's parameters and the memory of their state; prints as a table.

    Attributes:
        rows: one for each parameter.
    """

    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(torch.Size(row.shape).numel() for row in self.rows)

    @property
    def neurons(self) -> int:
        """The number of trained neurons."""
        return sum(row.neurons for row in self.rows if row.state_bytes)

    @property
    def state_bytes(self) -> int:
        """The size of Nero's state."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def adam_bytes(self) -> int:
        """The size of Adam's state for the same parameters."""
        return sum(row.adam_bytes for row in self.rows)

    def __str__(self) -> str:
        share = f", {_percent(self.state_bytes / self.adam_bytes)} of it" if self.adam_bytes else ""
        return "\n".join(
            [
                text_table(HEADER, [row.cells() for row in self.rows], numeric=False),
                "",
                f"{self.parameters:,} parameters in {len(self.rows)} tensors; {self.neurons:,} neurons",
                f"state: {_bytes(self.state_bytes)} for Nero, {_bytes(self.adam_bytes)} for Adam{share}",
                *self._reasons(),
            ]
        )

    __repr__ = __str__  # notebooks display the repr

    def _reasons(self) -> list[str]:
        """Return the lines that list what will not be balanced, by reason."""
        names: dict[str, list[str]] = {}
        for row in self.rows:
            if row.unbalanced:
                names.setdefault(row.unbalanced, []).append(row.name)
        if not names:
            return []
        width = max(map(len, names))
        return ["not balanced:", *(f"  {reason.ljust(width)}  {_listed(own)}" for reason, own in names.items())]


def describe(model: nn.Module, overrides: Mapping[str, Override] | None = None) -> Description:
    """Describe the role of every parameter of a model, and why it has that role. Nothing is changed.

    Args:
        model: any module, also one on the meta device.
        overrides: as for :func:`nero.roles_of`.

    Returns:
        An object that prints as a table and holds its numbers.

    Example:
        >>> print(describe(nn.Linear(784, 10)))
        name    shape     role    neurons x fan-in  state / Adam's  why
        ------  --------  ------  ----------------  --------------  -------------
        weight  10 x 784  neuron  10 x 784          52 B / 62.7 kB  Linear.weight
        bias    10        bias    -                 56 B / 84 B     Linear.bias
        <BLANKLINE>
        7,850 parameters in 2 tensors; 10 neurons
        state: 108 B for Nero, 62.8 kB for Adam, 0.17 % of it
        not balanced:
          bias: it has no fan-in  bias
    """
    roles = roles_of(model, overrides)
    return Description(tuple(_row(name, parameter, roles[name]) for name, parameter in model.named_parameters()))


def _row(name: str, parameter: Tensor, role: Role) -> Row:
    number_bytes = statistics_dtype(parameter.dtype).itemsize
    is_neuron = role.kind == "neuron"
    fan_in = role.fan_in(parameter.shape)
    axes = role.fan_in_axes or ()
    others = math.prod(size for axis, size in enumerate(parameter.shape) if axis not in axes)
    neurons = others * role.fan_in_groups if is_neuron else 0
    if not parameter.requires_grad:
        return Row(name, tuple(parameter.shape), role, neurons, fan_in, 0, 0, "frozen")
    # the step and the count of skipped updates, and for gains and biases the scale
    fixed = 4 + 8 + (0 if is_neuron else number_bytes)
    state_bytes = fixed + number_bytes * (neurons if is_neuron else parameter.numel())
    adam_bytes = 4 + 2 * parameter.numel() * parameter.element_size()
    unbalanced = _why_unbalanced(parameter, role, fan_in)
    return Row(name, tuple(parameter.shape), role, neurons, fan_in, state_bytes, adam_bytes, unbalanced)


@torch.no_grad()
def _why_unbalanced(parameter: Tensor, role: Role, fan_in: int) -> str:
    if "fan-in 1" in role.why:
        return "gain: its fan-in is 1"
    if role.kind != "neuron":
        return f"{role.kind}: it has no fan-in"
    if fan_in == 2:
        return "norm only: its fan-in is 2"
    if parameter.is_complex():
        return COMPLEX
    if parameter.is_meta or not parameter.numel():
        return ""
    wide = role.view(parameter).to(statistics_dtype(parameter.dtype))
    possible = project(wide, role.axes).possible
    stuck = int((~possible).sum())
    if not stuck:
        return ""
    size = norm(wide, role.axes)
    if not bool(size.isfinite().all()):
        return f"{int((~size.isfinite()).sum())} of {possible.numel()} neurons not finite: initialise them first"
    at_origin = int((size == 0).sum())
    what = {0: "constant", stuck: "zero"}.get(at_origin, "zero or constant")
    return f"{stuck} of {possible.numel()} neurons {what}, until their first gradient"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= 0.9995 * size:  # rounds to at least 1 of the unit, not to 1000 of the smaller one
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.99 else f"{100 * share:.0f} %"
