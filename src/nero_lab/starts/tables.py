"""The tables of docs/studies/starts.md."""

import statistics
from typing import Any

from nero_lab.report.markdown import render_table, seeds_note
from nero_lab.starts.cases import CASES

GAINS = ("zero-gain", "layer-scale", "convnext", "gemma")
NEURONS = ("lora", "control", "zero-head", "adaln", "zero-projection")
#: Columns by title: a contender and its rate.
GAIN_COLUMNS = {
    "mean size": ("before", 0.01),
    "at least 0.01": ("hundredth", 0.01),
    "at least 0.1": ("tenth", 0.01),
    "at least 1": ("ball", 0.01),
}
NEURON_COLUMNS = {
    "jump": ("before", 0.01),
    "norm grows by η": ("forced", 0.01),
    "free, then held": ("held", 0.01),
    "in the ball": ("ball", 0.01),
    "in the ball, mean free": ("ball-uncentred", 0.01),
}
RIVALS = {f"AdamW {rate:g}": ("adamw", rate) for rate in (0.0003, 0.001, 0.003)}
NERO = {"`nero.Nero(model)`": ("nero", 0.01)}


def losses(records: list[dict[str, Any]], case: str, contender: str, lr: float) -> list[float]:
    """Return the validation losses of a contender, by seed."""
    cell = [run for run in records if (run["case"], run["contender"], run["lr"]) == (case, contender, lr)]
    by_seed = {run["seed"]: run["valid"] for run in cell}  # of repeated runs the last counts
    return [by_seed[seed] for seed in sorted(by_seed)]


def starts_tables(records: list[dict[str, Any]]) -> dict[str, str]:
    """Return the tables by name."""
    return {
        "neurons": _table(records, NEURONS, {**NERO, **NEURON_COLUMNS, **RIVALS}),
        "gains": _table(records, GAINS, {**NERO, **GAIN_COLUMNS, **RIVALS}),
    }


def _table(records: list[dict[str, Any]], cases: tuple[str, ...], columns: dict[str, tuple[str, float]]) -> str:
    rows = []
    for case in cases:
        cells = [losses(records, case, *column) for column in columns.values()]
        rows.append([CASES[case].title, *map(_cell, cells)])
    return render_table(["case", *columns], rows)


def _cell(found: list[float]) -> str:
    return f"{statistics.fmean(found):.3f}{seeds_note(len(found))}" if found else "-"
