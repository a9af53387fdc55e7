"""A reading of a watch: a row of numbers per layer, fetched from the device on first access."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from nero.text import text_table

HEADER = ("layer", "role", "turned", "from start", "grad norm", "silent", "near limit", "off balance", "skipped")


class Writer(Protocol):
    """A target for scalars, such as TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""


class Spread(NamedTuple):
    """Three quantiles over the neurons of a layer: 10 %, 50 % and 90 %."""

    low: float
    middle: float
    high: float


class Layer(NamedTuple):
    """The numbers of one parameter at one reading.

    Args:
        name: the name of the parameter in the optimiser.
        role: ``"neuron"``, ``"gain"`` or ``"bias"``.
        followed: the number of its neurons, gains or biases that the numbers are taken from.
        step: the number of steps it has made.
        skipped: the number of its updates that were skipped because a gradient was not finite.
        turned: the angle since the last reading, in radians. For gains and biases, the distance moved, in units of
            their scale. The learning rate is the size of one step in either unit.
        from_start: the same since the watch began.
        grad_norm: the root mean square of the gradient norms: the optimiser's running average, bias-corrected.
        silent: the share that has never had a finite gradient other than zero, such as neurons behind a ReLU that is
            never active. NaN before the first step.
        near_limit: the share of neurons whose largest weight is at least 90 % of the largest that the constraints
            allow. That limit is all weight on one input: sqrt(1 - 1/fan_in) for balanced neurons. NaN for gains and
            biases.
        off_balance: the share of neurons that violate the constraints by more than rounding: zero or constant neurons
            before their first gradient, or neurons changed by other code. NaN for gains and biases.
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


class LayerHead(NamedTuple):
    """The part of a layer's row that is known without the device."""

    place: int
    name: str
    role: str
    followed: int


class BatchResult(NamedTuple):
    """Layers that were measured together; the tensors may still be on the device."""

    heads: Sequence[LayerHead]
    steps: Tensor
    skipped: Tensor
    table: Tensor

    def layers(self) -> Iterator[tuple[int, Layer]]:
        """Fetch the numbers; yield each layer with its place in the optimiser's order."""
        rows = zip(self.heads, self.steps.tolist(), self.skipped.tolist(), self.table.tolist(), strict=True)
        for head, step, skipped, row in rows:
            spreads = (Spread(*row[0:3]), Spread(*row[3:6]), Spread(*row[6:9]))
            yield head.place, Layer(head.name, head.role, head.followed, int(step), skipped, *spreads, *row[9:])


class Reading:
    """All layers at one moment of a training run; prints as a table. ``reading["0.weight"]`` is one layer.

    The numbers stay on the device until they are first accessed.
    """

    def __init__(self, results: Sequence[BatchResult] = (), step: int | None = None) -> None:
        self._results, self._step = list(results), step

    @classmethod
    def of(cls, layers: Sequence[Layer], step: int) -> "Reading":
        """Return a reading of known numbers, such as saved ones."""
        reading = cls(step=step)
        reading.layers = tuple(layers)
        return reading

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """One :class:`Layer` for each parameter, in the optimiser's order."""
        found = sorted(placed for result in self._results for placed in result.layers())
        self._results = []
        return tuple(layer for _, layer in found)

    @property
    def step(self) -> int:
        """The step given to :meth:`Watch.read`, or the number of steps the optimiser has made."""
        return max((layer.step for layer in self.layers), default=0) if self._step is None else self._step

    def __getitem__(self, name: str) -> Layer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}; there are {', '.join(layer.name for layer in self.layers)}")

    def __str__(self) -> str:
        return f"step {self.step}\n" + text_table(HEADER, map(_cells, self.layers))

    __repr__ = __str__  # notebooks show the repr

    def write(self, writer: Writer) -> None:
        """Write the numbers as scalars with tags like ``turned/0.weight``; spreads are written as their medians.

        Args:
            writer: a ``torch.utils.tensorboard.SummaryWriter``, or any object with the same ``add_scalar``.
        """
        if not hasattr(writer, "add_scalar"):
            raise TypeError(f"a writer must have add_scalar(tag, value, step), got {type(writer).__name__}")
        for layer in self.layers:
            for quantity in (*Layer._fields[5:], "skipped"):
                found = getattr(layer, quantity)
                value = found.middle if isinstance(found, Spread) else found
                if not math.isnan(value):
                    writer.add_scalar(f"{quantity}/{layer.name}", value, self.step)


def _cells(layer: Layer) -> tuple[str, ...]:
    spreads = (_cell(spread.middle, ".3g") for spread in (layer.turned, layer.from_start, layer.grad_norm))
    shares = (_cell(share, ".0%") for share in (layer.silent, layer.near_limit, layer.off_balance))
    return layer.name, layer.role, *spreads, *shares, str(layer.skipped)


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
