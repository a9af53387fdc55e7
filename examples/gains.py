"""Pull the gains of a batch-normalised network to one, harder and harder, and see what it fits and what it learns.

Section 5.6 of the paper in small: scikit-learn's digits instead of ImageNet, a perceptron of four layers instead of
ResNet-50, and one label in five drawn at random, so that there is something to overfit to. Nero as tuned there, at
rate 0.02 with scale one for gains and biases; every strength of the penalty on the same seeds.
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
NERO, GREY = "#0072B2", "#555555"  # of Okabe and Ito's colours, as in the demo


@dataclass(frozen=True)
class Plan:
    """How large a net is trained, on how much, and for how long."""

    depth: int = 4
    width: int = 128
    examples: int = 600
    wrong: float = 0.2
    batch: int = 100
    epochs: int = 60
    rate: float = 0.02


@dataclass(frozen=True)
class Run:
    """What came of training once."""

    penalty: float
    seed: int
    train_loss: float
    test_error: float
    gains: list[float]  # their quantiles, from the least to the largest


def perceptron(plan: Plan) -> nn.Sequential:
    """Batch norm behind every layer but the last."""
    layers: list[nn.Module] = []
    for fan_in in (64, *[plan.width] * (plan.depth - 2)):
        layers += [nn.Linear(fan_in, plan.width, bias=False), nn.BatchNorm1d(plan.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(plan.width, 10))


def digits(plan: Plan, seed: int) -> list[Tensor]:
    """Digits to train on and to test on, then what they show; of the former, some labels are drawn at random."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, train_size=plan.examples, random_state=seed, stratify=labels)
    train, test, shown, unseen = map(torch.as_tensor, parts)
    shown = torch.where(torch.rand(len(shown)) < plan.wrong, torch.randint(10, (len(shown),)), shown)
    return [*(((part - train.mean()) / train.std()).float() for part in (train, test)), shown, unseen]


def train(plan: Plan, penalty: float, seed: int) -> Run:
    """One run, from weights, labels and batches that depend on the seed alone."""
    torch.manual_seed(seed)
    pixels, unseen, labels, unseen_labels = digits(plan, seed)
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
        error = (model(unseen).argmax(1) != unseen_labels).float().mean().item()
    gains = torch.cat([part.parameter.detach() for part in optimiser.parts() if part.role.kind == "gain"])
    spread = gains.quantile(torch.linspace(0, 1, 11)).tolist()
    return Run(penalty, seed, round(loss, 5), round(error, 5), [round(gain, 4) for gain in spread])


def draw(runs: list[Run], plan: Plan) -> Figure:
    """The gains, the fit and the error by the strength of the penalty, seed by seed."""
    figure = Figure(figsize=(11, 3.9), dpi=160, layout="constrained")
    figure.suptitle(
        "Gains pulled to one: a batch-normalised network that would overfit", fontsize=12, fontweight="bold"
    )
    gains, loss, error = figure.subplots(1, 3)
    penalties = sorted({run.penalty for run in runs})
    by_penalty = [[run for run in runs if run.penalty == penalty] for penalty in penalties]
    for place, those in enumerate(by_penalty):
        middle = [statistics.mean(run.gains[index] for run in those) for index in range(11)]
        for low, high, width in ((0, 10, 1.2), (1, 9, 5), (3, 7, 11)):
            ends = [middle[low], middle[high]]
            gains.plot([place] * 2, ends, color=NERO, alpha=0.3, linewidth=width, solid_capstyle="butt")
        gains.plot(place, middle[5], marker="o", color=NERO, markersize=5)
    gains.axhline(1, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    free = {run.seed: run.test_error for run in runs if run.penalty == 0}
    for axes, of in ((loss, _fit), (error, partial(_beside, free))):
        for seed in free:
            axes.plot(
                [of(run) for those in by_penalty for run in those if run.seed == seed], color=NERO, alpha=0.2, lw=1
            )
        axes.plot([statistics.mean(map(of, those)) for those in by_penalty], color=NERO, lw=2.4, marker="o", ms=5)
    error.axhline(0, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    loss.set_yscale("log")
    loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss.yaxis.set_minor_locator(NullLocator())
    loss.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _dress(gains, penalties, "Gains: all, eight in ten, four in ten")
    _dress(loss, penalties, f"Training loss, {plan.wrong:.0%} of the labels at random")
    without = 100 * statistics.mean(free.values())
    _dress(error, penalties, f"Test error, points from the {without:.1f}% without it")
    return figure


def _fit(run: Run) -> float:
    return run.train_loss


def _beside(free: dict[int, float], run: Run) -> float:
    return 100 * (run.test_error - free[run.seed])


def _dress(axes: Axes, penalties: list[float], title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xticks(range(len(penalties)), [f"{penalty:g}" for penalty in penalties], fontsize=8)
    axes.set_xlabel("gain_penalty", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def table(runs: list[Run]) -> str:
    """The means, and how test errors differ from those without a penalty on the same seeds."""
    free = {run.seed: run.test_error for run in runs if run.penalty == 0}
    lines = ["penalty  largest gain  train loss  test error, %  less than without, points"]
    for penalty in sorted({run.penalty for run in runs}):
        those = [run for run in runs if run.penalty == penalty]
        largest, loss, error = (
            statistics.mean(values)
            for values in zip(*((run.gains[-1], run.train_loss, 100 * run.test_error) for run in those), strict=True)
        )
        less = [-_beside(free, run) for run in those]
        off = statistics.stdev(less) / math.sqrt(len(less)) if len(less) > 1 else math.nan
        lines.append(
            f"{penalty:<7g}  {largest:12.3f}  {loss:10.4f}  {error:13.2f}  {statistics.mean(less):.2f} ± {off:.2f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Train, tell and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure and the record (out)")
    parser.add_argument("--seeds", type=int, default=10, help="how many runs of each strength (10)")
    parser.add_argument("--quick", action="store_true", help="a few epochs: to see that it works")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(width=16, epochs=2) if options.quick else Plan()
    torch.set_num_threads(1)  # the products are too small to share out
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
