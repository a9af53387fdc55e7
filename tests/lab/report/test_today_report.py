"""The study of today's optimisers: its rule, and its tables and figures from made-up records."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nero_lab.protocol import best_rate
from nero_lab.report.today import Study, read_study, width_near
from nero_lab.report.today.figures import FIGURES
from nero_lab.report.today.significance import is_better, welch_p
from nero_lab.report.today.tables import TABLES
from nero_lab.store import StoreError
from nero_lab.tasks import TASKS

EPOCHS = 4


def make_record(
    value: float | None, contender: str = "nero", rate: float = 0.01, seed: int = 0, task: str = "gpt", **changes: Any
) -> dict[str, Any]:
    """Return a record that ends at a value: bits per byte, or an error in per cent."""
    if task.startswith("gpt"):
        curve = {"valid_loss": [None if value is None else 3 * value + 1 / (step + 1) for step in range(EPOCHS)]}
        result = {"valid_bits_per_byte": value}
    else:
        accuracy = None if value is None else 1 - value / 100
        curve, result = {"test_accuracy": [0.1, 0.2, 0.3, accuracy]}, {"tta_accuracy": accuracy}
    curve["train_loss"] = [1.0, 1.0, 1.0, None if value is None else 1.0]
    names = {"task": task, "optimiser": contender, "lr": rate, "seed": seed, "epochs": EPOCHS, "precision": "bf16"}
    costs = {"seconds": 9.0, "side_by_side": 4, "state_bytes": 16, "parameters": 64}
    return {**names, "curve": curve, **result, **costs, **changes}


def search(values: dict[float, float | None], contender: str = "nero", **changes: Any) -> list[dict[str, Any]]:
    return [make_record(value, contender, rate, **changes) for rate, value in values.items()]


def seeds(values: list[float | None], contender: str, **changes: Any) -> list[dict[str, Any]]:
    return [make_record(value, contender, seed=seed, **changes) for seed, value in enumerate(values)]


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of a table's body."""
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_welch_agrees_with_published_values():
    # two-sided points of Student's t with 4 degrees of freedom: 2.776 at 0.05, 4.604 at 0.01
    for t, p in ((2.776, 0.05), (4.604, 0.01)):
        shift = t * math.sqrt(2 / 3)  # three values each, variance one
        assert welch_p([-1.0, 0.0, 1.0], [shift - 1, shift, shift + 1]) == pytest.approx(p, rel=1e-3)
    # Welch's correction: df = 1.06 for variances 1 and 100 of 30 and 2 values
    wide, narrow = [-10.0, 10.0], [(-1.0) ** i for i in range(30)]
    assert welch_p(narrow, [30 + x for x in wide]) == pytest.approx(0.2, abs=0.02)


LOW, WIDTH = [-1.0, 0.0, 1.0], math.sqrt(2 / 3)
LOST = [math.inf, math.inf]


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        (LOW, [x + 4.7 * WIDTH for x in LOW], True),
        (LOW, [x + 4.5 * WIDTH for x in LOW], False),
        ([x + 4.7 * WIDTH for x in LOW], LOW, False),
        # single seeds decide nothing
        ([1.0], [2.0, 2.001], False),
        ([1.0, 1.001], [2.0], False),
        ([], [2.0], False),
        ([1.0, 1.0], [1.0, 1.0], False),
        # a contender that always diverged is worse; one that diverged once is not decided
        ([1.0, 1.0], LOST, True),
        ([1.0, 1.0], [1.0, math.inf], False),
        (LOST, [1.0, 1.0], False),
    ],
)
def test_rule_decides_by_p_value_and_divergence(ours: list[float], theirs: list[float], wanted: bool):
    assert is_better(ours, theirs) == wanted


def test_width_interpolates_in_log_rate():
    width = width_near({0.01: 3.0, 0.1: 1.0, 1.0: 2.0}, best=0.1, limit=1.5)
    assert width.factor == pytest.approx(10 ** (1 / 4 + 1 / 2))
    assert not width.is_open


@pytest.mark.parametrize("end", [0.01, 1.0])
def test_width_where_grid_ends_first_is_open(end: float):
    values = {0.01: 3.0, 0.1: 1.0, 1.0: 3.0} | {end: 1.1}
    width = width_near(values, best=0.1, limit=1.5)
    assert width.is_open
    assert width.factor == pytest.approx(10 * 10 ** (1 / 4))


def test_width_beside_a_diverged_run_ends_at_the_last_rate():
    width = width_near({0.01: math.inf, 0.1: 1.0, 1.0: 1.2, 10.0: math.inf}, best=0.1, limit=1.5)
    assert width == pytest.approx((10.0, False))


def test_width_uses_one_per_cent_of_loss_and_a_point_of_error():
    study = Study(search({0.01: 1.0, 0.1: 1.02}) + search({0.01: 6.0, 0.1: 8.0}, task="vit"))
    for task in ("gpt", "vit"):
        assert study.width(task, "nero").factor == pytest.approx(math.sqrt(10))
        assert study.width(task, "nero").is_open


def test_width_of_one_rate_or_all_diverged_is_none():
    study = Study([*search({0.01: 1.0}), *search({0.01: None, 0.1: None}, "adamw")])
    assert study.width("gpt", "nero") is None
    assert study.width("gpt", "adamw") is None


def test_best_rate_is_chosen_as_the_sweep_does():
    low, high = search({0.01: 1.0, 0.02: 1.001})
    low["curve"]["valid_loss"][-1] = 9.0
    assert Study([low, high]).best_rate("gpt", "nero") == 0.02


def test_tie_of_rates_goes_to_the_usual_one_as_in_the_sweep():
    usual = TASKS["vit"].contenders["adamw"].best
    records = search({usual / 2: 10.0, usual: 10.0, 2 * usual: 10.0}, "adamw", task="vit")
    assert Study(records).best_rate("vit", "adamw") == best_rate(TASKS["vit"], records) == usual


def test_seeds_of_a_rate_have_one_precision():
    mixed = [make_record(2.0, precision="float32"), *seeds([1.0, 1.2, 1.1], "nero")]
    assert Study(mixed).values("gpt", "nero") == [1.0, 1.2, 1.1]


def test_state_of_contenders_that_diverged_on_a_seed_is_not_drawn():
    assert not FIGURES["gpt-state"].has_runs(Study(seeds([1.0, None], "nero")))
    assert FIGURES["gpt-state"].has_runs(Study([*seeds([1.0, None], "nero"), *seeds([1.1, 1.0], "adamw")]))


def test_best_rate_is_of_the_lowest_seed():
    study = Study([*search({0.01: 1.2, 0.02: 1.1, 0.04: None}), make_record(9.0, rate=0.02, seed=1)])
    assert study.best_rate("gpt", "nero") == 0.02
    assert study.values("gpt", "nero") == [1.1, 9.0]
    assert study.best_rate("gpt", "lion") is None


def test_best_rate_of_airbench_has_the_most_runs():
    runs = [make_record(6.0, rate=0.1, seed=seed, task="airbench") for seed in range(3)]
    study = Study([*runs, make_record(5.0, rate=0.2, task="airbench")])
    assert study.best_rate("airbench", "nero") == 0.1


def test_study_counts_the_last_of_repeated_runs():
    study = Study([make_record(1.0, finished="2026-02"), make_record(2.0, finished="2026-01")])
    assert study.values("gpt", "nero") == [1.0]


def test_study_leaves_out_short_runs_and_says_so():
    short = make_record(0.5, "adamw", epochs=1)
    study = Study([*seeds([1.0, 1.1], "nero"), short])
    assert study.short == {"gpt": 1}
    assert study.values("gpt", "adamw") == []
    assert "1 run" in TABLES["gpt"](study).splitlines()[-1]


def test_record_without_its_measure_raises_unless_diverged():
    whole, diverged = make_record(1.0), make_record(None)
    del whole["valid_bits_per_byte"], diverged["valid_bits_per_byte"]
    assert Study([diverged]).values("gpt", "nero") == [math.inf]
    with pytest.raises(StoreError, match="valid_bits_per_byte"):
        Study([whole])
    with pytest.raises(StoreError, match="curve test_accuracy"):
        Study([{**whole, "task": "vit"}])


def test_diverged_run_with_finite_accuracy_is_infinite():
    record = make_record(7.0, task="vit")
    record["curve"]["train_loss"][-1] = None
    assert Study([record]).values("vit", "nero") == [math.inf]


def test_ranking_names_who_is_better_than_whom():
    values = {"muon": [1.0, 1.001, 1.002], "nero": [1.1, 1.101, 1.102], "adamw": [1.1005, 1.1015, 1.1025]}
    values |= {"lion": [None, None]}
    study = Study([record for name, found in values.items() for record in seeds(found, name)])
    rows = {row[1].strip("*"): row for row in rows_of(TABLES["gpt"](study)) if row[0] != "-"}
    assert [rows[name][-1] for name in ("Muon", "Nero", "AdamW", "Lion")] == ["2 to 4", "4", "4", "none"]
    assert rows["Lion"][2] == "2 of 2 diverged"
    assert rows["Nero"][2] == "1.1010 ± 0.0010"
    assert rows["Nero"][6] == "0.25"
    assert rows_of(TABLES["gpt-ours"](study)) == [["**Nero**", "Lion", "Muon", "AdamW"]]


def test_ranking_marks_best_rates_at_the_ends_of_the_grid():
    grids = {"nero": {0.1: 1.0, 0.2: 1.1}, "muon": {0.1: 1.1, 0.2: 1.0}, "lion": {0.1: 1.1, 0.2: 1.0, 0.4: 1.1}}
    study = Study([record for name, values in grids.items() for record in search(values, name)])
    rates = {row[1].strip("*"): row[4] for row in rows_of(TABLES["gpt"](study)) if row[0] != "-"}
    assert rates == {"Nero": "≤ 0.1", "Muon": "≥ 0.2", "Lion": "0.2"}


def test_ranking_of_single_seeds_decides_nothing():
    study = Study([make_record(1.0, "muon"), make_record(2.0, "nero")])
    assert {row[-1] for row in rows_of(TABLES["gpt"](study))} == {"-"}
    assert {row[3] for row in rows_of(TABLES["gpt"](study)) if row[0] != "-"} == {"1 seed"}
    assert "(1 seed)" in TABLES["overview"](study)


def test_seconds_are_those_of_the_benchmark(tmp_path: Path):
    rows = [{"task": "mnist-deep", "optimiser": "nero", "seconds_in_full": 9.0}]
    rows += [{"task": "gpt", "optimiser": "nero", "seconds_of_steps": 12.345}]
    path = tmp_path / "benchmarks/results/suite-cuda.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"rows": rows}))
    study = Study([make_record(1.0, "nero"), make_record(2.0, "muon")], read_study(tmp_path).seconds)
    assert [row[7] for row in rows_of(TABLES["gpt"](study))[:2]] == ["12.3", "not timed"]


@pytest.mark.parametrize("missing", [[], ["muon"]])
def test_curves_have_a_panel_by_time_if_all_were_timed(missing: list[str]):
    seconds = {("gpt", "nero"): 10.0, ("gpt", "muon"): 30.0}
    for name in missing:
        del seconds["gpt", name]
    axes = FIGURES["gpt-curves"].draw(Study([make_record(1.0, "nero"), make_record(2.0, "muon")], seconds)).axes
    assert len(axes) == (1 if missing else 2)
    if not missing:
        assert [line.get_xdata()[-1] for line in axes[0].lines[::2]] == [10.0, 30.0]


def test_contender_that_takes_far_longer_leaves_the_panel_by_time():
    names = ("nero", "muon", "soap")
    seconds = dict(zip((("gpt", name) for name in names), (10.0, 12.0, 50.0), strict=True))
    by_time, by_steps = FIGURES["gpt-curves"].draw(Study([make_record(1.0, name) for name in names], seconds)).axes
    assert by_time.get_xlim() == (0, 24)
    assert {line.get_xdata()[-1] for line in by_steps.lines[:3]} == {400.0}
    assert [text.get_text() for text in by_steps.texts] == [
        f"{name}  3.250, 1 seed" for name in ("Nero", "Muon", "SOAP")
    ]


def test_overview_marks_results_of_fewer_than_three_seeds():
    study = Study([*seeds([1.0, 1.1], "muon"), *seeds([2.0, 2.0, 2.0], "nero")])
    cells = {row[0].strip("*"): row[1] for row in rows_of(TABLES["overview"](study))}
    assert cells == {"Muon": "1.0500 (2 seeds)", "Nero": "2.0000"}  # contenders without a run have no row


@pytest.mark.parametrize(
    ("second", "is_bold"),
    [
        ([2.0, 2.001, 2.002], True),
        ([1.0005, 1.0015, 1.0025], False),
        ([2.0], False),
        ([None, None], True),
        (None, False),
    ],
    ids=["decided", "close", "one seed", "diverged", "not run"],
)
def test_overview_best_is_bold_where_the_rule_decides(second: list[float | None] | None, is_bold: bool):
    others = set(TASKS["gpt"].contenders) - {"muon", "adamw"}
    records = [record for other in others for record in seeds([3.0, 3.001, 3.002], other)]
    study = Study([*records, *seeds([1.0, 1.001, 1.002], "muon"), *(seeds(second, "adamw") if second else [])])
    cells = {row[0]: row[1] for row in rows_of(TABLES["overview"](study))}
    assert cells["Muon"] == ("**1.0010**" if is_bold else "1.0010")
    assert "**" not in cells.get("AdamW", "")


def test_transfer_gives_best_rates_and_cost_of_keeping_one():
    small, large = search({0.01: 1.0, 0.02: 1.1}, task="gpt-w256"), search({0.01: 1.1, 0.02: 1.0}, task="gpt-w1024")
    (row,) = rows_of(TABLES["widths"](Study(small + large)))
    assert row == ["**Nero**", "≤ 0.01 (1.0000)", "not run", "≥ 0.02 (1.0000)", "2", "10.00 %"]


def test_transfer_has_no_best_rate_of_one_run():
    one, two = {0.01: 1.0}, {0.01: 1.1, 0.02: 1.0}
    (row,) = rows_of(TABLES["widths"](Study(search(one, task="gpt-w256") + search(two, task="gpt-w1024"))))
    assert row[1:5] == ["0.01 alone (1.0000)", "not run", "≥ 0.02 (1.0000)", "-"]
    (row,) = rows_of(TABLES["widths"](Study(search(two, task="gpt-w256") + search({0.02: 1.0}, task="gpt-w1024"))))
    assert row[3:] == ["0.02 alone (1.0000)", "-", "-"]


def test_airbench_counts_runs_at_the_target():
    study = Study(seeds([5.0, 6.0, 7.0, 8.0], "sgd", task="airbench"), {("airbench", "sgd"): 2.5})
    row = rows_of(TABLES["airbench"](study))[0]
    assert row[3:8] == ["4", "93.500", f"{math.sqrt(5 / 3) / 2:.3f}", "50 %", "2.50"]


def all_records() -> list[dict[str, Any]]:
    """Return a study with every task, diverged runs and missing numbers."""
    records = []
    for task in ("gpt", "gpt-large", "gpt-w256", "gpt-d16", "gpt-w1024", "vit"):
        for place, contender in enumerate(("nero", "muon", "unknown")):
            near = 1 + 0.1 * place
            records += search({0.01: near, 0.02: 1.3 * near, 0.04: 9.0, 0.08: None}, contender, task=task)
    records += search({0.01: None, 0.02: None}, "lion")
    records += seeds([6.0, 6.1], "muon", task="airbench") + seeds([None], "nero", task="airbench")
    del records[0]["state_bytes"]
    return records


@pytest.mark.parametrize(
    ("records", "names"),
    [
        (all_records(), list(FIGURES)),
        (search({0.01: None}), ["gpt-rates", "gpt-curves"]),
        (search({0.01: 5.0}, task="vit"), ["vit-rates", "vit-curves"]),
    ],
    ids=["full", "diverged", "one run"],
)
def test_figures_draw_any_study(records: list[dict[str, Any]], names: list[str]):
    study = Study(records)
    assert [name for name, figure in FIGURES.items() if figure.has_runs(study)] == names
    for name in names:
        figure = FIGURES[name].draw(study)
        assert any(axes.lines for axes in figure.axes)
        if len(records) == 1:
            figure.draw_without_rendering()


@pytest.mark.parametrize("records", [[], all_records()], ids=["empty", "full"])
def test_tables_have_no_long_cell(records: list[dict[str, Any]]):
    study = Study(records)
    for name, table in TABLES.items():
        assert max(len(cell) for row in [[""], *rows_of(table(study))] for cell in row) <= 80, name
