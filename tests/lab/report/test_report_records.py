"""Records: what a run needs, and errors that name the record and the value."""

import math
import re
from typing import Any

import pytest
from report_samples import NERO, Record, make_record, vgg_cells

from nero_lab.report.records import parse_record
from nero_lab.report.runs import Runs
from nero_lab.store import StoreError


def in_curve(**changes: Any) -> Record:
    return {"curve": {**make_record(*NERO, 0, 0.88)["curve"], **changes}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_curve(train_accuracy=[0.5]), "with seed 0: train_accuracy must have 199 values, one per epoch, got 1;"),
        (in_curve(train_loss=[0.5]), "train_loss must have 199 values"),
        (in_curve(train_loss=["much"] * 199), 'train_loss must be a number, or null if not finite, got "much"'),
        (in_curve(test_accuracy=[50.0] * 199), "test_accuracy must be in [0, 1], got 50.0; run it again"),
        (in_curve(test_accuracy=[math.nan] * 199), "test_accuracy must be in [0, 1], got NaN"),
        (in_curve(test_accuracy=[0.5] * 198 + [None]), "test_accuracy must be in [0, 1], got null"),
        (in_curve(train_accuracy=["half"] * 199), 'train_accuracy must be in [0, 1], got "half"'),
        (in_curve(train_accuracy=None), "train_accuracy must be a list, got null"),
        ({"curve": {}}, "train_accuracy must be a list, got null"),
        ({"curve": None}, "curve must be an object, got null"),
        ({"curve": [0.5]}, "curve must be an object, got [0.5]"),
        ({"task": None}, "the record by nero at 0.01 with seed 0: task must be a string, got null"),
        ({"optimiser": 3}, "the record of cifar10-vgg11 at 0.01 with seed 0: optimiser must be a string, got 3"),
        ({"lr": None}, "the record of cifar10-vgg11 by nero with seed 0: lr must be a number, got null; run it again"),
        ({"lr": "0.01"}, 'lr must be a number, got "0.01"'),
        ({"lr": math.inf}, "lr must be a number, got Infinity"),
        ({"lr": 10**400}, "lr must be a number, got 1000"),
        ({"seed": None}, "by nero at 0.01: seed must be an int, got null"),
        ({"seed": 0.5}, "seed must be an int, got 0.5"),
        ({"epochs": None}, "epochs must be an int, got null"),
        ({"epochs": True}, "epochs must be an int, got true"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"seconds": None}, "seconds must be a number, got null"),
        ({"side_by_side": None}, "side_by_side must be an int, got null"),
        ({"precision": None}, "precision must be a string, got null"),
        ({"device": None}, "device must be a string, got null"),
        ({"finished": 5}, "finished must be a string, got 5"),
    ],
)
def test_record_with_a_wrong_value_is_refused(change: Record, message: str):
    record = {**make_record(*NERO, 0, 0.88), **change}
    with pytest.raises(StoreError, match=re.escape(message)):
        parse_record(record)
    with pytest.raises(StoreError, match=re.escape("(folder/run.json): ")):
        parse_record({**record, "path": "folder/run.json"})


def test_record_without_required_keys_is_refused():
    with pytest.raises(StoreError, match="the record of mnist-deep with seed 0: missing optimiser, lr; this file"):
        parse_record({"task": "mnist-deep", "seed": 0, "epochs": 1, "curve": {}})


def test_record_of_a_text_without_validation_is_refused():
    record = make_record("wikitext2", "nero", 0.01, 0, 180.0)
    record["curve"] = {name: values for name, values in record["curve"].items() if not name.startswith("valid")}
    with pytest.raises(StoreError, match=r"wikitext2 by nero at 0\.01 with seed 0: missing valid_loss; run it again"):
        Runs([record])


def test_record_with_one_of_two_distances_is_refused():
    record = make_record("cgan", "nero", 0.01, 0, 20.0)
    del record["curve"]["train_distance"]
    with pytest.raises(StoreError, match="train_distance"):
        Runs([record])


def test_record_without_optional_keys_gets_defaults():
    record = make_record(*NERO, 0, 0.88)
    for key in ("precision", "seconds", "side_by_side", "device", "finished"):
        del record[key]
    assert vgg_cells(record, table="runs") == [["Nero", "0.01", "0", "float32", "90.00", "12.00", "-", "1", "unknown"]]
