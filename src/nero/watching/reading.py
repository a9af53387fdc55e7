"""What a reading holds: a line of numbers for each layer, fetched from the device when they are asked for."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor


class Writer(Protocol):
    """What numbers are written to: TensorBoard's ``SummaryWriter``, or whatever has its method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""


class Spread(NamedTuple):
    """How a number is spread over a layer's neurons: a tenth of them are below ``low``, half, nine tenths."""

    low: float
    middle: float
    high: float


class Layer(NamedTuple):
    """One parameter, as it was when it was read.

    Args:
        name: the optimiser's name of it.
        role: ``"neuron"``, ``"gain"`` or ``"bias"``.
        followed: how many of its neurons, gains or biases the numbers are of.
        step: how many steps it has made.
        skipped: how many updates of it sat out because a gradient was not finite.
        turned: the angle from where a neuron was at the last reading, in radians. A gain or bias has none: how far it
            has moved, in units of its scale. Both are what the learning rate is to one step.
        from_start: the same from where it was when the watch began.
        grad_norm: the root mean square of its gradients' norms: the optimiser's running average, corrected.
        silent: the share that has had no gradient but zero, such as the neurons behind a ReLU that is never on, or
            none that was finite, which ``skipped`` tells of; nan before its first step.
        near_limit: the share of neurons near the limit of what the constraints allow, which is to have all weight on
            one input: of balanced weights the largest is at most sqrt(1 - 1/fan_in), and theirs is 90 % of it.
        off_balance: the share of neurons that the constraints do not hold, beyond what rounding explains: at the
            origin or constant until their first gradient, or changed since by others. No number but nan for gains
            and biases, as the one before.
    """

    name: str
    role: str
    followed: int
    step: int
    skipped: int
    turned: Spread
    from_start: Spread
    grad_norm: Spread
    silent: float
    near_limit: float
    off_balance: float


class Lines(NamedTuple):
    """Layers that were measured together: what is known here, and numbers that may still be on a device."""

    heads: Sequence[tuple[int, str, str, int]]  # the layer's place, name, role and how many of it are followed
    steps: Tensor
    skipped: Tensor
    table: Tensor

    def layers(self) -> Iterator[tuple[int, Layer]]:
        numbers = zip(self.heads, self.steps.tolist(), self.skipped.tolist(), self.table.tolist(), strict=True)
        for (place, name, role, followed), step, skipped, line in numbers:
            spreads = (Spread(*line[0:3]), Spread(*line[3:6]), Spread(*line[6:9]))
            yield place, Layer(name, role, followed, int(step), skipped, *spreads, *line[9:])


class Reading:
    """The layers at one moment of a training run; prints as a table. ``reading["0.weight"]`` is one of them.

    Nothing waits for the device until a number is asked for.
    """

    def __init__(self, lines: Sequence[Lines] = (), step: int | None = None) -> None:
        self._lines, self._step = list(lines), step

    @classmethod
    def of(cls, layers: Sequence[Layer], step: int) -> "Reading":
        """A reading of numbers that are here, such as saved ones."""
        made = cls(step=step)
        made.layers = tuple(layers)
        return made

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """A line for each parameter, in the optimiser's order."""
        found = sorted(placed for lines in self._lines for placed in lines.layers())
        self._lines = []
        return tuple(layer for _, layer in found)

    @property
    def step(self) -> int:
        """The number that was given to the reading, or how many steps the optimiser has made."""
        return max((layer.step for layer in self.layers), default=0) if self._step is None else self._step

    def __getitem__(self, name: str) -> Layer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}; there are {', '.join(layer.name for layer in self.layers)}")

    def __str__(self) -> str:
        header = (
            "layer",
            "role",
            "turned",
            "from start",
            "grad norm",
            "silent",
            "near limit",
            "off balance",
            "skipped",
        )
        table = [header, *map(_cells, self.layers)]
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([f"step {self.step}", *lines])

    __repr__ = __str__  # a notebook shows the repr

    def write(self, writer: Writer) -> None:
        """Write the numbers, of spreads the middle, as scalars named like ``turned/0.weight``.

        Args:
            writer: a ``torch.utils.tensorboard.SummaryWriter``, or whatever has an ``add_scalar`` like it.
        """
        if not hasattr(writer, "add_scalar"):
            raise TypeError(f"a writer has add_scalar(tag, value, step), but this {type(writer).__name__} has not")
        for layer in self.layers:
            for what, value in _scalars(layer).items():
                if not math.isnan(value):
                    writer.add_scalar(f"{what}/{layer.name}", value, self.step)


def _scalars(layer: Layer) -> dict[str, float]:
    return {
        "turned": layer.turned.middle,
        "from_start": layer.from_start.middle,
        "grad_norm": layer.grad_norm.middle,
        "silent": layer.silent,
        "near_limit": layer.near_limit,
        "off_balance": layer.off_balance,
        "skipped": layer.skipped,
    }


def _cells(layer: Layer) -> tuple[str, ...]:
    spreads = (_cell(spread.middle, ".3g") for spread in (layer.turned, layer.from_start, layer.grad_norm))
    shares = (_cell(share, ".0%") for share in (layer.silent, layer.near_limit, layer.off_balance))
    return layer.name, layer.role, *spreads, *shares, str(layer.skipped)


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
