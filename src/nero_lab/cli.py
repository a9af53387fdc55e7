"""Command line of the experiments: list the tasks, train them, and draw the paper's figures from the records."""

import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from nero.extras import how_to_install

try:
    import typer
    from rich.console import Console
    from rich.progress import Progress
    from typer.core import TyperCommand, TyperGroup

    from nero_lab.progress import Display, duration
    from nero_lab.report import report as write_report
except ModuleNotFoundError as error:
    sys.exit(f"the command `nero` needs {error.name}: {how_to_install('lab')}")

import torch

import nero
from nero_lab import distributed, interrupts
from nero_lab.data import DataError, Dataset, Game, Photos, load
from nero_lab.plan import cells_of, lines_of
from nero_lab.pool import train_in_processes
from nero_lab.protocol import PRECISIONS, Precision, SettingError, Settings, Task
from nero_lab.report.published import all_published
from nero_lab.store import ReadOnlyStore, Store, StoreError, read_records
from nero_lab.sweep import RunObserver, search, train
from nero_lab.tasks import TASKS, depth, task_named

#: Trains runs and returns their records; the second argument says whether more runs follow.
RunAll: TypeAlias = Callable[[list[Settings], bool], list[dict[str, Any]]]


class InterruptibleGroup(TyperGroup):
    """The subcommands. An interrupt that no subcommand handles ends the process with one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand. Handles interrupts here because typer would exit silently."""
        try:
            interrupts.raise_interrupts()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("nero: stopped", file=sys.stderr)
            raise SystemExit(130) from None


class SweepCommand(TyperCommand):
    """The subcommand ``sweep``, whose option ``--ray`` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give ``--ray`` an empty value if an option follows it, or nothing."""
        for place, argument in enumerate(args):
            if argument == "--ray" and (place + 1 == len(args) or args[place + 1].startswith("-")):
                args = [*args[: place + 1], "", *args[place + 1 :]]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=InterruptibleGroup, no_args_is_help=True, add_completion=False)
console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

#: Default folder of records. It differs from the folder of the committed ones, so that a reproduction starts empty.
OUT = Path("out/paper")
PAGES = OUT / "pages"

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="A task of `nero list`.")]
Data = Annotated[
    Path | None, typer.Option(help="Folder with the data. Default: $NERO_DATA, or a download to the cache.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")]
Out = Annotated[Path, typer.Option(help="Folder for records, checkpoints and TensorBoard files.")]
Epochs = Annotated[int | None, typer.Option(help="Stop after this many epochs of the task's schedule.")]
#: Both spellings of the option.
OPTIMISER_NAMES = ("--optimiser", "--optimizer")
Shard = Annotated[
    bool,
    typer.Option("--shard", help="With torchrun: split the network over the processes (FSDP2), instead of replicas."),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option("--precision", help="Of matrix products: float32, bf16, or tf32 on a GPU. Default: the task's."),
]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        console.print(f"nero {nero.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run the experiments of 'Learning by Turning', one command each."""


@app.command("list")
def list_tasks() -> None:
    """List the tasks, what they show, and how long they take."""
    for study in dict.fromkeys(task.study for task in TASKS.values() if task.study != "depth"):
        _list_study(study)
    console.print(
        "Times are of a single run. The GPU is an NVIDIA H200; the CPU is two cores of a Neoverse-N1, in float32.\n"
    )
    console.print("Step size by depth (docs/studies/depth.md), on mnist:")
    names, columns = [task.name for task in depth.TASKS], len(depth.LAYERS)
    for start in range(0, len(names), columns):
        console.print("    " + "  ".join(names[start : start + columns]))
    console.print(f"    --optimiser nero; or {' | '.join(depth.FORMS)}, as for every task above that Nero trains")


def _list_study(study: str) -> None:
    line = "{:23}{:29}{:11}{:14}{:11}{}"
    origin = "OF THE PAPER" if study == "paper" else f"OF THE STUDY {study}"
    tasks = [task for task in TASKS.values() if task.study == study]
    fast: Precision = "bf16" if any(task.precision == "bf16" for task in tasks) else "tf32"
    console.print(line.format("TASK", origin, "DATA", "GPU, FLOAT32", f"GPU, {fast.upper()}", "CPU"))
    for task in tasks:
        known = (task.seconds.gpu, task.seconds.on("cuda", fast), task.seconds.cpu)
        times = ["not timed" if seconds is None else duration(seconds) for seconds in known]
        console.print(line.format(task.name, task.shows, task.dataset, *times))
        console.print(f"    {task.title}\n    --optimiser {' | '.join(task.contenders)}\n")


@app.command()
def run(
    task: TaskName,
    optimiser: Annotated[
        str, typer.Option(*OPTIMISER_NAMES, help="An optimiser of the task (see `nero list`). Default: its first.")
    ] = "",
    lr: Annotated[
        str | None,
        typer.Option(metavar="NUMBER|auto", help="Learning rate; auto: by depth, for Nero. Default: the task's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, order, augmentation and dropout.")] = 0,
    epochs: Epochs = None,
    data: Data = None,
    device: Device = "auto",
    out: Out = OUT,
    precision: PrecisionOption = None,
    weights: Annotated[bool, typer.Option("--weights", help="Save the trained weights beside the record.")] = False,
    shard: Shard = False,
) -> None:
    """Train once, or resume an unfinished run with the same settings."""
    optimiser = optimiser or next(iter(task_named(task).contenders))
    if lr == "auto":
        optimiser, lr = depth.form_of(task_named(task), optimiser), None
    chosen = task_named(task, optimiser)
    settings = chosen.settings(optimiser, None if lr is None else _rate(lr), seed, epochs, precision)
    with _training_session(chosen, data, device, out, settings.precision, 1, weights=weights, shard=shard) as run_all:
        run_all([settings], False)


@app.command(cls=SweepCommand)
def sweep(
    task: TaskName,
    optimiser: Annotated[
        list[str] | None, typer.Option(*OPTIMISER_NAMES, help="Run only this optimiser; repeat for several.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds at the best rate. Default: the task's, mostly 3.")
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid/--no-grid", help="Search the learning rates, or take the task's.")
    ] = True,
    epochs: Epochs = None,
    data: Data = None,
    device: Device = "auto",
    out: Out = OUT,
    precision: PrecisionOption = None,
    side_by_side: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at a time. Default: what suits an H200; one on a CPU. With --ray: runs per GPU, default 1.",
        ),
    ] = None,
    shard: Shard = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:PORT]",
            help="Train on the Ray cluster at this address, one task per run. Without an address: on this machine's.",
        ),
    ] = None,
) -> None:
    """Follow the protocol: the grid of learning rates on seed 0, then three seeds (or more) at the best."""
    chosen = task_named(task, *(optimiser or ()))
    contenders = optimiser or list(chosen.contenders)
    checked = [chosen.settings(name, epochs=epochs, precision=precision) for name in contenders]
    known_precision = checked[0].precision
    if shard and ray is not None:
        raise SettingError("--shard splits a run over the processes of torchrun, --ray gives it one: choose either")
    session = (
        _training_session(chosen, data, device, out, known_precision, side_by_side, shard=shard)
        if ray is None
        else _ray_session(chosen, data, device, out, known_precision, side_by_side, ray)
    )
    with session as run_all:
        rates, seeds = None if grid else (), seeds or chosen.seeds
        best = search(chosen, contenders, seeds, known_precision, run_all, rates=rates, epochs=epochs)
    for name, rate in best.items():
        papers = chosen.contenders[name].best
        source = "the paper's is" if chosen.study == "paper" else "the default is"
        searched = f"best of the grid is {rate:g}; {source} {papers:g}"
        taken = f"the paper has {papers:g} as its best" if chosen.study == "paper" else f"{source} {papers:g}"
        console.print(f"{name}: {searched if grid and chosen.grid_of(name) else taken}")


@app.command()
def plan(
    task: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help="Only these tasks.")] = None,
    study: Annotated[str, typer.Option(help="Without tasks: paper, today, depth or claims.")] = "paper",
    records: Annotated[Path, typer.Option(help="The --out of runs and sweeps.")] = OUT,
    run: Annotated[int, typer.Option(metavar="PROCESSES", min=0, help="Make the missing runs, in processes.")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="With --run: start no run after this time.")] = math.inf,
    data: Data = None,
    device: Device = "auto",
    precision: PrecisionOption = None,
) -> None:
    """Show which runs of the protocol are on record, and make those that are missing."""
    if task and study != "paper":
        raise SettingError("name tasks or a --study, not both")
    tasks = [task_named(name) for name in task or [each.name for each in TASKS.values() if each.study == study]]
    if not tasks:
        raise SettingError(f"there is no study {study!r}: take paper, today, depth or claims")
    known = next((each for each in PRECISIONS if each == precision), None)
    if known != precision:
        raise SettingError(f"the precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    cells = cells_of(tasks, read_records(records) if records.exists() or not (run or records == OUT) else [], known)
    console.print(*lines_of(cells, known), sep="\n")
    if not run:
        return
    if any(cell.missing for cell in cells if cell.task.dataset == "imagenet"):
        console.print("imagenet has processes of its own: make its runs by `nero sweep imagenet --no-grid`")
    runs = list(dict.fromkeys(each for cell in cells if cell.task.dataset != "imagenet" for each in cell.missing))
    for settings in runs:
        _check_precision(settings.precision, _device(device))
    for each in {cell.task.name: cell.task for cell in cells if cell.missing}.values():
        Store(records).check(each, _bytes_needed(each, run))
    with _exit_if_stopped():
        train_in_processes(runs, data, _device(device), records, run, minutes=minutes, say=console.print)


@app.command()
def report(
    records: Annotated[Path, typer.Option(help="The --out of runs and sweeps.")] = OUT,
    out: Annotated[Path, typer.Option(help="Folder of the pages. Updates their tables and figures.")] = PAGES,
) -> None:
    """Write tables and figures beside the paper's, from the records."""
    found = read_records(records)
    if not found:
        raise StoreError(f"there are no records in {records}: make some with `nero sweep TASK --out {records}`")
    console.print(*map(str, write_report(found, out)), sep="\n")
    if missing := [task for task in all_published() if task not in {record["task"] for record in found}]:
        console.print(f"not run, so without a page: {', '.join(missing)}")
    short = [record for record in found if record["task"] in TASKS and record["epochs"] < TASKS[record["task"]].epochs]
    if short:
        console.print(f"left out of results and figures, with fewer epochs than their tasks: {len(short)}")
    skipped = Counter(record["task"] for record in found if record["task"] not in all_published())
    if skipped:
        counts = ", ".join(f"{task} ({count})" for task, count in sorted(skipped.items()))
        console.print(f"left out of all pages, as tasks without published numbers: {counts}")


def main() -> None:
    """Run the command line. Errors that the user can fix end in one line."""
    try:
        app(standalone_mode=True)
    except (SettingError, DataError, StoreError) as error:
        sys.exit(f"nero: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"nero: the GPU's memory is full ({error}): free some, or run `nero sweep` with fewer --side-by-side")


@contextmanager
def _training_session(
    task: Task,
    data: Path | None,
    device_name: str,
    out: Path,
    precision: Precision,
    side_by_side: int | None,
    *,
    weights: bool = False,
    shard: bool = False,
) -> Iterator[RunAll]:
    """Check and load everything that could fail, and yield a function that trains runs."""
    device = _device(device_name)
    _check_precision(precision, device)
    at_a_time = side_by_side or (task.side_by_side if device.type == "cuda" else 1)
    with distributed.process_group(device, shard=shard):
        _check_processes(task, at_a_time, shard)
        is_first = distributed.rank() == 0
        console.quiet = not is_first
        store = (Store if is_first else ReadOnlyStore)(out, weights=weights)
        store.check(task, _bytes_needed(task, at_a_time))
        dataset, stand_in = _load_for(task, data, device)
        # the display is inside, so that its bars are gone before the last line
        with _exit_if_stopped(), Display(console, out, device) if is_first else nullcontext(RunObserver()) as observer:

            def run_all(asked: list[Settings], more: bool) -> list[dict[str, Any]]:
                runs = [replace(settings, data=stand_in) for settings in asked]
                _check_same_runs(task, runs, store)
                return train(task, runs, dataset, store, observer, at_a_time, more=more)

            yield run_all


@contextmanager
def _ray_session(
    task: Task,
    data: Path | None,
    device_name: str,
    out: Path,
    precision: Precision,
    side_by_side: int | None,
    address: str,
) -> Iterator[RunAll]:
    """Join a Ray cluster, check everything that could fail here, and yield a function that trains runs on the nodes."""
    if distributed.is_launched():
        raise SettingError("Ray starts the processes of --ray: start the command without torchrun")
    try:
        from nero_lab import ray_sweep
    except ModuleNotFoundError as error:
        raise SettingError(f"--ray needs {error.name}: {how_to_install('ray')}") from error
    with ray_sweep.cluster(address):
        device, gpus, at_a_time = ray_sweep.choose_device(device_name, side_by_side)
        _check_precision(precision, device)
        store = Store(out)
        store.check(task, _bytes_needed(task, at_a_time))
        folder = data or (Path(os.environ["NERO_DATA"]) if os.environ.get("NERO_DATA") else None)
        name = _load(task.dataset, folder).name  # downloads what is missing, before many nodes do
        console.print(f"the Ray cluster has room for {at_a_time} runs at a time")
        with _exit_if_stopped(), Display(console, out, device) as observer:
            sweep = ray_sweep.RaySweep(task, folder and folder.absolute(), device, gpus, store, observer, console.print)

            def run_all(asked: list[Settings], more: bool) -> list[dict[str, Any]]:
                stand_in = name if name != task.dataset else None
                return sweep.train([replace(settings, data=stand_in) for settings in asked], more=more)

            yield run_all


def _check_precision(precision: Precision, device: torch.device) -> None:
    if precision == "tf32" and device.type != "cuda":
        raise SettingError(f"tf32 needs an NVIDIA GPU, got --device {device}: take --precision float32")


def _check_processes(task: Task, at_a_time: int, shard: bool) -> None:
    if distributed.world_size() == 1:
        if shard:
            raise SettingError("--shard splits a network over several processes: start them with torchrun")
        return
    if not task.is_distributable:
        raise SettingError(f"{task.name} is trained by one process: start it without torchrun")
    if at_a_time > 1:  # collectives of two runs could be matched with each other
        raise SettingError("several processes make one run at a time: start them without --side-by-side")


def _check_same_runs(task: Task, runs: list[Settings], store: Store) -> None:
    if distributed.world_size() == 1:
        return
    if not distributed.all_equal([(settings, store.record(task, settings) is None) for settings in runs]):
        raise SettingError(
            "the processes do not have the same runs to make: start all by the same command, and let all see the same "
            "--out and --data"
        )


def _bytes_needed(task: Task, at_a_time: int) -> int:
    """Estimate the space for checkpoints, old and new: weights and two states per weight, or ten if SOAP trains."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
    states = 10 if any(contender.optimiser == "soap" for contender in task.contenders.values()) else 2
    files, tensors, float32_bytes, other_bytes = 2, 1 + states, 4, 2**26
    return files * tensors * float32_bytes * parameters * at_a_time + other_bytes


def _load_for(task: Task, folder: Path | None, device: torch.device) -> tuple[Dataset | Game, str | None]:
    """Return the task's data on the device, and the name of the stand-in if it is not the task's own."""
    dataset = _load(task.dataset, folder).to(device)
    if not isinstance(dataset, Photos):
        return dataset, None
    dataset = dataset.with_measured_rate(task.batch)
    console.print(dataset.description)
    return dataset, dataset.name if dataset.name != task.dataset else None


def _load(name: str, folder: Path | None) -> Dataset | Game:
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bars: dict[str, Any] = {}

        def show(work: str, done: int, total: int) -> None:
            if work not in bars:
                bars[work] = progress.add_task(work, total=total or None)
                if not console.is_terminal:
                    console.print(work + (f", {total / 1e6:.1f} MB" if total else ""))
            progress.update(bars[work], completed=done)

        return load(name, folder, progress=show)


@contextmanager
def _exit_if_stopped() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        console.print("stopped: run the same command again to continue")
        # the status that shells use for a signal; an interrupt without a number comes from Ctrl-C
        raise SystemExit(128 + next(iter(interrupt.args), signal.SIGINT)) from None


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(f"the learning rate must be a number, or auto, got {text!r}") from None


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = distributed.local_gpu() if name == "cuda" else torch.device(name)
    except RuntimeError as error:
        raise SettingError(f"there is no device {name!r}: take cpu, cuda or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingError(f"the tasks run on cpu or cuda, got {name!r}")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise SettingError(f"torch finds no {name}: take --device cpu, or install a torch with CUDA for your driver")
    return device


if __name__ == "__main__":
    main()
