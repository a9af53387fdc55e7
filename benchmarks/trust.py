"""The angle through which neurons may turn before the gradients change: the trust of Definition 4, measured.

For each network of the paper's supervised tasks, balanced and untrained, and one batch of its data: turn all neurons by
Nero's first step, through angles from 0.0001 to 0.1, and measure the relative change of each layer's gradient. Writes
benchmarks/results/trust.json and draws docs/figures/trust.png. On two cores it takes some minutes.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from records import ROOT, command_line, origin, write_record
from torch import Tensor, nn

import nero
from nero.theory import relative_change
from nero_lab.data import Dataset, load
from nero_lab.models.dropout import Dropout
from nero_lab.protocol import Task
from nero_lab.tasks import TASKS

ANGLES = tuple(round(10 ** (exponent / 2), 7) for exponent in range(-8, -1))
#: Name of the network, task that trains it, number of examples in the batch.
NETWORKS = (
    *((f"perceptron of {layers} layers", f"perceptron-{layers}", 250) for layers in (5, 10, 20, 50, 100)),
    ("VGG-11", "cifar10-vgg11", 128),
    ("ResNet-18", "cifar10-resnet18", 32),
    ("language model", "wikitext2", 20),
    ("translator", "translation", 64),
    ("ResNet-50", "imagenet", 32),
)


def main(argv: list[str] | None = None) -> int:
    """Measure and draw from the command line."""
    parser = command_line(__doc__, has_device=False, has_quick=False)
    parser.add_argument("--data", type=Path, help="folder with the data; without: $NERO_DATA, or a download")
    parser.add_argument("--images", type=Path, help="folder of classes for ResNet-50; without, it is left out")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/figures/trust.png", help="file of the figure")
    parser.add_argument("--draw", action="store_true", help="draw the record and measure nothing")
    arguments = parser.parse_args(argv)
    path = arguments.out / "trust.json"
    if not arguments.draw:
        rows: list[dict[str, Any]] = []
        for name, task, examples in NETWORKS:
            folder = arguments.images if task == "imagenet" else arguments.data
            if task == "imagenet" and folder is None:
                print(f"{name} is left out: it needs --images")
                continue
            rows.append({"network": name, **measure(TASKS[task], examples, folder)})
            print(f"{name}: {rows[-1]['median']}")
            write_record(path, {**origin(torch.device("cpu")), "angles": ANGLES, "rows": rows})
    draw(json.loads(path.read_text())["rows"], arguments.figure)
    return 0


def measure(task: Task, examples: int, folder: Path | None) -> dict[str, Any]:
    """Measure the relative change of the layers' gradients: the least, the median and the greatest at each angle."""
    data = cast(Dataset, load(task.dataset, folder))  # no game is measured
    torch.manual_seed(0)
    model = nero.balance_(task.model(**data.sizes))
    *inputs, labels = next(iter(data.epoch(examples, torch.Generator().manual_seed(0), task.augment)))
    depth = nero.depth_of(model, *inputs)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.keep = 1.0  # dropout would change the gradients, too

    def loss(model: nn.Module) -> Tensor:
        logits = model(*inputs)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=task.smoothing)

    step = first_step(model, loss)
    changes = [
        [layer.change for layer in relative_change(model, loss, step(angle)).layers if layer.kind == "neuron"]
        for angle in ANGLES
    ]
    medians = [statistics.median(layers) for layers in changes]
    return {
        "layers": len(changes[0]),
        "depth": round(depth, 2),
        "least": [_short(min(layers)) for layers in changes],
        "median": [_short(median) for median in medians],
        "most": [_short(max(layers)) for layers in changes],
        "trusted": _short(trusted_angle(medians)),
    }


def first_step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Callable[[float], dict[str, Tensor]]:
    """Return a function of the angle that computes the change of all neurons by Nero's first step."""
    roles = nero.roles_of(model)
    neurons = {name: parameter for name, parameter in model.named_parameters() if roles[name].kind == "neuron"}
    gradients = torch.autograd.grad(loss(model), list(neurons.values()))

    def change(angle: float) -> dict[str, Tensor]:
        before = {name: parameter.detach().clone() for name, parameter in neurons.items()}
        optimiser = nero.Nero(nero.param_groups(model), lr=angle)
        for parameter, gradient in zip(neurons.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimiser.step()
        optimiser.zero_grad()
        with torch.no_grad():
            changes = {name: parameter.detach() - before[name] for name, parameter in neurons.items()}
            for name, parameter in neurons.items():
                parameter.copy_(before[name])
        return changes

    return change


def trusted_angle(changes: list[float]) -> float:
    """Return the angle at which the gradient of the median layer has changed by its own length.

    The angle is interpolated between those of :data:`ANGLES`; NaN if the change does not pass one within them.
    """
    for place in range(len(ANGLES) - 1):
        small, large = changes[place : place + 2]
        if small < 1 <= large:
            way = math.log(1 / small) / math.log(large / small)
            return float(ANGLES[place] * (ANGLES[place + 1] / ANGLES[place]) ** way)
    return math.nan


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the change of the median layer by angle: perceptrons on the left, other networks on the right."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    sides = figure.subplots(1, 2, sharey=True)
    perceptrons = [row for row in rows if row["network"].startswith("perceptron")]
    others = [row for row in rows if row not in perceptrons]
    for axes, some, title in zip(sides, (perceptrons, others), ("Perceptrons", "Other networks"), strict=True):
        for place, row in enumerate(some):
            colour = colormaps["viridis"](place / max(1, len(some) - 1) * 0.9)
            axes.plot(ANGLES, row["median"], "o-", color=colour, label=row["network"].removeprefix("perceptron of "))
        axes.axhline(1, color="grey", linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="angle of the first step", ylim=(0.01, 10), title=title)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        if some:
            axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    sides[0].set_ylabel("relative change of the median layer's gradient")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


if __name__ == "__main__":
    sys.exit(main())
