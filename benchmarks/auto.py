"""Whether lr="auto" does as well as a tuned rate: perceptrons of 5 to 100 layers at every rate, and the paper's tasks.

`auto.py depths` trains perceptrons on MNIST for 5 epochs, at rates from 0.0003 to 0.03 and with "auto" at several
amounts of trust; `auto.py falling` does the same with a rate that falls to zero, `auto.py normed` with batch norm in
every hidden layer, `auto.py swift` with a running average that follows the gradients. `auto.py TASK ...` trains by
"auto" what the paper's suite trains at the tuned rate. With `--form unbounded` a step may be as long as the paper's,
and not three times the angle at most; FORMS has the others. Records, as the suite writes them, go to
benchmarks/results/auto. `auto.py draw` makes docs/figures/auto.png of them and says how far "auto" is from the best.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from nero.auto.depth import LONGEST_STEP, TRUST
from nero_lab.data import DataError, Photos, load
from nero_lab.models.mlp import mlp
from nero_lab.progress import Display
from nero_lab.protocol import Contender, SettingError, Settings, Task
from nero_lab.store import Store, StoreError, read_records
from nero_lab.sweep import train
from nero_lab.tasks import TASKS

ROOT = Path(__file__).parents[1]
LAYERS = (5, 10, 20, 50, 100)
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
#: What "auto" is tried with besides what it is.
TRUSTS = tuple(sorted({0.04, 0.06, 0.08, 0.16, TRUST}))
#: "auto", and the same with other bounds: with none, with one that only the longest steps meet, and with none for words
#: that are read, or for all words, those that are said too.
FORMS: dict[str, dict[str, Any]] = {
    "auto": {"longest_step": LONGEST_STEP},
    "unbounded": {},
    "loose": {"longest_step": 10.0},
    "read": {"longest_step": LONGEST_STEP, "unbounded": "read"},
    "words": {"longest_step": LONGEST_STEP, "unbounded": "words"},
}
#: Forms that are of words, and who has any.
OF_WORDS, WORDED = ("read", "words"), ("wikitext2", "translation")
#: What of it is named in the figure; without a bound, less was tried as well.
TICKS = (0.01, 0.02, *TRUSTS)
EPOCHS = 5
#: On which the constant was chosen. What is run on others says what it does where it was not.
SEEDS = range(3)
#: β of an average that follows the gradients; the paper's is 0.999.
SWIFT = 0.9
#: What is below so many per cent in the end has hardly begun to learn.
CHANCE = 25.0


def main(argv: list[str] | None = None) -> int:
    """Run a part of the study, or draw it, from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = "cuda" if torch.cuda.is_available() else "cpu"
    whole, some = at_least(int, 0), at_least(int, 1)
    parser.add_argument(
        "what",
        nargs="+",
        choices=(*STUDIES, "draw", *TASKS),
        metavar=f"{', '.join(STUDIES)}, draw or TASK",
        help=f"a task is one of {', '.join(TASKS)}",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help=f"default: {here}, which is here")
    parser.add_argument("--data", type=Path, help="folder with the data; without: $NERO_DATA, or a download")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/auto", help="where the records go")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/figures/auto.png", help="where it is drawn")
    parser.add_argument("--precision", choices=("float32", "tf32"), default="float32", help="of matrix products")
    parser.add_argument("--layers", type=some, nargs="+", default=LAYERS, help="of the perceptrons")
    parser.add_argument("--seeds", type=whole, nargs="+", default=[0], help="those of each (0)")
    parser.add_argument(
        "--trust", type=at_least(float, 1e-6), nargs="+", help="run these alone, and no rates; without: all, or its own"
    )
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="auto",
        help=f"""which steps are bounded: all, at {LONGEST_STEP:g} times the angle (auto) or at
        {FORMS["loose"]["longest_step"]:g} (loose); none (unbounded); all but those of words that are read (read), or of
        words (words), both for {" and ".join(WORDED)} alone""",
    )
    parser.add_argument("--epochs", type=some, help="how many, at most the task's")
    arguments = parser.parse_args(argv)
    console = Console()
    try:
        study(arguments, console)
    except (DataError, SettingError, StoreError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit("stopped: the same command goes on from what was kept") from None
    return 0


def at_least(kind: type[float], least: float) -> Callable[[str], float]:
    """What makes a number of an argument, or says that it is too small."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {least:g} up")
        return value

    return number


def study(arguments: argparse.Namespace, console: Console) -> None:
    """Do one thing after the other that was asked for, if all of it can be done."""
    plans = [planned(what, arguments) for what in arguments.what]
    for place, plan in enumerate(plans, 1):
        if not plan:
            draw(arguments.out, arguments.figure, console)
        for count, (task, runs) in enumerate(plan, 1):
            go(task, runs, arguments, console, more=count < len(plan) or place < len(plans))


def planned(what: str, arguments: argparse.Namespace) -> list[tuple[Task, list[Settings]]]:
    """The tasks of what was asked for, each with its runs; nothing is run where there is only to draw."""
    if what == "draw":
        return []
    if arguments.form in OF_WORDS and what not in WORDED:
        raise SettingError(
            f"{what} has no words to leave without a bound: --form {arguments.form} is for {' and '.join(WORDED)}"
        )
    make = STUDIES.get(what)
    tasks = [make(count) for count in arguments.layers] if make else [automatic(TASKS[what])]
    return [
        (
            task,
            [
                task.settings(*cell, seed, arguments.epochs, arguments.precision)
                for seed in arguments.seeds
                for cell in cells_of(task, arguments.form, arguments.trust)
            ],
        )
        for task in tasks
    ]


def perceptron(layers: int) -> Task:
    """One on MNIST, at a given rate or at an automatic one, for as many epochs as the study has."""
    nero = Contender("nero", best=0.01)
    return replace(
        TASKS["mnist-deep"],
        name=f"perceptron-{layers}",
        model=partial(mlp, layers),
        contenders={"nero": nero, **_automatic(nero)},
        epochs=EPOCHS,
        seconds=(None, None),  # not those of a hundred layers
    )


def falling(layers: int) -> Task:
    """The same, with a rate that falls to zero, step by step, where the other falls by a third in all."""
    task = perceptron(layers)
    return replace(
        task, name=f"{task.name}-falling", schedule=lambda step, steps_an_epoch: 1 - step / (EPOCHS * steps_an_epoch)
    )


def normed(layers: int) -> Task:
    """The same as the first, with batch norm behind the sums of every hidden layer."""
    task = perceptron(layers)
    return replace(task, name=f"{task.name}-normed", model=partial(with_norms, layers))


def swift(layers: int) -> Task:
    """The same as the first, with an average over ten gradients or so: no step is longer than √10 times the rate."""
    task = perceptron(layers)
    contenders = {
        name: replace(each, options={**each.options, "beta": SWIFT}) for name, each in task.contenders.items()
    }
    return replace(task, name=f"{task.name}-swift", contenders=contenders)


def with_norms(layers: int) -> nn.Sequential:
    """A perceptron whose hidden layers' sums are normed, without gains and biases of the norms' own."""
    *hidden, last = mlp(layers)
    parts = [
        (each, nn.BatchNorm1d(each.out_features, affine=False)) if isinstance(each, nn.Linear) else (each,)
        for each in hidden
    ]
    return nn.Sequential(*(part for each in parts for part in each), last)


#: What the perceptrons are tried with.
STUDIES = {"depths": perceptron, "falling": falling, "normed": normed, "swift": swift}


def automatic(task: Task) -> Task:
    """A task of the paper's whose contenders are Nero at an automatic rate, in all of its forms."""
    return replace(task, contenders=_automatic(task.contenders[_nero(task)]))


def cells_of(task: Task, name: str, trusts: Sequence[float] | None = None) -> list[tuple[str, float]]:
    """Who is run at which rate: all rates and trusts of a perceptron, one trust of anything else, or those given."""
    grid = [("nero", rate) for rate in RATES] if "nero" in task.contenders and trusts is None else []
    return grid + [(name, trust) for trust in trusts or (TRUSTS if grid else (TRUST,))]


def go(task: Task, runs: list[Settings], arguments: argparse.Namespace, console: Console, *, more: bool) -> None:
    """Train, side by side on a GPU, and go on where it was broken off; more: whether other work is to follow."""
    device = torch.device(arguments.device)
    data = load(task.dataset, arguments.data).to(device)
    if isinstance(data, Photos):
        data = data.with_measured_rate(task.batch)
        runs = [replace(each, data=data.name if data.name != task.dataset else None) for each in runs]
    with Display(console, arguments.out, device) as watch:
        at_a_time = len(runs) if device.type == "cuda" else 1
        train(task, runs, data, Store(arguments.out), watch, at_a_time, more=more)


def draw(records: Path, figure: Path, console: Console) -> None:
    """The perceptrons' accuracy by rate, where "auto" stands on each curve, and what is lost by trust."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    kept = read_records(records) if records.is_dir() else []
    found = {count: accuracies(kept, count) for count in LAYERS}
    found = {count: each for count, each in found.items() if each["nero"] and TRUST in each["auto"]}
    if not found:
        raise SystemExit(f"nothing to draw: {records} has no perceptrons by a rate and by auto; run `auto.py depths`")
    table = Table(title=f'Perceptrons after {EPOCHS} epochs: "auto" (trust {TRUST:g}) beside the best of the grid')
    for column in ("layers", "best rate", "train accuracy, %", "auto's rate", "train accuracy, %", "difference"):
        table.add_column(column, justify="right")
    picture, (left, *rights) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    colours = plt.get_cmap("viridis")
    for place, (count, each) in enumerate(found.items()):
        colour = colours(place / max(1, len(found) - 1) * 0.9)
        best = max(each["nero"], key=lambda rate: each["nero"][rate])
        begun = each["nero"][best] > CHANCE
        name = f"{count} layers" + ("" if begun else ", which have hardly begun to learn")
        left.plot(each["nero"].keys(), [100 - value for value in each["nero"].values()], "o-", color=colour, label=name)
        star = {"color": colour, "markersize": 16, "markeredgecolor": "black"}
        high, own = each["nero"][best], each["auto"][TRUST]
        left.plot(TRUST / count, 100 - own, "*", **star)
        if begun:
            for right, who in zip(rights, ("auto", "unbounded"), strict=True):
                right.plot(each[who].keys(), [high - value for value in each[who].values()], "o-", color=colour)
        cells = (f"{best:g}", f"{high:.2f}", f"{TRUST / count:.2g}", f"{own:.2f}", f"{own - high:+.2f}")
        table.add_row(str(count), *cells)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="learning rate",
        title='Train error, mean of the seeds; a star is "auto"',
    )
    left.yaxis.set_major_formatter("{x:g} %")
    for right, title in zip(
        rights,
        ("Points below the best of the grid, up to 8", "... without a bound on a step's length"),
        strict=True,
    ):
        right.set(xscale="log", xlim=(0.009, 0.18), xlabel="trust: the rate times the depth", title=title)
        right.set_xticks(TICKS, [f"{trust:g}" for trust in TICKS])
        right.minorticks_off()
        right.axvline(TRUST, color="grey", linestyle="--")
        right.axhline(1, color="grey", linestyle=":")
        right.set_ylim(-1.2, 8)
    for each in (left, *rights):
        each.grid(alpha=0.3)
    picture.legend(loc="outside upper center", ncols=len(found), frameon=False)
    figure.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(figure, dpi=160)
    plt.close(picture)
    console.print(table)


def accuracies(
    records: list[dict[str, Any]], layers: int, part: str = "train", schedule: str = ""
) -> dict[str, dict[float, float]]:
    """The last accuracy of perceptrons of so many layers, in per cent, by contender and rate: the mean over SEEDS."""
    ends: dict[str, dict[float, list[float]]] = {"nero": {}, "auto": {}, "unbounded": {}}
    for each in sorted(records, key=lambda record: record["lr"]):
        if (each["task"], each["epochs"]) == (f"perceptron-{layers}{schedule}", EPOCHS) and each["seed"] in SEEDS:
            end = each["curve"][f"{part}_accuracy"][-1]
            if (rates := ends.get(each["optimiser"])) is not None:
                rates.setdefault(each["lr"], []).append(math.nan if end is None else 100 * end)
    return {name: {rate: statistics.fmean(each) for rate, each in rates.items()} for name, rates in ends.items()}


def _automatic(contender: Contender) -> dict[str, Contender]:
    """The same at a rate by depth, as it is by "auto" and with other bounds."""
    return {
        name: replace(contender, best=TRUST, options={**contender.options, "depth": "auto", **form})
        for name, form in FORMS.items()
    }


def _nero(task: Task) -> str:
    """What Nero is called there; the first, where it comes in several forms."""
    names = [name for name, each in task.contenders.items() if each.optimiser == "nero"]
    if not names:
        raise SystemExit(f"{task.name} is not trained by Nero")
    return "nero" if "nero" in names else names[-1]


if __name__ == "__main__":
    raise SystemExit(main())
