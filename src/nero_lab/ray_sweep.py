"""Sweeps on a Ray cluster: one Ray task per run. A run whose node dies continues elsewhere, from its checkpoint.

The process of the command writes all files. The workers send it their progress, checkpoints and records through a
mailbox, an actor on the command's own node.
"""

import logging
import os
import socket
import time
from _thread import interrupt_main
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nero_lab.data import DataError, Photos, load_once
from nero_lab.loops.training import Snapshot, Training
from nero_lab.protocol import SettingError, Settings, Task
from nero_lab.store import Store, StoreError, write_bytes
from nero_lab.sweep import RunObserver, deferred_interrupts, find_done, train

#: Time between two looks into the mailbox, and between two reports of a run.
POLL_EVERY_S = 0.5
#: Time to reach the address of a cluster.
CONNECT_TIMEOUT_S = 5.0
#: A sweep fails if one run loses this many workers in a row without a new checkpoint.
MAX_DEATHS = 3


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """Join the Ray cluster at ``HOST:PORT``. Without an address, join or start one on this machine.

    Raises:
        SettingError: if the cluster cannot be joined.
    """
    if ray.is_initialized():
        yield
        return
    if address:
        _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address or None, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SettingError(f"cannot join the Ray cluster at {address or 'this machine'}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise SettingError(f"--ray takes HOST:PORT of the cluster's head, such as 10.0.0.1:6379, got {address!r}")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        hint = "start one there by `ray start --head`"
        raise SettingError(f"there is no Ray cluster at {address} ({error}): {hint}") from error


def choose_device(name: str, side_by_side: int | None) -> tuple[torch.device, float, int]:
    """Return the type of device to train on, the GPUs of one run, and the number of runs at a time."""
    resources = ray.cluster_resources()
    gpus, cores = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if name not in ("cpu", "cuda"):
        raise SettingError(f"Ray gives every run its device: take --device cpu, cuda or auto, got {name!r}")
    if name == "cpu":
        return torch.device("cpu"), 0.0, int(cores)
    if not gpus:
        raise SettingError("the Ray cluster has no GPU: take --device cpu")
    per_gpu = side_by_side or 1
    return torch.device("cuda"), int(1e4 / per_gpu) / 1e4, int(gpus * per_gpu)  # Ray counts in ten-thousandths


class Mailbox:
    """Messages of the workers to the command, and its request to stop."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []
        self.is_stopping = False

    def post(self, *message: Any) -> bool:
        """Leave a message. Return whether the worker must save its run and stop."""
        self.messages.append(message)
        return self.is_stopping

    def take(self) -> list[tuple[Any, ...]]:
        """Return all messages since the last call."""
        taken, self.messages = self.messages, []
        return taken

    def stop(self) -> None:
        """Ask all workers to save their runs and stop."""
        self.is_stopping = True


def _post(mailbox: Any, *message: Any) -> bool:
    """Send a message from a worker, and return the answer."""
    # not ray.get: Ray gives the core of a task that waits in there to the next task
    return bool(mailbox.post.remote(*message).future().result())


class _Outbox(Store):
    """Store of a worker: reads a checkpoint from its own folder, and posts the files that it writes."""

    def __init__(self, root: Path, mailbox: Any, settings: Settings) -> None:
        super().__init__(root)
        self.mailbox, self.settings = mailbox, settings

    def _write(self, path: Path, write: Callable[[IO[bytes]], object]) -> None:
        content = BytesIO()
        write(content)
        name = str(path.relative_to(self.root))
        _post(self.mailbox, "file", self.settings, name, content.getvalue())


class _Reporter(RunObserver):
    """Observer of a worker: posts snapshots of its run, and interrupts the run if the command asks for that."""

    def __init__(self, mailbox: Any) -> None:
        self.mailbox, self.reported_at, self.epochs, self.is_stopping = mailbox, 0.0, 0, False

    def begun(self, training: Training | Snapshot) -> None:
        self._post("begun", training)

    def stepped(self, training: Training | Snapshot) -> None:
        if training.epochs_known > self.epochs or time.monotonic() - self.reported_at > POLL_EVERY_S:
            self._post("stepped", training)

    def ended(self, training: Training | Snapshot) -> None:
        self._post("ended", training)

    def _post(self, kind: str, training: Training | Snapshot) -> None:
        snapshot = Snapshot.of(training)
        must_stop = _post(self.mailbox, kind, training.settings, snapshot)
        self.reported_at, self.epochs = time.monotonic(), snapshot.epochs_known
        if must_stop and not self.is_stopping:
            self.is_stopping = True
            interrupt_main()  # train saves the run after this step; Ray blocks the signal itself


def train_here(
    task: Task, settings: Settings, folder: Path | None, device: torch.device, checkpoint: bytes | None, mailbox: Any
) -> dict[str, Any] | None:
    """Train one run on the node of a worker. Return its record, or None if the command asked to stop."""
    try:
        data = load_once(task.dataset, folder, device)
        if isinstance(data, Photos) and data.name != (settings.data or task.dataset):
            raise DataError(f"{folder} holds {data.name} here, not {settings.data or task.dataset}: copy the data here")
        with TemporaryDirectory() as root:
            store = _Outbox(Path(root), mailbox, settings)
            if checkpoint is not None:
                write_bytes(store.path(task, settings, ".checkpoint"), checkpoint)
            return train(task, [settings], data, store, _Reporter(mailbox))[0]
    except KeyboardInterrupt:
        return None
    except (SettingError, DataError, StoreError) as error:
        raise type(error)(f"on the node {socket.gethostname()}: {error}") from error


@dataclass
class RaySweep:
    """Runs of one task on the cluster.

    Args:
        task: the task of the runs.
        folder: the data folder, which every node must have; None: the nodes' own caches.
        device: the type of device to train on.
        gpus: GPUs of one run.
        store: the folder of records and checkpoints.
        observer: called as the runs proceed.
        say: prints a line.
    """

    task: Task
    folder: Path | None
    device: torch.device
    gpus: float
    store: Store
    observer: RunObserver
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        self._running: dict[Any, Settings] = {}
        self._begun: set[Settings] = set()
        self._deaths: Counter[Settings] = Counter()
        self._failure: Exception | None = None

    def train(self, runs: Sequence[Settings], *, more: bool = False) -> list[dict[str, Any]]:
        """Train all runs that are not done, and return the records of all runs, as :func:`nero_lab.sweep.train`.

        Raises:
            KeyboardInterrupt: interrupted, with the number of the signal. All runs under way are saved.
        """
        runs = list(dict.fromkeys(runs))
        done = find_done(self.task, runs, self.device, self.store, self.observer)
        with deferred_interrupts(self.observer.stopping) as interrupted:
            for settings in runs:
                if settings not in done:
                    self._submit(settings)
            is_stopping = False
            while self._running:
                ready, _ = ray.wait(list(self._running), timeout=POLL_EVERY_S)
                self._deliver()  # before the results: a worker returns after its last message
                done |= {settings: record for ref in ready for settings, record in self._collect(ref, is_stopping)}
                if (interrupted() or self._failure) and not is_stopping:
                    is_stopping = True
                    self._stop()
            if self._failure is not None:
                raise self._failure
            if interrupted() and (more or len(done) < len(runs)):
                raise KeyboardInterrupt(interrupted())
        return [done[settings] for settings in runs]

    def _submit(self, settings: Settings) -> None:
        """Have Ray train a run, from its checkpoint if there is one."""
        path = self.store.path(self.task, settings, ".checkpoint")
        checkpoint = path.read_bytes() if path.exists() else None
        worker = ray.remote(train_here).options(num_cpus=1, num_gpus=self.gpus, max_retries=0)
        arguments = self.task, settings, self.folder, self.device, checkpoint, self._mailbox
        self._running[worker.remote(*arguments)] = settings

    def _deliver(self) -> None:
        """Write the files and show the progress that the workers have sent."""
        for kind, settings, *content in ray.get(self._mailbox.take.remote()):
            if kind == "file":
                name, data = content
                write_bytes(self.store.root / name, data)
                self._deaths[settings] = 0
            else:
                self._begun.add(settings)
                getattr(self.observer, kind)(*content)

    def _collect(self, ref: Any, is_stopping: bool) -> Iterator[tuple[Settings, dict[str, Any]]]:
        """Yield the run and its record, if the run is done. Submit it again if its worker died."""
        settings, record = self._running.pop(ref), None
        try:
            record = ray.get(ref)
        except TaskCancelledError:
            pass
        except RayTaskError as error:
            self._failure = self._failure or (error.cause if isinstance(error.cause, Exception) else error)
        except RayError as error:
            # the worker may have died after it had sent its record
            record = self.store.record(self.task, settings)
            if record is None and not is_stopping:
                self._resubmit(settings, type(error).__name__)
        if record is not None:
            self.store.discard(self.task, settings)
            yield settings, record

    def _resubmit(self, settings: Settings, reason: str) -> None:
        self._begun.discard(settings)
        self._deaths[settings] += 1
        name = self.task.run_name(settings)
        if self._deaths[settings] == MAX_DEATHS:
            hint = "see the logs of Ray, and give the nodes more memory"
            self._failure = SettingError(f"{MAX_DEATHS} workers of {name} died without a checkpoint ({reason}): {hint}")
            return
        self.say(f"{name}: its worker died ({reason}); another continues from the last checkpoint")
        self._submit(settings)

    def _stop(self) -> None:
        """Ask the workers to save their runs and stop, and cancel runs that have not begun."""
        ray.get(self._mailbox.stop.remote())
        for ref, settings in self._running.items():
            if settings not in self._begun:
                ray.cancel(ref)
