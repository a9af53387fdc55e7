"""Files of a run: a checkpoint while it trains, and one JSON record when it is done.

``TASK/RUN.json`` holds the record of one run, ``runs.jsonl`` those of many, one a line. ``TASK/RUN.lock`` exists while
a process makes a run.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch

import nero
from nero_lab import atomic
from nero_lab.loops.training import Training, copy_to_cpu
from nero_lab.protocol import Settings, Task
from nero_lab.provenance import commit, device_name, versions

#: Age at which a partly written file counts as abandoned.
STALE_AFTER_S = 3600.0
#: Remedy for a checkpoint that cannot be used.
DELETE_IT = "delete it to start this run again"
#: What a record is read for, and the types of it; the last two are missing in records of earlier versions.
FIELDS = {"task": str, "optimiser": str, "lr": int | float, "seed": int, "epochs": int, "curve": dict} | {
    "data": str | None,
    "seconds": int | float | None,
}
#: What records of earlier versions lack, as it was then.
EARLIER = {"precision": "float32"}


class StoreError(RuntimeError):
    """A folder or file that cannot be used; the message says what to do."""


class BusyError(StoreError):
    """A run that another process makes."""


class Store:
    """The folder of ``--out``: ``TASK/RUN.json`` is a record, ``TASK/RUN.checkpoint`` an unfinished run.

    Args:
        root: the folder.
        weights: keep the ``state_dict`` of every finished network as ``TASK/RUN.pt``.
    """

    def __init__(self, root: Path, *, weights: bool = False) -> None:
        self.root, self.weights = root, weights
        self.commit = commit()  # read once: the source tree may change during the runs
        self._commits: dict[Settings, list[str | None]] = {}
        self._claims: dict[Path, int] = {}

    def check(self, task: Task, bytes_needed: int) -> None:
        """Check that the folder can hold the results, and remove abandoned files. Does not create the folder.

        Raises:
            StoreError: if the folder is not writable or the disk has too little room.
        """
        folder = self.root / task.name
        # lexists: a broken symbolic link blocks the folder, and must fail here
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        try:
            tempfile.TemporaryFile(dir=existing).close()
            free = shutil.disk_usage(existing).free
        except OSError as error:
            raise StoreError(f"cannot write into {folder}: {error.strerror}; choose another folder by --out") from error
        for part in folder.glob(f"*{atomic.PART_SUFFIX}"):
            with suppress(OSError):  # already renamed by a live process, or owned by another user
                if part.stat().st_mtime < time.time() - STALE_AFTER_S:
                    part.unlink()
        if free < bytes_needed:
            raise StoreError(
                f"checkpoints need {bytes_needed / 1e6:,.0f} MB, but {self.root} has {free / 1e6:,.0f} MB free: "
                "make room, or choose another folder by --out"
            )

    @cached_property
    def _packed(self) -> list[dict[str, Any]]:
        """The records of ``NAME.jsonl`` files, which no run writes."""
        return [record for file in sorted(self.root.glob("*.jsonl")) for record in _read_lines(file)]

    def path(self, task: Task, settings: Settings, suffix: str) -> Path:
        """Return the path of a run's file."""
        return self.root / task.name / (task.run_name(settings) + suffix)

    def record(self, task: Task, settings: Settings) -> dict[str, Any] | None:
        """Return the record of a finished run, or None if there is none.

        Raises:
            StoreError: if the file is damaged, belongs to another run, or lacks weights that this store keeps.
        """
        path = self.path(task, settings, ".json")
        wanted = {**asdict(settings), "batch": task.batch, "options": _options(task, settings)}
        where, remedy = str(path), "move it away"
        if path.exists():
            record = _parse_record(_read(path), str(path))
        else:
            record = next((each for each in self._packed if not _differing(each, wanted)), {})
            if not record:
                return None
            where, remedy = record["path"], "delete that line"
        if differing := _differing(record, wanted):
            key = differing[0]
            raise StoreError(f"{where} is the record of another run with {key} {record.get(key)!r}: {remedy}")
        if (count := len(record["curve"].get(task.metric, ()))) != settings.epochs:
            raise StoreError(
                f"{where} has {count} values of {task.metric} for {settings.epochs} epochs: "
                f"{remedy} to make the run again"
            )
        if self.weights and not self.path(task, settings, ".pt").exists():
            raise StoreError(f"{where} is the record of a run without saved weights: {remedy} to train again")
        return record

    def claim(self, task: Task, settings: Settings) -> None:
        """Keep other processes from making a run, until it is released or this process ends.

        Raises:
            BusyError: if another process makes the run.
        """
        path = self.path(task, settings, ".lock")
        try:
            self._claims[path] = atomic.lock(path)
        except BlockingIOError as error:
            raise BusyError(f"{error} makes {path.with_suffix('')}") from None
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}; choose another folder") from error

    def release(self, task: Task, settings: Settings) -> None:
        """Let other processes make a run; do nothing if it is not claimed."""
        path = self.path(task, settings, ".lock")
        if (file := self._claims.pop(path, None)) is not None:
            atomic.unlock(path, file)

    def begin(self, task: Task, settings: Settings, device: torch.device) -> dict[str, Any] | None:
        """Return the state of an unfinished run, or None for a new run. Notes the commit that trains from here on."""
        state = self.checkpoint(task, settings, device)
        before = [] if state is None else state.get("commits", [])
        self._commits[settings] = list(dict.fromkeys([*before, self.commit]))
        return state

    def checkpoint(
        self, task: Task, settings: Settings, device: torch.device, *, mmap: bool = False
    ) -> dict[str, Any] | None:
        """Read the checkpoint of an unfinished run. Return None if there is none.

        Args:
            task: the task of the run.
            settings: the settings of the run.
            device: the device to continue on.
            mmap: leave the tensors on the disk, for a quick check.

        Raises:
            StoreError: if the file is damaged or belongs to another run.
        """
        path = self.path(task, settings, ".checkpoint")
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
            found = dict(state["run"])
        except KeyError:
            raise misfit(path, "lacks 'run'") from None
        except (OSError, MemoryError) as error:
            raise StoreError(
                f"{path} cannot be read ({str(error) or 'too little memory'}): fix that, and run again"
            ) from error
        except Exception as error:
            if "memory" in str(error):
                raise StoreError(f"{path} cannot be read, for lack of memory: free some, and run again") from error
            raise StoreError(f"{path} cannot be read ({type(error).__name__}): {DELETE_IT}") from error
        wanted = _identity(task, settings, device)
        if (writer := found.get("nero")) != nero.__version__:
            writer = f"nero {writer}" if writer else "an earlier nero"
            raise StoreError(f"{path} was written by {writer}, and this is nero {nero.__version__}: {DELETE_IT}")
        if differing := [key for key in wanted | found if found.get(key) != wanted.get(key)]:
            key = differing[0]
            raise StoreError(
                f"{path} is the checkpoint of another run, with {key} {found.get(key)!r} "
                f"instead of {wanted.get(key)!r}: {DELETE_IT}"
            )
        return state

    def save(self, training: Training) -> None:
        """Write a checkpoint."""
        identity = _identity(training.task, training.settings, training.device)
        state = {"run": identity, "commits": self._commits.get(training.settings, []), **training.state()}
        path = self.path(training.task, training.settings, ".checkpoint")
        self._write(path, lambda file: torch.save(state, file))

    def write_files(self, training: Training) -> None:
        """Write the files that a run has produced so far, such as pictures, beside its record."""
        for suffix, content in list(training.files.items()):
            self._write_bytes(self.path(training.task, training.settings, suffix), content)
            del training.files[suffix]

    def make_record(self, training: Training) -> dict[str, Any]:
        """Return the record of a finished run.

        ``side_by_side`` is the largest number of runs that one command trained at a time. It does not count runs of
        other commands on the same GPU; they slow each other down as well, so compare ``seconds`` with care.
        """
        commits = self._commits.get(training.settings, [self.commit])
        return {
            **asdict(training.settings),
            "batch": training.task.batch,
            "options": _options(training.task, training.settings),
            "curve": {name: [_rounded(value) for value in values] for name, values in training.curve.items()},
            **training.final_results(),
            **training.sizes(),
            "commit": ", ".join(name for name in commits if name) or None,
            "resumed": training.resumed,
            "versions": versions(),
            "device": device_name(training.device),
            "side_by_side": training.side_by_side,
            "seconds": round(training.seconds, 1),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }

    def finish(self, training: Training) -> dict[str, Any]:
        """Write the record of a finished run, delete its checkpoint, and return the record."""
        record = self.make_record(training)
        self.write_files(training)  # after make_record, whose verdict may add files
        if self.weights:
            weights = copy_to_cpu(dict(training.network.state_dict()))
            path = self.path(training.task, training.settings, ".pt")
            self._write(path, lambda file: torch.save(weights, file))
        line = json.dumps(record, allow_nan=False) + "\n"
        self._write_bytes(self.path(training.task, training.settings, ".json"), line.encode())
        self.discard(training.task, training.settings)
        return record

    def discard(self, task: Task, settings: Settings) -> None:
        """Delete the checkpoint of a run."""
        checkpoint = self.path(task, settings, ".checkpoint")
        for path in (checkpoint, *checkpoint.parent.glob(f"{checkpoint.name}.*{atomic.PART_SUFFIX}")):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, write: Callable[[IO[bytes]], object]) -> None:
        write_atomically(path, write)

    def _write_bytes(self, path: Path, content: bytes) -> None:
        self._write(path, lambda file: file.write(content))


class ReadOnlyStore(Store):
    """A store that writes nothing, for all processes but the first that train one network together.

    It reads the states of runs like the first process's store, since all processes must gather a sharded state.
    """

    def check(self, task: Task, bytes_needed: int) -> None:
        """Do nothing."""

    def discard(self, task: Task, settings: Settings) -> None:
        """Do nothing."""

    def claim(self, task: Task, settings: Settings) -> None:
        """Do nothing."""

    def _write(self, path: Path, write: Callable[[IO[bytes]], object]) -> None:
        """Do nothing."""


def misfit(checkpoint: Path, what: str) -> StoreError:
    """Return the error for a checkpoint that does not fit this version of the code."""
    return StoreError(f"{checkpoint} {what}, perhaps from another version of nero: {DELETE_IT}")


def read_records(root: Path) -> list[dict[str, Any]]:
    """Read all records of a folder, and add the ``path`` of each.

    Args:
        root: a folder with ``TASK/RUN.json`` files of one run each, ``NAME.jsonl`` files with one run a line, or both.
            Deeper folders are not read.

    Returns:
        the records, sorted by file name, single runs first.
    """
    if not root.is_dir():
        raise StoreError(f"there is no folder {root}: give --records the --out of `nero run` or `nero sweep`")
    single = [{**_parse_record(_read(path), str(path)), "path": str(path)} for path in _single(root)]
    return single + [record for path in sorted(root.glob("*.jsonl")) for record in _read_lines(path)]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object a line."""
    return [_parse_line(line, f"{path}:{number}") for number, line in enumerate(_read(path).splitlines(), 1)]


def pack_records(root: Path) -> None:
    """Move the records of ``TASK/RUN.json`` files to the end of ``runs.jsonl``, one line a run."""
    single, packed = _single(root), root / "runs.jsonl"
    if not single:
        return
    lines = _read(packed).splitlines() if packed.exists() else []
    new = [json.dumps(_parse_record(_read(path), str(path))).encode() for path in single]
    lines += [line for line in new if line not in lines]  # some are there, if this was interrupted before
    write_bytes(packed, b"".join(line + b"\n" for line in lines))
    for path in single:
        path.unlink()


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Create or replace a file with what ``write`` writes, completely or not at all."""
    remedy = "then run the same command again to continue"
    with atomic.replacing(path, raises=StoreError, remedy=remedy) as part, part.open("wb") as file:
        write(file)


def write_bytes(path: Path, content: bytes) -> None:
    """Create or replace a file atomically with the given content."""
    write_atomically(path, lambda file: file.write(content))


def _single(root: Path) -> list[Path]:
    """Return the files of single runs. A glob would leave out folders that cannot be read."""
    try:
        folders = [folder for folder in root.iterdir() if folder.is_dir()]
        return sorted(path for folder in folders for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        raise StoreError(f"cannot read {error.filename}: {error.strerror}; fix its permissions") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}; move it away, or fix its permissions") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a ``.jsonl`` file, and add the ``path`` of each; none if there is no file."""
    lines = enumerate(_read(path).splitlines() if path.exists() else [], 1)
    numbered = [(f"{path}:{number}", line) for number, line in lines if line.strip()]
    return [{**_parse_record(line, source), "path": source} for source, line in numbered]


def _parse_line(line: bytes, source: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise StoreError(f"{source} is not a record: {error}; delete that line") from error


def _parse_record(text: bytes, source: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError("it lacks the fields of a run")
        if wrong := [name for name, kinds in FIELDS.items() if not isinstance(record.get(name), kinds)]:
            raise ValueError(f"its {wrong[0]} is {record.get(wrong[0])!r}")
        counts = {name: len(values) for name, values in record["curve"].items()} or {"any curve": 0}
        for name, values in record["curve"].items():
            if wrong := [value for value in values if not isinstance(value, int | float | None)]:
                raise ValueError(f"a value of its {name} is {wrong[0]!r}")
        if short := [f"{count} values of {name}" for name, count in counts.items() if count != record["epochs"]]:
            raise ValueError(f"it has {short[0]} for {record['epochs']} epochs")
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{source} is not a record of `nero run`: {error}; give another folder, or move it away"
        ) from error
    return record


def _options(task: Task, settings: Settings) -> dict[str, Any]:
    return dict(task.contenders[settings.optimiser].options)


def _identity(task: Task, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Return everything that must be unchanged for a run to continue."""
    return {
        **asdict(settings),
        "batch": task.batch,
        "options": _options(task, settings),
        "device": device.type,
        "nero": nero.__version__,
    }


def _differing(record: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [key for key, value in wanted.items() if record.get(key, EARLIER.get(key)) != value]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
