"""Published numbers: they are the paper's, and agree with the tasks."""

import json
import math

import pytest
from report_samples import EPOCHS, ROOT

from nero_lab.report.published import all_published
from nero_lab.tasks import TASKS


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
