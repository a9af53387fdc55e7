"""What a run leaves: one JSON line when it is done, a checkpoint until then. Whole, or not at all."""

import errno
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

import nero
from nero.paper.protocol import Settings, Task
from nero.paper.training import Training


class StoreError(RuntimeError):
    """A folder or file that cannot be used; the text says what to do."""


class Store:
    """The folder of ``--out``: ``TASK/RUN.json`` is a record, ``TASK/RUN.checkpoint`` a run under way."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check(self, bytes_needed: int) -> None:
        """Raise now if the folder could not hold the work's results later."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.root).close()
            free = shutil.disk_usage(self.root).free
        except OSError as error:
            raise StoreError(
                f"cannot write into {self.root}: {error.strerror}; name another folder by --out"
            ) from error
        if free < bytes_needed:
            raise StoreError(
                f"{self.root} has {free / 1e9:.1f} GB free, and checkpoints need {bytes_needed / 1e9:.1f} GB: "
                "make room, or name another folder by --out"
            )

    def path(self, task: Task, settings: Settings, suffix: str) -> Path:
        """The file of a run."""
        return self.root / task.name / (task.name_of(settings) + suffix)

    def record(self, task: Task, settings: Settings) -> dict[str, Any] | None:
        """What a finished run left, if it is there."""
        path = self.path(task, settings, ".json")
        return _read(path) if path.exists() else None

    def checkpoint(self, task: Task, settings: Settings) -> dict[str, Any] | None:
        """Where an unfinished run stands, if it left word."""
        path = self.path(task, settings, ".checkpoint")
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            same = state["settings"] == asdict(settings)
        except Exception as error:
            raise StoreError(f"{path} cannot be read ({error}): delete it to begin this run again") from error
        if not same:
            raise StoreError(f"{path} is of another run, {state['settings']}: delete it to begin this run again")
        return state

    def save(self, training: Training) -> None:
        """Keep where a run stands."""
        state = {"settings": asdict(training.settings), **training.state()}
        write_whole(self.path(training.task, training.settings, ".checkpoint"), lambda file: torch.save(state, file))

    def finish(self, training: Training, side_by_side: int) -> dict[str, Any]:
        """Keep the record of a finished run, and let its checkpoint go."""
        record = describe_run(training, side_by_side)
        line = json.dumps(record, allow_nan=False) + "\n"
        write_whole(self.path(training.task, training.settings, ".json"), lambda file: file.write(line.encode()))
        self.path(training.task, training.settings, ".checkpoint").unlink(missing_ok=True)
        return record


def read_records(root: Path) -> list[dict[str, Any]]:
    """All records under a folder, by name of task and run."""
    if not root.is_dir():
        raise StoreError(f"there is no folder {root}: name the one that `nero sweep` wrote into")
    return [_read(path) for path in sorted(root.glob("*/*.json"))]


def describe_run(training: Training, side_by_side: int) -> dict[str, Any]:
    """A run's settings, curve and circumstances."""
    contender = training.task.contenders[training.settings.optimiser]
    device = training.device
    return {
        **asdict(training.settings),
        "batch": training.task.batch,
        "options": dict(contender.options),
        "curve": {name: [_short(value) for value in values] for name, values in training.curve.items()},
        "commit": commit(),
        "versions": versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "side_by_side": side_by_side,
        "seconds": round(training.seconds, 1),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


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
        part.unlink(missing_ok=True)
        # torch.save reports a full disk as a RuntimeError of its own
        if isinstance(error, OSError | RuntimeError):
            full = getattr(error, "errno", None) == errno.ENOSPC or shutil.disk_usage(_existing(path)).free < 2**20
            reason = "the disk is full" if full else str(error)
            raise StoreError(
                f"cannot write {path}: {reason}. What was there before is as it was: make room, run the same "
                "command again, and it goes on from there"
            ) from error
        raise


def commit() -> str | None:
    """The commit of the source tree this runs from, marked if files differ from it; None where that is not known."""
    if "NERO_COMMIT" in os.environ:
        return os.environ["NERO_COMMIT"]
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def versions() -> dict[str, str]:
    """Of all that a result may depend on."""
    found = {"python": platform.python_version(), "nero": nero.__version__, "torch": torch.__version__}
    for name in ("triton", "numba"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or not {"task", "optimiser", "lr", "seed", "curve"} <= set(record):
            raise ValueError("it is JSON, but no record of a run")
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is not a record: {error}") from error
    return record


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _existing(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
