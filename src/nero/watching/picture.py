"""The picture of a watched run: how far each layer has turned, as the hand of a clock, and what its gradients did."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.projections.polar import PolarAxes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nero.watching.reading import Layer, Reading, Spread

GREY, PALE = "#555555", "#dddddd"
SMALL, SMALLER = 9, 8
#: Layers that are named one by one; of more, the first and the last.
NAMED = 12


class Track(NamedTuple):
    """A layer through the run."""

    name: str
    colour: str
    steps: list[int]
    layers: list[Layer]

    def spread(self, of: Callable[[Layer], Spread]) -> tuple[list[float], list[float], list[float]]:
        low, middle, high = zip(*map(of, self.layers), strict=True)
        return list(low), list(middle), list(high)


def draw(readings: Sequence[Reading]) -> Figure:
    """The fan of angles from the start, beside angles between readings, gradients and what needs attention."""
    tracks = _tracks(readings)
    figure = Figure(figsize=(11, 6.2), dpi=150, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.25, 1])
    if tracks:
        fan = left.add_subplot(projection="polar")
        assert isinstance(fan, PolarAxes)
        _fan(fan, tracks)
    upper, middle, lower = right.subplots(3, 1, sharex=True, height_ratios=[1, 1, 0.62])
    _curves(upper, tracks, lambda layer: layer.turned, "Turned between readings", math.degrees)
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}°"))
    _curves(middle, tracks, lambda layer: layer.grad_norm, "Gradient norm of a neuron (running)", lambda value: value)
    if any(layer.grad_norm.middle > 0 for track in tracks for layer in track.layers):
        middle.set_yscale("log")
    _troubles(lower, readings)
    _legend(left, tracks)
    return figure
