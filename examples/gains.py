"""Compare strengths of gain_penalty on a batch-normalised network: its gains, training loss and test error.

This is a small version of Section 5.6 of the paper: scikit-learn's digits instead of ImageNet, and a perceptron of four
layers instead of ResNet-50. One label in five is drawn at random, so that there is something to overfit to. Nero has
the paper's settings: lr 0.02, and scale 1 for gains and biases. All strengths use the same seeds.
"""

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

import nero

PENALTIES = (0.0, 0.0001, 0.0003, 0.001, 0.01, 0.1, 1.0)
NERO, GREY = "#0072B2", "#555555"  # from the palette of Okabe and Ito, as in the demo


@dataclass(frozen=True)
class Plan:
    """The size of the network and of the data, and the length of training."""

    depth: int = 4
    width: int = 128
    examples: int = 600
    wrong: float = 0.2  # share of random labels
    batch: int = 100
    epochs: int = 60
    rate: float = 0.02


@dataclass(frozen=True)
class Run:
    """The result of one training run."""

    penalty: float
    seed: int
    train_loss: float
    test_error: float
    gains: list[float]  # quantiles, from the smallest to the largest


def perceptron(plan: Plan) -> nn.Sequential:
    """Return a perceptron with batch norm after every layer but the last."""
    layers: list[nn.Module] = []
    for fan_in in (64, *[plan.width] * (plan.depth - 2)):
        layers += [nn.Linear(fan_in, plan.width, bias=False), nn.BatchNorm1d(plan.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(plan.width, 10))


def load_data(plan: Plan, seed: int) -> list[Tensor]:
    """Return training images, test images, training labels and test labels; some training labels are random."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, train_size=plan.examples, random_state=seed, stratify=labels)
    train, test, train_labels, test_labels = map(torch.as_tensor, parts)
    count = len(train_labels)
    train_labels = torch.where(torch.rand(count) < plan.wrong, torch.randint(10, (count,)), train_labels)
    return [*(((part - train.mean()) / train.std()).float() for part in (train, test)), train_labels, test_labels]


def train(plan: Plan, penalty: float, seed: int) -> Run:
    """Train once; the initial weights, labels and batches depend on the seed alone."""
    torch.manual_seed(seed)
    pixels, test_pixels, labels, test_labels = load_data(plan, seed)
    model = perceptron(plan)
    groups = nero.param_groups(model)
    for group in groups:
        if group["role"] != "neuron":
            group["scale"] = 1.0
    optimiser = nero.Nero(groups, lr=plan.rate, gain_penalty=penalty)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, plan.epochs)
    for _ in range(plan.epochs):
        for batch in torch.split(torch.randperm(len(labels)), plan.batch):
            optimiser.zero_grad()
            functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        loss = functional.cross_entropy(model(pixels), labels).item()
        error = (model(test_pixels).argmax(1) != test_labels).float().mean().item()
    gains = torch.cat([part.parameter.detach() for part in optimiser.parts() if part.role.kind == "gain"])
    spread = gains.quantile(torch.linspace(0, 1, 11)).tolist()
    return Run(penalty, seed, round(loss, 5), round(error, 5), [round(gain, 4) for gain in spread])


def draw(runs: list[Run], plan: Plan) -> Figure:
    """Draw gains, training loss and test error by strength of the penalty, with a thin line per seed."""
    figure = Figure(figsize=(6.8, 6.4), dpi=200, layout="constrained")
    title = "Gains pulled to one: a batch-normalised network that would overfit"
    figure.suptitle(title, fontsize=11.5, fontweight="bold")
    gains, loss, error = figure.subplot_mosaic([["gains", "gains"], ["loss", "error"]]).values()
    penalties = sorted({run.penalty for run in runs})
    by_penalty = [[run for run in runs if run.penalty == penalty] for penalty in penalties]
    for place, group in enumerate(by_penalty):
        middle = [statistics.mean(run.gains[index] for run in group) for index in range(11)]
        for low, high, width in ((0, 10, 1.2), (1, 9, 5), (3, 7, 11)):
            ends = [middle[low], middle[high]]
            gains.plot([place] * 2, ends, color=NERO, alpha=0.3, linewidth=width, solid_capstyle="butt")
        gains.plot(place, middle[5], marker="o", color=NERO, markersize=5)
    gains.axhline(1, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    free = {run.seed: run.test_error for run in runs if run.penalty == 0}
    for axes, of in ((loss, _train_loss), (error, partial(_error_change, free))):
        for seed in free:
            axes.plot(
                [of(run) for group in by_penalty for run in group if run.seed == seed], color=NERO, alpha=0.2, lw=1
            )
        axes.plot([statistics.mean(map(of, group)) for group in by_penalty], color=NERO, lw=2.4, marker="o", ms=5)
    error.axhline(0, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    loss.set_yscale("log")
    loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss.yaxis.set_minor_locator(NullLocator())
    loss.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _style(gains, penalties, "Gains: all, eight in ten, four in ten")
    _style(loss, penalties, f"Training loss, {plan.wrong:.0%} of labels random")
    without = 100 * statistics.mean(free.values())
    _style(error, penalties, f"Test error, points from {without:.1f}% at 0")
    return figure


def _train_loss(run: Run) -> float:
    return run.train_loss


def _error_change(free: dict[int, float], run: Run) -> float:
    return 100 * (run.test_error - free[run.seed])


def _style(axes: Axes, penalties: list[float], title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xticks(range(len(penalties)), [f"{penalty:g}" for penalty in penalties], rotation=35)
    axes.set_xlabel("gain_penalty", fontsize=9.5)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def table(runs: list[Run]) -> str:
    """Return a table of means, with the decrease of the test error beside no penalty on the same seeds."""
    free = {run.seed: run.test_error for run in runs if run.penalty == 0}
    lines = ["penalty  largest gain  train loss  test error, %  less than without, points"]
    for penalty in sorted({run.penalty for run in runs}):
        group = [run for run in runs if run.penalty == penalty]
        largest, loss, error = (
            statistics.mean(values)
            for values in zip(*((run.gains[-1], run.train_loss, 100 * run.test_error) for run in group), strict=True)
        )
        less = [-_error_change(free, run) for run in group]
        standard_error = statistics.stdev(less) / math.sqrt(len(less)) if len(less) > 1 else math.nan
        means = f"{penalty:<7g}  {largest:12.3f}  {loss:10.4f}  {error:13.2f}"
        lines.append(f"{means}  {statistics.mean(less):.2f} ± {standard_error:.2f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Train, draw and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the figure and the record (default: out)"
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of runs per strength (default: 10)")
    parser.add_argument("--quick", action="store_true", help="train a small network for two epochs, as a check")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(width=16, epochs=2) if options.quick else Plan()
    torch.set_num_threads(1)  # the matrices are too small for threads to help
    runs = [train(plan, penalty, seed) for penalty in PENALTIES for seed in range(options.seeds)]
    path = options.out / "gains.png"
    draw(runs, plan).savefig(path, metadata={"Software": None})
    record = {"torch": torch.__version__, "plan": asdict(plan), "runs": [asdict(run) for run in runs]}
    path.with_suffix(".json").write_text(json.dumps(record) + "\n")
    print(table(runs))
    print(f"Figure: {path}; every run: {path.with_suffix('.json')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
