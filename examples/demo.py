"""Train a 50-layer perceptron, without batch norm or skip connections, by Nero, SGD and Adam, and draw the curves.

The paper's deep-MLP experiment made small enough for a laptop: scikit-learn's digits instead of MNIST, 50 layers
instead of 100. Every optimiser is run at every step size of the paper's grid; its best is the one it is judged by.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

import nero

RATES = (0.0001, 0.001, 0.01, 0.1)
DEFAULT_RATE = 0.01  # Nero's own, which is of the grid, so its run is there already
DECAY = 0.9
OPTIMISERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "Nero": lambda model, rate: nero.Nero(model, lr=rate),
    "SGD": lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate),
    "Adam": lambda model, rate: torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.999), fused=True),
}
# of Okabe and Ito's palette, and dashed apart for those who print in grey
LOOKS = {"Nero": ("#0072B2", "-", "o"), "SGD": ("#D55E00", "--", "s"), "Adam": ("#009E73", ":", "^")}


@dataclass(frozen=True)
class Plan:
    """How large a net is trained, and for how long."""

    depth: int = 50
    width: int = 64  # that of the images, so that the layers are square like the paper's
    batch: int = 144
    epochs: int = 36


@dataclass(frozen=True)
class Images:
    """Digits with their labels."""

    pixels: Tensor
    labels: Tensor

    @property
    def chance(self) -> float:
        """The accuracy of always naming the commonest digit."""
        return self.labels.bincount().max().item() / len(self.labels)


@dataclass(frozen=True)
class Run:
    """What became of one training run."""

    optimiser: str
    rate: float
    curve: list[float]
    test: float
    state_bytes: int

    @property
    def training(self) -> float:
        """The training accuracy in the last epoch."""
        return self.curve[-1]


class Perceptron(nn.Module):
    """Linear layers as PyTorch initialises them, with √2·max(0, x) in between."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(plan.width, plan.width) for _ in range(plan.depth - 1))
        self.output = nn.Linear(plan.width, 10)
        self.gain = torch.tensor(math.sqrt(2))

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the ten digits."""
        for layer in self.hidden:
            x = functional.relu(layer(x)) * self.gain
        scores: Tensor = self.output(x)
        return scores


def load() -> tuple[Images, Images]:
    """The bundled digits, one fifth of them kept for the test, normalised by the training pixels."""
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    known, unseen, known_labels, unseen_labels = map(torch.as_tensor, split)
    mean, deviation = known.mean(), known.std()
    return (
        Images(((known - mean) / deviation).float(), known_labels),
        Images(((unseen - mean) / deviation).float(), unseen_labels),
    )


def train(
    name: str, rate: float, plan: Plan, data: Images, test: Images, seed: int, report: Callable[[float], None]
) -> Run:
    """One run; every run of a seed starts from the same weights and sees the same batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Perceptron(plan)
        optimiser = OPTIMISERS[name](model, rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, DECAY)
        curve = []
        for _ in range(plan.epochs):
            right = 0
            for batch in torch.randperm(len(data.labels)).split(plan.batch):
                scores, labels = model(data.pixels[batch]), data.labels[batch]
                optimiser.zero_grad()
                functional.cross_entropy(scores, labels).backward()
                optimiser.step()
                right += int((scores.argmax(1) == labels).sum())
            schedule.step()
            curve.append(right / len(data.labels))
            report(curve[-1])
    with torch.no_grad():
        accuracy = (model(test.pixels).argmax(1) == test.labels).float().mean().item()
    tensors = [value for state in optimiser.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Run(name, rate, curve, accuracy, sum(tensor.nbytes for tensor in tensors))


def search(plan: Plan, data: Images, test: Images, seed: int, console: Console) -> list[Run]:
    """Every optimiser at every step size, under a progress bar."""
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    live = TextColumn("training accuracy {task.fields[accuracy]:>4.0%}")
    with Progress(*columns, live, TimeElapsedColumn(), console=console) as progress:
        total = len(OPTIMISERS) * len(RATES) * plan.epochs
        task = progress.add_task("", total=total, accuracy=0.0)
        for name in OPTIMISERS:
            for rate in RATES:
                progress.update(task, description=f"{name:<4} at {rate:<6g}")
                report = lambda accuracy: progress.update(task, advance=1, accuracy=accuracy)  # noqa: E731
                runs.append(train(name, rate, plan, data, test, seed, report))
    return runs


def tabulate(runs: Iterable[Run], default: Run, data: Images, test: Images) -> Table:
    """Who learned what."""
    table = Table()
    for heading in ("optimiser", "step size", "training accuracy", "test accuracy", "state, bytes"):
        table.add_column(heading, justify="left" if heading == "optimiser" else "right")
    for choice, run in [*(("best", run) for run in runs), ("default", default)]:
        figures = (f"{run.rate:g}", f"{run.training:.1%}", f"{run.test:.1%}", f"{run.state_bytes:,}")
        table.add_row(f"{run.optimiser}, {choice}", *figures)
    table.add_row("chance", "", f"{data.chance:.1%}", f"{test.chance:.1%}", "", style="dim")
    return table


def verdict(best: list[Run], default: Run, data: Images) -> str:
    """One sentence on the results, whatever they are."""
    # four standard errors above guessing: less could be luck
    bar = data.chance + 4 * math.sqrt(data.chance * (1 - data.chance) / len(data.labels))
    ranked = sorted(best, key=lambda run: run.training, reverse=True)
    clauses = [
        f"{run.optimiser} gets {run.training:.0%} of the training digits right and {run.test:.0%} of the unseen ones"
        for run in ranked
        if run.training > bar
    ]
    stuck = [run.optimiser for run in ranked if run.training <= bar]
    if stuck:
        clauses.append(f"{' and '.join(stuck)} {'does' if len(stuck) == 1 else 'do'} no better than guessing")
    if default not in best:
        clauses.append(f"Nero as it comes, at {default.rate:g}, gets {default.training:.0%} and {default.test:.0%}")
    elif default.training > bar:
        clauses.append(f"Nero's best step size is its default, {default.rate:g}")
    return f"Each at its best step size: {'; '.join(clauses)}."


def spread(heights: list[float], gap: float) -> list[float]:
    """The heights, moved up where two labels would touch."""
    placed = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for below, above in zip(order, order[1:], strict=False):
        placed[above] = max(placed[above], placed[below] + gap)
    return placed


def draw(runs: list[Run], best: list[Run], default: Run, plan: Plan, chance: float, path: Path) -> None:
    """The learning curves, and beside them the search for the step size."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    figure.suptitle(
        f"Training a {plan.depth}-layer perceptron to read 8×8 digits, without batch norm or skip connections",
        fontsize=13,
        fontweight="bold",
    )
    curves, rates = figure.subplots(1, 2, sharey=True, width_ratios=[5, 3])
    epochs = range(1, plan.epochs + 1)
    shown = best if default in best else [*best, default]
    for run in runs:
        colour, dashes, _ = LOOKS[run.optimiser]
        style = {"lw": 2.4, "zorder": 3} if run in shown else {"lw": 0.8, "alpha": 0.4}
        curves.plot(epochs, run.curve, color=colour, ls=dashes, **style)
    label_ends(curves, shown, best, default, plan)
    for name, (colour, dashes, marker) in LOOKS.items():
        ends = [run.training for run in runs if run.optimiser == name]
        rates.plot(RATES, ends, color=colour, ls=dashes, marker=marker, lw=1.6, label=name)
    rates.set(xscale="log", xlabel="initial step size", title="in the last epoch, by step size")
    rates.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    rates.minorticks_off()
    rates.legend(frameon=False, loc="upper left")
    for axes in (curves, rates):
        axes.axhline(chance, color="0.35", ls=(0, (1, 2)), lw=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    curves.set(xlabel="epoch", ylabel="training accuracy", ylim=(0, 1.02), title="at each optimiser's best step size")
    curves.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    curves.text(1, chance - 0.02, "chance", color="0.35", va="top")
    figure.savefig(path, dpi=200)


def label_ends(axes: Axes, shown: list[Run], best: list[Run], default: Run, plan: Plan) -> None:
    """A label at the end of each curve, in its colour."""
    for run, height in zip(shown, spread([run.training for run in shown], 0.055), strict=True):
        kind = " and ".join(["best"] * (run in best) + ["default"] * (run is default))
        text = f"{run.optimiser}, {run.rate:g}" + (f" ({kind})" if run is default else "")
        axes.text(plan.epochs * 1.02, height, text, color=LOOKS[run.optimiser][0], va="center", fontweight="bold")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked before any time is spent."""

    def seed(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) >= 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
        return int(text)

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure (default: out)")
    parser.add_argument("--seed", type=seed, default=0, help="of the weights and the batches (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a small net for a few epochs, to see that all runs")
    options = parser.parse_args(argv)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"cannot write into --out {options.out}: {error.strerror}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Search, tell and draw."""
    options = parse(argv)
    console = Console(highlight=False)
    plan = Plan(depth=8, epochs=4) if options.quick else Plan()
    data, test = load()
    console.print(
        f"{plan.depth} layers of width {plan.width}, {len(data.labels):,} digits to train on, batches of {plan.batch}, "
        f"{plan.epochs} epochs, the step size times {DECAY:g} after each, seed {options.seed}"
    )
    threads, start = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)  # the products are too small to share out
    try:
        # on Arm, what oneDNN does before each product takes longer than products of this size
        with torch.backends.mkldnn.flags(enabled=False):
            runs = search(plan, data, test, options.seed, console)
    except KeyboardInterrupt:
        console.print("stopped; nothing is written")
        return 130
    finally:
        torch.set_num_threads(threads)
    best = [max((run for run in runs if run.optimiser == name), key=lambda run: run.training) for name in OPTIMISERS]
    default = next(run for run in runs if run.optimiser == "Nero" and run.rate == DEFAULT_RATE)
    path = options.out / "demo.png"
    draw(runs, best, default, plan, data.chance, path)
    console.print(tabulate(best, default, data, test))
    console.print(verdict(best, default, data))
    console.print(f"Learning curves: {path} ({time.perf_counter() - start:.0f} s in all)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
