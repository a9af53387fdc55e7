"""Tables over all tasks: what was run, Table 1, and the experiments outside it."""

import pytest
from report_samples import NERO, cells, diverge, make_all_records, make_record

from nero_lab.report.markdown import DIVERGED_NOTE
from nero_lab.report.overview import compact_table1, full_table1, index_table, others_table
from nero_lab.report.published import all_published
from nero_lab.report.runs import Runs


def coverage(task: str, *records: dict) -> str:
    return next(line[-1] for line in cells(index_table(Runs(records))) if line[0].startswith(f"[{task}]"))


def test_index_counts_the_seeds_of_each_contender():
    nero = [make_record(*NERO, seed, 0.88) for seed in range(3)]
    sgd = make_record("cifar10-vgg11", "sgd", 0.1, 0, 0.87, precision="tf32")
    assert coverage("cifar10-vgg11") == "not run"
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
    assert table[1] == ["", "", "paper", "11.16 ± 0.17", "12.61 ± 0.21", "12.86 ± 0.34", "13.66 ± 0.05"]
    assert len(table) == 2 * sum(facts.table1_name is not None for facts in all_published().values())


def test_full_table_1_prints_the_papers_spread():
    table = cells(full_table1(Runs([])))
    place = next(place for place, line in enumerate(table) if line[0].startswith("Multi30k"))
    assert table[place + 1][2:] == ["paper", "11.35 ± 1.20", "92.40 ± 89.48", "12.63 ± 0.34", "16.36 ± 0.29"]


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
    table = cells(others_table(Runs([make_record("mnist-deep", "nero", 0.001, 0, 0.92)])))
    assert table[0][2:] == ["Nero", "94.00 (1 seed)", "93.25 ± 4.28", "authors' stored runs"]
    sources = {line[0].partition("]")[0][1:]: line[-1] for line in table if line[0]}
    assert sources["mnist-reparameterised"] == "authors' stored runs"
    assert sources["cifar10-ablation"] == "paper"
    assert sources["imagenet"] == "paper: no number is printed"


def test_overview_tables_have_every_task_once():
    table1 = {facts.table1_name for facts in all_published().values() if facts.table1_name}
    others = [line[0] for line in cells(others_table(Runs([]))) if line[0]]
    assert {line[0] for line in cells(full_table1(Runs([]))) if line[0]} == table1
    assert len(table1) + len(others) == len(all_published())


@pytest.mark.parametrize("table", [index_table, full_table1, compact_table1, others_table])
def test_overview_cells_have_at_most_80_characters(table):
    assert all(len(cell) <= 80 for line in cells(table(Runs(make_all_records(1)))) for cell in line)
