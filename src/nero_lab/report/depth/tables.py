"""The tables of docs/guide/auto.md and docs/studies/depth.md: one function per table, named like its block."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nero_lab.protocol import perplexity
from nero_lab.report.depth import CHANCE, LEARNING_LAYERS, NETWORKS, SEEDS, Study, breaks_down
from nero_lab.report.markdown import number, render_table
from nero_lab.tasks import TASKS
from nero_lab.tasks.depth import LAYERS, RATES, TRUST


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


#: Name of a task's metric in the tables, and its conversion to their unit.
MEASURES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "train_accuracy": ("train accuracy, %", lambda value: 100 * value),
    "test_accuracy": ("test accuracy, %", lambda value: 100 * value),
    "valid_loss": ("validation perplexity", perplexity),
    "reward": ("mean return", _or_nan),
    "test_distance": ("distance to test images", _or_nan),
}


def depths(_: Study) -> str:
    """Return the depth of the paper's networks, the angle that follows, and the tuned rate."""
    rows = [
        [name, tensors, f"{depth:.1f}", f"{TRUST / depth:.2g}", f"{TASKS[task].contenders['nero'].best:g}"]
        for name, task, _, tensors, depth in NETWORKS
    ]
    return _table(["network", "tensors of neurons", "depth", '`"auto"`', "tuned"], rows)


def perceptrons(study: Study) -> str:
    """Compare ``lr="auto"`` with the best rate of the grid: mean accuracies of three seeds."""
    rows = []
    for layers in LAYERS:
        task, best = f"perceptron-{layers}", study.best_rate(layers)
        row = [layers, f"{best:g}", *(_two(study.mean(task, "nero", best, part)) for part in ("train", "test"))]
        row += [f"{TRUST / layers:.2g}", *(_two(study.mean(task, "auto", TRUST, part)) for part in ("train", "test"))]
        rows.append(row)
    return _table(["layers", "best rate", "train", "test", '`"auto"`', "train", "test"], rows)


def unseen(study: Study) -> str:
    """Compare train accuracies on the seeds that the trust was not chosen on."""
    rows = []
    for layers in (5, 10):
        cells = (("nero", study.best_rate(layers)), ("unbounded", 0.06), ("auto", 0.06), ("auto", TRUST))
        for seed in (3, 4):
            ends = [study.ends(f"perceptron-{layers}", *cell, seeds=[seed]) for cell in cells]
            rows.append([layers, seed, *map(_list, ends)])
    return _table(["layers", "seed", "best rate", "0.06, no bound", "0.06, bound of 3", '`"auto"`'], rows)


#: How long steps are kept short: the words of the tables, the variant of the task and the contender.
REMEDIES = {
    "none": ("", "unbounded"),
    "β = 0.9": ("-swift", "unbounded"),
    "`longest_step=10`": ("", "loose"),
    "`longest_step=3`": ("", "auto"),
}


def breakdowns(study: Study) -> str:
    """Count the runs that break down, by trust and by what keeps long steps short."""
    trusts = (0.01, 0.02, 0.04, 0.06, 0.08, TRUST, 0.11, 0.16)
    rows = []
    for remedy, (variant, contender) in REMEDIES.items():
        cells = []
        for trust in trusts:
            tasks = [f"perceptron-{layers}{variant}" for layers in LEARNING_LAYERS]
            curves = [curve for task in tasks for curve in study.curves(task, contender, trust, seeds=SEEDS)]
            cells.append(f"{sum(map(breaks_down, curves))} of {len(curves)}" if curves else "-")
        rows.append([remedy, *cells])
    return _table(["remedy", *trusts], rows)


def remedies(study: Study) -> str:
    """List train accuracies at a trust of 0.08, by what keeps long steps short."""
    rows = []
    for layers in LEARNING_LAYERS:
        task = f"perceptron-{layers}"
        best = study.ends(task, "nero", study.best_rate(layers), seeds=SEEDS)
        cells = [
            study.ends(task + variant, contender, 0.08, seeds=SEEDS)
            for variant, contender in (REMEDIES[name] for name in ("none", "β = 0.9", "`longest_step=3`"))
        ]
        rows.append([layers, *map(_list, (best, *cells))])
    return _table(["layers", "best rate", "no remedy", "β = 0.9", "`longest_step=3`"], rows)


def spans(study: Study) -> str:
    """Return the lowest and the highest train accuracy of three seeds, by trust."""
    trusts = (0.04, 0.06, 0.08, TRUST, 0.11, 0.16)
    rows = []
    for layers in LEARNING_LAYERS:
        for remedy, (variant, contender) in REMEDIES.items():
            ends = [study.ends(f"perceptron-{layers}{variant}", contender, trust, seeds=SEEDS) for trust in trusts]
            if sum(map(bool, ends)) > 1:
                cells = [f"{min(found):.2f} to {max(found):.2f}" if found else "-" for found in ends]
                rows.append([layers, remedy, *cells])
    return _table(["layers", "remedy", *trusts], rows)


def tasks(study: Study) -> str:
    """Compare ``lr="auto"`` with the tuned rate on the paper's tasks."""
    rows = []
    for task in _tasks_by_depth(study):
        nero, network_of = ("nero-both", "cifar10-vgg11") if task == "cifar10-ablation" else ("nero", task)
        tuned = TASKS[task].contenders[nero].best
        angles = ", ".join(f"{TRUST / network.depth:.2g}" for network in NETWORKS if network.task == network_of)
        results = _results(study, task, nero, tuned), _results(study, task, "auto", TRUST)
        rows.append([task, _measure(task), f"{tuned:g}", results[0], angles, results[1]])
    return _table(["task", "measure", "tuned", "result", '`"auto"`', "result"], rows)


def bounds(study: Study) -> str:
    """Compare trusts with a bound and without on the paper's tasks."""
    cells = (("auto", TRUST), ("auto", 0.06), ("unbounded", 0.06), ("unbounded", 0.08))
    rows = [
        [task, _measure(task), *(_results(study, task, *cell) or "-" for cell in cells)]
        for task in _tasks_by_depth(study)
    ]
    return _table(["task", "measure", "bound of 3, 0.1", "bound of 3, 0.06", "no bound, 0.06", "no bound, 0.08"], rows)


def translation(study: Study) -> str:
    """List the runs of the translator."""
    names = {
        ("nero", 0.001): "tuned rate, 0.001",
        ("auto", TRUST): '`"auto"`',
        ("auto", 0.06): "bound of 3, trust 0.06",
        ("read", TRUST): '`"auto"`, words free of the bound',
        ("unbounded", 0.06): "no bound, trust 0.06",
        ("unbounded", 0.08): "no bound, trust 0.08",
    }
    rows = []
    for (contender, rate), name in names.items():
        for seed in range(4):
            if run := study.runs.get(("translation", contender, rate, seed)):
                curve = [perplexity(loss) for loss in run["curve"]["valid_loss"]]
                worst = max(range(10, len(curve)), key=lambda epoch: curve[epoch])
                rows.append([name, seed, _two(curve[-1]), _two(run["test_bleu"]), f"{curve[worst]:.1f} ({worst + 1})"])
    return _table(["steps", "seed", "validation perplexity", "BLEU", "worst after epoch 10 (epoch)"], rows)


def words(study: Study) -> str:
    """List perplexities of the language model by which steps are bounded."""
    forms = {
        'all, at three times the angle (`"auto"`)': ("auto", TRUST),
        "all, at three times the angle, trust 0.06": ("auto", 0.06),
        "all, at ten times the angle": ("loose", TRUST),
        "all but the input words": ("read", TRUST),
        "all but the input and output words": ("words", TRUST),
        "none": ("unbounded", TRUST),
        "none, at the tuned angle": ("nero", 0.01),
    }
    rows = []
    for name, cell in forms.items():
        losses = [study.curves("wikitext2", *cell, f"{part}_loss") for part in ("train", "valid", "test")]
        rows.append([name, *(_list(perplexity(curve[-1]) for curve in curves) for curves in losses)])
    return _table(["bounded steps", "train", "validation", "test"], rows)


def trust(study: Study) -> str:
    """Compare the counted angle with the measured one (benchmarks/trust.py)."""
    best = {f"perceptron of {layers} layers": study.best_rate(layers) for layers in LEARNING_LAYERS}
    best |= {network.name.partition(",")[0]: TASKS[network.task].contenders["nero"].best for network in NETWORKS}
    best["ResNet-50"] = TASKS["imagenet"].contenders["nero-tuned"].best
    angles, rows = study.trust["angles"], []
    for row in study.trust["rows"]:
        beyond = f"below {angles[0]:g}" if row["median"][0] >= 1 else f"above {angles[-1]:g}"
        measured = beyond if row["trusted"] is None else f"{row['trusted']:.2g}"
        name, depth = row["network"], row["depth"]
        rows.append([name, f"{depth:.1f}", f"{TRUST / depth:.2g}", measured, f"{best[name]:g}"])
    return _table(["network", "depth", '`"auto"`', "trusted angle", "best rate found"], rows)


def time(study: Study) -> str:
    """Return the best unbounded angle after each epoch, by the mean of three seeds."""
    rows = []
    for layers in LAYERS:
        task, curves = f"perceptron-{layers}", dict[float, list[list[float]]]()
        for name, contender, rate, seed in study.runs:
            if name == task and contender in ("nero", "unbounded") and seed == SEEDS[0]:
                # a rate and a share of a trust may be the same angle
                angle = round(rate / (1 if contender == "nero" else layers), 8)
                curves.setdefault(angle, []).extend(study.curves(task, contender, rate, seeds=SEEDS))
        row: list[object] = [layers]
        for epoch in range(TASKS[task].epochs):
            means = {
                angle: statistics.fmean(curve[epoch] for curve in found)
                for angle, found in curves.items()
                if len(found) >= len(SEEDS)
            }
            best = max(means, key=lambda angle: means[angle])
            row.append(f"{best:.2g}" if 100 * means[best] > CHANCE else "-")
        rows.append(row)
    return _table(["layers", *(f"epoch {epoch}" for epoch in range(1, 6))], rows)


def falling(study: Study) -> str:
    """Compare perceptrons with those whose rate falls to zero."""
    return _beside(study, "-falling", "falling to zero", LEARNING_LAYERS)


def normed(study: Study) -> str:
    """Compare perceptrons with those that have batch norm."""
    return _beside(study, "-normed", "normed", (10,))


def trusts(study: Study) -> str:
    """List train accuracies, by trust, where the rate falls to zero."""
    shares = (0.01, 0.02, 0.04, 0.06, 0.08, 0.11, 0.16)
    rows = []
    for layers in LEARNING_LAYERS:
        task = f"perceptron-{layers}-falling"
        best = max(study.ends(task, "nero", rate, seeds=[0])[0] for rate in RATES)
        rows.append([layers, _two(best), *(_list(study.ends(task, "unbounded", share, seeds=[0])) for share in shares)])
    return _table(["layers", "best of the grid", *shares], rows)


TABLES: dict[str, Callable[[Study], str]] = {
    table.__name__: table
    for table in (
        *(depths, perceptrons, unseen, breakdowns, remedies, spans, tasks, bounds, translation, words, trust, time),
        *(falling, normed, trusts),
    )
}


def _beside(study: Study, variant: str, title: str, depths: Sequence[int]) -> str:
    """Compare perceptrons on seed 0 with a variant of them."""
    by_depth = {"(0.06, without the bound)": ("unbounded", 0.06), '(`"auto"`)': ("auto", TRUST)}
    rows = []
    for layers in depths:
        cells = {f"{rate:g}": ("nero", rate) for rate in RATES}
        cells |= {f"{cell[1] / layers:.2g} {name}": cell for name, cell in by_depth.items()}
        for angle, cell in cells.items():
            ends = [
                study.ends(f"perceptron-{layers}{end}", *cell, f"{part}_accuracy", [0])
                for end in ("", variant)
                for part in ("train", "test")
            ]
            rows.append([layers, angle, *map(_list, ends)])
    return _table(["layers", "angle", "train", "test", f"train, {title}", f"test, {title}"], rows)


def _tasks_by_depth(study: Study) -> list[str]:
    """Return the paper's tasks that were trained with ``lr="auto"``."""
    trained = {task for task, contender, *_ in study.runs if contender == "auto"}
    return [name for name, task in TASKS.items() if task.study == "paper" and name in trained]


def _measure(task: str) -> str:
    return MEASURES[TASKS[task].metric][0]


def _results(study: Study, task: str, contender: str, rate: float) -> str:
    metric = TASKS[task].metric
    convert = MEASURES[metric][1]
    return _list(convert(curve[-1]) for curve in study.curves(task, contender, rate, metric))


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    return render_table(head, rows, left=None)


def _two(value: float) -> str:
    return "diverged" if value == math.inf else number(value)


def _list(values: Iterable[float]) -> str:
    return ", ".join(map(_two, values))
