"""Records that a report reads, the selection of runs among them, and the published numbers."""

import json
import math
from typing import Any

import pytest
from report_samples import EPOCHS, NERO, ROOT, Record, cells, diverge, make_record, vgg_cells

from nero_lab.report.published import all_published
from nero_lab.report.runs import Runs, parse_record
from nero_lab.report.tables import task_tables
from nero_lab.store import StoreError
from nero_lab.tasks import TASKS


def in_curve(**changes: Any) -> Record:
    return {"curve": {**make_record(*NERO, 0, 0.88)["curve"], **changes}}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (in_curve(train_accuracy=[0.5]), "train_accuracy has 1 values for 199 epochs"),
        (in_curve(train_loss=[0.5]), "train_loss has 1 values for 199 epochs"),
        (in_curve(test_accuracy=[0.5] * 198 + [None]), "NoneType"),
        (in_curve(train_accuracy=["half"] * 199), "str"),
        ({"curve": {}}, "it lacks 'train_loss'"),
        ({"curve": [0.5]}, "list"),
        ({"epochs": None}, "199 values for None epochs"),
    ],
)
def test_record_with_a_wrong_value_is_refused(change: Record, fault: str):
    record = {**make_record(*NERO, 0, 0.88), "path": "folder/run.json", **change}
    with pytest.raises(StoreError, match=rf"^folder/run\.json is not the record of a whole run \(.*{fault}.*\): make"):
        parse_record(record)


@pytest.mark.parametrize(
    ("task", "missing", "fault"),
    [("wikitext2", "valid", "has no valid_perplexity"), ("cgan", "train_distance", "lacks 'train_distance'")],
)
def test_record_without_a_curve_of_its_task_is_refused(task: str, missing: str, fault: str):
    record = make_record(task, "nero", 0.01, 0, 20.0)
    record["curve"] = {name: values for name, values in record["curve"].items() if not name.startswith(missing)}
    with pytest.raises(StoreError, match=f"a record of {task} is not the record of a whole run .it {fault}"):
        Runs([record])


def test_record_without_optional_keys_gets_defaults():
    record = make_record(*NERO, 0, 0.88)
    for key in ("precision", "seconds", "side_by_side", "device", "finished"):
        del record[key]
    assert vgg_cells(record, table="runs") == [["Nero", "0.01", "0", "float32", "90.00", "12.00", "-", "1", "unknown"]]


def test_float32_counts_before_other_precisions():
    records = [
        make_record(*NERO, 0, 0.88, precision="tf32"),
        make_record(*NERO, 0, 0.89),
        make_record(*NERO, 1, 0.87, precision="tf32"),
    ]
    for order in (records, records[::-1]):
        assert vgg_cells(*order)[0][2:6] == ["11.00", "13.00", "not run", "12.00 ± 1.00 (2 seeds)"]
        assert vgg_cells(*order)[0][-1] == "float32, tf32"
        assert vgg_cells(*order, table="precision") == [
            ["Nero", "0.01", "0", "199", "91.00", "90.00", "11.00", "12.00"]
        ]
        assert [line[3] for line in vgg_cells(*order, table="runs")] == ["float32", "tf32", "tf32"]
    assert not cells(task_tables("cifar10-vgg11", Runs(records[2:]))["precision"])


def test_missing_precision_is_not_run():
    records = [make_record(*NERO, seed, 0.88, precision=kind) for seed in (0, 1) for kind in ("float32", "tf32")]
    records.append(make_record(*NERO, 0, 0.88, precision="bfloat16"))
    table = vgg_cells(*records, table="precision")
    assert table[1][4:] == ["90.00", "not run", "90.00", "12.00", "not run", "12.00"]


def test_short_run_in_another_precision_is_compared_at_its_end():
    short, full = make_record(*NERO, 0, 0.5, epochs=20), make_record(*NERO, 0, 0.88, precision="tf32")
    shorter = make_record(*NERO, 0, 0.3, epochs=10, finished="2027-01-01")
    for records in ([short, full, shorter], [shorter, full, short]):
        (line,) = vgg_cells(*records, table="precision")
        assert line[:5] == ["Nero", "0.01", "0", "20", "52.00"]
        beside = full["curve"]["train_accuracy"][19], 1 - full["curve"]["test_accuracy"][19]
        assert [line[5], line[7]] == [f"{100 * value:.2f}" for value in beside]
        assert line[6] == "50.00"
    assert vgg_cells(short, full)[0][2] == "12.00"
    (line,) = vgg_cells(
        make_record(*NERO, 0, 0.89),
        full,
        make_record(*NERO, 0, 0.3, epochs=30, precision="bfloat16"),
        table="precision",
    )
    assert line[3:] == ["199", "91.00", "90.00", "11.00", "12.00"]


def test_trial_of_few_epochs_is_not_compared_by_precision():
    trial, full = make_record(*NERO, 0, 0.3, epochs=19), make_record(*NERO, 0, 0.88, precision="tf32")
    assert not cells(task_tables("cifar10-vgg11", Runs([trial, full]))["precision"])


def test_of_repeated_runs_the_latest_counts():
    records = [make_record(*NERO, 0, 0.88, finished="2026-11-16"), make_record(*NERO, 0, 0.80, finished="2026-11-15")]
    assert vgg_cells(*records)[0][2] == "12.00"
    assert len(vgg_cells(*records, table="runs")) == 2


def test_recovered_loss_is_no_divergence():
    record = diverge(make_record(*NERO, 0, 0.88))
    record["curve"]["train_loss"][-1] = 2.3
    assert vgg_cells(record)[0][2] == "90.20"


def test_own_data_counts_before_a_stand_in():
    stand_in = make_record("imagenet", "nero-tuned", 0.02, 0, 0.6, data="tiny-imagenet")
    both = Runs([stand_in, make_record("imagenet", "nero-tuned", 0.02, 0, 0.7)])
    assert cells(task_tables("imagenet", both)["seeds"])[1][2] == "30.00"


def test_only_one_of_two_stand_ins_counts():
    records = [make_record("imagenet", "nero", 0.01, seed, 0.5, data="cats", precision="tf32") for seed in range(2)]
    records.append(make_record("imagenet", "nero-tuned", 0.02, 0, 0.6, data="tiny-imagenet"))
    runs = Runs([*records, make_record("imagenet", "nero", 0.01, 0, 0.9, data="tiny-imagenet")])
    assert runs.stand_in("imagenet") in ("cats", "tiny-imagenet")
    assert "22.50" not in task_tables("imagenet", runs)["seeds"]
    assert not runs.precision_groups("imagenet")


def test_published_rows_are_the_papers():
    facts = all_published()
    assert [tuple(row[1:]) for row in facts["cifar10-resnet18"].rows] == [
        ("nero", 0.01, 5.75, 0.07), ("sgd", 0.1, 7.75, 0.17), ("adam", 0.01, 5.93, 0.19), ("lamb", 0.1, 6.46, 0.12),
    ]  # fmt: skip
    nero = facts["mnist-deep"].rows[0]
    assert nero.mean == pytest.approx((95.75 + 96.77 + 87.22) / 3)
    assert len(facts["mnist-deep"].search) == 16
    assert all(len(curve.values) == each.epochs for each in facts.values() for curve in each.stored_curves)


@pytest.mark.parametrize("task", EPOCHS)
def test_published_facts_agree_with_the_task(task: str):
    facts, definition = all_published()[task], TASKS[task]
    best = {row.optimiser: row.rate for row in facts.rows if row.task == task}
    assert best == {name: contender.best for name, contender in definition.contenders.items()}
    assert facts.epochs == definition.epochs
    assert facts.measure.startswith(definition.metric.partition("_")[0])
    assert {cell.rate for cell in facts.search} <= set(definition.grid)
    assert all(row.rate == TASKS[row.task].contenders[row.optimiser].best for row in facts.rows)


def test_published_translation_runs_give_table_1():
    printed = {"nero": (11.35, 1.20), "adam": (12.63, 0.34), "lamb": (16.36, 0.29), "sgd": (92.40, 89.48)}
    *theirs, ours = all_published()["translation"].rows
    assert {row.optimiser: (row.mean, row.spread) for row in theirs} == {
        name: pytest.approx(values, abs=0.01) for name, values in printed.items()
    }
    assert ours.optimiser == "nero-scaled"
    assert math.isnan(ours.mean)


def test_published_numbers_have_sources():
    facts = json.loads((ROOT / "src/nero_lab/report/published.json").read_text())
    assert all(task["source"] and ("search" in task) == ("search_source" in task) for task in facts.values())
