"""The picture of a watched run. Its titles use the column names of a reading."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.projections.polar import PolarAxes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from nero.watching.reading import Layer, Reading, Spread

GREY, PALE = "#555555", "#dddddd"
SMALL_PT = 9
#: Up to this number of layers, each is labelled with its name; beyond, a colour bar identifies them.
MAX_LABELLED = 12
#: The radius of the empty centre of the rings, as a share of the whole.
HOLE = 0.25


class Track(NamedTuple):
    """A layer of neurons over the run."""

    name: str
    colour: tuple[float, ...]
    steps: list[int]
    layers: list[Layer]

    def curves(self, of: Callable[[Layer], Spread]) -> tuple[tuple[float, ...], ...]:
        """Return the low, middle and high curve of a spread over the readings."""
        return tuple(zip(*map(of, self.layers), strict=True))


def draw(readings: Sequence[Reading]) -> Figure:
    """Draw a figure: "from start" over the run; "turned" and "grad norm"; "from start" at the end, and shares."""
    tracks = _tracks(readings)
    figure = Figure(figsize=(7.4, 9), dpi=200, layout="constrained")
    above, middle, below = cast(list[SubFigure], figure.subfigures(3, 1, height_ratios=[1.25, 0.9, 1]))
    _draw_from_start(above, tracks)
    turned, grad_norm = middle.subplots(1, 2)
    left, right = cast(list[SubFigure], below.subfigures(1, 2))
    _draw_rings(left, tracks)
    shares = right.subplots()
    _draw_curves(turned, tracks, lambda layer: Spread(*map(math.degrees, layer.turned)))
    turned.yaxis.set_major_formatter(lambda value, _: f"{value:g}°")
    turned.set_ylim(bottom=0)
    _style(turned, "Turned: since the last reading")
    _draw_curves(grad_norm, tracks, _positive_grad_norm)
    _set_log_scale(grad_norm, [layer.grad_norm.middle for track in tracks for layer in track.layers])
    _style(grad_norm, "Grad norm: of a neuron")
    _draw_shares(shares, readings)
    return figure


def _tracks(readings: Sequence[Reading]) -> list[Track]:
    """Return the layers of neurons, coloured from the first to the last."""
    names = list(dict.fromkeys(layer.name for read in readings for layer in read.layers if layer.role == "neuron"))
    colours = _colours()
    tracks = []
    for place, name in enumerate(names):
        found = [(read.step, layer) for read in readings for layer in read.layers if layer.name == name]
        shade = place / (len(names) - 1) if len(names) > 1 else 0.0
        tracks.append(Track(name, colours(shade), [step for step, _ in found], [layer for _, layer in found]))
    return tracks


def _colours() -> Colormap:
    """Return a colour map from dark to light, without the palest colours."""
    return ListedColormap([colormaps["plasma"](0.02 + 0.78 * index / 255) for index in range(256)])


def _draw_from_start(figure: SubFigure, tracks: list[Track]) -> None:
    """Draw the median neuron of each layer, in a band that holds eight of ten neurons."""
    axes = figure.subplots()
    _draw_curves(axes, tracks, lambda layer: Spread(*map(math.degrees, layer.from_start)), weight=2.2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}°")
    if axes.get_ylim()[1] > 75:
        axes.axhline(90, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
    _style(axes, "From start: the angle since the watch began", size=13)
    line, band = ("dot", "bar") if all(len(track.steps) == 1 for track in tracks) else ("line", "band")
    line = f"{line}: the median neuron" + (f"; {band}: eight in ten" if len(tracks) <= MAX_LABELLED else "")
    axes.text(0.99, 0.03, line, transform=axes.transAxes, ha="right", fontsize=SMALL_PT, color=GREY)
    if len(tracks) > MAX_LABELLED:
        scale = ScalarMappable(Normalize(1, len(tracks)), _colours())
        bar = figure.colorbar(scale, ax=axes, shrink=0.8, aspect=30, pad=0.02)
        bar.set_label(f"layer: 1 is {tracks[0].name}, {len(tracks)} is {tracks[-1].name}", fontsize=SMALL_PT)
        bar.outline.set_visible(False)
        return
    _label_layers(axes, tracks)


def _label_layers(axes: Axes, tracks: list[Track]) -> None:
    """Write the name of each layer at the end of its curve."""
    ends = {track.name: math.degrees(track.layers[-1].from_start.middle) for track in tracks}
    named = sorted((track for track in tracks if not math.isnan(ends[track.name])), key=lambda track: ends[track.name])
    heights = _spaced([ends[track.name] for track in named], 0.055 * axes.get_ylim()[1])
    lift = max(0.0, -min(heights, default=0.0))  # keeps the labels above the axis
    for track, height in zip(named, heights, strict=True):
        axes.annotate(
            track.name.removesuffix(".weight"),
            (1.015, height + lift),
            xycoords=("axes fraction", "data"),
            color=track.colour,
            fontsize=SMALL_PT,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def _draw_rings(figure: SubFigure, tracks: list[Track]) -> None:
    """Draw the final angle of each layer as a ring, the first layer innermost."""
    axes = cast(PolarAxes, figure.add_subplot(projection="polar"))
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    width = (1 - HOLE) / max(1, len(tracks))
    widest = 0.0
    for place, track in enumerate(tracks):
        low, middle, high = track.layers[-1].from_start
        if math.isnan(middle):
            continue
        inner = HOLE + place * width
        look = {"bottom": inner, "color": track.colour, "align": "edge", "linewidth": 0}
        axes.bar(0, 0.8 * width, middle, alpha=0.9, **look)  # type: ignore[arg-type]
        axes.bar(low, 0.8 * width, high - low, alpha=0.25, **look)  # type: ignore[arg-type]
        widest = max(widest, high)
        if len(tracks) <= MAX_LABELLED:
            axes.text(
                high, inner + 0.4 * width, f" {math.degrees(middle):.0f}°", color=track.colour, fontsize=SMALL_PT,
                fontweight="bold", va="center", rotation=-math.degrees(high), rotation_mode="anchor",
            )  # fmt: skip
    end = 90 if widest <= math.pi / 2 else 180
    axes.set_thetamin(0)
    axes.set_thetamax(end)
    axes.set_rlim(0, 1)
    axes.set_rgrids([])
    axes.set_thetagrids(range(0, end + 1, 15 if end == 90 else 30), fontsize=SMALL_PT, color=GREY)
    axes.grid(color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_color(PALE)
    axes.set_title("From start: the end, first layer inmost", fontsize=SMALL_PT + 1, fontweight="bold", loc="left")


def _spaced(places: Sequence[float], room: float) -> list[float]:
    """Move sorted places as little as needed to be ``room`` apart."""
    moved = list(places)
    for _ in range(200):
        for index in range(1, len(moved)):
            missing = room - (moved[index] - moved[index - 1])
            if missing > 1e-6:
                moved[index - 1] -= missing / 2
                moved[index] += missing / 2
    return moved


def _draw_curves(axes: Axes, tracks: list[Track], of: Callable[[Layer], Spread], weight: float = 1.5) -> None:
    for track in tracks:
        low, middle, high = track.curves(of)
        if len(tracks) <= MAX_LABELLED:  # more bands would overlap
            axes.fill_between(track.steps, low, high, color=track.colour, alpha=0.09, linewidth=0)
            if _is_point(middle):
                axes.vlines(track.steps, low, high, color=track.colour, alpha=0.35, linewidth=weight)
        axes.plot(track.steps, middle, color=track.colour, linewidth=weight, marker=_marker(middle))


def _is_point(values: Sequence[float]) -> bool:
    return sum(not math.isnan(value) for value in values) == 1


def _marker(values: Sequence[float]) -> str:
    """Return a dot for a curve of one point, whose line would be invisible."""
    return "o" if _is_point(values) else ""


def _positive_grad_norm(layer: Layer) -> Spread:
    """Return the spread of gradient norms; NaN if the median is zero, which a log axis cannot show."""
    return layer.grad_norm if layer.grad_norm.middle > 0 else Spread(math.nan, math.nan, math.nan)


def _set_log_scale(axes: Axes, values: list[float]) -> None:
    """Make the y axis logarithmic, with labels between the decades if there are few."""
    positive = [value for value in values if value > 0]
    axes.set_ylim(bottom=0)
    if positive:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(positive) < 100 * min(positive) else (1,)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(min(positive) / 2, max(positive) * 2)


def _draw_shares(axes: Axes, readings: Sequence[Reading]) -> None:
    """Draw the shares of silent, near-limit and off-balance neurons; count skipped updates in the title."""
    kinds: dict[str, tuple[str, str, Callable[[Layer], float]]] = {
        "silent": ("#D55E00", "-", lambda layer: layer.silent),
        "near limit": ("#0072B2", "--", lambda layer: layer.near_limit),
        "off balance": ("#009E73", ":", lambda layer: layer.off_balance),
    }
    steps = [reading.step for reading in readings]
    for name, (colour, dashes, of) in kinds.items():
        shares = [_overall_share(reading, of) for reading in readings]
        now = "-" if math.isnan(shares[-1]) else f"{shares[-1]:.1%}"
        axes.plot(
            steps, shares, color=colour, linestyle=dashes, linewidth=1.8, marker=_marker(shares), label=f"{name} {now}"
        )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0, max(0.05, axes.get_ylim()[1]))
    axes.legend(frameon=False, fontsize=SMALL_PT, loc="upper right")
    skipped = sum(layer.skipped for layer in readings[-1].layers)
    _style(axes, f"Shares of neurons; skipped: {skipped:,}")


def _overall_share(reading: Reading, of: Callable[[Layer], float]) -> float:
    """Return the share over the followed neurons of all layers for which it is defined."""
    layers = [layer for layer in reading.layers if layer.role == "neuron" and not math.isnan(of(layer))]
    followed = sum(layer.followed for layer in layers)
    return sum(of(layer) * layer.followed for layer in layers) / followed if followed else math.nan


def _style(axes: Axes, title: str, size: float = SMALL_PT + 1) -> None:
    axes.set_xlabel("step", fontsize=SMALL_PT, color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    axes.set_title(title, fontsize=size, loc="left", fontweight="bold")
    axes.tick_params(labelsize=SMALL_PT - 1, colors=GREY)
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
