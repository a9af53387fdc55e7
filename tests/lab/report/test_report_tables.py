"""Records that a report reads, and its tables: every number is that of the records or of the paper."""

import json
import math
from typing import Any

import pytest
from report_samples import EPOCHS, NERO, ROOT, Record, cells, diverge, make_all_records, make_record, vgg_cells

from nero_lab.report.markdown import DIVERGED_NOTE
from nero_lab.report.overview import compact_table1, full_table1, index_table, others_table
from nero_lab.report.published import all_published
from nero_lab.report.runs import Runs, parse_record
from nero_lab.report.tables import task_tables
from nero_lab.store import StoreError
from nero_lab.tasks import TASKS


def test_three_seeds_stand_beside_the_paper():
    nero, sgd, *_ = vgg_cells(*(make_record(*NERO, seed, end) for seed, end in enumerate((0.89, 0.88, 0.90))))
    spread = f"{100 * math.sqrt(2 / 3) * 0.01:.2f}"
    assert nero == [
        "Nero", "0.01", "11.00", "12.00", "10.00", f"11.00 ± {spread}", "11.16 ± 0.17", "-0.16", "-0.9", "float32",
    ]  # fmt: skip
    assert sgd == ["SGD", "0.1", *["not run"] * 4, "12.61 ± 0.21", "-", "-", "-"]


def test_other_number_of_seeds_than_three_is_named():
    assert vgg_cells(make_record(*NERO, 0, 0.88))[0][2:6] == ["12.00", "not run", "not run", "12.00 (1 seed)"]
    assert vgg_cells(make_record(*NERO, 0, 0.88), make_record(*NERO, 1, 0.90))[0][5] == "11.00 ± 1.00 (2 seeds)"
    table = vgg_cells(*(make_record(*NERO, seed, 0.88) for seed in range(5)))
    assert table[0][2:8] == ["12.00"] * 5 + ["12.00 ± 0.00 (5 seeds)"]


def test_run_at_another_rate_is_named_but_not_counted():
    records = [make_record("cifar10-vgg11", "nero", rate, 0, 0.5) for rate in (0.1, 0.001)]
    assert vgg_cells(*records)[0][5] == "not run (but at 0.001, 0.1)"
    assert [line[:3] for line in vgg_cells(*records, table="runs")] == [["Nero", "0.001", "0"], ["Nero", "0.1", "0"]]


def test_several_seeds_at_another_rate_have_a_row():
    records = [make_record("cifar10-vgg11", "adam", 0.0001, seed, 0.9) for seed in (0, 1, 2)]
    records.append(make_record("cifar10-vgg11", "adam", 0.001, 0, 0.85))
    rows = [line for line in vgg_cells(*records) if line[0] == "Adam"]
    assert [line[1] for line in rows] == ["0.001", "0.0001"]
    assert [line[5] for line in rows] == ["15.00 (1 seed)", "10.00 ± 0.00"]


def test_diverged_run_is_marked_in_seeds_and_runs():
    records = [diverge(make_record(*NERO, 0, 0.88)), make_record(*NERO, 1, 0.88)]
    assert vgg_cells(*records)[0][2:8] == [
        "90.20†", "12.00", "not run", "51.10 ± 39.10† (2 seeds)", "11.16 ± 0.17", "+39.94",
    ]  # fmt: skip
    assert vgg_cells(records[0])[0][5] == "90.20† (1 seed)"
    assert [line[4:6] for line in vgg_cells(*records, table="runs")] == [["9.88†", "90.20†"], ["90.00", "12.00"]]
    for found, is_marked in ((records, True), (records[1:], False), ([], False)):
        tables = task_tables("cifar10-vgg11", Runs(found))
        for text in (tables["seeds"], tables["runs"]):
            assert (DIVERGED_NOTE in text) == ("†" in text) == is_marked


def test_diverged_run_is_marked_in_search_epochs_precision():
    kinds = ("float32", "tf32")
    records = [diverge(make_record("mnist-deep", "nero", 0.1, 0, 0.5, precision=kind)) for kind in kinds]
    tables = task_tables("mnist-deep", Runs(records))
    assert cells(tables["search"])[3] == ["Nero", "0.1", "9.88†", "10.44", "9.80†", "10.28"]
    assert cells(tables["precision"])[0][4:] == ["9.88†", "9.88†", "90.20†", "90.20†"]
    assert tables["search"].endswith(DIVERGED_NOTE)
    assert tables["precision"].endswith(DIVERGED_NOTE)
    records = [diverge(make_record("mnist-reparameterised", "sigma-1", 0.01, seed, 0.98)) for seed in range(3)]
    by_epoch = cells(task_tables("mnist-reparameterised", Runs(records))["epochs"])
    assert by_epoch[0][3:5] == ["47.20 ± 0.00", "9.88 ± 0.00†"]
    assert not any("†" in cell for cell in by_epoch[1])


def test_short_runs_are_left_out_and_counted():
    short = make_record(*NERO, 0, 0.88, epochs=20)
    assert vgg_cells(short)[0][5] == "not run"
    for count, words in ((1, "1 record."), (2, "2 records.")):
        text = task_tables("cifar10-vgg11", Runs([short] * count))["runs"]
        assert text.startswith("not run")
        assert text.endswith(f": {words}")
        line = next(line for line in cells(index_table(Runs([short] * count))) if "cifar10-vgg11" in line[0])
        assert line[-1].startswith("not run for all 199 epochs")


def test_search_table_has_every_cell():
    records = [make_record("mnist-deep", "nero", 0.001, 0, 0.9), make_record("mnist-deep", "adam", 0.1, 0, 0.1)]
    table = cells(task_tables("mnist-deep", Runs(records))["search"])
    assert len(table) == 16
    assert table[1] == ["Nero", "**0.001**", "92.00", "95.75", "90.00", "89.26"]
    assert table[11] == ["Adam", "0.1", "12.00", "9.87", "10.00", "9.80"]
    assert table[0][2:] == ["not run", "94.33", "not run", "27.04"]


def test_text_tasks_show_perplexities():
    records = [make_record("wikitext2", "nero", 0.01, seed, end) for seed, end in enumerate((172.0, 173.0, 174.0))]
    records.append(make_record("wikitext2", "adam", 0.0001, 0, 178.0, precision="tf32"))
    records.append(diverge(make_record("wikitext2", "sgd", 1.0, 0, 180.0)))
    records.append(make_record("wikitext2", "nero", 0.01, 0, 172.5, precision="tf32"))
    tables = task_tables("wikitext2", Runs(records))
    nero, sgd, adam, lamb = cells(tables["seeds"])
    assert nero[2:8] == ["172.00", "173.00", "174.00", "173.00 ± 0.82", "172.99 ± 0.51", "+0.01"]
    assert sgd[2] == "inf†"
    assert sgd[5] == "inf† (1 seed)"
    assert adam[5:9] == ["178.00 (1 seed)", "178.05 ± 0.96", "-0.05", "-0.1"]
    assert lamb[5] == "not run"
    (line,) = cells(tables["precision"])
    assert line == ["Nero", "0.01", "0", "20", "172.00", "172.50", f"{172 * math.exp(-0.05):.2f}", line[7]]
    assert "| validation perplexity | test perplexity |" in tables["runs"]


def test_infinite_perplexities_have_an_infinite_difference():
    records = [diverge(make_record("wikitext2", "sgd", 1.0, seed, 180.0)) for seed in (0, 1)]
    sgd = cells(task_tables("wikitext2", Runs(records))["seeds"])[1]
    assert sgd[5:9] == ["inf† (2 seeds)", "181.76 ± 0.49", "inf", "inf"]


def test_translation_search_says_where_a_log_ends():
    tables = task_tables("translation", Runs([make_record("translation", "nero", 0.001, 0, 12.0)]))
    search = cells(tables["search"])
    assert search[0][:2] == ["Nero", "0.0001"]
    assert search[1] == ["Nero", "**0.001**", "12.00", "12.28"]
    assert [line[3] for line in search[2:5]] == ["2544.58", "314.32 (epoch 29)", "16625.04 (epoch 14)"]
    assert search[9] == ["Adam", "1", "not run", "inf (epoch 46)"]
    assert search[14][3] == "182.32 (epoch 94)"
    assert [line[3] for line in search[-3:]] == ["2.01e+10", "2.74e+14", "inf (epoch 51)"]
    assert "| validation, ours | validation, authors |" in tables["search"]


def test_bleu_is_shown_where_it_was_measured():
    options = ({"test_bleu": 35.125}, {})
    records = [make_record("translation", "nero", 0.001, seed, 12.0, **more) for seed, more in enumerate(options)]
    assert [line[6] for line in cells(task_tables("translation", Runs(records))["runs"])] == ["35.12", "-"]


def test_games_show_returns():
    played = [make_record("pong", "nero", 0.01, seed, 20.0 + seed) for seed in range(3)]
    nero = cells(task_tables("pong", Runs(played))["seeds"])[0]
    assert nero[2:8] == ["20.00", "21.00", "22.00", "21.00 ± 0.82", "20.62 ± 0.05", "+0.38"]
    diverged = diverge(make_record("pong", "lamb", 0.001, 0, -20.0))
    assert cells(task_tables("pong", Runs([diverged]))["seeds"])[3][2] == "-†"


def test_contender_without_a_published_number_has_dashes():
    record = make_record("pong", "lamb-momentum", 0.001, 0, 15.0)
    row = cells(task_tables("pong", Runs([record]))["seeds"])[4]
    assert row[-5:] == ["15.00 (1 seed)", "-", "-", "-", "float32"]
    assert cells(task_tables("pong", Runs([]))["seeds"])[4][-5:] == ["not run", "-", "-", "-", "-"]


def test_fid_is_shown_where_it_was_measured():
    record = make_record("cgan", "nero", 0.01, 0, 20.0)
    assert "FID to" not in task_tables("cgan", Runs([record]))["runs"]
    record["curve"] |= {"train_fid": record["curve"]["train_distance"], "test_fid": [15.5] * record["epochs"]}
    table = task_tables("cgan", Runs([record]))["runs"]
    assert "FID to test images" in table
    assert "15.50" in cells(table)[0]


def test_stand_in_is_named_and_not_compared():
    records = [make_record("imagenet", "nero-tuned", 0.02, 0, 0.6, data="tiny-imagenet")]
    tables = task_tables("imagenet", Runs(records))
    note, _, header, *_ = tables["seeds"].splitlines()
    assert "tiny-imagenet" in note
    assert "difference" not in header
    assert "paper: no number is printed" in header
    (line,) = cells(tables["runs"])
    assert line[-4:] == ["tiny-imagenet", "93", "4", "NVIDIA H200"]


def test_zero_spread_is_not_divided_by():
    table = cells(task_tables("mnist-deep", Runs([make_record("mnist-deep", "adam", 0.001, 0, 0.1)]))["seeds"])
    assert table[2][-3:] == ["+0.76", "spread is 0", "float32"]


def test_epochs_table_compares_every_epoch():
    records = [make_record("mnist-reparameterised", "sigma-1", 0.01, seed, 0.98) for seed in range(3)]
    table = cells(task_tables("mnist-reparameterised", Runs(records))["epochs"])
    assert [line[1] for line in table] == ["ours", "authors", "ours", "authors"]
    assert table[0][-1] == "100.00 ± 0.00"
    assert table[1][2] == "94.18 ± 0.03"
    assert table[2][2:] == ["not run"] * 5


def test_granularity_takes_neros_rows_from_the_ablation():
    records = [make_record("cifar10-ablation", "nero-both", 0.02, seed, 0.91) for seed in range(3)]
    table = {line[0]: line for line in cells(task_tables("cifar10-granularity", Runs(records))["seeds"])}
    assert table["Nero (both constraints)"][5] == "9.00 ± 0.00"
    assert list(table) == [
        "Madam", "Nero (neither constraint)", "LAMB", "Madam (balanced)", "Nero (both constraints)", "LAMB (balanced)",
    ]  # fmt: skip


def test_runs_table_counts_runs_of_one_process():
    text = task_tables("cifar10-vgg11", Runs([make_record(*NERO, 0, 0.88, side_by_side=6)]))["runs"]
    header = text.splitlines()[0].strip("|").split("|")
    assert dict(zip(map(str.strip, header), cells(text)[0], strict=True))["side by side"] == "6"


def coverage(task: str, *records: dict) -> str:
    return next(line[-1] for line in cells(index_table(Runs(records))) if line[0].startswith(f"[{task}]"))


def test_index_counts_the_seeds_of_each_contender():
    nero = [make_record(*NERO, seed, 0.88) for seed in range(3)]
    sgd = make_record("cifar10-vgg11", "sgd", 0.1, 0, 0.87, precision="tf32")
    assert coverage("cifar10-vgg11", {**nero[0], "lr": 0.5}) == "not run"
    assert coverage("cifar10-vgg11", *nero) == "float32: 3 seeds of Nero; SGD, Adam, LAMB not run"
    assert coverage("cifar10-vgg11", *nero, sgd) == "float32, tf32: 3 seeds of Nero; 1 of SGD; Adam, LAMB not run"
    assert coverage("cifar10-vgg11", *make_all_records(1)) == "float32: 1 seed each"


def test_index_names_a_stand_in():
    data = "cats-3-classes-1200-images-of-64-0123abcd"
    record = make_record("imagenet", "nero-tuned", 0.02, 0, 0.6, data=data)
    assert coverage("imagenet", record).endswith("; on cats (3 classes, 1,200 images)")


def test_index_names_unknown_tasks():
    assert "chess (1)" in index_table(Runs([make_record("chess", "nero", 0.01, 0, 0.9)]))


def test_full_table_1_has_ours_above_the_paper():
    table = cells(full_table1(Runs([make_record(*NERO, seed, 0.88) for seed in range(2)])))
    assert table[0] == [
        "CIFAR-10, VGG-11", "test error, %", "ours", "12.00 ± 0.00 (2 seeds)", "not run", "not run", "not run",
    ]  # fmt: skip
    assert table[1:] == [["", "", "paper", "11.16 ± 0.17", "12.61 ± 0.21", "12.86 ± 0.34", "13.66 ± 0.05"]]


def test_full_table_1_prints_the_papers_spread():
    table = cells(full_table1(Runs([make_record("translation", "nero", 0.01, 0, 11.0)])))
    assert table[1][2:] == ["paper", "11.35 ± 1.20", "92.40 ± 89.48", "12.63 ± 0.34", "16.36 ± 0.29"]


def test_compact_table_1_has_ours_and_paper_in_a_cell():
    records = [make_record(*NERO, seed, 0.88) for seed in range(3)]
    records.append(diverge(make_record("cifar10-vgg11", "sgd", 0.1, 0, 0.87)))
    text = compact_table1(Runs(records))
    assert cells(text)[0] == [
        "CIFAR-10, VGG-11", "test error, %", "12.00 / 11.16", "90.20† (1 seed) / 12.61", "not run / 12.86",
        "not run / 13.66",
    ]  # fmt: skip
    assert text.endswith(DIVERGED_NOTE)
    assert len(cells(text)) == 6


def test_compact_table_1_names_both_measures_of_the_gan():
    line = next(line for line in cells(compact_table1(Runs([]))) if "GAN" in line[0])
    assert "(ours)" in line[1]
    assert "FID (paper)" in line[1]


def test_others_table_names_the_source_of_each_number():
    tasks = ("mnist-reparameterised", "cifar10-ablation", "imagenet")
    records = [make_record("mnist-deep", "nero", 0.001, 0, 0.92), *make_all_records(1, tasks=tasks)]
    table = cells(others_table(Runs(records)))
    assert table[0][2:] == ["Nero", "94.00 (1 seed)", "93.25 ± 4.28", "authors' stored runs"]
    sources = {line[0].partition("]")[0][1:]: line[-1] for line in table if line[0]}
    assert sources["mnist-reparameterised"] == "authors' stored runs"
    assert sources["cifar10-ablation"] == "paper"
    assert sources["imagenet"] == "paper: no number is printed"


def test_overview_tables_have_every_task_once():
    table1 = {facts.table1_name for facts in all_published().values() if facts.table1_name}
    runs = Runs(make_all_records(1))
    others = [line[0] for line in cells(others_table(runs)) if line[0]]
    assert {line[0] for line in cells(full_table1(runs)) if line[0]} == table1
    assert len(table1) + len(others) == len(all_published())


@pytest.mark.parametrize("table", [index_table, full_table1, compact_table1, others_table])
def test_overview_cells_have_at_most_80_characters(table):
    assert all(len(cell) <= 80 for line in cells(table(Runs(make_all_records(1)))) for cell in line)


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


def test_precision_of_the_most_seeds_counts_then_float32():
    records = [
        make_record(*NERO, 0, 0.88, precision="tf32"),
        make_record(*NERO, 0, 0.89),
        make_record(*NERO, 1, 0.87, precision="tf32"),
    ]
    for order in (records, records[::-1]):
        assert vgg_cells(*order)[0][2:6] == ["12.00", "13.00", "not run", "12.50 ± 0.50 (2 seeds)"]
        assert vgg_cells(*order)[0][-1] == "tf32"
        assert vgg_cells(*order, table="precision") == [
            ["Nero", "0.01", "0", "199", "91.00", "90.00", "11.00", "12.00"]
        ]
        assert [line[3] for line in vgg_cells(*order, table="runs")] == ["float32", "tf32", "tf32"]
    assert vgg_cells(*records[:2])[0][-1] == "float32"
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
