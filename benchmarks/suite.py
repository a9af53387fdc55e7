"""How long the paper's tasks take here, alone and side by side, and what the authors' way of running one takes.

Times whole epochs (their data, steps and evaluation) of every task that learns from labels, and some seconds of steps
of the GAN and of the game, in float32 and on a GPU in TF32 too; on a GPU also all cells of mnist-deep's search at once,
in float32; and steps of mnist-deep done as the paper's script does them: a loader on the host, tensor by tensor,
nothing captured. Writes benchmarks/results/suite-cuda.json or suite-cpu.json; what is timed again takes the place of
what an earlier record of the same machine has.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from end_to_end import Perceptron
from rich.console import Console
from rich.table import Table
from timing import Clock, Row, machine
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import nero
from nero_lab.data import Corpus, Dataset, ImageDataset, Images, Pairs, load
from nero_lab.data.corpus import Rows
from nero_lab.data.pairs import Sentences
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import Precision, Task
from nero_lab.store import commit, write_whole
from nero_lab.tasks import TASKS

ROOT = Path(__file__).parents[1]
#: One task for each network; those on the same one take the same time.
TIMED = ("mnist-deep", "mnist-reparameterised", "cifar10-vgg11", "cifar10-resnet18", "wikitext2", "translation")
#: Those of another loop, which are timed by steps.
STEPPED = ("cgan", "pong")
#: Their steps on a GPU before time is taken: an epoch of the GAN, whose last batch is smaller, two rounds of the game.
#: What comes for the first time is captured then, which may take longer than all that is timed.
FIRST = 300
SCRIPTED = "mnist-deep, the authors' way"


def main(argv: list[str] | None = None) -> int:
    """Time the tasks from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help=f"default: {here}, which is here")
    parser.add_argument("--data", type=Path, help="folder with the data; without: $NERO_DATA, or a download")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="where the JSON goes")
    parser.add_argument("--tasks", nargs="+", choices=TIMED + STEPPED, metavar="TASK", help="these alone")
    parser.add_argument("--epochs", type=int, default=2, help="timed of each, after one to warm up (2)")
    parser.add_argument("--share", type=float, help="of the data; without: all of it on a GPU, 1/100 on a CPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="of steps, of what is timed by steps (10)")
    arguments = parser.parse_args(argv)
    most = min(TASKS[name].epochs for name in TIMED) - 1
    if not 1 <= arguments.epochs <= most:
        parser.error(f"--epochs must be from 1 to {most}, but it is {arguments.epochs}")
    device = torch.device(arguments.device)
    record = {"machine": machine(device), "torch": torch.__version__}
    path = arguments.out / f"suite-{device.type}.json"
    before = earlier(path, record)
    if before is None and arguments.tasks:
        parser.error(
            f"{path} is broken, or of another machine or torch: name another folder by --out, or time all tasks"
        )
    share = arguments.share or (1.0 if device.type == "cuda" else 0.01)
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows: list[Row] = []
    precisions: tuple[Precision, ...] = ("float32", "tf32") if device.type == "cuda" else ("float32",)
    asked = [name for name in TIMED + STEPPED if name in (arguments.tasks or TIMED + STEPPED)]
    whole = {name: load(name, arguments.data) for name in dict.fromkeys(TASKS[task].dataset for task in asked)}
    for name in (each for each in asked if each in TIMED):
        task = TASKS[name]
        data = part(whole[task.dataset], share, task.batch).to(device)
        times = whole[task.dataset].examples / data.examples
        for precision in precisions:
            first = next(iter(task.contenders))
            rows.append(
                time_cells(task, [(first, task.contenders[first].best)], data, precision, arguments.epochs, times)
            )
            console.print(f"{name}, {precision}: {rows[-1]['seconds_an_epoch']:.3g} s an epoch")
            if name == "mnist-deep":
                rows.append(time_script(images(whole["mnist"]), device, precision, rows[-1]))
                console.print(f"{SCRIPTED}, {precision}: {rows[-1]['milliseconds_a_step']:.3g} ms a step")
            if name == "mnist-deep" and device.type == "cuda" and precision == "float32":
                cells = [(optimiser, rate) for optimiser in task.contenders for rate in task.grid]
                rows.append(time_cells(task, cells, data, precision, arguments.epochs, times))
                console.print(f"{name}, all {len(cells)} cells: {rows[-1]['seconds_an_epoch']:.3g} s an epoch")
    for name in (each for each in asked if each in STEPPED):
        for precision in precisions:
            data = whole[TASKS[name].dataset].to(device)
            rows.append(time_steps(TASKS[name], data, precision, arguments.seconds))
            console.print(f"{name}, {precision}: {rows[-1]['milliseconds_a_step']:.3g} ms a step")
    console.print(table(rows))
    told = {
        "date": date.today().isoformat(),
        "nero": nero.__version__,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "share": share,
        "epochs": arguments.epochs,
    }
    again = {_what(row) for row in rows}
    rows = [row for row in before or [] if _what(row) not in again] + [{**row, **told} for row in rows]
    text = json.dumps({**record, "rows": rows}, indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))
    console.print(f"written to {path}", soft_wrap=True)
    return 0


def earlier(path: Path, record: dict[str, str]) -> list[Row] | None:
    """The rows that there are of the same machine and torch; None if those there are of others, or cannot be read."""
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_text())
        same = all(before[key] == value for key, value in record.items())
        rows: list[Row] = [row for row in before["rows"] if _what(row)]
        return rows if same else None
    except (ValueError, TypeError, KeyError):
        return None


def _what(row: Row) -> tuple[str, str, int | None]:
    """What a row is of."""
    return row["task"], row["precision"], row.get("side_by_side")


def time_cells(
    task: Task, cells: list[tuple[str, float]], data: Dataset, precision: Precision, epochs: int, larger: float
) -> Row:
    """Seconds an epoch of runs side by side, after the first; all the data is so many times larger than this."""
    start = time.perf_counter()
    trainings = [
        Supervised(task, task.settings(optimiser, rate, epochs=epochs + 1, precision=precision), data)
        for optimiser, rate in cells
    ]
    times: list[float] = []
    while not trainings[-1].finished:
        for training in trainings:
            training.advance()
        if trainings[-1].epochs_known > len(times):  # the host has waited for the epoch's numbers
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
    timed = statistics.median(times[1:])
    begun = max(0.0, times[0] - timed)
    return {
        "task": task.name,
        "optimiser": cells[0][0] if len(cells) == 1 else "all",
        "precision": precision,
        "side_by_side": len(cells),
        "seconds_an_epoch": round(larger * timed, 4),
        "milliseconds_a_step": round(1e3 * timed / trainings[0].steps_per_epoch, 3),
        "seconds_to_begin": round(begun, 2),
        "seconds_in_full": round(larger * timed * task.epochs + begun, 1),
    }


def time_steps(task: Task, data: Any, precision: Precision, seconds: float) -> Row:
    """What a run of another loop takes by its steps, so many seconds of them; looks at images do not count."""
    assert task.loop is not None
    start = time.perf_counter()
    first = next(iter(task.contenders))
    training = task.loop(task, task.settings(first, precision=precision), data, None)
    clock = Clock(data.device)
    clock.burst(training.advance, FIRST if clock.gpu else 1)
    begun, done, before = time.perf_counter() - start, training.steps_done, time.perf_counter()
    while time.perf_counter() - before < seconds:
        training.advance()  # which waits for the device if and when a run does
    clock.wait()
    step = (time.perf_counter() - before) / (training.steps_done - done)
    begun = max(0.0, begun - done * step)
    return {
        "task": task.name,
        "optimiser": first,
        "precision": precision,
        "side_by_side": 1,
        "seconds_an_epoch": round(step * training.steps_per_epoch, 4),
        "milliseconds_a_step": round(1e3 * step, 3),
        "seconds_to_begin": round(begun, 2),
        "seconds_in_full": round(step * training.steps_per_epoch * task.epochs + begun, 1),
    }


def time_script(
    train: Images, device: torch.device, precision: Precision, ours: Row, steps: int = 20, depth: int = 100
) -> Row:
    """Steps of mnist-deep as the paper's script makes them; ours were timed just before, in the same process."""
    model = Perceptron(depth).to(device)
    optimiser = Plain(model)
    clock = Clock(device)
    matrices = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    batches = host_batches(train)
    correct = 0

    def step() -> None:
        nonlocal correct
        inputs, labels = (tensor.to(device) for tensor in next(batches))
        inputs = inputs.flatten(1)
        model.zero_grad()
        logits = model(inputs)
        functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        correct += int((logits.argmax(1) == labels).sum())

    few = max(1, steps // 10 if device.type == "cpu" else steps)
    clock.burst(step, max(1, few // 5))
    taken = 1e3 * clock.burst(step, few)
    torch.set_float32_matmul_precision(matrices)
    return {
        "task": SCRIPTED,
        "optimiser": "nero",
        "precision": precision,
        "milliseconds_a_step": round(taken, 3),
        "times_ours": round(taken / ours["milliseconds_a_step"], 2),
    }


class Plain:
    """Algorithm 1 in the fewest operations, tensor by tensor: no care taken of anything."""

    def __init__(self, model: nn.Module, lr: float = 0.001, beta: float = 0.999) -> None:
        self.lr, self.beta, self.steps = lr, beta, 0
        self.parameters = list(model.parameters())
        nero.balance_(model)
        self.averages = [torch.zeros_like(each if each.dim() == 1 else each[:, :1]) for each in self.parameters]
        self.scales = [float(each.detach().abs().mean()) if each.dim() == 1 else 1.0 for each in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Turn every neuron, nudge every bias."""
        self.steps += 1
        for parameter, average, scale in zip(self.parameters, self.averages, self.scales, strict=True):
            grad = parameter.grad
            assert grad is not None
            rows = parameter.dim() > 1
            square = grad.norm(dim=1, keepdim=True).square() if rows else grad.square()
            average.mul_(self.beta).add_(square, alpha=1 - self.beta)
            size = (average / (1 - self.beta**self.steps)).sqrt()
            parameter.sub_(grad / size, alpha=self.lr * scale)
            if rows:
                parameter.sub_(parameter.mean(dim=1, keepdim=True))
                parameter.div_(parameter.norm(dim=1, keepdim=True))


def host_batches(train: Images, batch: int = 250) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches as torch's loader makes them on the host: image by image, then stacked."""

    class Examples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(train.labels)

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            image = train.pixels[index].float().div(255)
            return image.sub(0.1307).div(0.3081), int(train.labels[index])

    while True:
        yield from DataLoader(Examples(), batch_size=batch, shuffle=True)


def images(data: Dataset) -> Images:
    """What a data set of images trains on."""
    assert isinstance(data, ImageDataset)
    return data.train


def part(data: Dataset, share: float, batch: int) -> Dataset:
    """The first examples of a data set, at least a few batches."""
    assert isinstance(data, ImageDataset | Corpus | Pairs)
    if isinstance(data, Pairs):
        some, held, last = (few(pairs, share, batch) for pairs in (data.train, data.valid, data.test))
        return replace(data, train=some, valid=held, test=last)
    if isinstance(data, Corpus):
        train, valid, test = (text_of(rows, share, batch) for rows in (data.train, data.valid, data.test))
        return replace(data, train=train, valid=valid, test=test)

    def first(images: Images, least: int) -> Images:
        count = max(least, round(share * len(images.labels)))
        return Images(images.pixels[:count], images.labels[:count])

    return replace(data, train=first(data.train, 2 * batch), test=first(data.test, 1))


def few(pairs: Sentences, share: float, batch: int) -> Sentences:
    """The first pairs of sentences, two batches at least."""
    count = max(2 * batch, round(share * len(pairs.lengths)))
    return Sentences(pairs.words[:count], pairs.labels[:count], pairs.lengths[:count])


def text_of(rows: Rows, share: float, batch: int) -> Rows:
    """The first rows of a text, whole batches of them."""
    count = max(2, round(share * len(rows.words) / batch)) * batch
    return Rows(rows.words[:count], rows.labels[:count])


def table(rows: list[Row]) -> Table:
    """For a person."""
    found = Table(box=None, pad_edge=False)
    for column in ("task", "precision", "at a time", "a step, ms", "an epoch, s", "in full, s", "times ours"):
        found.add_column(column, justify="left" if column in ("task", "precision") else "right")
    for row in rows:
        numbers = ("side_by_side", "milliseconds_a_step", "seconds_an_epoch", "seconds_in_full", "times_ours")
        found.add_row(row["task"], row["precision"], *(f"{row[key]:g}" if key in row else "" for key in numbers))
    return found


if __name__ == "__main__":
    sys.exit(main())
