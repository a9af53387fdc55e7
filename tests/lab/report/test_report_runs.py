"""Selection of runs: precision, repetition, length and data decide which run counts."""

from report_samples import NERO, cells, diverge, make_record, vgg_cells

from nero_lab.report.runs import Runs
from nero_lab.report.tables import task_tables


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
