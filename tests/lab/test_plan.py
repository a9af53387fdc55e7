"""What is missing of a study's protocol, and runs in several processes that make it up."""

from dataclasses import replace

import pytest
from lab.helpers import CPU, FAST, RecordingObserver, assert_close_records, find_and_interrupt, find_fast, make_data

from nero_lab.plan import cells_of, lines_of
from nero_lab.pool import train_in_processes
from nero_lab.protocol import Settings
from nero_lab.store import Store, StoreError, read_records
from nero_lab.sweep import train
from nero_lab.tasks import TASKS

TASK = replace(FAST, contenders={name: FAST.contenders[name] for name in ("sgd", "nero")})


def record(contender, lr, seed=0, **changes):
    task = {"task": TASK.name, "epochs": TASK.epochs, "options": dict(TASK.contenders[contender].options)}
    curve = {"test_accuracy": [lr], "train_loss": [1.0]}
    return {**task, "optimiser": contender, "lr": lr, "seed": seed, "curve": curve, **changes}


def missing(cells, contender, part):
    (cell,) = [each for each in cells if (each.contender, each.part) == (contender, part)]
    return [(settings.lr, settings.seed) for settings in cell.missing], cell.wanted


def test_plan_finds_missing_rates_and_seeds():
    cells = cells_of([TASK], [record("nero", 0.01), record("nero", 0.01, 2), record("sgd", 0.1, 1)], None)
    assert missing(cells, "nero", "search") == ([(0.1, 0)], 2)
    assert missing(cells, "nero", "seeds") == ([(0.01, 1)], 3)
    assert missing(cells, "sgd", "search") == ([(0.01, 0), (0.1, 0)], 2)
    assert missing(cells, "sgd", "seeds") == ([(0.1, 0), (0.1, 2)], 3)
    assert [(cell.contender, cell.part) for cell in cells[:2]] == [("nero", "search"), ("nero", "seeds")]
    assert cells[-1][1:3] == ("sgd", "search")


@pytest.mark.parametrize("changes", [{"epochs": 1}, {"options": {"beta": 0.5}}, {"task": "other"}])
def test_plan_ignores_runs_of_other_settings(changes):
    cells = cells_of([TASK], [record("nero", 0.01, **changes)], None)
    assert missing(cells, "nero", "seeds")[0] == [(0.01, 0), (0.01, 1), (0.01, 2)]


def test_plan_of_a_study_takes_the_best_rate_of_a_whole_search():
    task = replace(TASK, study="today", seeds=2)
    half = cells_of([task], [record("nero", 0.01)], None)
    assert missing(half, "nero", "seeds") == ([], 0)
    whole = cells_of([task], [record("nero", 0.01), record("nero", 0.1)], None)
    assert missing(whole, "nero", "seeds") == ([(0.1, 1)], 2)
    assert "0 of ?: seeds follow when the search is complete" in [*lines_of(half, None)][-1]


def test_plan_table_counts_each_missing_run_once():
    head, sgd, nero, total = lines_of(cells_of([TASK], [], "tf32"), "tf32")
    assert head.split() == ["TASK", "OPTIMISER", "RATES", "SEEDS", "MISSING", "ON", "A", "GPU"]
    for line in (sgd, nero):
        assert line.split()[2:9] == ["0", "of", "2", "0", "of", "3", "4"]  # a run of the search is also a seed
    assert total == "8 runs are missing: about 8 s on an NVIDIA H200, one by one"


def test_plan_of_every_study_is_made():
    for study in ("paper", "today"):
        tasks = [task for task in TASKS.values() if task.study == study]
        cells = cells_of(tasks, [], None)
        assert {cell.task.name for cell in cells} == {task.name for task in tasks}
        assert all(isinstance(settings, Settings) for cell in cells for settings in cell.missing)


def test_processes_train_all_but_a_run_that_fails(tmp_path):
    runs, lines = [TASK.settings("nero", 0.01, seed) for seed in range(3)], []
    broken = replace(runs[0], optimiser="none")
    with pytest.raises(StoreError, match="1 of 4 runs failed"):
        train_in_processes([broken, *runs], None, CPU, tmp_path, 2, minutes=9.0, say=lines.append, find=find_fast)
    assert "tiny, none at 0.01, seed 0 failed: KeyError('none')" in lines
    assert lines[-1] == f"3 of 4 runs done; records in {tmp_path}"
    alone = train(TASK, runs, make_data(), Store(tmp_path / "alone"), RecordingObserver())
    assert_close_records(read_records(tmp_path), alone)
    assert {record["side_by_side"] for record in read_records(tmp_path)} == {2}


def test_interrupted_processes_save_their_runs(tmp_path):
    runs, lines = [TASK.settings("nero", 0.01, seed) for seed in range(2)], []
    with pytest.raises(KeyboardInterrupt):
        train_in_processes(runs, None, CPU, tmp_path, 1, minutes=9.0, say=lines.append, find=find_and_interrupt)
    assert lines == ["stopping to save the runs"]
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1
    assert not list(tmp_path.rglob("*.json"))
    train(TASK, runs, make_data(), Store(tmp_path), RecordingObserver())
    assert [record["resumed"] > 0 for record in read_records(tmp_path)] == [True, False]


def test_no_run_starts_after_the_minutes(tmp_path):
    runs = [TASK.settings("nero")]
    assert train_in_processes(runs, None, CPU, tmp_path, 1, minutes=0.0, say=print, find=find_fast) == 0
