"""What a run leaves: one JSON line when it is done, a checkpoint until then. Whole, or not at all."""

import errno
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

import nero
from nero_lab.loops.training import Training, copy_to_cpu, curve_fault
from nero_lab.protocol import Settings, Task

#: Seconds after which a half-written file is nobody's any more.
STALE = 3600.0
#: What to do with a checkpoint that nothing can go on from.
AGAIN = "delete it to begin this run again"


class StoreError(RuntimeError):
    """A folder or file that cannot be used; the text says what to do."""


class Store:
    """The folder of ``--out``: ``TASK/RUN.json`` is a record, ``TASK/RUN.checkpoint`` a run under way.

    Args:
        root: the folder.
        weights: whether a run that is done leaves its network's ``state_dict`` as ``TASK/RUN.pt``.
    """

    def __init__(self, root: Path, *, weights: bool = False) -> None:
        self.root, self.weights = root, weights
        self.commit = commit()  # now: it may change while runs are under way
        self._commits: dict[Settings, list[str | None]] = {}

    def check(self, task: Task, bytes_needed: int) -> None:
        """Raise now if the folder, which is made when there is something to keep, could not hold the work's results."""
        folder = self.root / task.name
        # where it is or will be made; a link to nowhere is in the way, and so counts
        place = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
        try:
            tempfile.TemporaryFile(dir=place).close()
            free = shutil.disk_usage(place).free
        except OSError as error:
            raise StoreError(f"cannot write into {folder}: {error.strerror}; name another folder by --out") from error
        for part in folder.glob("*.part"):  # what a killed process left half written
            with suppress(OSError):  # another process, which lives, has done with it, or it is another user's
                if part.stat().st_mtime < time.time() - STALE:
                    part.unlink()
        if free < bytes_needed:
            raise StoreError(
                f"{self.root} has {free / 1e6:,.0f} MB free, and checkpoints need {bytes_needed / 1e6:,.0f} MB: "
                "make room, or name another folder by --out"
            )

    def path(self, task: Task, settings: Settings, suffix: str) -> Path:
        """The file of a run."""
        return self.root / task.name / (task.name_of(settings) + suffix)

    def record(self, task: Task, settings: Settings) -> dict[str, Any] | None:
        """What a finished run left, if it is there."""
        path = self.path(task, settings, ".json")
        if not path.exists():
            return None
        record = _read(path)
        wanted = {**asdict(settings), "batch": task.batch, "options": _options(task, settings)}
        if differing := [key for key, value in wanted.items() if record.get(key) != value]:
            raise StoreError(
                f"{path} is of another run: its {differing[0]} is {record.get(differing[0])!r}; move it away"
            )
        curve = record["curve"]
        if fault := curve_fault(curve, settings.epochs) if task.metric in curve else f"no {task.metric}":
            raise StoreError(f"{path} has {fault}: move it away, and the run is made again")
        if self.weights and not self.path(task, settings, ".pt").exists():
            raise StoreError(f"{path} is of a run whose weights were not kept: move it away to train again")
        return record

    def begin(self, task: Task, settings: Settings, device: torch.device) -> dict[str, Any] | None:
        """Where an unfinished run stands, if it left word."""
        state = self.look(task, settings, device)
        before = [] if state is None else state["commits"]
        self._commits[settings] = list(dict.fromkeys([*before, self.commit]))
        return state

    def look(
        self, task: Task, settings: Settings, device: torch.device, *, whole: bool = True
    ) -> dict[str, Any] | None:
        """An unfinished run's checkpoint, if there is one; if not whole, its tensors stay on the disk."""
        path = self.path(task, settings, ".checkpoint")
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=not whole))
        except Exception as error:
            raise StoreError(f"{path} cannot be read ({type(error).__name__}: {error}): {AGAIN}") from error
        for key, kind in (("run", dict), ("commits", list)):
            if not isinstance(state.get(key), kind):
                raise unfit(path, f"lacks {key!r}")
        if strange := [each for each in state["commits"] if each is not None and not isinstance(each, str)]:
            raise unfit(path, f"has {strange[0]!r} among its commits")
        found, wanted = state["run"], _identity(task, settings, device)
        if lacking := wanted.keys() - found.keys():
            raise unfit(path, f"lacks {min(lacking)!r} of its run")
        if differing := [key for key in found if key not in wanted or found[key] != wanted[key]]:
            raise StoreError(
                f"{path} is of another run: {differing[0]} was {found.get(differing[0])!r}, "
                f"and is {wanted.get(differing[0])!r} now; {AGAIN}"
            )
        return state

    def save(self, training: Training) -> None:
        """Keep where a run stands."""
        identity = _identity(training.task, training.settings, training.device)
        state = {"run": identity, "commits": self._commits.get(training.settings, []), **training.state()}
        write_whole(self.path(training.task, training.settings, ".checkpoint"), lambda file: torch.save(state, file))

    def keep(self, training: Training) -> None:
        """Write the files that a run has made by now beside its record."""
        for suffix, content in list(training.files.items()):
            write_bytes(self.path(training.task, training.settings, suffix), content)
            del training.files[suffix]

    def told(self, training: Training) -> dict[str, Any]:
        """The record of a finished run."""
        commits = self._commits.get(training.settings, [self.commit])
        return {
            **asdict(training.settings),
            "batch": training.task.batch,
            "options": _options(training.task, training.settings),
            "curve": {name: [_short(value) for value in values] for name, values in training.curve.items()},
            **training.final_results(),
            "commit": ", ".join(each for each in commits if each) or None,
            "resumed": training.resumed,
            "versions": versions(),
            "device": name_of(training.device),
            "side_by_side": training.side_by_side,
            "seconds": round(training.seconds, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def finish(self, training: Training) -> dict[str, Any]:
        """Keep the record of a finished run, and let its checkpoint go."""
        record = self.told(training)
        self.keep(training)  # its verdict may have made some
        if self.weights:
            weights = copy_to_cpu(dict(training.network.state_dict()))
            write_whole(self.path(training.task, training.settings, ".pt"), lambda file: torch.save(weights, file))
        line = json.dumps(record, allow_nan=False) + "\n"
        write_bytes(self.path(training.task, training.settings, ".json"), line.encode())
        checkpoint = self.path(training.task, training.settings, ".checkpoint")
        for left in (checkpoint, *checkpoint.parent.glob(f"{checkpoint.name}.*.part")):
            left.unlink(missing_ok=True)
        return record


class Onlooker(Store):
    """The same folder, for all but the first of the processes that train one network together: nothing is written."""

    def check(self, task: Task, bytes_needed: int) -> None:
        """Nothing is needed."""

    def save(self, training: Training) -> None:
        """The first does."""

    def keep(self, training: Training) -> None:
        """The first does."""
        training.files.clear()

    def finish(self, training: Training) -> dict[str, Any]:
        """The record, which the first keeps."""
        return self.told(training)


def unfit(checkpoint: Path, what: str) -> StoreError:
    """The error of a checkpoint that lacks something, or has what does not fit."""
    return StoreError(f"{checkpoint} {what}, as of another version of the code: {AGAIN}")


def read_records(root: Path) -> list[dict[str, Any]]:
    """All records under a folder, by name of task and run, each with its path."""
    if not root.is_dir():
        raise StoreError(f"there is no folder {root}: name by --records the --out of `nero run` or `nero sweep`")
    return [{**_read(path), "path": str(path)} for path in sorted(root.glob("*/*.json"))]


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under another name and rename it when all of it is on the disk."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        # torch.save reports a full disk as a RuntimeError of its own, and an interrupt too
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt(*error.__context__.args) from None
        if isinstance(error, OSError | RuntimeError):
            hidden = not isinstance(error, OSError) and isinstance(error.__context__, OSError)
            found = error.__context__ if hidden else error
            full = getattr(found, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            full = full or shutil.disk_usage(_existing(path)).free < 2**20
            reason = "the disk is full: make room" if full else f"{found}: mend that"
            raise StoreError(
                f"cannot write {path}: {reason}, run the same command again, and it goes on from what was kept"
            ) from error
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Likewise, what is there already."""
    write_whole(path, lambda file: file.write(content))


def commit() -> str | None:
    """The commit of the source tree this runs from, marked if files differ; None where that is not known.

    A tree without its history, such as a copy on another machine, is told by the variable NERO_COMMIT.
    """
    if "NERO_COMMIT" in os.environ:
        return os.environ["NERO_COMMIT"]
    here = Path(__file__).resolve().parent
    top = _git(here, "rev-parse", "--show-toplevel")
    if top is None or Path(top) / "src/nero_lab" != here:
        return None  # installed, perhaps into some other project's tree
    return _git(here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def versions() -> dict[str, str]:
    """Of all that a result may depend on."""
    found = {"python": platform.python_version(), "nero": nero.__version__, "torch": torch.__version__}
    for name in ("triton", "numba", "ale-py"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def name_of(device: torch.device) -> str:
    """A device's name: its maker's for a GPU, and of a CPU the model with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with suppress(OSError, subprocess.CalledProcessError):
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        models = [line.partition(":")[2].strip() for line in told if line.startswith("Model name:")]
        name = f"{models[0]}, {platform.machine()}" if models else name
    return f"{name}, {torch.get_num_threads()} threads"


def _options(task: Task, settings: Settings) -> dict[str, Any]:
    return dict(task.contenders[settings.optimiser].options)


def _identity(task: Task, settings: Settings, device: torch.device) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    return {
        **asdict(settings),
        "batch": task.batch,
        "options": _options(task, settings),
        "device": device.type,
        "nero": nero.__version__,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or not {"task", "optimiser", "lr", "seed", "curve"} <= set(record):
            raise ValueError("it is JSON, but no record of a run")
        if not record["curve"] or not all(record["curve"].values()):
            raise ValueError("its curve is not whole")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is not a record: {error}") from error
    return record


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _existing(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())
