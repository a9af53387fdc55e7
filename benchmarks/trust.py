"""How far neurons may turn before the gradients are others: the trust of Definition 4, measured beside the depth.

Takes each network of the paper's supervised tasks as it begins, balanced, and a batch of its data; turns all neurons
by Nero's first step, through angles from 0.0001 to 0.1; and measures by how much of itself each layer's gradient
changes. Writes benchmarks/results/trust.json, and `trust.py --draw` makes docs/figures/trust.png of it. On two cores
it takes some minutes.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from timing import machine
from torch import Tensor, nn

import nero
from nero.theory import relative_change
from nero_lab.data import load
from nero_lab.models.dropout import Dropout
from nero_lab.models.mlp import mlp
from nero_lab.protocol import Task
from nero_lab.provenance import commit
from nero_lab.store import write_atomically
from nero_lab.tasks import TASKS

ROOT = Path(__file__).parents[1]
ANGLES = tuple(round(10 ** (exponent / 2), 7) for exponent in range(-8, -1))


class Network(NamedTuple):
    """What is measured: a task's network on so many examples of its data."""

    name: str
    task: Task
    examples: int


def networks() -> list[Network]:
    """Perceptrons from 5 layers to 100, and the others of the suite that learn from labels."""
    perceptrons = [
        Network(f"perceptron of {count} layers", replace(TASKS["mnist-deep"], model=partial(mlp, count)), 250)
        for count in (5, 10, 20, 50, 100)
    ]
    return [
        *perceptrons,
        Network("VGG-11", TASKS["cifar10-vgg11"], 128),
        Network("ResNet-18", TASKS["cifar10-resnet18"], 32),
        Network("language model", TASKS["wikitext2"], 20),
        Network("translator", TASKS["translation"], 64),
        Network("ResNet-50", TASKS["imagenet"], 32),
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw what was measured, from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with the data; without: $NERO_DATA, or a download")
    parser.add_argument("--images", type=Path, help="folder of classes for ResNet-50; without, it is left out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="where the JSON is")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/figures/trust.png", help="where it is drawn")
    parser.add_argument("--draw", action="store_true", help="draw what was measured, and measure nothing")
    arguments = parser.parse_args(argv)
    console, path = Console(width=None if sys.stdout.isatty() else 120), arguments.out / "trust.json"
    if arguments.draw:
        draw(json.loads(path.read_text())["rows"], arguments.figure)
        return 0
    told = {"machine": machine(torch.device("cpu")), "torch": torch.__version__, "commit": commit()}
    rows: list[dict[str, Any]] = []
    for network in networks():
        place = arguments.images if network.task.dataset == "imagenet" else arguments.data
        if place is None and network.task.dataset == "imagenet":
            console.print(f"{network.name} left out: it wants --images")
            continue
        rows.append(measured(network, place))
        console.print(f"{network.name}: {rows[-1]['median']}")
        text = json.dumps({**told, "date": date.today().isoformat(), "angles": ANGLES, "rows": rows}, indent=1) + "\n"
        write_atomically(path, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    console.print(table(rows))
    return 0


def measured(network: Network, place: Path | None) -> dict[str, Any]:
    """By how much of themselves the layers' gradients change, by angle: the least, the median and the most."""
    data = load(network.task.dataset, place)
    torch.manual_seed(0)
    model = nero.balance_(network.task.model(**data.sizes))
    random = torch.Generator().manual_seed(0)
    *inputs, labels = next(iter(data.epoch(network.examples, random, network.task.augment)))
    depth = nero.depth_of(model, *inputs)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.keep = 1.0  # what chance leaves out is not the step's doing

    def loss(model: nn.Module) -> Tensor:
        logits = model(*inputs)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=network.task.smoothing)

    steps = first_steps(model, loss)
    changes = [
        [layer.change for layer in relative_change(model, loss, steps(angle)).layers if layer.kind == "neuron"]
        for angle in ANGLES
    ]
    median = [statistics.median(each) for each in changes]
    return {
        "network": network.name,
        "layers": len(changes[0]),
        "depth": round(depth, 2),
        "least": [_short(min(each)) for each in changes],
        "median": [_short(each) for each in median],
        "most": [_short(max(each)) for each in changes],
        "trusted": _short(trusted(median)),
    }


def first_steps(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Callable[[float], dict[str, Tensor]]:
    """Nero's first step, as a change of all neurons, by angle."""
    roles, parameters = nero.roles_of(model), dict(model.named_parameters())
    turned = {name: parameters[name] for name, role in roles.items() if role.kind == "neuron"}
    gradients = torch.autograd.grad(loss(model), list(turned.values()))

    def step(angle: float) -> dict[str, Tensor]:
        before = {name: parameter.detach().clone() for name, parameter in turned.items()}
        optimiser = nero.Nero(nero.param_groups(model), lr=angle)
        for parameter, gradient in zip(turned.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimiser.step()
        optimiser.zero_grad()
        with torch.no_grad():
            change = {name: parameter.detach() - before[name] for name, parameter in turned.items()}
            for name, parameter in turned.items():
                parameter.copy_(before[name])
        return change

    return step


def trusted(changes: list[float]) -> float:
    """The angle at which half of the layers have another gradient than before: one that has changed by its length.

    It is told from the angles around it, and is not a number if there are none such.
    """
    for (low, small), (high, large) in zip(
        zip(ANGLES, changes, strict=True), zip(ANGLES[1:], changes[1:], strict=True), strict=False
    ):
        if small < 1 <= large:
            way = math.log(1 / small) / math.log(large / small)
            return float(low * (high / low) ** way)
    return math.nan


def table(rows: list[dict[str, Any]]) -> Table:
    """For a person."""
    found = Table(box=None, pad_edge=False)
    for column in ("network", "layers", "depth", '"auto"', "half of the gradients are others at"):
        found.add_column(column, justify="left" if column == "network" else "right")
    for row in rows:
        auto = f"{nero.auto.depth.TRUST / row['depth']:.2g}"
        found.add_row(row["network"], str(row["layers"]), f"{row['depth']:.1f}", auto, at(row))
    return found


def at(row: dict[str, Any]) -> str:
    """The trusted angle in words, where it may be shorter than all that were tried."""
    if row["trusted"] is not None:
        return f"{row['trusted']:.2g}"
    return f"below {ANGLES[0]:g}" if row["median"][0] >= 1 else f"above {ANGLES[-1]:g}"


def draw(rows: list[dict[str, Any]], figure: Path) -> None:
    """The median layer's change by angle: of perceptrons on the left, of the others on the right."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    picture, sides = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    alike = [row for row in rows if row["network"].startswith("perceptron")]
    others = [row for row in rows if row not in alike]
    for axes, some, title in zip(sides, (alike, others), ("Perceptrons", "Other networks"), strict=True):
        colours = plt.get_cmap("viridis")
        for place, row in enumerate(some):
            colour = colours(place / max(1, len(some) - 1) * 0.9)
            axes.plot(ANGLES, row["median"], "o-", color=colour, label=row["network"].removeprefix("perceptron of "))
        axes.axhline(1, color="grey", linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="angle of the first step", ylim=(0.01, 10), title=title)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    sides[0].set_ylabel("change of the median layer's gradient, of its length")
    figure.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(figure, dpi=160)
    plt.close(picture)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


if __name__ == "__main__":
    sys.exit(main())
