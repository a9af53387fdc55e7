"""The table to read before training: the role of each parameter, its cost, and what will not be balanced."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nero.groups import Part
from nero.known_layers import ADAPTERS
from nero.options import check_option
from nero.parameters import COMPLEX
from nero.radius import balance_change, initial_radius, wide_neurons
from nero.regrowth import grown_neurons
from nero.role import Override, Role
from nero.roles import as_override, roles_of
from nero.rule import norm, project, statistics_dtype
from nero.sharding import sharding_of
from nero.text import text_table

#: The reason of neurons that nero.Nero takes for grown from zero, because another layer is balanced.
SHORT = "neurons kept shorter than one, as if grown from zero"
HEADER = ("name", "shape", "role", "neurons x fan-in", "state", "why")
#: Longer lists of parameter names are cut.
MAX_NAMES = 3
MAX_COLUMNS = 100
#: Where balancing changes weights by more, relative to their norm, the text names ``pretrained=True``. As much as ten
#: steps of the default learning rate can: a network that Nero has trained is far below, one that others have far above.
LARGE_CHANGE = 0.1


class Row(NamedTuple):
    """One parameter: its role, its cost, and why it is not balanced, or an empty string if it is.

    The last two are of the trained neurons: how far balancing moves them, and their norm, both squared. They are NaN
    where the values are not known, as on the meta device.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    neurons: int
    fan_in: int
    state_bytes: int
    adam_bytes: int
    unbalanced: str
    squared_change: float = 0.0
    squared_norm: float = 0.0

    @property
    def is_unknown(self) -> bool:
        """True if the layer is unknown, so that the role comes from the shape."""
        return " is unknown" in self.role.why

    def cells(self) -> tuple[str, ...]:
        """Return the text of each column."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        neurons = f"{self.neurons:,} x {self.fan_in:,}" if self.role.kind == "neuron" else "-"
        state = _bytes(self.state_bytes) if self.state_bytes else "-"
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

    @property
    def balancing_change(self) -> float:
        """The change of the trained neurons by balancing, relative to their norm; NaN if their values are unknown."""
        norm = sum(row.squared_norm for row in self.rows)
        return math.sqrt(sum(row.squared_change for row in self.rows) / norm) if norm else math.nan

    def __str__(self) -> str:
        share = f", {_percent(self.state_bytes / self.adam_bytes)} of it" if self.adam_bytes else ""
        blocks = sorted(_blocks(self.rows), key=lambda block: block[0].is_unknown)
        tensors = _count(len(self.rows), "tensor")
        lines = [
            _fitted_table([(_label(block), *block[0].cells()[1:]) for block in blocks]),
            "",
            f"{_count(self.parameters, 'parameter')} in {tensors}; {_count(self.neurons, 'neuron')}",
            f"state: {_bytes(self.state_bytes)} for Nero, {_bytes(self.adam_bytes)} for Adam{share}",
            *self._reasons(blocks),
            *self._advice(),
            *self._unknown([block for block in blocks if block[0].is_unknown]),
            *self._change(),
        ]
        return "\n".join(lines)

    __repr__ = __str__  # notebooks display the repr

    def _reasons(self, blocks: Iterable[Sequence[Row]]) -> list[str]:
        """Return the lines that list what will not be balanced, by reason."""
        labels: dict[str, list[str]] = {}
        for block in blocks:
            if block[0].unbalanced:
                labels.setdefault(block[0].unbalanced, []).append(_label(block))
        if not labels:
            return []
        width = max(map(len, labels))
        lines = (f"  {reason.ljust(width)}  {_listed(own, MAX_COLUMNS - width - 4)}" for reason, own in labels.items())
        return ["not balanced:", *lines]

    def _advice(self) -> list[str]:
        """Return the line that says what to do about short neurons; those of adapters usually did grow from zero."""
        if not any(SHORT in row.unbalanced and not any(name in row.name for name in ADAPTERS) for row in self.rows):
            return []
        return ["if a layer with such short neurons is new: nero.balance_(layer) before you make the optimiser"]

    def _unknown(self, blocks: Iterable[Sequence[Row]]) -> list[str]:
        """Return the lines that give the roles of unknown parameters as overrides, to be checked."""
        entries = [
            f"    {pattern!r}: {as_override(block[0].role)}," for block in blocks for pattern in self._patterns(block)
        ]
        return ["unknown, with roles by shape; check them:", "overrides={", *entries, "}"] if entries else []

    def _patterns(self, block: Sequence[Row]) -> list[str]:
        """Return one pattern that matches the rows of a block and no others, or else their names."""
        names = [row.name for row in block]
        pattern = re.sub(r"\b\d+\b", "*", names[0])
        is_exact = names == [row.name for row in self.rows if fnmatchcase(row.name, pattern)]
        return [pattern] if is_exact and len(names) > 1 else names

    def _change(self) -> list[str]:
        change = self.balancing_change
        if math.isnan(change):
            return []
        trained = [row for row in self.rows if row.role.kind == "neuron" and row.state_bytes]
        is_adapter = all("lora_" in row.name for row in trained)  # balancing is harmless while B is zero
        hint = "; if they are pretrained, use pretrained=True" if change > LARGE_CHANGE and not is_adapter else ""
        return [f"balancing changes the weights by {_percent(change)} of their norm{hint}"]


def describe(
    model: nn.Module, overrides: Mapping[str, Override] | None = None, *, momentum: float = 0.0
) -> Description:
    """Describe the role of every parameter of a model, and why it has that role. Nothing is changed.

    Args:
        model: any module, also one on the meta device.
        overrides: as for :func:`nero.roles_of`.
        momentum: as for :class:`nero.Nero`. Momentum adds to the state as much as the trained parameters hold.

    Returns:
        An object that prints as a table and holds its numbers.

    Example:
        >>> print(describe(nn.Linear(784, 10, device="meta")))
        name    shape     role    neurons x fan-in  state  why
        ------  --------  ------  ----------------  -----  -------------
        weight  10 x 784  neuron  10 x 784          52 B   Linear.weight
        bias    10        bias    -                 56 B   Linear.bias
        <BLANKLINE>
        7,850 parameters in 2 tensors; 10 neurons
        state: 108 B for Nero, 62.8 kB for Adam, 0.17 % of it
        not balanced:
          biases have no fan-in  bias
    """
    check_option("momentum", momentum)
    roles, named = roles_of(model, overrides), dict(model.named_parameters())
    group = {"fix_mean": True, "fix_norm": True}
    trained = [Part(name, each, roles[name], group) for name, each in named.items() if each.requires_grad]
    grown = grown_neurons(part for part in trained if not part.parameter.is_complex())
    return Description(
        tuple(_row(name, each, roles[name], bool(momentum), grown.get(each)) for name, each in named.items())
    )


def _row(name: str, parameter: Tensor, role: Role, has_momentum: bool, grown: Tensor | None) -> Row:
    number_bytes = statistics_dtype(parameter.dtype).itemsize
    is_neuron = role.kind == "neuron"
    fan_in = role.fan_in(parameter.shape)
    neurons = math.prod(role.state_shape(parameter.shape)) if is_neuron else 0
    if not parameter.requires_grad:
        return Row(name, tuple(parameter.shape), role, neurons, fan_in, 0, 0, "frozen")
    # the step and the count of skipped updates, and for gains and biases the scale
    fixed = 4 + 8 + (0 if is_neuron else number_bytes)
    numbers = parameter.numel()
    if is_neuron:
        is_readable = not (parameter.is_meta or parameter.is_complex()) and numbers
        has_radius = is_readable and initial_radius(parameter, role, True, grown) is not None  # some neurons are zero
        numbers = 2 * neurons if has_radius else neurons
    buffer_bytes = parameter.numel() * parameter.element_size() if has_momentum else 0
    state_bytes = fixed + number_bytes * numbers + buffer_bytes
    adam_bytes = 4 + 2 * parameter.numel() * parameter.element_size()
    unbalanced, squares = _why_unbalanced(parameter, role, fan_in, grown), _change_and_norm(parameter, role, grown)
    return Row(name, tuple(parameter.shape), role, neurons, fan_in, state_bytes, adam_bytes, unbalanced, *squares)


def _change_and_norm(parameter: Tensor, role: Role, grown: Tensor | None) -> tuple[float, float]:
    """Return how far balancing moves the neurons that it can, and their norm, both squared. Grown neurons stay."""
    if role.kind != "neuron" or parameter.is_complex() or not parameter.numel():
        return 0.0, 0.0
    if parameter.is_meta:
        return math.nan, math.nan
    radius = None if grown is None else initial_radius(parameter, role, True, grown)
    change, size = balance_change(parameter, role, radius=radius)
    return change**2, size**2


@torch.no_grad()
def _why_unbalanced(parameter: Tensor, role: Role, fan_in: int, grown: Tensor | None) -> str:
    if grown is not None:
        found = sharding_of(parameter, role).total(torch.stack([grown.sum(), torch.ones_like(grown).sum()]))
        return "{} of {} {}".format(*found.tolist(), SHORT)
    if role.kind != "neuron":
        has_one = role.is_weight and "fan-in 1" in role.why
        return "gain: its fan-in is 1" if has_one else f"{'gains' if role.kind == 'gain' else 'biases'} have no fan-in"
    if fan_in == 2:
        return "norm only: its fan-in is 2"
    if parameter.is_complex():
        return COMPLEX
    if parameter.is_meta or not parameter.numel():
        return ""
    wide = wide_neurons(parameter, role)
    possible, size = project(wide, role.axes).possible, norm(wide, role.axes)
    masks = (~possible, ~size.isfinite(), size == 0, torch.ones_like(possible))
    counts = sharding_of(parameter, role).total(torch.stack([mask.sum() for mask in masks]))
    stuck, infinite, at_origin, total = counts.tolist()
    if not stuck:
        return ""
    if infinite:
        return f"{infinite} of {total} neurons not finite: initialise them first"
    if at_origin == stuck:
        return f"{stuck} of {total} neurons zero until a gradient comes, then of norm one at most"
    what = "zero or constant" if at_origin else "constant"
    return f"{stuck} of {total} neurons {what}, until their first gradient"


def _blocks(rows: Iterable[Row]) -> list[list[Row]]:
    """Group the rows that differ in the numbers of their names alone, as of repeated layers."""
    blocks: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        name = re.sub(r"\b\d+\b", "*", row.name)
        key = (name, row.shape, row.role, row.role.why, row.state_bytes, row.adam_bytes, row.unbalanced)
        blocks.setdefault(key, []).append(row)
    return list(blocks.values())


def _label(block: Sequence[Row]) -> str:
    """Name a block by the ranges of its numbers, and count it: ``layers.0-11.weight (12)``."""
    if len(block) == 1:
        return block[0].name
    columns = zip(*(re.findall(r"\b\d+\b", row.name) for row in block), strict=True)
    ranges = iter([_range(sorted(set(map(int, column)))) for column in columns])
    return re.sub(r"\b\d+\b", lambda _: next(ranges), block[0].name) + f" ({len(block)})"


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    is_dense = numbers[-1] - numbers[0] + 1 == len(numbers)
    return f"{numbers[0]}-{numbers[-1]}" if is_dense else "*"


def _fitted_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Make the table, with names and reasons cut where it would be wider than a terminal."""
    names, _, *middle, whys = (max(map(len, column)) for column in zip(HEADER, *rows, strict=True))
    shapes = min(24, max(len(row[1]) for row in (HEADER, *rows)))
    free = MAX_COLUMNS - shapes - sum(middle) - 2 * (len(HEADER) - 1)
    if names + whys > free:
        whys = max(min(whys, free // 4), free - names)
        names = free - whys
    cut = [(_cut(name, names), _ended(shape, shapes), *own, _ended(why, whys)) for name, shape, *own, why in rows]
    return text_table(HEADER, cut, numeric=False)


def _cut(text: str, columns: int) -> str:
    """Cut the beginning of a text, since names differ at their ends."""
    return text if len(text) <= columns else "…" + text[len(text) - columns + 1 :]


def _ended(text: str, columns: int) -> str:
    """Cut the end of a text."""
    return text if len(text) <= columns else text[: columns - 1] + "…"


def _listed(names: Sequence[str], columns: int) -> str:
    """List names while there is room for them, and count the others."""
    for count in range(min(MAX_NAMES, len(names)), 0, -1):
        more = f" and {len(names) - count} more" if len(names) > count else ""
        text = ", ".join(names[:count]) + more
        if len(text) <= columns:
            return text
    return _cut(names[0], columns - len(more)) + more


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= 0.9995 * size:  # rounds to at least 1 of the unit, not to 1000 of the smaller one
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _percent(share: float) -> str:
    if 0 < share < 1e-6:
        return "less than 0.0001 %"
    return f"{100 * share:.2g} %" if share < 0.99 else f"{100 * share:.0f} %"
