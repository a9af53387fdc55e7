"""The tables of docs/studies/claims.md, and the count of verdicts of docs/paper/claims.md."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from nero_lab.claims.measurements import ACTIVATION_RATES, ROBUST_RATES, WAYS
from nero_lab.claims.studies import (
    AVERAGED,
    BATCHES,
    CLIPPED_RATES,
    CLIPS,
    FACTORS,
    RATES,
    RAW_SCALES,
    REGULARISED,
    START_RATES,
    STRENGTHS,
    USUAL_RATES,
)
from nero_lab.protocol import has_diverged
from nero_lab.report.markdown import over_seeds, render_table, seeds_note
from nero_lab.report.runs import that_count
from nero_lab.tasks import TASKS

#: What a row of the list of claims may end in.
VERDICTS = ("holds", "partly", "does not hold", "not run")
NAMES = {
    "nero": "Nero",
    "adam": "Adam",
    "sgd": "SGD",
    "lamb": "LAMB",
    "adamw": "AdamW",
    "adam-balanced": "Adam, balanced",
    "kaiming": "Adam, from Kaiming's weights",
}
WAY_NAMES = {
    "plain": "Adam, no constraint",
    "printed": "Adam, Eq. (cwn) as printed",
    "safe": "Adam, `nero.centred_weight_norm`",
    "projected": "Adam, `nero.balance_after_step`",
    "nero": "Nero",
}
ACCURACIES = ("train_accuracy", "test_accuracy")
SHOWN_POWERS = (-40, -20, -10, -4, -2, 0, 2, 10, 16, 20, 36)
SHOWN_LAYERS = (1, 5, 10, 15, 20)

Records = list[dict[str, Any]]


def select(records: Records, study: str, **settings: Any) -> Records:
    """Return the results of a study's runs with these settings, by seed."""
    found = [
        record for record in records if record["study"] == study and settings.items() <= record["settings"].items()
    ]
    found.sort(key=lambda record: record["settings"].get("seed", 0))
    return [record["results"] for record in found]


def per_cent(runs: Records, key: str = "test_error") -> list[float]:
    """Return a share of every run in per cent."""
    return [100 * run[key] for run in runs]


def _cell(runs: Records, key: str = "test_error") -> str:
    return over_seeds(per_cent(runs, key)) if runs else "-"


def _mean(runs: Records, key: str = "test_error") -> str:
    """Format the mean, which is all that a wide table has room for."""
    return f"{statistics.fmean(per_cent(runs, key)):.2f}{seeds_note(len(runs))}" if runs else "-"


def claims_tables(records: Records, of_tasks: Records) -> dict[str, str]:
    """Return the tables by name, from the study's records and those of the lab's tasks."""
    of_tasks = that_count(
        run for run in of_tasks if run["task"] in TASKS and run["epochs"] == TASKS[run["task"]].epochs
    )
    makers: dict[str, Callable[[Records], str]] = {
        "initial-scale": _initial_scale,
        "start": _start,
        "batch-size": _batch_size,
        "overflow": _overflow,
        "overflow-loss": _overflow_loss,
        "robustness": _robustness,
        "robustness-order": _robustness_order,
        "activations": _activations,
        "activations-start": _activations_start,
        "cost": _cost,
        "gains": _gains,
        "clip": _clip,
        "average": _average,
    }
    return {
        "raw-scale": _raw_scale(records, of_tasks),
        "balanced-start": _balanced_start(of_tasks),
        **{name: make(records) for name, make in makers.items()},
    }


def _raw_scale(records: Records, of_tasks: Records) -> str:
    rows = []
    for sigma in RAW_SCALES:
        runs = [run["curve"] for run in of_tasks if run["optimiser"] == f"sigma-{sigma:g}"]
        if runs:
            rows.append(_curve_row("Adam, reparameterised", sigma, [run["train_accuracy"] for run in runs]))
    for study, name in {"raw-scale": "Nero", "raw-scale-bounded": "Nero, `longest_step=3`"}.items():
        for sigma in RAW_SCALES:
            runs = select(records, study, sigma=sigma)
            if runs:
                rows.append(_curve_row(name, sigma, [run["train_accuracy"] for run in runs]))
    return render_table(["weights", "sigma", *(f"epoch {epoch}" for epoch in range(1, 6))], rows)


def _balanced_start(of_tasks: Records) -> str:
    """Compare runs of the 100-layer perceptron from balanced weights with Nero's."""
    found: dict[tuple[str, float], Records] = {}
    for run in of_tasks:
        if run["task"] != "mnist-deep-balanced" and (run["task"], run["optimiser"]) != ("mnist-deep", "nero"):
            continue
        found.setdefault((NAMES[run["optimiser"]], run["lr"]), []).append(run["curve"])
    rows = []
    for (name, lr), curves in sorted(found.items(), key=lambda item: (item[0][0] != "Nero", item[0])):
        diverged = any(map(has_diverged, curves))
        cells = (over_seeds([100 * curve[key][-1] for curve in curves], has_diverged=diverged) for key in ACCURACIES)
        rows.append([name, f"{lr:g}", *cells])
    return render_table(["optimiser", "rate", "train accuracy, %", "test accuracy, %"], rows)


def _curve_row(name: str, sigma: float, curves: Sequence[Sequence[float]]) -> list[str]:
    return [name, f"{sigma:g}", *(over_seeds([100 * share for share in epoch]) for epoch in zip(*curves, strict=True))]


def _initial_scale(records: Records) -> str:
    rows = []
    for optimiser, (usual, *others) in RATES.items():
        cells = [
            _mean(select(records, "initial-scale", optimiser=optimiser, lr=usual, factor=each)) for each in FACTORS
        ]
        rows.append([f"{NAMES[optimiser]} at {usual:g}", *cells])
        rates = (usual, *others)
        best = [_best(records, "initial-scale", rates, optimiser=optimiser, factor=factor) for factor in FACTORS]
        cells = [f"{error:.2f} ({lr:g})" for error, lr in best]
        rows.append([f"{NAMES[optimiser]}, best of three rates, seed 0", *cells])
    return render_table(["optimiser / factor", *(f"{factor:g}" for factor in FACTORS)], rows)


def _best(records: Records, study: str, rates: Sequence[float], **settings: Any) -> tuple[float, float]:
    """Return the lowest test error of seed 0 over the rates, and its rate."""
    found = {lr: select(records, study, lr=lr, seed=0, **settings) for lr in rates}
    return min((per_cent(runs)[0], lr) for lr, runs in found.items() if runs)


def _start(records: Records) -> str:
    rows = []
    for optimiser, is_balanced in (("nero", True), ("adam", True), ("adam", False)):
        for lr in START_RATES[optimiser]:
            runs = select(records, "start", optimiser=optimiser, is_balanced=is_balanced, lr=lr)
            accuracy = over_seeds([100 * run["train_accuracy"][-1] for run in runs]) if runs else "-"
            rows.append([NAMES[optimiser], "balanced" if is_balanced else "torch's", f"{lr:g}", accuracy, _cell(runs)])
    return render_table(["optimiser", "start", "rate", "train accuracy, %", "test error, %"], rows)


def _batch_size(records: Records) -> str:
    rows = []
    for optimiser, usual in USUAL_RATES.items():
        runs = [select(records, "batch-size", optimiser=optimiser, lr=usual, batch=batch) for batch in BATCHES]
        means = [statistics.fmean(per_cent(found)) for found in runs if found]
        rows.append([f"{NAMES[optimiser]} at {usual:g}", *map(_cell, runs), f"{max(means) - min(means):.2f}"])
        rates = [round(usual * factor, 6) for factor in (0.1, 1.0, 10.0)]
        best = [_best(records, "batch-size", rates, optimiser=optimiser, batch=batch) for batch in BATCHES]
        spread = max(best)[0] - min(best)[0]
        cells = [f"{error:.2f} ({lr:g})" for error, lr in best]
        rows.append([f"{NAMES[optimiser]}, best of three rates, seed 0", *cells, f"{spread:.2f}"])
    return render_table(["optimiser", *(f"batch {batch:,}" for batch in BATCHES), "largest - smallest"], rows)


def _overflow(records: Records) -> str:
    rows = []
    for way in ("printed", "safe", "nero"):
        cells = []
        for dtype in ("float32", "bfloat16", "float16"):
            for run in select(records, "overflow", way=way, dtype=dtype)[:1]:
                by_power = dict(zip(run["powers"], run["is_balanced"], strict=True))
                good = [power for power, fits in by_power.items() if fits]
                finite = [power for power, fits in by_power.items() if fits is not None]
                text = f"1e{good[0]} to 1e{good[-1]}"
                cells.append(f"all: {text}" if good == finite else text)
        rows.append([WAY_NAMES[way], *cells])
    return render_table(["weights", "float32", "bfloat16", "float16"], rows)


def _overflow_loss(records: Records) -> str:
    rows = []
    for way in ("printed", "safe", "nero"):
        for run in select(records, "overflow", way=way, dtype="float32")[:1]:
            by_power = dict(zip(run["powers"], run["loss"], strict=True))
            losses = [by_power[power] for power in SHOWN_POWERS]
            rows.append([WAY_NAMES[way], *("not finite" if loss is None else f"{loss:.2f}" for loss in losses)])
    return render_table(["weights / sigma", *(f"1e{power}" for power in SHOWN_POWERS)], rows)


def _robustness(records: Records) -> str:
    rows = []
    for optimiser, rates in ROBUST_RATES.items():
        for lr in rates:
            runs = select(records, "robustness", optimiser=optimiser, lr=lr)
            solved = [run for run in runs if "alpha_lower" in run]
            if not runs:
                continue
            norms = [statistics.fmean(run["weight_norms"][place] for run in runs) for place in (0, -1)]
            angles = [
                f"{statistics.fmean(run[key] for run in solved):.2g}" if solved else "-"
                for key in ("alpha_lower", "alpha_upper", "alpha_random")
            ]
            bounds = [
                f"{statistics.fmean(run[key] for run in solved):.0f}" if solved else "-"
                for key in ("bound_proved", "bound_random")
            ]
            row = [NAMES[optimiser], f"{lr:g}", f"{len(solved)} of {len(runs)}", f"{norms[0]:.1f} to {norms[1]:.1f}"]
            rows.append([*row, *angles, *bounds, _cell(runs)])
    header = ("optimiser", "rate", "solved", "weight norm", "α proved", "α at most", "α at random")
    return render_table([*header, "bound, proved", "bound, random", "test error, %"], rows)


def _robustness_order(records: Records) -> str:
    rows = []
    for title, optimisers in {"all": tuple(ROBUST_RATES), **{NAMES[name]: (name,) for name in ROBUST_RATES}}.items():
        solved = [
            run
            for optimiser in optimisers
            for run in select(records, "robustness", optimiser=optimiser)
            if "alpha_lower" in run
        ]
        if len(solved) < 4:
            continue
        errors = [run["test_error"] for run in solved]
        keys = ("alpha_lower", "alpha_upper", "alpha_random")
        cells = [f"{rank_correlation([run[key] for run in solved], errors):+.2f}" for key in keys]
        rows.append([title, len(solved), *cells])
    return render_table(["networks of", "number", "α proved", "α at most", "α at random"], rows)


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [
            sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
            for value in values
        ]

    return statistics.correlation(ranks(left), ranks(right))


def _activations(records: Records) -> str:
    rows = []
    for optimiser in ACTIVATION_RATES:
        runs = select(records, "activations", optimiser=optimiser, depth=20)
        for when in ("start", "end"):
            cells = []
            for layer in SHOWN_LAYERS:
                logs = [math.log(run[when]["variance"][layer - 1]) for run in runs]
                cells.append(f"{math.exp(statistics.fmean(logs)):.2g}" if runs else "-")
            error = _cell(runs) if when == "end" else ""
            rows.append([NAMES[optimiser] if when == "start" else "", when, *cells, error])
    return render_table(["optimiser", "when", *(f"layer {layer}" for layer in SHOWN_LAYERS), "test error, %"], rows, 2)


def _activations_start(records: Records) -> str:
    rows = []
    names = {"nero": "balanced", "adam": "torch's default", "kaiming": "Kaiming's, N(0, 1/d)"}
    for optimiser, name in names.items():
        starts = [
            run["start"]
            for depth in (5, 20, 100)
            for run in select(records, "activations", optimiser=optimiser, depth=depth, seed=0)
        ]
        rows.append([name, *(f"{start['variance'][-1]:.2g}, {start['means'][-1]:.2g}" for start in starts)])
    return render_table(["weights", "layer 5 of 5", "layer 20 of 20", "layer 100 of 100"], rows)


def _cost(records: Records) -> str:
    rows = []
    for way in WAYS:
        cells = [WAY_NAMES[way]]
        for batch in (32, 250):
            for run in select(records, "cost", batch=batch)[:1]:
                cells += [f"{run['milliseconds'][way]:.0f}", f"{run['ratio'][way]:.2f}", f"{run['megabytes'][way]:.1f}"]
        rows.append(cells)
    columns = [f"batch {batch}: {what}" for batch in (32, 250) for what in ("ms", "/ plain", "MB held")]
    return render_table(["weights", *columns], rows)


def _gains(records: Records) -> str:
    rows = []
    for optimiser, (lr, option, _) in REGULARISED.items():
        found = [select(records, "gains", optimiser=optimiser, strength=strength) for strength in STRENGTHS]
        rows.append([f"{NAMES[optimiser]} at {lr:g}, `{option}`", *map(_mean, found)])
    return render_table(["optimiser and option", *(f"{strength:g}" for strength in STRENGTHS)], rows)


def _clip(records: Records) -> str:
    rows = []
    for kind, clips in {"none": (0.0,), "flattened": CLIPS, "neurons": CLIPS}.items():
        for clip in clips:
            cells = [_cell(select(records, "clip", kind=kind, clip=clip, lr=lr)) for lr in CLIPPED_RATES]
            rows.append([kind, f"{clip:g}" if clip else "", *cells])
    return render_table(["clipped", "norm", *(f"rate {lr:g}" for lr in CLIPPED_RATES)], rows)


def _average(records: Records) -> str:
    rows = []
    for optimiser in AVERAGED:
        runs = select(records, "average", optimiser=optimiser)
        cells = [_cell(runs, f"{way}_error") for way in ("last", "flattened", "neurons")]
        norm = f"{statistics.fmean(run['norm_of_average'] for run in runs):.4f}" if runs else "-"
        rows.append([f"{NAMES[optimiser]} at {AVERAGED[optimiser]:g}", *cells, norm])
    return render_table(["optimiser", "last weights", "flattened average", "average by neuron", "norm kept"], rows)


def claims_of(text: str) -> list[list[str]]:
    """Return the cells of every claim on the page of claims: section, claim, runs, result and verdict."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if len(row) == 5 and row[0] not in ("section", "---")]


def verdicts_table(text: str) -> str:
    """Count the verdicts on the page of claims."""
    found = [row[-1] for row in claims_of(text)]
    return render_table(VERDICTS, [[*map(found.count, VERDICTS)]], 0)
