"""Pictures, tables and TensorBoard scalars of a watched run, and the words of docs/guide/watching.md."""

import math
import re
from pathlib import Path

import pytest
from torch import nn
from training import ScalarLog, charts_of, train_on_noise, watched_network, watched_run

import nero
from nero.watching import Layer, Reading, Spread


def network_with_zero_head():
    model = watched_network()
    nn.init.zeros_(model[3].weight)
    return model


@pytest.mark.no_cover  # coverage makes matplotlib twice as slow, and other tests draw the same lines
@pytest.mark.parametrize(
    "make",
    [
        watched_network,
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
    chart = draw(watched.readings).subfigs[0].axes[0]
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
    model, late = watched_network(), nn.Linear(6, 3)
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    watched.read()
    optimiser.add_param_group({"params": late})
    train_on_noise(model, optimiser, 2)
    watched.read()
    from_start, *_ = (list(lines_of(axes)) for axes in charts_of(watched) if "From start" in axes.get_title(loc="left"))
    (grad_norm,) = (list(lines_of(axes)) for axes in charts_of(watched) if "Grad norm" in axes.get_title(loc="left"))
    assert [(len(points), is_dot) for points, is_dot in from_start] == [(2, False), (2, False), (1, True)]
    assert [(len(points), is_dot) for points, is_dot in grad_norm] == [(1, True), (1, True), (0, False)]


def test_labels_stand_above_the_axis():
    model = watched_network()
    watched = nero.watch(nero.Nero(model))
    watched.read()
    chart = charts_of(watched)[0]
    places = {text.get_text(): text.xy[1] for text in chart.texts if hasattr(text, "xy")}
    assert places.keys() == {"0", "3"}
    assert min(places.values()) == 0 < max(places.values())


def test_silent_share_before_first_step_is_not_drawn():
    model = watched_network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    watched.read()

    def shown() -> tuple[str, list[float]]:
        charts = [axes for axes in charts_of(watched) if axes.get_legend()]
        (line,) = [each for chart in charts for each in chart.lines if each.get_label().startswith("silent")]
        return line.get_label(), list(line.get_ydata())

    assert shown()[0] == "silent -"
    model[0].requires_grad_(False)  # makes no step, so its share is undefined
    train_on_noise(model, optimiser, 1)
    watched.read()
    assert shown() == ("silent 0.0%", pytest.approx([math.nan, 0.0], nan_ok=True))


def test_rings_extend_to_180_degrees_and_labels_are_spaced():
    from nero.watching.picture import _spaced, draw

    layer = Layer("a", "neuron", 3, 5, 0, Spread(1.0, 2.0, 3.0), Spread(1.0, 2.0, 3.0), Spread(0, 0, 0), 1.0, 0.0, 0.0)
    figure = draw([Reading.of([layer], 5)])
    assert figure.subfigs[2].subfigs[0].axes[0].get_thetamax() == 180
    assert _spaced([1.0, 1.0, 5.0], 0.5) == pytest.approx([0.75, 1.25, 5.0])


def test_write_gives_every_number_its_tag():
    watched = watched_run()
    one, everything = ScalarLog(), ScalarLog()
    watched.readings[-1].write(one)
    watched.write(everything)
    layer = watched.readings[-1]["0.weight"]
    assert one.written["turned/0.weight", 6] == layer.turned.middle
    assert one.written["grad_norm/0.weight", 6] == layer.grad_norm.middle
    assert one.written["skipped/1.weight", 6] == 0
    assert ("near_limit/0.weight", 6) in one.written
    assert ("near_limit/1.weight", 6) not in one.written, "a gain has no limit"
    assert one.written.items() <= everything.written.items()
    assert {step for _, step in everything.written} == {2, 4, 6}
    with pytest.raises(TypeError, match=r"must have add_scalar\(tag, value, step\), got list"):
        watched.write([])


def test_tensorboard_reads_what_is_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watched = watched_run()
    watched.write(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = events.Scalars("from_start/3.weight")
    assert [each.step for each in found] == [2, 4, 6]
    wanted = [reading["3.weight"].from_start.middle for reading in watched.readings]
    assert [each.value for each in found] == pytest.approx(wanted)


def test_reading_prints_as_table_with_given_step():
    model = watched_network()
    watched = nero.watch(nero.Nero(model))
    reading = watched.read(step=700)
    assert reading.step == 700
    lines = str(reading).splitlines()
    assert lines[0] == "step 700"
    assert lines[3].split() == ["0.weight", "neuron", "0", "0", "0", "-", "8%", "0%", "0"]
    assert repr(reading) == str(reading)
    with pytest.raises(KeyError, match=r"no layer 'x'; there are 0\.weight, "):
        reading["x"]


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guide/watching.md"


def words_of_table(watched):
    heading = str(watched.readings[-1]).splitlines()[1]
    return re.split("  +", heading)[2:]


def words_of_tensorboard(watched):
    written = ScalarLog()
    watched.write(written)
    return dict.fromkeys(tag.partition("/")[0].replace("_", " ") for tag, _ in written.written)


def words_of_picture(watched):
    charts = charts_of(watched)
    titles = [title for axes in charts for title in axes.get_title(loc="left").split("; ")]
    legends = [text.get_text() for axes in charts if axes.get_legend() for text in axes.get_legend().get_texts()]
    names = [re.sub(r"(: .*| [\d.]+%)$", "", text).lower() for text in (*titles, *legends)]
    return dict.fromkeys(word for word in names if word != "shares of neurons")


def words_of_page(_):
    table = PAGE.read_text().partition("| word |")[2].partition("\n\n")[0]
    return re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [words_of_table, words_of_tensorboard, words_of_picture, words_of_page],
    ids=lambda it: it.__name__,
)
def test_a_number_has_the_same_name_everywhere(words):
    """The name of the attribute is used in the table, the tags, the picture and the page."""
    wanted = [field.replace("_", " ") for field in Layer._fields if field not in ("name", "role", "followed", "step")]
    assert sorted(words(watched_run())) == sorted(wanted)


def test_code_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert (tmp_path / "run.png").exists()
    assert list((tmp_path / "runs/1").iterdir())
