"""The picture of a watched run."""

import math
from pathlib import Path

import pytest
from torch import nn
from watched_networks import (
    charts_of,
    network,
    train,
    watched_run,
)

import nero
from nero.watching import Layer, Reading, Spread


def network_with_zero_head():
    model = network()
    nn.init.zeros_(model[3].weight)
    return model


@pytest.mark.parametrize(
    "make",
    [
        network,
        lambda: nn.Linear(6, 1),
        lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(14))),
        network_with_zero_head,
        lambda: nn.BatchNorm1d(6),
    ],
    ids=["network", "one layer", "many layers", "zero head", "no neurons"],
)
def test_plot_draws_every_kind_of_network(make, tmp_path: Path):
    watched = watched_run(make(), readings=2)
    watched.plot(str(tmp_path / "run.svg"))
    text = (tmp_path / "run.svg").read_text()
    assert text.count("<path") > 100
    assert text.rstrip().endswith("</svg>")


def test_plot_twice_gives_the_same_bytes(tmp_path: Path):
    watched = watched_run(nn.Linear(6, 3), readings=1)
    for name in ("one.png", "other.png"):
        watched.plot(tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()


def test_curves_show_the_readings_in_degrees():
    from nero.watching.picture import draw

    watched = watched_run()
    chart = draw(watched.readings).subfigs[0].subfigs[0].axes[0]
    names = {text.get_text(): text.get_color() for text in chart.texts}
    for name in ("0.weight", "3.weight"):
        wanted = [math.degrees(reading[name].from_start.middle) for reading in watched.readings]
        (line,) = [each for each in chart.lines if each.get_color() == names[name.removesuffix(".weight")]]
        assert list(line.get_xdata()) == [2, 4, 6]
        assert list(line.get_ydata()) == pytest.approx(wanted)


def lines_of(chart):
    """Yield the points of each line, and whether they are drawn as dots."""
    for line in chart.lines:
        points = [(x, y) for x, y in zip(*line.get_data(), strict=True) if not math.isnan(y)]
        yield points, line.get_marker() == "o"


def test_single_reading_is_drawn_as_dots():
    watched = watched_run(readings=1)
    charts = [axes for axes in charts_of(watched) if axes.lines]
    assert len(charts) == 4
    for chart in charts:
        assert all(is_dot and [x for x, _ in points] == [2] for points, is_dot in lines_of(chart))
        chart.figure.canvas.draw()
        low, high = chart.get_xlim()
        assert [tick for tick in chart.get_xticks() if low <= tick <= high] == [2]
    assert "dot: the median neuron; bar: eight in ten" in [text.get_text() for text in charts[0].texts]
    assert any(bar.get_segments() for bar in charts[0].collections if hasattr(bar, "get_segments"))
    assert not any(is_dot for axes in charts_of(watched_run(readings=2)) for _, is_dot in lines_of(axes))


def test_layer_first_read_at_the_end_is_drawn_as_dot():
    """Read an added layer, and gradients whose first reading came before the first step."""
    model, late = network(), nn.Linear(6, 3)
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    watched.read()
    optimiser.add_param_group({"params": late})
    train(model, optimiser, 2)
    watched.read()
    from_start, *_ = (list(lines_of(axes)) for axes in charts_of(watched) if "From start" in axes.get_title(loc="left"))
    (grad_norm,) = (list(lines_of(axes)) for axes in charts_of(watched) if "Grad norm" in axes.get_title(loc="left"))
    assert [(len(points), is_dot) for points, is_dot in from_start] == [(2, False), (2, False), (1, True)]
    assert [(len(points), is_dot) for points, is_dot in grad_norm] == [(1, True), (1, True), (0, False)]


def test_labels_stand_above_the_axis():
    model = network()
    watched = nero.watch(nero.Nero(model))
    watched.read()
    chart = charts_of(watched)[0]
    places = {text.get_text(): text.xy[1] for text in chart.texts if hasattr(text, "xy")}
    assert places.keys() == {"0", "3"}
    assert min(places.values()) == 0 < max(places.values())


def test_silent_share_before_first_step_is_not_drawn():
    model = network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    watched.read()

    def shown() -> tuple[str, list[float]]:
        charts = [axes for axes in charts_of(watched) if axes.get_legend()]
        (line,) = [each for chart in charts for each in chart.lines if each.get_label().startswith("silent")]
        return line.get_label(), list(line.get_ydata())

    assert shown()[0] == "silent -"
    model[0].requires_grad_(False)  # makes no step, so its share is undefined
    train(model, optimiser, 1)
    watched.read()
    assert shown() == ("silent 0.0%", pytest.approx([math.nan, 0.0], nan_ok=True))


def test_rings_extend_to_180_degrees_and_labels_are_spaced():
    from nero.watching.picture import _spaced, draw

    layer = Layer("a", "neuron", 3, 5, 0, Spread(1.0, 2.0, 3.0), Spread(1.0, 2.0, 3.0), Spread(0, 0, 0), 1.0, 0.0, 0.0)
    figure = draw([Reading.of([layer], 5)])
    assert figure.subfigs[0].subfigs[1].axes[0].get_thetamax() == 180
    assert _spaced([1.0, 1.0, 5.0], 0.5) == pytest.approx([0.75, 1.25, 5.0])
