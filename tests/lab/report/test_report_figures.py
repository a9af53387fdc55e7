"""Figures: every contender is named, labels do not overlap, and no collapse is cut off."""

import math
from itertools import pairwise

import pytest
from matplotlib.axes import Axes
from report_samples import EPOCHS, diverge, make_all_records, make_record

from nero_lab.report.figures import draw
from nero_lab.report.labels import spread_labels
from nero_lab.report.published import all_published
from nero_lab.report.runs import Runs

ABSENT = ("sgd", "lamb", "nero-norm", "madam", "sigma-100")
SCENES = {
    "three seeds": make_all_records(),
    "one seed, some missing": make_all_records(1, without=ABSENT),
    "two seeds, one diverged": [diverge(one) if one["seed"] else one for one in make_all_records(2)],
    "at chance and at zero error": [
        {**one, "curve": dict.fromkeys(one["curve"], [0.1 if one["optimiser"] != "nero" else 1.0] * one["epochs"])}
        for one in make_all_records()
    ],
    "nothing": [],
}


@pytest.mark.no_cover  # coverage makes matplotlib twice as slow, and other tests draw every figure
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("task", EPOCHS)
def test_figure_names_contenders_without_overlaps(task: str, scene: str):
    runs = Runs(SCENES[scene])
    figure = draw(task, runs)
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_position()[0] > 1 and text.get_text()]
        assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
        assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    key = [text for legend in figure.legends for text in legend.get_texts()]
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in key)
    words = " ".join(text.get_text() for text in (*key, *(text for axes in figure.axes for text in axes.texts)))
    assert ("not run" in words) == any(not runs.counted(row) for row in all_published()[task].rows)
    assert ("1 seed" in words) == (scene == "one seed, some missing")


def is_inside(axes: Axes, value: float) -> bool:
    low, high = axes.get_ylim()
    return low <= value <= high


def test_error_that_rises_again_stays_inside_the_frame():
    record = make_record("cifar10-ablation", "nero-both", 0.02, 0, 0.91)
    record["curve"]["test_accuracy"][170:190] = [0.13] * 20
    for task in ("cifar10-ablation", "cifar10-granularity"):
        assert is_inside(draw(task, Runs([record])).axes[1], 87)


def test_perplexity_above_the_frame_is_marked():
    records = make_all_records(1, tasks=("translation",))
    key = [text.get_text() for text in draw("translation", Runs(records)).legends[0].get_texts()]
    sgd = next(record for record in records if record["optimiser"] == "sgd" and record["lr"] == 0.0001)
    sgd["curve"]["train_loss"][90] = math.log(1e5)
    train = draw("translation", Runs(records)).axes[0]
    assert not is_inside(train, 1e5)
    assert any(list(line.get_xdata()) == [91] for line in train.lines)
    assert "peak above the frame" in key  # the authors' SGD leaves the frame, too


def test_gan_figure_has_both_distances():
    figure = draw("cgan", Runs([make_record("cgan", "nero", 0.01, 0, 20.0)]))
    assert [len(axes.lines) >= 1 for axes in figure.axes] == [True, True]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_contender_without_data_is_named_in_the_key_only():
    figure = draw("cgan", Runs([make_record("cgan", "nero", 0.01, 0, 20.0)]))
    assert not any("not run" in text.get_text() for axes in figure.axes for text in axes.texts)
    assert sum("not run" in text.get_text() for text in figure.legends[0].get_texts()) == 4


@pytest.mark.parametrize("wanted", [[0.5] * 5, [0.0, 0.0, 1.0, 1.0], [0.1, 0.12, 0.9], [1.0, 0.97, 0.94, 0.0], []])
def test_labels_keep_apart_and_inside(wanted: list[float]):
    heights = spread_labels(wanted, 0.06)
    assert all(high - low > 0.06 - 1e-9 for low, high in pairwise(sorted(heights)))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in heights)
