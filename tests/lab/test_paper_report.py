"""The report on the paper's tasks: tables and figures say what the records say, and say where there are none."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from nero_lab.report import drawing, figures, report, tables
from nero_lab.report.published import all_published
from nero_lab.report.runs import Runs
from nero_lab.store import StoreError, read_records
from nero_lab.tasks import TASKS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/paper"
RESULTS = ROOT / "results"
FULL = {task: facts.epochs for task, facts in all_published().items()}


def record(task: str, optimiser: str, lr: float, seed: int, end: float, **changes: Any) -> dict[str, Any]:
    """A run whose test accuracy climbs to an end; or whose perplexity or distance falls, or reward climbs to it."""
    epochs = changes.pop("epochs", FULL.get(task, 3))
    shares = [(epoch + 1) / epochs for epoch in range(epochs)]
    if task == "pong":
        curve = {"reward": [-21 + (end + 21) * share for share in shares], "policy_loss": [0.1] * epochs}
        changes, end = {"curve": curve, **changes}, 0.5
    if task == "cgan":  # which is looked at now and then
        every = [None if epoch % 10 else 100 + (end - 100) * epoch / epochs for epoch in range(1, epochs + 1)]
        curve = {"generator_loss": [0.1] * epochs, "train_distance": every, "test_distance": every}
        changes, end = {"curve": curve, **changes}, 0.5
    if task in ("wikitext2", "translation"):
        end = min(end, 1e9)
        falling = [math.log(1000) + (math.log(end) - math.log(1000)) * (epoch + 1) / epochs for epoch in range(epochs)]
        shifts = {"train": 0.1, "valid": 0.0, "test": -0.05}
        words = {f"{part}_loss": [loss + shift for loss in falling] for part, shift in shifts.items()}
        changes["curve"] = {**words, **{f"{part}_accuracy": [0.2] * epochs for part in shifts}}
        end = 0.5
    test = [0.1 + (end - 0.1) * (epoch + 1) / epochs for epoch in range(epochs)]
    train = [min(1.0, value + 0.02) for value in test]
    curve = {"train_loss": [1.0] * epochs, "test_loss": [1.0] * epochs, "train_accuracy": train, "test_accuracy": test}
    return {
        "task": task, "optimiser": optimiser, "lr": lr, "seed": seed, "epochs": epochs, "batch": 128,
        "precision": "float32", "curve": curve, "commit": "0" * 12, "versions": {}, "device": "NVIDIA H200",
        "side_by_side": 4, "seconds": 93.1, "finished": "2026-11-15T08:00:00+00:00", **changes,
    }  # fmt: skip


def diverged(made: dict[str, Any]) -> dict[str, Any]:
    """The same run, whose loss is not finite in its second half; it answers "zero" then, as runs on a GPU do."""
    half = made["epochs"] // 2
    ends = {"train_accuracy": 0.09875, "test_accuracy": 0.098, "valid_accuracy": 0.0}
    curve = {name: values[:half] + [ends.get(name)] * (len(values) - half) for name, values in made["curve"].items()}
    return {**made, "curve": curve}


def everything(seeds: int = 3, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Records of all rows of the paper's, near its numbers."""
    chance = random.Random(0)
    made = []
    for task, facts in all_published().items():
        for row in facts.finals:
            if row.task == task and row.optimiser not in without:
                end = row.mean / 100 - 0.02 if facts.measure == "train_accuracy" else 1 - row.mean / 100
                end = row.mean if facts.measure in ("valid_perplexity", "reward", "test_distance") else end
                end = 0.7 if math.isnan(end) and facts.measure == "test_error" else 15.0 if math.isnan(end) else end
                ends = [end + chance.uniform(-0.003, 0.003) for _ in range(seeds)]
                made += [record(task, row.optimiser, row.rate, seed, end) for seed, end in enumerate(ends)]
        for cell in facts.search:
            if not any((one["optimiser"], one["lr"]) == (cell.optimiser, cell.rate) for one in made):
                (end, *_) = cell.ends.values()
                end = end if task == "translation" else max(0.0, end / 100 - 0.02)
                made.append(record(task, cell.optimiser, cell.rate, 0, end))
    return made


def committed() -> list[dict[str, Any]]:
    """The records that the committed pages are made from."""
    return read_records(RESULTS) if RESULTS.is_dir() else []


def rows(table: str) -> list[list[str]]:
    """The cells of a table's body."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def vgg(*records: dict[str, Any], table: str = "seeds") -> list[list[str]]:
    return rows(tables.of_task("cifar10-vgg11", Runs(records))[table])


NERO = ("cifar10-vgg11", "nero", 0.01)


def test_published_is_the_papers():
    facts = all_published()
    assert [tuple(row[1:]) for row in facts["cifar10-resnet18"].finals] == [
        ("nero", 0.01, 5.75, 0.07), ("sgd", 0.1, 7.75, 0.17), ("adam", 0.01, 5.93, 0.19), ("lamb", 0.1, 6.46, 0.12),
    ]  # fmt: skip
    nero = facts["mnist-deep"].finals[0]
    assert nero.mean == pytest.approx((95.75 + 96.77 + 87.22) / 3)
    assert len(facts["mnist-deep"].search) == 16
    assert all(len(curve.values) == each.epochs for each in facts.values() for curve in each.curves)
    assert all(each.headline for each in facts.values())


@pytest.mark.parametrize("task", FULL)
def test_published_agrees_with_the_tasks(task: str):
    facts, ran = all_published()[task], TASKS[task]
    best = {row.optimiser: row.rate for row in facts.finals if row.task == task}
    assert best == {name: contender.best for name, contender in ran.contenders.items()}
    assert facts.epochs == ran.epochs
    assert facts.measure.startswith(ran.metric.partition("_")[0])
    assert {cell.rate for cell in facts.search} <= set(ran.grid)
    assert all(row.rate == TASKS[row.task].contenders[row.optimiser].best for row in facts.finals)


def test_three_seeds_beside_the_paper():
    nero, sgd, *_ = vgg(*(record(*NERO, seed, end) for seed, end in enumerate((0.89, 0.88, 0.90))))
    spread = f"{100 * math.sqrt(2 / 3) * 0.01:.2f}"
    assert nero == [
        "Nero", "0.01", "11.00", "12.00", "10.00", f"11.00 ± {spread}", "11.16 ± 0.17", "-0.16", "-0.9", "float32",
    ]  # fmt: skip
    assert sgd == ["SGD", "0.1", *["not run"] * 4, "12.61 ± 0.21", "-", "-", "-"]


def test_one_seed_has_no_spread_and_two_say_so():
    assert vgg(record(*NERO, 0, 0.88))[0][2:6] == ["12.00", "not run", "not run", "12.00 (1 seed)"]
    assert vgg(record(*NERO, 0, 0.88), record(*NERO, 1, 0.90))[0][5] == "11.00 ± 1.00 (2 seeds)"


def test_more_seeds_than_the_papers_have_columns():
    table = vgg(*(record(*NERO, seed, 0.88) for seed in range(5)))
    assert table[0][2:8] == ["12.00"] * 5 + ["12.00 ± 0.00 (5 seeds)"]


def test_a_run_at_another_rate_is_named_but_not_counted():
    made = [record("cifar10-vgg11", "nero", 0.1, 0, 0.5), record("cifar10-vgg11", "nero", 0.001, 0, 0.6)]
    assert vgg(*made)[0][5] == "not run (but at 0.001, 0.1)"
    assert [line[:3] for line in vgg(*made, table="runs")] == [["Nero", "0.001", "0"], ["Nero", "0.1", "0"]]


def test_our_own_best_rate_has_a_row_where_it_is_another():
    made = [record("cifar10-vgg11", "adam", 0.0001, seed, 0.9) for seed in (0, 1, 2)]
    made.append(record("cifar10-vgg11", "adam", 0.001, 0, 0.85))
    rows = [line for line in vgg(*made) if line[0] == "Adam"]
    assert [line[1] for line in rows] == ["0.001", "0.0001"]
    assert [line[5] for line in rows] == ["15.00 (1 seed)", "10.00 ± 0.00"]


MARKED = "\n\n† diverged: its loss was no longer finite"


def test_what_diverged_is_marked():
    made = [diverged(record(*NERO, 0, 0.88)), record(*NERO, 1, 0.88)]
    assert vgg(*made)[0][2:8] == ["90.20†", "12.00", "not run", "51.10 ± 39.10† (2 seeds)", "11.16 ± 0.17", "+39.94"]
    assert vgg(made[0])[0][5] == "90.20† (1 seed)"
    assert [line[4:6] for line in vgg(*made, table="runs")] == [["9.88†", "90.20†"], ["90.00", "12.00"]]
    assert "Nero: 51.10 ± 39.10† (2 seeds); SGD: not run" in tables.index(Runs(made))
    for records, marked in ((made, True), (made[1:], False), ([], False)):
        found = tables.of_task("cifar10-vgg11", Runs(records))
        for text in (found["seeds"], found["runs"], tables.index(Runs(records))):
            assert text.endswith(MARKED) == ("†" in text) == marked


def test_what_diverged_is_marked_in_the_search_and_by_epoch_and_precision():
    made = [diverged(record("mnist-deep", "nero", 0.1, 0, 0.5, precision=kind)) for kind in ("float32", "tf32")]
    found = tables.of_task("mnist-deep", Runs(made))
    assert rows(found["search"])[3] == ["Nero", "0.1", "9.88†", "10.44", "9.80†", "10.28"]
    assert rows(found["precision"])[0][4:] == ["9.88†", "9.88†", "90.20†", "90.20†"]
    assert found["search"].endswith(MARKED)
    assert found["precision"].endswith(MARKED)
    made = [diverged(record("mnist-reparameterised", "sigma-1", 0.01, seed, 0.98)) for seed in range(3)]
    by_epoch = rows(tables.of_task("mnist-reparameterised", Runs(made))["epochs"])
    assert by_epoch[0][3:5] == ["47.20 ± 0.00", "9.88 ± 0.00†"]
    assert not any("†" in cell for cell in by_epoch[1])


def test_a_loss_that_came_back_is_no_divergence():
    made = diverged(record(*NERO, 0, 0.88))
    made["curve"]["train_loss"][-1] = 2.3
    assert vgg(made)[0][2] == "90.20"


def test_float32_counts_and_the_others_stand_beside_it():
    made = [record(*NERO, 0, 0.88, precision="tf32"), record(*NERO, 0, 0.89), record(*NERO, 1, 0.87, precision="tf32")]
    for records in (made, made[::-1]):
        assert vgg(*records)[0][2:6] == ["11.00", "13.00", "not run", "12.00 ± 1.00 (2 seeds)"]
        assert vgg(*records)[0][-1] == "float32, tf32"
        assert vgg(*records, table="precision") == [["Nero", "0.01", "0", "199", "91.00", "90.00", "11.00", "12.00"]]
        assert [line[3] for line in vgg(*records, table="runs")] == ["float32", "tf32", "tf32"]
    assert "No run was made" in tables.of_task("cifar10-vgg11", Runs(made[2:]))["precision"]


def test_a_precision_that_is_missing_is_not_run():
    made = [record(*NERO, seed, 0.88, precision=kind) for seed in (0, 1) for kind in ("float32", "tf32")]
    made.append(record(*NERO, 0, 0.88, precision="bfloat16"))
    assert vgg(*made, table="precision")[1][4:] == ["90.00", "not run", "90.00", "12.00", "not run", "12.00"]


def test_a_short_run_in_another_precision_stands_beside_the_same_epoch():
    short, full = record(*NERO, 0, 0.5, epochs=20), record(*NERO, 0, 0.88, precision="tf32")
    shorter = record(*NERO, 0, 0.3, epochs=10, finished="2027-01-01")
    for records in ([short, full, shorter], [shorter, full, short]):
        (line,) = vgg(*records, table="precision")
        assert line[:5] == ["Nero", "0.01", "0", "20", "52.00"]
        beside = full["curve"]["train_accuracy"][19], 1 - full["curve"]["test_accuracy"][19]
        assert [line[5], line[7]] == [f"{100 * value:.2f}" for value in beside]
        assert line[6] == "50.00"
    assert vgg(short, full)[0][2] == "12.00"  # and counts for nothing else
    a_try = record(*NERO, 0, 0.3, epochs=19)
    assert "No run was made" in tables.of_task("cifar10-vgg11", Runs([a_try, full]))["precision"]
    third = record(*NERO, 0, 0.3, epochs=30, precision="bfloat16")
    (line,) = vgg(record(*NERO, 0, 0.89), full, third, table="precision")
    assert line[3:] == ["199", "91.00", "90.00", "11.00", "12.00"]


def test_of_repeated_runs_the_latest_counts():
    made = [record(*NERO, 0, 0.88, finished="2026-11-16"), record(*NERO, 0, 0.80, finished="2026-11-15")]
    assert vgg(*made)[0][2] == "12.00"
    assert len(vgg(*made, table="runs")) == 2


def test_short_runs_are_left_out_and_counted():
    short = record(*NERO, 0, 0.88, epochs=20)
    assert vgg(short)[0][5] == "not run"
    for count, words in ((1, "1 record."), (2, "2 records.")):
        text = tables.of_task("cifar10-vgg11", Runs([short] * count))["runs"]
        assert text == f"not run\n\nLeft out for having fewer than 199 epochs: {words}"
        line = next(line for line in rows(tables.index(Runs([short] * count))) if "cifar10-vgg11" in line[0])
        assert line[4] == f"not run for all 199 epochs ({words[:-1]} left out)"


def test_records_of_other_tasks_are_told():
    assert "not shown: chess (1)" in tables.index(Runs([record("chess", "nero", 0.01, 0, 0.9)]))


def test_the_search_shows_every_cell():
    made = [record("mnist-deep", "nero", 0.001, 0, 0.9), record("mnist-deep", "adam", 0.1, 0, 0.1)]
    found = rows(tables.of_task("mnist-deep", Runs(made))["search"])
    assert len(found) == 16
    assert found[1] == ["Nero", "**0.001**", "92.00", "95.75", "90.00", "89.26"]
    assert found[11] == ["Adam", "0.1", "12.00", "9.87", "10.00", "9.80"]
    assert found[0][2:] == ["not run", "94.33", "not run", "27.04"]


def test_texts_are_told_by_perplexity():
    made = [record("wikitext2", "nero", 0.01, seed, end) for seed, end in enumerate((172.0, 173.0, 174.0))]
    made.append(record("wikitext2", "adam", 0.0001, 0, 178.0, precision="tf32"))
    made.append(diverged(record("wikitext2", "sgd", 1.0, 0, 180.0)))
    made.append(record("wikitext2", "nero", 0.01, 0, 172.5, precision="tf32"))
    found = tables.of_task("wikitext2", Runs(made))
    nero, sgd, adam, lamb = rows(found["seeds"])
    assert nero[2:8] == ["172.00", "173.00", "174.00", "173.00 ± 0.82", "172.99 ± 0.51", "+0.01"]
    assert sgd[2] == "inf†"
    assert sgd[5] == "inf† (1 seed)"
    assert adam[5:9] == ["178.00 (1 seed)", "178.05 ± 0.96", "-0.05", "-0.1"]
    assert lamb[5] == "not run"
    (line,) = rows(found["precision"])
    assert line == ["Nero", "0.01", "0", "20", "172.00", "172.50", f"{172 * math.exp(-0.05):.2f}", line[7]]
    assert "| validation perplexity | test perplexity |" in found["runs"]
    index = next(line for line in rows(tables.index(Runs(made))) if "wikitext2" in line[0])
    assert index[3:5] == ["validation perplexity", "Nero: 173.00 ± 0.82; Adam: 178.00 (1 seed)"]
    assert index[5] == "Nero: 172.99 ± 0.51; Adam: 178.05 ± 0.96"
    twice = [diverged(record("wikitext2", "sgd", 1.0, seed, 180.0)) for seed in (0, 1)]
    assert rows(tables.of_task("wikitext2", Runs(twice))["seeds"])[1][5:9] == [
        "inf† (2 seeds)", "181.76 ± 0.49", "inf", "inf",
    ]  # fmt: skip


def test_the_authors_translations_are_the_papers():
    facts = all_published()["translation"]
    printed = {"nero": (11.35, 1.20), "adam": (12.63, 0.34), "lamb": (16.36, 0.29), "sgd": (92.40, 89.48)}
    *theirs, ours = facts.finals
    assert {row.optimiser: (row.mean, row.spread) for row in theirs} == {
        name: pytest.approx(values, abs=0.01) for name, values in printed.items()
    }
    assert ours.optimiser == "nero-scaled"
    assert math.isnan(ours.mean)
    found = tables.of_task("translation", Runs([record("translation", "nero", 0.001, 0, 12.0)]))
    search = rows(found["search"])
    assert search[0][:2] == ["Nero", "0.0001"]
    assert search[1] == ["Nero", "**0.001**", "12.00", "12.28"]
    assert [line[3] for line in search[2:5]] == ["2544.58", "314.32 (epoch 29)", "16625.04 (epoch 14)"]
    assert search[9] == ["Adam", "1", "not run", "inf (epoch 46)"]
    assert search[14][3] == "182.32 (epoch 94)"
    assert [line[3] for line in search[-3:]] == ["2.01e+10", "2.74e+14", "inf (epoch 51)"]
    assert "| validation, ours | validation, authors |" in found["search"]
    index = next(line for line in rows(tables.index(Runs([]))) if "translation" in line[0])
    assert index[5] == "Nero: 11.35 ± 1.20; Adam: 12.63 ± 0.34"  # as in Table 1, on the same page
    made = [
        record("translation", "nero", 0.001, seed, 12.0, **more)
        for seed, more in enumerate(({"test_bleu": 35.125}, {}))
    ]
    assert [line[6] for line in rows(tables.of_task("translation", Runs(made))["runs"])] == ["35.12", "-"]


def test_games_are_told_by_their_return_beside_the_papers():
    played = [record("pong", "nero", 0.01, seed, 20.0 + seed) for seed in range(3)]
    first = rows(tables.of_task("pong", Runs(played))["seeds"])[0]
    assert first[2:8] == ["20.00", "21.00", "22.00", "21.00 ± 0.82", "20.62 ± 0.05", "+0.38"]
    learns = rows(tables.of_task("pong", Runs([record("pong", "lamb-momentum", 0.001, 0, 15.0)]))["seeds"])[4]
    assert learns[-5:] == ["15.00 (1 seed)", "-", "-", "-", "float32"]  # the paper prints no number of it
    gone = diverged(record("pong", "lamb", 0.001, 0, -20.0))
    lamb = rows(tables.of_task("pong", Runs([gone]))["seeds"])[3]
    assert lamb[2] == "-†"
    assert rows(tables.of_task("pong", Runs([]))["seeds"])[4][-5:] == ["not run", "-", "-", "-", "-"]


def test_fid_is_told_where_it_was_measured():
    made = record("cgan", "nero", 0.01, 0, 20.0)
    assert "FID to" not in tables.of_task("cgan", Runs([made]))["runs"]
    made["curve"] |= {"train_fid": made["curve"]["train_distance"], "test_fid": [15.5] * made["epochs"]}
    found = tables.of_task("cgan", Runs([made]))["runs"]
    assert "FID to test images" in found
    assert "15.50" in rows(found)[0]
    del made["curve"]["train_distance"]
    with pytest.raises(StoreError, match="train_distance"):
        Runs([made])


def test_what_is_of_another_thing_than_the_papers_is_not_compared():
    made = [record("imagenet", "nero-tuned", 0.02, 0, 0.6, data="tiny-imagenet")]
    found = tables.of_task("imagenet", Runs(made))
    told, _, header, *_ = found["seeds"].splitlines()
    assert told == "On tiny-imagenet, a stand-in for imagenet."
    assert "difference" not in header
    assert "paper: no number is printed" in header
    (line,) = rows(found["runs"])
    assert line[-4:] == ["tiny-imagenet", "93", "4", "NVIDIA H200"]
    both = Runs([*made, record("imagenet", "nero-tuned", 0.02, 0, 0.7)])
    assert rows(tables.of_task("imagenet", both)["seeds"])[1][2] == "30.00"  # the task's own data count
    others = [record("imagenet", "nero", 0.01, seed, 0.5, data="cats", precision="tf32") for seed in range(2)]
    mixed = Runs([*made, *others, record("imagenet", "nero", 0.01, 0, 0.9, data="tiny-imagenet")])
    assert mixed.stand_in("imagenet") in ("cats", "tiny-imagenet")  # one of them, and no mean over both
    assert "22.50" not in tables.of_task("imagenet", mixed)["seeds"]
    assert tables.of_task("imagenet", mixed)["precision"] == "No run was made in more than one precision."
    assert "(on tiny-imagenet)" in tables.index(Runs(made))
    named = [record("imagenet", "nero-tuned", 0.02, 0, 0.6, data="cats-3-classes-1200-images-of-64-0123abcd")]
    assert "(on cats (3 classes, 1,200 images))" in tables.index(Runs(named))
    words = tables.table_1(Runs([]))
    assert "Atari Pong, PPO" in words
    assert "imagenet" not in words.lower()


def test_no_spread_is_not_divided_by():
    found = rows(tables.of_task("mnist-deep", Runs([record("mnist-deep", "adam", 0.001, 0, 0.1)]))["seeds"])
    assert found[2][-3:] == ["+0.76", "spread is 0", "float32"]


def test_epochs_are_compared_one_by_one():
    made = [record("mnist-reparameterised", "sigma-1", 0.01, seed, 0.98) for seed in range(3)]
    found = rows(tables.of_task("mnist-reparameterised", Runs(made))["epochs"])
    assert [line[1] for line in found] == ["ours", "authors", "ours", "authors"]
    assert found[0][-1] == "100.00 ± 0.00"
    assert found[1][2] == "94.18 ± 0.03"
    assert found[2][2:] == ["not run"] * 5


def test_neros_rows_of_the_granularity_are_the_ablations():
    made = [record("cifar10-ablation", "nero-both", 0.02, seed, 0.91) for seed in range(3)]
    found = {line[0]: line for line in rows(tables.of_task("cifar10-granularity", Runs(made))["seeds"])}
    assert found["Nero, both constraints"][5] == "9.00 ± 0.00"
    assert list(found) == [
        "Madam", "Nero, neither constraint", "LAMB", "Madam, balanced", "Nero, both constraints", "LAMB, balanced",
    ]  # fmt: skip


def in_curve(**changes: Any) -> dict[str, Any]:
    return {"curve": {**record(*NERO, 0, 0.88)["curve"], **changes}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_curve(train_accuracy=[0.5]), "with seed 0 has 1 values of train_accuracy for 199 epochs: run it again"),
        (in_curve(train_loss=[0.5]), "1 values of train_loss"),
        (in_curve(train_loss=["much"] * 199), 'has "much" in train_loss: losses are numbers, or null'),
        (in_curve(test_accuracy=[50.0] * 199), "has 50.0 in test_accuracy, which is no fraction"),
        (in_curve(test_accuracy=[math.nan] * 199), "no fraction"),
        (in_curve(test_accuracy=[0.5] * 198 + [None]), "has null in test_accuracy, which is no fraction"),
        (in_curve(train_accuracy=["half"] * 199), 'has "half" in train_accuracy'),
        (in_curve(train_accuracy=None), "has null for train_accuracy, which is not a list"),
        ({"curve": {}}, "has null for train_accuracy"),
        ({"curve": None}, "has null for curve, which is not an object"),
        ({"curve": [0.5]}, "has [0.5] for curve"),
        ({"task": None}, "the record by nero at 0.01 with seed 0 has null for task, which is not a word"),
        ({"optimiser": 3}, "the record of cifar10-vgg11 at 0.01 with seed 0 has 3 for optimiser"),
        (
            {"lr": None},
            "the record of cifar10-vgg11 by nero with seed 0 has null for lr, which is not a number: run it",
        ),
        ({"lr": "0.01"}, 'has "0.01" for lr'),
        ({"lr": math.inf}, "has Infinity for lr"),
        ({"lr": 10**400}, "for lr, which is not a number"),
        ({"seed": None}, "by nero at 0.01 has null for seed, which is not a whole number"),
        ({"seed": 0.5}, "has 0.5 for seed"),
        ({"epochs": None}, "has null for epochs"),
        ({"epochs": True}, "has true for epochs"),
        ({"epochs": 0}, "has 0 epochs"),
        ({"seconds": None}, "has null for seconds"),
        ({"side_by_side": None}, "has null for side_by_side"),
        ({"precision": None}, "has null for precision, which is not a word"),
        ({"device": None}, "has null for device"),
        ({"finished": 5}, "has 5 for finished"),
    ],
)
def test_a_record_that_is_none_is_refused(change: dict[str, Any], words: str):
    made = {**record(*NERO, 0, 0.88), **change}
    with pytest.raises(StoreError, match=re.escape(words)):
        Runs([made])
    with pytest.raises(StoreError, match=re.escape("(folder/run.json) has ")):
        Runs([{**made, "path": "folder/run.json"}])


def test_a_text_without_what_it_is_measured_by_is_refused():
    made = record("wikitext2", "nero", 0.01, 0, 180.0)
    made["curve"] = {name: values for name, values in made["curve"].items() if not name.startswith("valid")}
    with pytest.raises(StoreError, match=r"wikitext2 by nero at 0\.01 with seed 0 has no valid_loss: run it again"):
        Runs([made])


def test_what_a_record_need_not_have():
    made = record(*NERO, 0, 0.88)
    for key in ("precision", "seconds", "side_by_side", "device", "finished"):
        del made[key]
    assert vgg(made, table="runs") == [["Nero", "0.01", "0", "float32", "90.00", "12.00", "-", "1", "unknown"]]


def test_what_is_no_record_at_all_is_refused():
    with pytest.raises(StoreError, match=re.escape("the record of mnist-deep with seed 0 has no optimiser, lr: it is")):
        Runs([{"task": "mnist-deep", "seed": 0, "epochs": 1, "curve": {}}])


SCENES = {
    "three seeds": everything(),
    "one seed, some missing": everything(1, without=("sgd", "lamb", "nero-norm", "madam", "sigma-100")),
    "two seeds, one diverged": [diverged(one) if one["seed"] else one for one in everything(2)],
    "at chance and at zero error": [
        {**one, "curve": dict.fromkeys(one["curve"], [0.1 if one["optimiser"] != "nero" else 1.0] * one["epochs"])}
        for one in everything()
    ],
    "nothing": [],
}


@pytest.mark.no_cover  # matplotlib takes more than twice as long where it is traced, and a whole report is
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("task", FULL)
def test_figures_name_every_contender_clear_of_the_others(task: str, scene: str):
    figure = figures.draw(task, Runs(SCENES[scene]))
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_position()[0] > 1 and text.get_text()]
        assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
        assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    words = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    assert ("not run" in words) == (scene in ("nothing", "one seed, some missing") and _lacks(task, scene))
    assert ("1 seed" in words) == (scene == "one seed, some missing")


def _lacks(task: str, scene: str) -> bool:
    runs = Runs(SCENES[scene])
    return any(not runs.at(row) for row in all_published()[task].finals)


@pytest.mark.parametrize("wanted", [[0.5] * 5, [0.0, 0.0, 1.0, 1.0], [0.1, 0.12, 0.9], [1.0, 0.97, 0.94, 0.0], []])
def test_labels_keep_apart_and_inside(wanted: list[float]):
    placed = drawing.apart(wanted, 0.06)
    ranked = sorted(placed)
    assert all(high - low > 0.06 - 1e-9 for low, high in pairwise(ranked))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in placed)


def test_a_report_is_the_same_however_often_it_is_made(tmp_path: Path):
    records = everything(without=("sgd",))
    written = report(records, tmp_path)
    assert {path.name for path in written} == {
        "README.md",
        *(f"{task}{end}" for task in FULL for end in (".md", ".png")),
    }
    first = {path: path.read_bytes() for path in written}
    random.Random(1).shuffle(records)
    # where records lie is no part of them
    assert (
        report([{**one, "path": f"/elsewhere/{place}.json"} for place, one in enumerate(records)], tmp_path) == written
    )
    assert {path: path.read_bytes() for path in written} == first
    pixels = imread(tmp_path / "figures/mnist-deep.png")
    assert pixels.shape[-1] == 3 or pixels[..., 3].min() == 1  # opaque
    assert pixels[:8, :, :3].min() == pixels[:, :8, :3].min() == pixels[:, -8:, :3].min() == 1  # a white margin


def test_a_report_leaves_the_words_of_a_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nero_lab.report.figures.save", lambda *_: None)
    page = tmp_path / "mnist-deep.md"
    page.write_text("# Mine\n\nwords\n\n<!-- table: search -->\nold\n<!-- end -->\n\nmore \\1 words\n")
    report([], tmp_path)
    start, end = page.read_text().split("<!-- table: search -->")
    assert start == "# Mine\n\nwords\n\n"
    assert end.endswith("|\n\n<!-- end -->\n\nmore \\1 words\n")
    assert "old" not in end


@pytest.mark.parametrize(
    ("text", "words"),
    [("<!-- table: seeds -->\n", "close each with"), ("<!-- table: sedes -->\n<!-- end -->\n", "one of seeds, search")],
)
def test_a_page_with_broken_markers_is_refused_before_anything_is_written(tmp_path: Path, text: str, words: str):
    (tmp_path / "mnist-deep.md").write_text(text)
    with pytest.raises(StoreError, match=words):
        report([], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mnist-deep.md"]


def test_a_folder_that_cannot_be_written_into_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("words")
    for out in (tmp_path / "file", tmp_path / "file" / "pages"):
        with pytest.raises(StoreError, match=re.escape(f"cannot write into {out}: ") + ".*another folder by --out"):
            report([], out)
    assert (tmp_path / "file").read_text() == "words"


@pytest.mark.parametrize("spoil", [Path.mkdir, lambda path: path.write_bytes(b"\xff")])
def test_a_page_that_cannot_be_read_is_named(tmp_path: Path, spoil: Callable[[Path], object]):
    spoil(tmp_path / "mnist-deep.md")
    with pytest.raises(StoreError, match=re.escape(f"cannot read the page {tmp_path / 'mnist-deep.md'}: ")):
        report([], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mnist-deep.md"]


def test_a_figure_or_page_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "figures").write_text("words")
    with pytest.raises(StoreError, match=re.escape(f"cannot write {tmp_path / 'figures/mnist-deep.png'}: ")):
        report([], tmp_path)
    monkeypatch.setattr("nero_lab.report.figures.save", lambda *_: None)
    monkeypatch.setattr("nero_lab.report._page", lambda *_: "words")
    (tmp_path / "cifar10-vgg11.md").mkdir()
    with pytest.raises(StoreError, match=re.escape(f"cannot write {tmp_path / 'cifar10-vgg11.md'}: ")):
        report([], tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_the_committed_pages_are_what_the_committed_records_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "nero_lab.report.figures.save", lambda *_: None
    )  # the text is compared, and pixels vary with fonts
    copy = shutil.copytree(PAGES, tmp_path / "paper")
    report(committed(), copy)
    for page in sorted(PAGES.glob("*.md")):
        assert (copy / page.name).read_text() == page.read_text(), f"{page.name} is old: run `make paper`"


@pytest.mark.parametrize("task", FULL)
def test_a_page_has_its_figure_its_command_and_all_its_tables(task: str):
    text = (PAGES / f"{task}.md").read_text()
    assert set(re.findall("<!-- table: (.*) -->", text)) == set(tables.of_task(task, Runs([])))
    assert re.search(rf"^nero sweep {task}( --data DATA)?$", text, re.MULTILINE)
    assert "\nnero report\n" in text
    assert f"`out/paper/pages/{task}.md`" in text
    assert "## What differs and why\n" in text
    assert f"](figures/{task}.png)" in text
    assert (PAGES / f"figures/{task}.png").exists()


@pytest.mark.parametrize("task", FULL)
def test_a_page_says_what_we_found_or_that_nothing_was_run(task: str):
    _, _, after = (PAGES / f"{task}.md").read_text().partition("## What we found\n")
    found, _, _ = after.partition("\n## ")
    assert found.strip()
    if RESULTS.is_dir():
        not_run = re.fullmatch("Not run yet: [^\n]+", found.strip()) is not None
        assert not_run == all(one["task"] != task for one in committed())


@pytest.mark.parametrize("task", [task for task in FULL if task.startswith("cifar10")])
def test_pages_of_cifar_say_when_the_rate_drops(task: str):
    text = (PAGES / f"{task}.md").read_text()
    assert "after 100, 150 and 180 epochs" in text.partition("## What is run\n")[2].partition("\n## ")[0]
    assert "may count from one" in text.partition("## What differs and why\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    "page",
    [
        page.relative_to(ROOT)
        for where in ("", "docs", "docs/guide", "docs/paper", "docs/studies")
        for page in (ROOT / where).glob("*.md")
    ],
    ids=str,
)
def test_links_between_pages_hold(page: Path):
    """To files and to headings, by the anchors that GitHub makes: of punctuation, nothing is left in them."""
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), name
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


def test_published_numbers_have_sources():
    facts = json.loads((ROOT / "src/nero/paper/report/published.json").read_text())
    assert all(task["source"] and ("search" in task) == ("search_source" in task) for task in facts.values())
