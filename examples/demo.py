"""Train a 50-layer perceptron, without batch norm or skip connections, by Nero, SGD, Adam and LAMB.

This is the deep-MLP experiment of the paper, small enough for a laptop: scikit-learn's digits instead of MNIST, and 50
layers instead of 100. Every optimiser runs at every learning rate of the paper's grid and is judged by its best.
All start from PyTorch's initialisation, which Nero balances; "Adam (balanced)" starts from the same balanced weights.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

import nero
from nero_lab.baselines import Lamb

RATES = (0.0001, 0.001, 0.01, 0.1)
DEFAULT_RATE = 0.01  # of Nero; it is on the grid
DECAY = 0.9
SQRT2 = torch.tensor(math.sqrt(2))  # a float would become a tensor in every forward pass
OPTIMISERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "Nero": lambda model, rate: nero.Nero(model, lr=rate),
    "SGD": lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate),
    "Adam": lambda model, rate: torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.999), fused=True),
    "Adam (balanced)": lambda model, rate: OPTIMISERS["Adam"](nero.balance_(model), rate),
    "LAMB": lambda model, rate: Lamb(model.parameters(), lr=rate, betas=(0.9, 0.999)),
}
# colours of Okabe and Ito, which are safe for the colour-blind; dashes and markers for print in grey
LOOKS = {
    "Nero": ("#0072B2", "-", "o"),
    "SGD": ("#D55E00", "--", "s"),
    "Adam": ("#009E73", ":", "^"),
    "Adam (balanced)": ("#5FA83C", "--", "v"),
    "LAMB": ("#CC79A7", "-.", "D"),
}
LABEL_HEIGHT = 0.055  # in the figure, in units of accuracy


@dataclass(frozen=True)
class Plan:
    """The size of the network, and the length of training."""

    depth: int = 50
    width: int = 64  # the number of pixels, so that layers are square as in the paper
    batch: int = 144
    epochs: int = 32


@dataclass(frozen=True)
class Digits:
    """Images, as rows of pixels, with their labels."""

    pixels: Tensor
    labels: Tensor

    @property
    def chance(self) -> float:
        """The accuracy of always naming the commonest digit."""
        return self.labels.bincount().max().item() / len(self.labels)


@dataclass(frozen=True)
class Run:
    """The result of one training run. Training accuracies are running ones, taken during each epoch."""

    optimiser: str
    rate: float
    curve: list[float]  # training accuracy by epoch
    training: float  # training accuracy of the last epoch
    test: float
    state_bytes: int


class ScaledReLU(nn.Module):
    """The activation √2·max(0, x)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x) * SQRT2


def perceptron(plan: Plan) -> nn.Sequential:
    """Return a perceptron with PyTorch's default initialisation."""
    hidden = [layer for _ in range(plan.depth - 1) for layer in (nn.Linear(plan.width, plan.width), ScaledReLU())]
    return nn.Sequential(*hidden, nn.Linear(plan.width, 10))


def load() -> tuple[Digits, Digits]:
    """Return the training digits, and one in five as test digits, normalised by the training digits."""
    pixels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = map(
        torch.as_tensor, train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    )
    train, test = ((part - train.mean()) / train.std() for part in (train, test))
    return Digits(train.float(), train_labels), Digits(test.float(), test_labels)


def train(name: str, rate: float, plan: Plan, data: Digits, test: Digits, report: Callable[[float], None]) -> Run:
    """Train once, from the current state of the random number generator."""
    model = perceptron(plan)
    optimiser = OPTIMISERS[name](model, rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, DECAY)
    curve = []
    for _ in range(plan.epochs):
        right = 0
        for batch in torch.split(torch.randperm(len(data.labels)), plan.batch):
            scores, labels = model(data.pixels[batch]), data.labels[batch]
            optimiser.zero_grad()
            functional.cross_entropy(scores, labels).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            right += int((scores.argmax(1) == labels).sum())
        schedule.step()
        curve.append(right / len(data.labels))
        report(curve[-1])
    with torch.no_grad():
        accuracy = (model(test.pixels).argmax(1) == test.labels).float().mean().item()
    state_bytes = sum(value.nbytes for state in optimiser.state.values() for value in state.values())
    return Run(name, rate, curve, curve[-1], accuracy, state_bytes)


def search(plan: Plan, data: Digits, test: Digits, seed: int, console: Console) -> list[Run]:
    """Train by every optimiser at every learning rate, from the same weights and with the same batches."""
    runs = []
    live = TextColumn("training accuracy {task.fields[accuracy]:>4.0%}")
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), live)
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress, torch.random.fork_rng(devices=[]):
        task = progress.add_task("", total=len(OPTIMISERS) * len(RATES) * plan.epochs, accuracy=0.0)
        for name in OPTIMISERS:
            for rate in RATES:
                progress.update(task, description=f"{name:<15} at {rate:<6g}")
                torch.manual_seed(seed)
                run = train(name, rate, plan, data, test, lambda now: progress.update(task, advance=1, accuracy=now))
                runs.append(run)
    return runs


def tabulate(best: list[Run], default: Run, data: Digits, test: Digits) -> Table:
    """Return a table of the best run of each optimiser."""
    table = Table(Column("optimiser", no_wrap=True))
    for heading in ("step size", "training accuracy", "test accuracy", "state, bytes"):
        table.add_column(heading, justify="right")
    for label, run in [*((f"{run.optimiser}, best", run) for run in best), ("Nero, default", default)]:
        table.add_row(label, f"{run.rate:g}", f"{run.training:.1%}", f"{run.test:.1%}", f"{run.state_bytes:,}")
    table.add_row("chance", "", f"{data.chance:.1%}", f"{test.chance:.1%}", "", style="dim")
    return table


def verdict(best: list[Run], default: Run, data: Digits) -> str:
    """Summarise the results in one sentence."""
    # within four standard errors of chance
    threshold = data.chance + 4 * math.sqrt(data.chance * (1 - data.chance) / len(data.labels))
    ranked = sorted(best, key=lambda run: run.training, reverse=True)
    clauses = [
        f"{run.optimiser} gets {run.training:.0%} of the training digits right and {run.test:.0%} of the unseen ones"
        for run in ranked
        if run.training > threshold
    ]
    if stuck := [run.optimiser for run in ranked if run.training <= threshold]:
        names = " and ".join([", ".join(stuck[:-1]), stuck[-1]] if stuck[1:] else stuck)
        clauses.append(f"{names} {'do' if stuck[1:] else 'does'} no better than chance")
    if default in best:
        clauses.append(f"Nero's best step size is its default, {default.rate:g}")
    else:
        clauses.append(f"Nero at its default, {default.rate:g}, gets {default.training:.0%} and {default.test:.0%}")
    return f"Each at its best step size: {'; '.join(clauses)}."


def draw(runs: list[Run], best: list[Run], default: Run, plan: Plan, chance: float) -> Figure:
    """Draw the learning curves, and the final accuracy by learning rate."""
    figure = Figure(figsize=(7.4, 4.8), layout="constrained")
    task = f"Training a {plan.depth}-layer perceptron to read digits,\nwithout batch norm or skip connections"
    figure.suptitle(task, fontsize=12, fontweight="bold", x=0.01, ha="left")
    curves, rates = figure.subplots(1, 2, sharey=True, width_ratios=[5, 4])
    shown = [run for run in runs if run in best or run is default]
    for run in runs:
        colour, dashes, _ = LOOKS[run.optimiser]
        weight = {"lw": 2.4, "zorder": 3} if run in shown else {"lw": 0.8, "alpha": 0.4}
        curves.plot(range(1, plan.epochs + 1), run.curve, color=colour, ls=dashes, **weight)
    ranked = sorted(shown, key=lambda run: run.training)
    crowd = [run for run in ranked if run.training < ranked[0].training + LABEL_HEIGHT]
    height = ranked[0].training - LABEL_HEIGHT * (len(crowd) + 1) / 2  # centres the labels of the lowest curves
    for run in ranked:
        height = max(0.0 if run in crowd else run.training, height + LABEL_HEIGHT)  # above the label below
        label = f"{run.optimiser}, {run.rate:g}" + (" (default)" if run is default else "")
        curves.annotate(
            label, (1.02, height), xycoords=("axes fraction", "data"), va="center", color=LOOKS[run.optimiser][0]
        ).set_fontweight("bold")
    for name, (colour, dashes, marker) in LOOKS.items():
        ends = [run.training for run in runs if run.optimiser == name]
        rates.plot(RATES, ends, color=colour, ls=dashes, marker=marker, ms=8, mfc="none", mew=1.6)
    for axes in (curves, rates):
        axes.axhline(chance, color="0.35", ls=(0, (1, 2)), lw=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
    curves.text(1, chance - 0.02, "chance", color="0.35", va="top")
    curves.set(xlabel="epoch", ylabel="training accuracy", ylim=(0, 1.02), xlim=(0, plan.epochs))
    curves.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    curves.set_title("At the best step size (thin: others)", fontsize=10.5, loc="left")
    rates.set(xscale="log", xlabel="initial step size")
    rates.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    rates.minorticks_off()
    rates.set_title("Last epoch, by step size", fontsize=10.5, loc="left")
    return figure


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the figure and the record (default: out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches (default: 0)")
    parser.add_argument("--quick", action="store_true", help="train a small network for four epochs, as a check")
    options = parser.parse_args(argv)
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed must be from 0 to 2^63 - 1, got {options.seed}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"cannot write into --out {options.out}: {error.strerror}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Train, draw and print."""
    options = parse(argv)
    console = Console(highlight=False, markup=False, emoji=False)
    plan = Plan(depth=8, epochs=4) if options.quick else Plan()
    data, test = load()
    console.print(
        f"{plan.depth} layers, {plan.width} wide; {len(data.labels):,} digits in batches of {plan.batch}; "
        f"{plan.epochs} epochs, the step size times {DECAY:g} after each; seed {options.seed}"
    )
    start, threads, onednn = time.perf_counter(), torch.get_num_threads(), torch.backends.mkldnn.enabled
    # the matrices are too small for threads and, on Arm, for the overhead of oneDNN
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        runs = search(plan, data, test, options.seed, console)
    except KeyboardInterrupt:
        console.print("stopped: nothing was written")
        return 130
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = onednn
    best = [max((run for run in runs if run.optimiser == name), key=lambda run: run.training) for name in OPTIMISERS]
    default = next(run for run in runs if run.optimiser == "Nero" and run.rate == DEFAULT_RATE)
    path = options.out / "demo.png"
    draw(runs, best, default, plan, data.chance).savefig(path, dpi=200)
    record = {
        "seed": options.seed,
        "torch": torch.__version__,
        "plan": asdict(plan),
        "runs": [asdict(run) for run in runs],
    }
    path.with_suffix(".json").write_text(json.dumps(record) + "\n")
    console.print(tabulate(best, default, data, test))
    console.print(verdict(best, default, data))
    console.print(
        f"Learning curves: {path}; every run: {path.with_suffix('.json')} ({time.perf_counter() - start:.0f} s)",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
