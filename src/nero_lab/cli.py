"""The command ``nero``: whoever doubts a figure of the paper types one command and sees it drawn from their own run."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import Progress
    from typer.core import TyperGroup

    from nero_lab import report as drawing
    from nero_lab.progress import Display, Silence, duration
except ModuleNotFoundError as error:
    sys.exit(f"the command `nero` needs {error.name}: pip install 'nero-optim[paper]'")

import torch

import nero
import nero_lab.command
from nero_lab import distributed
from nero_lab.data import DataError, Dataset, Photos, load
from nero_lab.protocol import Precision, SettingError, Settings, Task
from nero_lab.store import Onlooker, Store, StoreError, read_records
from nero_lab.sweep import search, train
from nero_lab.tasks import TASKS, task_named


class Commands(TyperGroup):
    """What can be asked for; where it is interrupted and has not said so itself, that is told in a line."""

    def invoke(self, ctx: Any) -> Any:
        """Do it. An interrupt is met here, since typer would end without a word."""
        try:
            nero_lab.command.raise_interrupts()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("nero: stopped", file=sys.stderr)
            raise SystemExit(130) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
)
console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

#: Where runs leave their records; not where the committed ones are, so that whoever doubts makes their own.
OUT = Path("out/paper")
PAGES = OUT / "pages"

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="one of `nero list`")]
Data = Annotated[
    Path | None, typer.Option(help="folder with the data; without: $NERO_DATA, or a download to the cache")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")]
Out = Annotated[Path, typer.Option(help="folder for records, checkpoints and TensorBoard's files")]
Epochs = Annotated[int | None, typer.Option(help="stop after so many epochs of the paper's schedule")]
PrecisionOption = Annotated[str, typer.Option("--precision", help="of matrix products: float32, or a GPU's tf32")]


def _tell_version(asked: bool) -> None:
    if asked:
        console.print(f"nero {nero.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """The experiments of 'Learning by Turning', one command each."""


@app.command("list")
def list_tasks() -> None:
    """What there is to run, what it shows, and how long it takes."""
    line = "{:23}{:29}{:11}{:11}{}"
    console.print(line.format("TASK", "OF THE PAPER", "DATA", "ON A GPU", "ON A CPU"))
    for task in TASKS.values():
        times = ["not timed" if seconds is None else duration(seconds) for seconds in task.seconds]
        console.print(line.format(task.name, task.shows, task.dataset, *times))
        console.print(f"    {task.title}\n    --optimiser {' | '.join(task.contenders)}\n")
    console.print("Times are of one run, alone and in float32: on an NVIDIA H200, and on two cores of a Neoverse-N1.")


@app.command()
def run(
    task: TaskName,
    optimiser: Annotated[str, typer.Option(help="one of the task's (`nero list`); without: its first")] = "",
    lr: Annotated[float | None, typer.Option(help="learning rate; without: the paper's best")] = None,
    seed: Annotated[int, typer.Option(help="of weights, order, augmentation and dropout")] = 0,
    epochs: Epochs = None,
    data: Data = None,
    device: Device = "auto",
    out: Out = OUT,
    precision: PrecisionOption = "float32",
    weights: Annotated[bool, typer.Option("--weights", help="leave the trained weights beside the record")] = False,
) -> None:
    """Train once, or go on where a run with the same settings was broken off."""
    chosen = task_named(task)
    settings = chosen.settings(optimiser or next(iter(chosen.contenders)), lr, seed, epochs, precision)
    with _workplace(chosen, data, device, out, settings.precision, 1, weights=weights) as runs:
        runs([settings], False)


@app.command()
def sweep(
    task: TaskName,
    optimiser: Annotated[list[str] | None, typer.Option(help="only this one; may be given again")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds at the best rate")] = 3,
    grid: Annotated[bool, typer.Option("--grid/--no-grid", help="search the rates, or take the paper's best")] = True,
    epochs: Epochs = None,
    data: Data = None,
    device: Device = "auto",
    out: Out = OUT,
    precision: PrecisionOption = "float32",
    side_by_side: Annotated[
        int | None, typer.Option(min=1, help="runs at a time; without: what suits the task and an H200; on a CPU one")
    ] = None,
) -> None:
    """The paper's protocol: the grid of learning rates on seed 0, then three seeds at the best."""
    chosen = task_named(task)
    contenders = optimiser or list(chosen.contenders)
    checked = [chosen.settings(name, epochs=epochs, precision=precision) for name in contenders]
    accuracy = checked[0].precision
    with _workplace(chosen, data, device, out, accuracy, side_by_side) as runs:
        best = search(chosen, contenders, seeds, accuracy, runs, rates=None if grid else (), epochs=epochs)
    for name, rate in best.items():
        papers = chosen.contenders[name].best
        searched = f"best of the grid is {rate:g}; the paper's is {papers:g}"
        console.print(f"{name}: {searched if grid and chosen.grid else f'the paper has {papers:g} as its best'}")


@app.command()
def report(
    records: Annotated[Path, typer.Option(help="the --out of runs and sweeps")] = OUT,
    out: Annotated[Path, typer.Option(help="folder of the pages; tables and figures in it are made anew")] = PAGES,
) -> None:
    """Tables and figures beside the paper's, from records alone."""
    found = read_records(records)
    if not found:
        raise StoreError(f"there are no records in {records}: make some with `nero sweep TASK --out {records}`")
    for path in drawing.report(found, out):
        console.print(str(path))
    short = [each for each in found if each["task"] in TASKS and each["epochs"] < TASKS[each["task"]].epochs]
    if short:
        console.print(f"runs of fewer epochs than their task has, which results and figures leave out: {len(short)}")


def main() -> None:
    """The command; errors that the user can mend are told in a line."""
    try:
        app(standalone_mode=True)
    except (SettingError, DataError, StoreError) as error:
        sys.exit(f"nero: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"nero: the GPU's memory is full ({error}): free some, or let `nero sweep` have fewer --side-by-side")


@contextmanager
def _workplace(
    task: Task,
    data: Path | None,
    device: str,
    out: Path,
    precision: Precision,
    side_by_side: int | None,
    *,
    weights: bool = False,
) -> Iterator[Callable[[list[Settings], bool], list[dict[str, Any]]]]:
    """A function that trains, once all has been checked and loaded that could end an hour of work in an error."""
    place = _device(device)
    if precision == "tf32" and place.type != "cuda":
        raise SettingError("tf32 is a mode of NVIDIA's GPUs: take --precision float32, or --device cuda")
    at_a_time = side_by_side or (task.side_by_side if place.type == "cuda" else 1)
    with distributed.joined(place):
        if distributed.count() > 1 and not task.several:
            raise SettingError(f"{task.name} is trained by one process: start it without torchrun")
        if distributed.count() > 1 and at_a_time > 1:  # whose messages might cross
            raise SettingError("several processes make one run at a time: start them without --side-by-side")
        first = distributed.rank() == 0
        console.quiet = not first
        store = (Store if first else Onlooker)(out, weights=weights)
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in task.model().parameters())
        # weights and two numbers of state a weight at most, of four bytes; the file, and the one it replaces
        store.check(task, 2 * 3 * 4 * parameters * at_a_time + 2**26)
        found = _load(task.dataset, data).to(place)
        stand_in = None
        if isinstance(found, Photos):
            found = found.with_measured_rate(task.batch)
            console.print(found.description)
            stand_in = found.name if found.name != task.dataset else None
        with Display(console, out, place) if first else nullcontext(Silence()) as watch:

            def runs(asked: list[Settings], more: bool) -> list[dict[str, Any]]:
                wanted = [replace(each, data=stand_in) for each in asked]
                if distributed.count() > 1 and not distributed.alike(
                    [(each, store.record(task, each) is None) for each in wanted]
                ):
                    raise SettingError(
                        "the processes do not have the same runs to make: start all by the same command, and let all "
                        "see the same --out and --data"
                    )
                return train(task, wanted, found, store, watch, at_a_time, more=more)

            try:
                yield runs
            except KeyboardInterrupt as interrupt:
                console.print("stopped: the same command goes on from what was kept")
                # as a shell has it of who was ended by a signal; one without a number is Ctrl-C's
                raise SystemExit(128 + next(iter(interrupt.args), signal.SIGINT)) from None


def _load(name: str, folder: Path | None) -> Dataset:
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bars: dict[str, Any] = {}

        def tell(work: str, done: int, total: int) -> None:
            if work not in bars:
                bars[work] = progress.add_task(work, total=total or None)
                if not console.is_terminal:
                    console.print(work + (f", {total / 1e6:.1f} MB" if total else ""))
            progress.update(bars[work], completed=done)

        return load(name, folder, progress=tell)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = distributed.gpu() if name == "cuda" else torch.device(name)
    except RuntimeError as error:
        raise SettingError(f"there is no device {name!r}: take cpu, cuda or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingError(f"the tasks run on cpu or cuda, not on {name!r}")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise SettingError(f"torch sees no {name}: take --device cpu, or install a torch with CUDA for your driver")
    return device


if __name__ == "__main__":
    main()
