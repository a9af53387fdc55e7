"""Sweeps on Ray: a cluster of two nodes here, one of which is killed; workers without a cluster; bad arguments."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab import photo_cases
from lab.helpers import RecordingObserver, assert_close_records, checkpoint_every_step, run_command
from lab.photo_cases import TASK, decoded, shallow, write_class_folder

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayTaskError, TaskCancelledError, WorkerCrashedError

from nero_lab import distributed, ray_sweep, sweep
from nero_lab.data import DataError, decoding
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import SettingError
from nero_lab.ray_sweep import Mailbox, RaySweep, train_here
from nero_lab.store import Store, read_records
from nero_lab.sweep import search, train
from nero_lab.tasks import TASKS

CPU = torch.device("cpu")


#: 12 images in batches of 4: 3 steps per epoch.
SMALL = replace(TASK, name="small", model=shallow, batch=4, epochs=6, grid=(0.01, 0.1))
#: Steps at which runs wait until the test has acted: the ends of epochs, which are always reported.
GATES = 3, 12


class GatedSupervised(Supervised):
    """The usual loop, which waits at each gate until there is a file of that name, and leaves its process number."""

    folder: Path

    def advance(self) -> None:
        while self.steps_done in GATES and not (self.folder / str(self.steps_done)).exists():
            (self.folder / f"at-{self.steps_done}-{os.getpid()}").touch()
            time.sleep(0.02)
        super().advance()


class Preparing:
    """A loop that prepares the process that unpickles it: to save after every step, and to decode images itself."""

    def __init__(self, gates: Path) -> None:
        self.gates = gates

    def __reduce__(self) -> tuple[Any, ...]:
        return prepare_worker, (self.gates,)


def prepare_worker(gates: Path) -> type[Supervised]:
    sweep.CHECKPOINT_EVERY_S = sweep.MIN_TRAIN_TO_SAVE_RATIO = 0.0
    decoding.default_count = lambda _: 0
    GatedSupervised.folder = gates
    return GatedSupervised


class Observer(RecordingObserver):
    """Observer that notes the start of each run, and acts once when two runs have reached a gate."""

    def __init__(self, gate: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.gate, self.act, self.starts, self.arrived = gate, act, [], set()

    def begun(self, training: Any) -> None:
        self.starts.append((training.settings, training.steps_done))

    def stepped(self, training: Any) -> None:
        if training.steps_done >= self.gate:
            self.arrived.add(training.settings)
        if len(self.arrived) == 2 and self.act is not None:
            self.act, act = None, self.act
            act()


def wait_for_death(folder: Path) -> None:
    """Wait until a worker at the second gate is dead: it outlives its node a little, and could finish its run."""
    while all(is_alive(path.name.rpartition("-")[2]) for path in folder.glob(f"at-{GATES[1]}-*")):
        time.sleep(0.02)


def is_alive(process: str) -> bool:
    state = Path("/proc", process, "stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@contextmanager
def two_nodes() -> Iterator[Callable[[], None]]:
    """Start two nodes with one core each, and join the first. Yield a function that kills the second."""
    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    for module in (sys.modules[__name__], photo_cases):
        ray.cloudpickle.register_pickle_by_value(module)  # the workers have nero_lab only
    # to notice soon that a node is dead; sooner, and on a busy machine a live one counts as dead, too
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "_system_config": soon})
    second = cluster.add_node(**small)
    ray.init(cluster.address, log_to_driver=False)
    try:
        yield lambda: cluster.remove_node(second, allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_class_folder(tmp_path_factory.mktemp("data") / "made")


def sweep_by(run: Callable[..., list[dict[str, Any]]], name: str) -> dict[str, float]:
    """Search two rates for two contenders, and run two seeds at the best."""

    def on_stand_in(runs: list[Any], more: bool) -> list[dict[str, Any]]:
        return run([replace(settings, data=name) for settings in runs], more=more)

    return search(SMALL, ["nero", "sgd"], 2, "float32", on_stand_in)


# one test: workers of pytest-xdist would each start a cluster for a test of their own
def test_interrupt_and_killed_node_lose_no_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(decoding, "default_count", lambda _: 0)
    monkeypatch.setitem(TASKS, "small", SMALL)
    data, out, lines, stop = decoded(folder), tmp_path / "ray", [], RaySweep._stop
    gated, gates = replace(SMALL, loop=Preparing(tmp_path)), [tmp_path / str(gate) for gate in GATES]
    monkeypatch.setattr(RaySweep, "_stop", lambda self: (stop(self), gates[0].touch()))
    with two_nodes() as kill_second:
        interrupted = Observer(GATES[0], lambda: signal.raise_signal(signal.SIGINT))
        killed = Observer(GATES[1], lambda: (kill_second(), wait_for_death(tmp_path), gates[1].touch()))
        with pytest.raises(KeyboardInterrupt):
            sweep_by(RaySweep(gated, folder, CPU, 0.0, Store(out), interrupted, lines.append).train, data.name)
        assert interrupted.stop_requests == 1
        assert [at for _, at in interrupted.starts] == [0, 0]  # the other two waited, and never began
        assert len(list(out.rglob("*.checkpoint"))) == 2
        best = sweep_by(RaySweep(gated, folder, CPU, 0.0, Store(out), killed, lines.append).train, data.name)
        again = ["small", "--optimiser", "nero", "--optimiser", "sgd", "--seeds", "2", "--data", str(folder)]
        code, printed = run_command(monkeypatch, "sweep", *again, "--out", str(out), "--ray")
    assert (code, printed.count("0 runs to do on cpu")) == (0, 2)
    for settings in interrupted.arrived:
        assert next(at for begun, at in killed.starts if begun == settings) >= GATES[0]
    (lost,) = {settings for settings, at in killed.starts if at >= GATES[1] - 1}
    # on a busy machine, Ray may lose other workers as well
    assert SMALL.run_name(lost) in [line.partition(":")[0] for line in lines]
    assert not list(out.rglob("*.checkpoint"))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as a worker has; a record tells
    ordinary = Store(tmp_path / "ordinary")
    run = lambda runs, more: train(SMALL, runs, data, ordinary, RecordingObserver(), more=more)  # noqa: E731
    assert sweep_by(run, data.name) == best
    torch.set_num_threads(threads)
    records = read_records(out)
    assert_close_records(records, read_records(tmp_path / "ordinary"))
    assert sum(record["resumed"] for record in records) >= 3  # two after the interrupt, and the lost one again


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace Ray by direct calls. Return a mailbox with the methods of an actor's handle."""
    inner = Mailbox()
    monkeypatch.setattr(decoding, "default_count", lambda _: 0)

    def post(*message: object) -> SimpleNamespace:
        answer = inner.post(*message)
        return SimpleNamespace(future=lambda: SimpleNamespace(result=lambda: answer))

    methods = {"post": post, "take": inner.take, "stop": inner.stop}
    return SimpleNamespace(inner=inner, **{name: SimpleNamespace(remote=call) for name, call in methods.items()})


def test_worker_posts_progress_and_record(mailbox: SimpleNamespace, folder: Path):
    settings = replace(SMALL.settings("nero", epochs=2), data=decoded(folder).name)
    record = train_here(SMALL, settings, folder, CPU, None, mailbox)
    messages = mailbox.inner.take()
    kinds = [kind for kind, *_ in messages]
    assert (kinds[0], kinds[-2:]) == ("begun", ["file", "ended"])
    assert messages[-1][2].epochs_known == 2
    assert record is not None
    assert len(record["curve"]["test_loss"]) == 2
    assert not mailbox.inner.take()


def test_stopped_worker_posts_checkpoint_to_resume(
    mailbox: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint_every_step(monkeypatch)
    monkeypatch.setattr(ray_sweep, "POLL_EVERY_S", 0.0)
    settings = replace(SMALL.settings("sgd"), data=decoded(folder).name)
    mailbox.inner.stop()
    assert train_here(SMALL, settings, folder, CPU, None, mailbox) is None
    *_, (kind, _, name, content) = mailbox.inner.take()
    assert (kind, Path(name).suffix) == ("file", ".checkpoint")
    assert train_here(SMALL, settings, folder, CPU, content, mailbox) is None
    assert [run.steps_done for kind, _, run, *_ in mailbox.inner.take() if kind == "begun"] == [1]


def test_worker_without_the_data_names_its_node(mailbox: SimpleNamespace, folder: Path, tmp_path: Path):
    with pytest.raises(DataError, match=rf"node {socket.gethostname()}: the data folder .* does not exist"):
        train_here(SMALL, SMALL.settings("nero"), tmp_path / "nowhere", CPU, None, mailbox)
    with pytest.raises(DataError, match="not imagenet: copy the data"):
        train_here(SMALL, SMALL.settings("nero"), folder, CPU, None, mailbox)


@pytest.fixture
def ray_sweeper(mailbox: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RaySweep:
    """Return a sweep whose Ray ends each task by the result or error that stands for its reference."""
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: mailbox))
    monkeypatch.setattr(ray, "remote", lambda _: actor)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs[:1], refs[1:]))
    monkeypatch.setattr(ray, "cancel", lambda _: None)

    def get(value: object) -> object:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(ray, "get", get)
    return RaySweep(SMALL, None, CPU, 0.0, Store(tmp_path), RecordingObserver(), lambda _: None)


def test_run_that_kills_every_worker_is_given_up(ray_sweeper: RaySweep, monkeypatch: pytest.MonkeyPatch):
    submitted = []

    def submit(settings: Any) -> None:
        submitted.append(settings)
        ray_sweeper._running[WorkerCrashedError()] = settings

    monkeypatch.setattr(ray_sweeper, "_submit", submit)
    with pytest.raises(SettingError, match=r"3 workers of nero-lr0.01-seed0 died .*WorkerCrashedError"):
        ray_sweeper.train([SMALL.settings("nero")])
    assert len(submitted) == ray_sweep.MAX_DEATHS


def test_error_in_one_run_stops_the_others(ray_sweeper: RaySweep, monkeypatch: pytest.MonkeyPatch):
    failed = RayTaskError("train_here", "traceback", DataError("on the node a: no data"))
    ends = iter([failed, TaskCancelledError()])
    monkeypatch.setattr(ray_sweeper, "_submit", lambda settings: ray_sweeper._running.__setitem__(next(ends), settings))
    with pytest.raises(DataError, match=r"^on the node a: no data$"):
        ray_sweeper.train([SMALL.settings("nero"), SMALL.settings("sgd")])
    assert ray_sweeper._mailbox.inner.is_stopping


@pytest.mark.parametrize(
    ("resources", "asked", "wanted"),
    [
        ({"CPU": 8.0}, ("auto", None), ("cpu", 0.0, 8)),
        ({"CPU": 8.0, "GPU": 2.0}, ("auto", None), ("cuda", 1.0, 2)),
        ({"CPU": 8.0, "GPU": 2.0}, ("cuda", 3), ("cuda", 0.3333, 6)),
        ({"CPU": 8.0, "GPU": 2.0}, ("cpu", None), ("cpu", 0.0, 8)),
        ({"CPU": 8.0}, ("cuda", None), "no GPU"),
        ({"CPU": 8.0, "GPU": 2.0}, ("cuda:1", None), "take --device cpu, cuda or auto"),
    ],
)
def test_device_follows_the_cluster(resources, asked, wanted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    if isinstance(wanted, str):
        with pytest.raises(SettingError, match=wanted):
            ray_sweep.choose_device(*asked)
    else:
        device, gpus, at_a_time = ray_sweep.choose_device(*asked)
        assert (device.type, gpus, at_a_time) == wanted


def test_ray_address_error_names_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = f"127.0.0.1:{listening.getsockname()[1]}"
    for address, message in ((closed, "ray start --head"), ("ray://head:10001", "takes HOST:PORT")):
        code, _ = run_command(monkeypatch, "sweep", "mnist-deep", "--ray", address)
        assert message in str(code)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Version mismatch")

    monkeypatch.setattr(ray, "init", fail)
    code, _ = run_command(monkeypatch, "sweep", "mnist-deep", "--ray", "--device", "cpu")
    assert "Version mismatch" in str(code)
    assert not list(tmp_path.iterdir())


def test_ray_with_torchrun_or_not_installed_names_remedy(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "is_launched", lambda: True)
        assert "without torchrun" in str(run_command(patch, "sweep", "mnist-deep", "--ray")[0])
    assert "choose either" in str(run_command(monkeypatch, "sweep", "imagenet", "--ray", "--shard")[0])
    monkeypatch.delitem(sys.modules, "nero_lab.ray_sweep")
    monkeypatch.delattr("nero_lab.ray_sweep")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install '.[ray]'" in str(run_command(monkeypatch, "sweep", "mnist-deep", "--ray")[0])
