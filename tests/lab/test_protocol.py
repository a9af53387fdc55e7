"""Tasks, settings, schedules, and the choice of the best learning rate."""

import math

import pytest

from nero_lab.protocol import SettingError, best_rate, decay_each_epoch, warm_up_then_drop
from nero_lab.tasks import TASKS


def test_best_rate_last_epoch_decides_and_ties_go_to_paper():
    task = TASKS["mnist-deep"]

    def record(lr, *accuracy):
        return {"optimiser": "nero", "lr": lr, "curve": {"train_accuracy": list(accuracy)}}

    assert best_rate(task, [record(0.0001, 0.99, 0.2), record(0.001, 0.1, 0.3), record(0.01, 0.1, 0.1)]) == 0.001
    assert best_rate(task, [record(rate, 0.1124) for rate in task.grid]) == 0.001
    assert best_rate(task, [record(0.1, 0.2), record(0.01, 0.2)]) == 0.01
    assert best_rate(task, [record(0.1, None), record(0.01, 0.0)]) == 0.01


def test_schedules_match_their_formulas():
    decay = decay_each_epoch(0.9)
    assert [decay(step, 10) for step in (0, 9, 10, 25)] == pytest.approx([1, 1, 0.9, 0.81])
    paper = TASKS["cifar10-vgg11"].schedule
    assert paper(0, 391) == 1 / (5 * 391)
    assert paper(5 * 391 - 1, 391) == 1
    found = [paper(epoch * 391, 391) for epoch in (5, 99, 100, 149, 150, 180, 198)]
    assert found == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.008, 0.008])
    assert warm_up_then_drop(2, 0.5, at=())(1, 2) == 0.5


def test_run_name_lists_departures_from_the_paper():
    task = TASKS["mnist-deep"]
    names = [
        task.run_name(task.settings("nero")),
        task.run_name(task.settings("sgd", 0.1, seed=2, precision="tf32")),
        task.run_name(task.settings("sgd", 0.1, epochs=3)),
    ]
    assert names == ["nero-lr0.001-seed0", "sgd-lr0.1-seed2-tf32", "sgd-lr0.1-seed0-epochs3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"contender": "nerro"}, "take one of nero"),
        ({"lr": -1.0}, "learning rate"),
        ({"lr": math.nan}, "learning rate"),
        ({"lr": 1e40}, "learning rate"),
        ({"seed": -1}, "seed"),
        ({"epochs": 0}, "1 to 50 epochs"),
        ({"epochs": 51}, "1 to 50 epochs"),
        ({"precision": "bf16"}, "one of float32, tf32"),
    ],
)
def test_settings_impossible_value_raises(arguments, message):
    with pytest.raises(SettingError, match=message):
        TASKS["mnist-deep"].settings(**{"contender": "nero", **arguments})
