"""The time that the lab's tasks take here, alone and side by side, beside the authors' way of running one.

Times whole epochs (data, steps and evaluation) of every supervised task, and some seconds of steps of the GAN and of
Pong; in float32, and on a GPU also in TF32. On a GPU, also all cells of mnist-deep's search at once, in float32. Steps
of mnist-deep done as the paper's script does them use a loader on the host, one tensor at a time, without CUDA graphs.
Of today's study, times the steps of every contender; on a CPU only if --tasks names it.
Writes benchmarks/results/suite-cuda.json or suite-cpu.json; new rows replace earlier ones of the same machine.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from end_to_end import Perceptron
from records import command_line, machine, terminal, write_record
from rich.table import Table
from timing import Clock, Row
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import nero
from nero_lab.data import Corpus, Dataset, ImageDataset, Images, Pairs, load
from nero_lab.data.corpus import Rows
from nero_lab.data.pairs import Sentences
from nero_lab.loops.speedrun import SpeedRun
from nero_lab.loops.supervised import Supervised
from nero_lab.loops.training import Training
from nero_lab.protocol import Precision, Task
from nero_lab.provenance import commit
from nero_lab.tasks import TASKS

#: One task per network, timed by whole epochs; other tasks on the same network take the same time.
EPOCH_TASKS = ("mnist-deep", "mnist-reparameterised", "cifar10-vgg11", "cifar10-resnet18", "wikitext2", "translation")
#: Tasks of other loops, timed by steps.
STEP_TASKS = ("cgan", "pong")
#: Steps on a GPU before STEP_TASKS are timed: an epoch of the GAN, whose last batch is smaller, and two rounds of Pong.
#: All CUDA graphs are captured in them, which may take longer than the timed steps.
WARM_UP_STEPS = 300
SCRIPT_TASK = "mnist-deep, the authors' way"
#: β of the steps done in that way.
BETA = 0.999
#: Tasks of today's study. The steps of each contender are timed in bursts within the first epoch, after one to warm up.
TODAY_TASKS = ("gpt", "gpt-large", "vit", "airbench")
#: Steps of a burst: SOAP renews its basis at every tenth.
TODAY_BURSTS, TODAY_BURST = 8, 10
#: A speed-run has its own clock, and is run whole.
SPEED_RUNS = 3


def main(argv: list[str] | None = None) -> int:
    """Time the tasks from the command line."""
    parser, arguments = parse(argv)
    device = torch.device(arguments.device)
    record = {"machine": machine(device), "torch": torch.__version__}
    path = arguments.out / f"suite-{device.type}.json"
    before = earlier_rows(path, record)
    if before is None and arguments.tasks:
        parser.error(f"{path} is broken, or of another machine or torch: choose another --out, or time all tasks")
    console = terminal()
    share = arguments.share or (1.0 if device.type == "cuda" else 0.01)
    common = {
        "date": date.today().isoformat(),
        "nero": nero.__version__,
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }
    parts = {"share": share, "epochs": arguments.epochs}
    unfinished = path.with_suffix(".unfinished") if before is None else path  # the old record may be of another machine
    rows: list[Row] = []
    for row in timed_rows(arguments, device, share):
        epoch = f", {row['seconds_an_epoch']:.3g} s an epoch" if "seconds_an_epoch" in row else ""
        console.print(f"{_name(row)}, {row['precision']}: {row['milliseconds_a_step']:.3g} ms a step{epoch}")
        rows.append({**row, **common, **(parts if row["task"] not in TODAY_TASKS else {})})
        replaced = {_key(row) for row in rows}
        kept = [row for row in before or [] if _key(row) not in replaced]
        write_record(unfinished, {**record, "rows": kept + rows})  # after each, so that an interruption loses little
    unfinished.replace(path)
    console.print(table(rows))
    console.print(f"written to {path}", soft_wrap=True)
    return 0


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse and check the command line."""
    parser = command_line(__doc__, has_quick=False)
    parser.add_argument("--data", type=Path, help="folder with the data; default: $NERO_DATA, or a download")
    tasks = EPOCH_TASKS + STEP_TASKS + TODAY_TASKS
    parser.add_argument("--tasks", nargs="+", choices=tasks, metavar="TASK", help="only these")
    parser.add_argument("--epochs", type=int, default=2, help="timed epochs, after one to warm up (2)")
    parser.add_argument("--share", type=float, help="share of the data; default: all on a GPU, 1/100 on a CPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of steps of the GAN and of Pong (10)")
    arguments = parser.parse_args(argv)
    most = min(TASKS[name].epochs for name in EPOCH_TASKS) - 1
    if not 1 <= arguments.epochs <= most:
        parser.error(f"--epochs must be from 1 to {most}, got {arguments.epochs}")
    return parser, arguments


def timed_rows(arguments: argparse.Namespace, device: torch.device, share: float) -> Iterator[Row]:
    """Time the tasks that were asked for, and yield a row for each."""
    precisions: tuple[Precision, ...] = ("float32", "tf32") if device.type == "cuda" else ("float32",)
    asked = arguments.tasks or EPOCH_TASKS + STEP_TASKS + (TODAY_TASKS if device.type == "cuda" else ())
    names = [name for name in EPOCH_TASKS + STEP_TASKS + TODAY_TASKS if name in asked]
    datasets: dict[str, Any] = {
        name: load(name, arguments.data) for name in dict.fromkeys(TASKS[task].dataset for task in names)
    }
    for name in names:
        task, whole = TASKS[name], datasets[TASKS[name].dataset]
        if name in STEP_TASKS:
            for precision in precisions:
                yield time_steps(task, whole.to(device), precision, arguments.seconds)
            continue
        if name in TODAY_TASKS:
            data = whole.to(device)
            yield from (time_contender(task, contender, data) for contender in task.contenders)
            continue
        data = first_part(whole, share, task.batch).to(device)
        larger = whole.examples / data.examples
        for precision in precisions:
            optimiser = next(iter(task.contenders))
            cells = [(optimiser, task.contenders[optimiser].best)]
            yield (row := time_cells(task, cells, data, precision, arguments.epochs, larger))
            if name == "mnist-deep":
                yield time_script(training_images(whole), device, precision, row)
            if name == "mnist-deep" and device.type == "cuda" and precision == "float32":
                cells = [(optimiser, rate) for optimiser in task.contenders for rate in task.grid]
                yield time_cells(task, cells, data, precision, arguments.epochs, larger)


def earlier_rows(path: Path, record: dict[str, str]) -> list[Row] | None:
    """Return the recorded rows; ``None`` if they are of another machine or torch, or cannot be read."""
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_text())
        is_same = all(before[key] == value for key, value in record.items())
        rows: list[Row] = [row for row in before["rows"] if _key(row)]
        return rows if is_same else None
    except (ValueError, TypeError, KeyError):
        return None


def _key(row: Row) -> tuple[str, str, int | None]:
    return _name(row), row["precision"], row.get("side_by_side")


def _name(row: Row) -> str:
    return f"{row['task']}, {row['optimiser']}" if row["task"] in TODAY_TASKS else row["task"]


def time_cells(
    task: Task, cells: list[tuple[str, float]], data: Dataset, precision: Precision, epochs: int, larger: float
) -> Row:
    """Time epochs of runs side by side, after a first epoch to warm up.

    Args:
        task: a supervised task.
        cells: the optimiser and the learning rate of each run.
        data: a part of the task's data.
        precision: of matrix products.
        epochs: the number of timed epochs.
        larger: the size of all data relative to this part.
    """
    start = time.perf_counter()
    trainings = [
        Supervised(task, task.settings(optimiser, rate, epochs=epochs + 1, precision=precision), data)
        for optimiser, rate in cells
    ]
    times: list[float] = []
    while not trainings[-1].is_finished:
        for training in trainings:
            training.advance()
        if trainings[-1].epochs_known > len(times):  # the host has waited for the epoch's numbers
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
    epoch_s = statistics.median(times[1:])
    warm_up_s = max(0.0, times[0] - epoch_s)
    return {
        "task": task.name,
        "optimiser": cells[0][0] if len(cells) == 1 else "all",
        "precision": precision,
        "side_by_side": len(cells),
        "seconds_an_epoch": round(larger * epoch_s, 4),
        "milliseconds_a_step": round(1e3 * epoch_s / trainings[0].steps_per_epoch, 3),
        "seconds_to_begin": round(warm_up_s, 2),
        "seconds_in_full": round(larger * epoch_s * task.epochs + warm_up_s, 1),
    }


def time_steps(task: Task, data: Any, precision: Precision, seconds: float) -> Row:
    """Time steps of the GAN or of Pong for some seconds, without the evaluation of images."""
    assert task.loop is not None
    start = time.perf_counter()
    optimiser = next(iter(task.contenders))
    training = task.loop(task, task.settings(optimiser, precision=precision), data, None)
    clock = Clock(data.device)
    clock.burst(training.advance, WARM_UP_STEPS if clock.is_gpu else 1)
    warm_up_s, done, before = time.perf_counter() - start, training.steps_done, time.perf_counter()
    while time.perf_counter() - before < seconds:
        training.advance()
    clock.synchronize()
    step_s = (time.perf_counter() - before) / (training.steps_done - done)
    warm_up_s = max(0.0, warm_up_s - done * step_s)
    return {
        "task": task.name,
        "optimiser": optimiser,
        "precision": precision,
        "side_by_side": 1,
        "seconds_an_epoch": round(step_s * training.steps_per_epoch, 4),
        "milliseconds_a_step": round(1e3 * step_s, 3),
        "seconds_to_begin": round(warm_up_s, 2),
        "seconds_in_full": round(step_s * training.steps_per_epoch * task.epochs + warm_up_s, 1),
    }


def time_contender(task: Task, contender: str, data: Dataset) -> Row:
    """Time the steps of a contender of today's study, without evaluations."""
    make = partial(task.loop or Supervised, task, task.settings(contender), data, None)
    training, clock = make(), Clock(data.device)
    if isinstance(training, SpeedRun):
        times = [_speed_run(training)] + [_speed_run(make()) for _ in range(SPEED_RUNS - 1)]
    else:
        clock.burst(training.advance, TODAY_BURST)
        times = [clock.burst(training.advance, TODAY_BURST) for _ in range(TODAY_BURSTS)]
    row = {
        "task": task.name,
        "optimiser": contender,
        "precision": training.settings.precision,
        "side_by_side": 1,
        "milliseconds_a_step": round(1e3 * statistics.median(times), 3),
        "range": [round(1e3 * each, 3) for each in (min(times), max(times))],
        "seconds_of_steps": round(statistics.median(times) * training.steps_per_epoch * task.epochs, 3),
    }
    del training, make
    gc.collect()  # a run is a reference cycle
    torch.compiler.reset()  # else the next contender's network would be one more variant of this one's
    return row


def _speed_run(training: Training) -> float:
    """Return the seconds per step of a whole speed-run, by its own clock."""
    while not training.is_finished:
        training.advance()
    return float(training.final_results()["train_seconds"]) / training.steps_done


def time_script(train: Images, device: torch.device, precision: Precision, ours: Row) -> Row:
    """Time steps of mnist-deep as the paper's script does them.

    Args:
        train: the training images.
        device: of the network.
        precision: of matrix products.
        ours: the row of the same task, timed just before in the same process.
    """
    model = Perceptron(100).to(device)
    optimiser = PlainNero(model)
    clock = Clock(device)
    matmul_precision = torch.get_float32_matmul_precision()
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

    count = 2 if device.type == "cpu" else 20
    clock.burst(step, max(1, count // 5))
    taken = 1e3 * clock.burst(step, count)
    torch.set_float32_matmul_precision(matmul_precision)
    return {
        "task": SCRIPT_TASK,
        "optimiser": "nero",
        "precision": precision,
        "milliseconds_a_step": round(taken, 3),
        "times_ours": round(taken / ours["milliseconds_a_step"], 2),
    }


class PlainNero:
    """Algorithm 1 in as few operations as possible, one tensor at a time, without any care for special cases."""

    def __init__(self, model: nn.Module, lr: float = 0.001) -> None:
        self.lr, self.steps = lr, 0
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
            is_matrix = parameter.dim() > 1
            square = grad.norm(dim=1, keepdim=True).square() if is_matrix else grad.square()
            average.mul_(BETA).add_(square, alpha=1 - BETA)
            size = (average / (1 - BETA**self.steps)).sqrt()
            parameter.sub_(grad / size, alpha=self.lr * scale)
            if is_matrix:
                parameter.sub_(parameter.mean(dim=1, keepdim=True))
                parameter.div_(parameter.norm(dim=1, keepdim=True))


def host_batches(train: Images, batch: int = 250) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches as torch's loader makes them on the host: image by image, then stacked."""

    class Examples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(train.labels)

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            image = train.pixels[index].float().div(255)
            return image.sub(0.1307).div(0.3081), int(train.labels[index])

    while True:
        yield from DataLoader(Examples(), batch_size=batch, shuffle=True)


def training_images(data: Dataset) -> Images:
    """Return the training images of a data set of images."""
    assert isinstance(data, ImageDataset)
    return data.train


def first_part(data: Dataset, share: float, batch: int) -> Dataset:
    """Return the first examples of a data set, at least two batches of each part."""
    assert isinstance(data, ImageDataset | Corpus | Pairs)
    if isinstance(data, Pairs):
        pairs = [_first_sentences(part, share, batch) for part in (data.train, data.valid, data.test)]
        return replace(data, train=pairs[0], valid=pairs[1], test=pairs[2])
    if isinstance(data, Corpus):
        texts = [_first_rows(part, share, batch) for part in (data.train, data.valid, data.test)]
        return replace(data, train=texts[0], valid=texts[1], test=texts[2])
    return replace(data, train=_first_images(data.train, share, 2 * batch), test=_first_images(data.test, share, 1))


def _first_images(images: Images, share: float, least: int) -> Images:
    count = max(least, round(share * len(images.labels)))
    return Images(images.pixels[:count], images.labels[:count])


def _first_sentences(pairs: Sentences, share: float, batch: int) -> Sentences:
    count = max(2 * batch, round(share * len(pairs.lengths)))
    return Sentences(pairs.words[:count], pairs.labels[:count], pairs.lengths[:count])


def _first_rows(rows: Rows, share: float, batch: int) -> Rows:
    """Return whole batches of the first rows of a text."""
    count = max(2, round(share * len(rows.words) / batch)) * batch
    return Rows(rows.words[:count], rows.labels[:count])


def table(rows: list[Row]) -> Table:
    """Format the rows for a terminal."""
    found = Table(box=None, pad_edge=False)
    for column in ("task", "precision", "side by side", "step, ms", "epoch, s", "in full, s", "times ours"):
        found.add_column(column, justify="left" if column in ("task", "precision") else "right")
    for row in rows:
        numbers = ("side_by_side", "milliseconds_a_step", "seconds_an_epoch", "seconds_in_full", "times_ours")
        found.add_row(_name(row), row["precision"], *(f"{row[key]:g}" if key in row else "" for key in numbers))
    return found


if __name__ == "__main__":
    sys.exit(main())
