"""Synthetic records for the tests of the report."""

import math
import random
from pathlib import Path
from typing import Any

from nero_lab.report.published import all_published
from nero_lab.report.runs import Runs
from nero_lab.report.tables import task_tables

ROOT = Path(__file__).parents[3]
EPOCHS = {task: facts.epochs for task, facts in all_published().items()}
#: Task, optimiser and rate of Nero's row of VGG-11.
NERO = ("cifar10-vgg11", "nero", 0.01)
Record = dict[str, Any]


def make_record(task: str, optimiser: str, lr: float, seed: int, end: float, **changes: Any) -> Record:
    """Make a record whose test accuracy, perplexity, distance or return reaches ``end``."""
    epochs = changes.pop("epochs", EPOCHS.get(task, 3))
    curves = {"pong": game_curve, "cgan": image_curve, "wikitext2": text_curve, "translation": text_curve}
    return {
        "task": task, "optimiser": optimiser, "lr": lr, "seed": seed, "epochs": epochs, "batch": 128,
        "precision": "float32", "curve": curves.get(task, label_curve)(epochs, end), "commit": "0" * 12, "versions": {},
        "device": "NVIDIA H200", "side_by_side": 4, "seconds": 93.1, "finished": "2026-11-15T08:00:00+00:00", **changes,
    }  # fmt: skip


def label_curve(epochs: int, end: float) -> Record:
    test = [0.1 + (end - 0.1) * epoch / epochs for epoch in range(1, epochs + 1)]
    train = [min(1.0, value + 0.02) for value in test]
    return {"train_loss": [1.0] * epochs, "test_loss": [1.0] * epochs, "train_accuracy": train, "test_accuracy": test}


def game_curve(epochs: int, end: float) -> Record:
    reward = [-21 + (end + 21) * epoch / epochs for epoch in range(1, epochs + 1)]
    return {"reward": reward, "policy_loss": [0.1] * epochs}


def image_curve(epochs: int, end: float) -> Record:
    """Measure a distance every tenth epoch."""
    values = [None if epoch % 10 else 100 + (end - 100) * epoch / epochs for epoch in range(1, epochs + 1)]
    return {"generator_loss": [0.1] * epochs, "train_distance": values, "test_distance": values}


def text_curve(epochs: int, end: float) -> Record:
    start, last = math.log(1000), math.log(min(end, 1e9))
    losses = [start + (last - start) * epoch / epochs for epoch in range(1, epochs + 1)]
    shifts = {"train": 0.1, "valid": 0.0, "test": -0.05}
    curve = {f"{part}_loss": [loss + shift for loss in losses] for part, shift in shifts.items()}
    return {**curve, **{f"{part}_accuracy": [0.2] * epochs for part in shifts}}


def diverge(record: Record) -> Record:
    """Return the record with no finite loss in its second half, and the accuracies of a constant answer."""
    half = record["epochs"] // 2
    ends = {"train_accuracy": 0.09875, "test_accuracy": 0.098, "valid_accuracy": 0.0}
    curve = {name: values[:half] + [ends.get(name)] * (len(values) - half) for name, values in record["curve"].items()}
    return {**record, "curve": curve}


def make_all_records(seeds: int = 3, without: tuple[str, ...] = (), tasks: tuple[str, ...] = ()) -> list[Record]:
    """Make records of every published row, near its numbers, and of every cell of the searches."""
    chance = random.Random(0)
    records: list[Record] = []
    for task, facts in all_published().items():
        if tasks and task not in tasks:
            continue
        for row in facts.rows:
            if row.task == task and row.optimiser not in without:
                end = _end_of(facts.measure, row.mean)
                ends = [end + chance.uniform(-0.003, 0.003) for _ in range(seeds)]
                records += [make_record(task, row.optimiser, row.rate, seed, end) for seed, end in enumerate(ends)]
        for cell in facts.search:
            if not any((record["optimiser"], record["lr"]) == (cell.optimiser, cell.rate) for record in records):
                (end, *_) = cell.ends.values()
                end = end if task == "translation" else max(0.0, end / 100 - 0.02)
                records.append(make_record(task, cell.optimiser, cell.rate, 0, end))
    return records


def _end_of(measure: str, mean: float) -> float:
    if math.isnan(mean):
        return 0.7 if measure == "test_error" else 15.0
    if measure == "train_accuracy":
        return mean / 100 - 0.02
    return 1 - mean / 100 if measure == "test_error" else mean


def cells(table: str) -> list[list[str]]:
    """Return the cells of a table's body."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def vgg_cells(*records: Record, table: str = "seeds") -> list[list[str]]:
    """Return the cells of a table of VGG-11's page."""
    return cells(task_tables("cifar10-vgg11", Runs(records))[table])
