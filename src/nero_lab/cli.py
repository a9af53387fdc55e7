"""Command line of the experiments: list the tasks, train them, and draw the paper's figures from the records."""

import errno
import math
import sys
from collections import Counter
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from nero.messages import how_to_install

try:
    import typer
    from rich.console import Console
    from typer.core import TyperCommand, TyperGroup

    from nero_lab.progress import duration
    from nero_lab.report import report as write_report
except ModuleNotFoundError as error:
    sys.exit(f"the command `nero` needs {error.name}: {how_to_install('lab')}")

import torch

import nero
from nero_lab import interrupts
from nero_lab.data import FOLDERS, DataError
from nero_lab.plan import cells_of, lines_of
from nero_lab.pool import train_in_processes
from nero_lab.protocol import Precision, SettingError, precision_named
from nero_lab.report.published import all_published
from nero_lab.session import (
    bytes_needed,
    check_precision,
    exit_if_stopped,
    exit_on_error,
    find_device,
    load_data,
    ray_session,
    training_session,
)
from nero_lab.store import Store, StoreError, read_records
from nero_lab.sweep import search
from nero_lab.tasks import TASKS, depth, task_named


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


class Command(TyperCommand):
    """A subcommand. It refuses an option that takes one value but was given several: the last would win silently."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Count the options, then parse the arguments."""
        given: list[Any] = self.make_parser(ctx).parse_args(args=[*args])[2]
        for option, count in Counter(given).items():
            if count > 1 and not option.multiple and not option.is_flag:
                swept = option.name in ("optimiser", "lr", "seed")
                remedy = (
                    "use `nero sweep`, which trains with several optimisers, rates and seeds" if swept else "give one"
                )
                raise SettingError(f"{option.opts[0]} takes one value, got {count}: {remedy}")
        return super().parse_args(ctx, args)


class SweepCommand(Command):
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
Data = Annotated[Path | None, typer.Option(help="Folder with the data. Default: $NERO_DATA, or ~/.cache/nero.")]
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
    """Train the tasks of 'Learning by Turning' and of later studies. `nero list` shows what there is."""


@app.command("list")
def list_tasks() -> None:
    """List the tasks, what they show, how long they take, and where their data is looked for."""
    for study in dict.fromkeys(task.study for task in TASKS.values() if task.study != "depth"):
        _list_study(study)
    _print_wrapped(
        "Times are of a single run. The GPU is an NVIDIA H200; the CPU is two cores of a Neoverse-N1, in float32.\n"
    )
    console.print("Step size by depth (docs/studies/depth.md), on mnist:")
    names, columns = [task.name for task in depth.TASKS], len(depth.LAYERS)
    for start in range(0, len(names), columns):
        _print_wrapped("    " + "  ".join(names[start : start + columns]))
    _print_wrapped(f"    --optimiser nero; or {' | '.join(depth.FORMS)}, as for every task above that Nero trains\n")
    console.print("DATA       FOLDER IN --data OR $NERO_DATA, DOWNLOADED IF MISSING")
    for name, folder in FOLDERS.items():
        console.print(f"{name:11}{folder}")
    console.print("imagenet   none: --data holds train/CLASS/*.JPEG and val/CLASS/*.JPEG")
    console.print("pong       none: it needs no data")


def _list_study(study: str) -> None:
    line = "{:23}{:11}{:14}{:11}{}"
    tasks = [task for task in TASKS.values() if task.study == study]
    fast: Precision = "bf16" if any(task.precision == "bf16" for task in tasks) else "tf32"
    title = "TASKS OF THE PAPER" if study == "paper" else f"TASKS OF STUDY {study}"
    console.print(line.format(title, "DATA", "GPU, FLOAT32", f"GPU, {fast.upper()}", "CPU"))
    for task in tasks:
        known = (task.seconds.gpu, task.seconds.on("cuda", fast), task.seconds.cpu)
        times = ["not timed" if seconds is None else duration(seconds) for seconds in known]
        console.print(line.format(task.name, task.dataset, *times))
        _print_wrapped("    " + ": ".join(filter(None, (task.shows, task.title))))
        _print_wrapped(f"    --optimiser {' | '.join(task.contenders)}\n")


def _print_wrapped(text: str) -> None:
    """Print a paragraph in lines of at most 80 characters, each indented like the first, and then its line break."""
    indent = text[: len(text) - len(text.lstrip())]
    console.print(fill(text, 80, subsequent_indent=indent, break_on_hyphens=False) + "\n" * text.endswith("\n"))


@app.command(cls=Command)
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
        optimiser, lr = depth.form_of(task_named(task), optimiser), str(depth.TRUST)
    chosen = task_named(task, optimiser)
    settings = chosen.settings(optimiser, None if lr is None else _rate(lr), seed, epochs, precision)
    chosen.check_installed(optimiser)
    with training_session(
        console, chosen, data, device, out, settings.precision, 1, weights=weights, shard=shard
    ) as run_all:
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
    for name in contenders:
        chosen.check_installed(name)
    known_precision = checked[0].precision
    if shard and ray is not None:
        raise SettingError("--shard splits a run over the processes of torchrun, --ray gives it one: choose either")
    session = (
        training_session(console, chosen, data, device, out, known_precision, side_by_side, shard=shard)
        if ray is None
        else ray_session(console, chosen, data, device, out, known_precision, side_by_side, ray)
    )
    with session as run_all:
        rates, seeds = None if grid else (), seeds or chosen.seeds
        best = search(chosen, contenders, seeds, known_precision, run_all, rates=rates, epochs=epochs)
    whose = "the paper's best" if chosen.study == "paper" else "the default"
    for name, rate in best.items():
        found = f"best of the grid is {rate:g}; " if grid and chosen.grid_of(name) else ""
        console.print(f"optimiser {name}: {found}{whose} is {chosen.contenders[name].best:g}")


@app.command(cls=Command)
def plan(
    task: Annotated[
        list[str] | None, typer.Argument(metavar="TASK", help="Only these tasks. Default: all of the study.")
    ] = None,
    study: Annotated[str, typer.Option(metavar="NAME", help="Without tasks: paper, today, depth or claims.")] = "paper",
    records: Annotated[Path, typer.Option(help="The --out of runs and sweeps.")] = OUT,
    run: Annotated[
        int,
        typer.Option(metavar="PROCESSES", min=0, show_default=False, help="Make the missing runs, so many at a time."),
    ] = 0,
    minutes: Annotated[
        float,
        typer.Option(min=0, show_default=False, help="With --run: save all runs and stop after so many minutes."),
    ] = math.inf,
    data: Data = None,
    device: Device = "auto",
    precision: PrecisionOption = None,
) -> None:
    """Show which runs of the protocol are on record, and make those that are missing."""
    if task and study != "paper":
        raise SettingError("name tasks or a --study, not both")
    if minutes < math.inf and not run:
        raise SettingError("--minutes needs --run")
    where = find_device(device)
    tasks = [task_named(name) for name in task or [each.name for each in TASKS.values() if each.study == study]]
    if not tasks:
        raise SettingError(f"there is no study {study!r}: take paper, today, depth or claims")
    known = None if precision is None else precision_named(precision)
    cells = cells_of(tasks, read_records(records) if records.exists() or not (run or records == OUT) else [], known)
    console.print(*lines_of(cells, known), sep="\n")
    if not run:
        return
    for name in sorted({cell.task.name for cell in cells if cell.missing and cell.task.dataset == "imagenet"}):
        console.print(f"{name} has processes of its own: make its runs by `nero sweep {name} --no-grid`")
    seconds = {
        settings: cell.task.seconds.on(where.type, settings.precision)
        for cell in cells
        if cell.task.dataset != "imagenet"
        for settings in cell.missing
    }
    for settings in seconds:
        task_named(settings.task).check_installed(settings.optimiser)
        check_precision(settings.precision, where)
    for each in {cell.task.name: cell.task for cell in cells if cell.missing}.values():
        Store(records).check(each, bytes_needed(each, run))
    datasets = {cell.task.name: cell.task.dataset for cell in cells if cell.missing}
    missing = {name for name in sorted({*datasets.values()} - {"imagenet"}) if not _can_load(name, data)}
    runs = [settings for settings in seconds if datasets[settings.task] not in missing]
    if runs:
        with exit_if_stopped(console):
            train_in_processes(runs, data, where, records, run, minutes=minutes, say=console.print, seconds=seconds)
    if missing:
        raise DataError(f"{len(seconds) - len(runs)} runs were left out: see above")


def _can_load(name: str, folder: Path | None) -> bool:
    """Load data, which downloads what is missing, before many processes do. Print why if that fails."""
    try:
        load_data(console, name, folder)
    except DataError as error:
        console.print(f"left out, all runs on {name}: {error}")
        return False
    return True


@app.command(cls=Command)
def report(
    records: Annotated[Path, typer.Option(help="The --out of runs and sweeps.")] = OUT,
    out: Annotated[Path, typer.Option(help="Folder of the pages. Updates their tables and figures.")] = PAGES,
) -> None:
    """Write tables and figures beside the paper's, from the records."""
    found = read_records(records)
    if not found:
        raise StoreError(f"there are no records in {records}: make some with `nero sweep TASK --out {records}`")
    pages = all_published()
    if not any(record["task"] in pages for record in found):
        raise StoreError(f"no record in {records} is of a task of the paper, and other tasks have no pages")
    console.print(*map(str, write_report(found, out)), sep="\n")
    if missing := [task for task in pages if task not in {record["task"] for record in found}]:
        console.print(f"not run, so without a page: {', '.join(missing)}")
    short = [record for record in found if record["task"] in pages and record["epochs"] < TASKS[record["task"]].epochs]
    if short:
        console.print(f"left out of results and figures, with fewer epochs than their tasks: {len(short)}")
    skipped = Counter(record["task"] for record in found if record["task"] not in pages)
    if skipped:
        counts = ", ".join(f"{task} ({count})" for task, count in sorted(skipped.items()))
        console.print(f"left out of all pages, as tasks without published numbers: {counts}")


def main() -> None:
    """Run the command line. Errors that the user can fix end in one line."""
    try:
        with exit_on_error("nero"):
            app(standalone_mode=True)
    except torch.OutOfMemoryError as error:
        sys.exit(f"nero: the GPU's memory is full ({error}): free some, or run `nero sweep` with fewer --side-by-side")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit("nero: the disk is full: make room, or send the output elsewhere")


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(f"the learning rate must be a number, or auto, got {text!r}") from None


if __name__ == "__main__":
    main()
