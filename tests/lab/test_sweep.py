"""Many runs: resumed after an interrupt, side by side, chosen by the protocol, in processes, and not yet made."""

import gc
import multiprocessing
import re
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.helpers import (
    CPU,
    FAST,
    TINY,
    Killed,
    RecordingObserver,
    assert_close_records,
    checkpoint_every_step,
    comparable,
    find_and_die,
    find_and_interrupt,
    find_fast,
    find_slow,
    make_data,
)

from nero_lab import pool
from nero_lab.data import DataError
from nero_lab.loops.supervised import Supervised
from nero_lab.plan import cells_of, lines_of
from nero_lab.pool import train_in_processes
from nero_lab.protocol import Settings, best_rate
from nero_lab.store import Store, StoreError, read_records
from nero_lab.sweep import search, train
from nero_lab.tasks import TASKS

TASK = replace(FAST, contenders={name: FAST.contenders[name] for name in ("sgd", "nero")})


@pytest.fixture
def forked(monkeypatch):
    """Fork the processes of a pool from one that has imported what they need, which takes four seconds to spawn.

    The tests that run the command in a process of its own spawn theirs, as the command does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.helpers", "nero_lab.pool", "torch._dynamo"])
    monkeypatch.setattr(pool, "get_context", lambda _: context)


@pytest.mark.parametrize("contender", TINY.contenders)
def test_killed_run_resumes_bit_for_bit(contender, tmp_path, monkeypatch):
    checkpoint_every_step(monkeypatch)
    data, settings = make_data(), TINY.settings(contender, epochs=2)
    (undisturbed,) = train(TINY, [settings], data, Store(tmp_path / "undisturbed"), RecordingObserver())
    store = Store(tmp_path / "killed")
    for _ in range(2):  # saves two steps, and dies in the third
        with pytest.raises(Killed):
            train(TINY, [settings], data, store, RecordingObserver(kill_after=2))
    observer = RecordingObserver()
    (resumed,) = train(TINY, [settings], data, store, observer)
    assert observer.begun_at == [4]
    assert comparable(resumed) == comparable(undisturbed)
    assert not list(tmp_path.rglob("*.checkpoint"))


def test_sigkilled_process_resumes(tmp_path):
    script, killed = tmp_path / "run.py", tmp_path / "killed"
    script.write_text(
        "import os, signal, sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from lab.helpers import FAST, RecordingObserver, make_data\n"
        "from nero_lab import sweep\n"
        "from nero_lab.store import Store\n"
        "sweep.CHECKPOINT_EVERY_S = sweep.MIN_TRAIN_TO_SAVE_RATIO = 0.0\n"
        "observer = RecordingObserver()\n"
        "observer.stepped = lambda run: run.steps_done == 5 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "sweep.train(FAST, [FAST.settings('nero')], make_data(), Store(Path(sys.argv[1])), observer)\n"
    )
    done = subprocess.run([sys.executable, script, killed], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in sorted(killed.rglob("*-*"))] == [".checkpoint", ".lock"]
    runs, observer = [FAST.settings("nero")], RecordingObserver()
    (resumed,) = train(FAST, runs, make_data(), Store(killed), observer)
    assert observer.begun_at == [4]
    assert not list(killed.rglob("*.lock"))
    (whole,) = train(FAST, runs, make_data(), Store(tmp_path / "whole"), RecordingObserver())
    assert_close_records([resumed], [whole])


def test_finished_run_is_freed_before_next_starts(tmp_path):
    """A run is a reference cycle, and holds memory of a GPU."""
    earlier, observer = [], RecordingObserver()

    def begun(training):
        assert all(reference() is None for reference in earlier)
        earlier.append(weakref.ref(training))

    observer.begun, observer.ended = begun, lambda _: None
    gc.disable()
    try:
        train(FAST, [FAST.settings("nero", seed=seed) for seed in range(3)], make_data(), Store(tmp_path), observer)
    finally:
        gc.enable()
    assert len(earlier) == 3


@pytest.mark.parametrize("where", ["write_files", "finish", "begin"])
def test_failure_between_steps_saves_all_runs(where, tmp_path, monkeypatch):
    data, runs = make_data(), [FAST.settings("nero", seed=seed) for seed in range(3)]
    whole = train(FAST, runs, data, Store(tmp_path / "whole"), RecordingObserver(), side_by_side=2)
    store, calls = Store(tmp_path / "broken"), []
    method = getattr(store, where)

    def fail(*arguments):
        calls.append(None)
        if len(calls) == (3 if where == "begin" else 1):
            raise OSError("no room")
        return method(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store, where, fail)
        with pytest.raises(OSError, match="no room"):
            train(FAST, runs, data, store, RecordingObserver(), side_by_side=2)
    suffix = "json" if where == "begin" else "checkpoint"
    saved = sorted(path.name for path in (tmp_path / "broken/tiny").iterdir())
    assert saved == [f"nero-lr0.01-seed0.{suffix}", f"nero-lr0.01-seed1.{suffix}"]
    again = train(FAST, runs, data, store, RecordingObserver(), side_by_side=2)
    assert [comparable(record) for record in again] == [comparable(record) for record in whole]


def test_side_by_side_runs_match_single_runs(tmp_path):
    data = make_data()
    runs = [TINY.settings(name, seed=seed, epochs=2) for name in ("nero", "adam") for seed in (0, 1)]
    alone = train(TINY, runs, data, Store(tmp_path / "alone"), RecordingObserver())
    together = train(TINY, runs, data, Store(tmp_path / "together"), RecordingObserver(), side_by_side=3)
    assert_close_records(together, alone)
    assert [record["side_by_side"] for record in together] == [3, 3, 3, 1]  # the last run was alone
    assert [record["side_by_side"] for record in alone] == [1, 1, 1, 1]


def test_slow_checkpoints_are_written_less_often(tmp_path, monkeypatch):
    """The pause between checkpoints depends on the time that all runs take to save."""
    clock, saves = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    class SlowStore(Store):
        def save(self, _):
            saves.append(clock[0])
            clock[0] += 10.0

    observer = RecordingObserver()
    observer.stepped = lambda _: clock.__setitem__(0, clock[0] + 20.0)
    runs = [FAST.settings("sgd", seed=seed) for seed in range(4)]
    train(FAST, runs, make_data(), SlowStore(tmp_path), observer, side_by_side=4)
    # 36 steps of 20 s, and one round of saves of 40 s: the next round would be due 800 s later
    assert saves == [80.0, 90.0, 100.0, 110.0]


def test_search_follows_protocol_and_skips_done_runs(tmp_path):
    data, store, observer = make_data(), Store(tmp_path), RecordingObserver()

    def run(settings, more):
        return train(FAST, settings, data, store, observer, more=more)

    best = search(FAST, ["nero", "sgd"], 3, "float32", run)
    assert observer.planned == [(4, 0), (6, 2)]
    assert set(best) == {"nero", "sgd"}
    assert len(read_records(tmp_path)) == 2 * (2 + 2)
    assert search(FAST, ["nero", "sgd"], 3, "float32", run) == best
    assert observer.planned[2:] == [(4, 4), (6, 6)]
    assert search(FAST, ["nero"], 1, "float32", run, rates=()) == {"nero": 0.01}


def test_full_disk_stops_run_and_keeps_checkpoint(tmp_path, monkeypatch):
    data, settings, store = make_data(), FAST.settings("nero"), Store(tmp_path)
    checkpoint_every_step(monkeypatch)
    saves, torch_save = [], torch.save

    def save(state, file):
        saves.append(state["step"])
        file.write(b"half")
        if len(saves) == 3:
            raise RuntimeError("PytorchStreamWriter failed writing file")
        torch_save(state, file.seek(0) or file)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(StoreError, match="cannot write"):
        train(FAST, [settings], data, store, RecordingObserver())
    monkeypatch.setattr(torch, "save", torch_save)
    again = RecordingObserver()
    train(FAST, [settings], data, store, again)
    assert again.begun_at == [2]


def test_bad_checkpoint_raises_before_training(tmp_path):
    runs = [FAST.settings("sgd", seed=seed) for seed in (0, 1)]
    store, observer = Store(tmp_path), RecordingObserver()
    bad = store.path(FAST, runs[1], ".checkpoint")
    bad.parent.mkdir()
    bad.write_text("junk")
    with pytest.raises(StoreError, match=r"seed1.checkpoint cannot be read \(\w+\): delete it"):
        train(FAST, runs, make_data(), store, observer)
    assert observer.begun_at == []


@pytest.mark.parametrize(
    ("where", "resumed_at"),
    [
        (None, [5, 4, 4]),  # before the step
        ("_begin_epoch", [4, 3, 3]),
        ("_update", [5, 0, 4]),  # within the step: its state is inconsistent, and not saved
        ("_evaluate", [3, 3, 2]),
    ],
)
def test_error_in_one_run_saves_consistent_runs(where, resumed_at, tmp_path, monkeypatch):
    data, runs = make_data(), [FAST.settings("sgd", seed=seed) for seed in (0, 1, 2)]
    whole = train(FAST, runs, data, Store(tmp_path / "whole"), RecordingObserver(), side_by_side=3)
    method = getattr(Supervised, where or "advance")

    def fail(self, *arguments):
        if self.settings.seed == 1 and self.steps_done == (3 if where in ("_begin_epoch", "_evaluate") else 4):
            raise DataError("an image does not decode")
        return method(self, *arguments)

    store, observer = Store(tmp_path / "broken"), RecordingObserver()
    with monkeypatch.context() as patch:
        patch.setattr(Supervised, where or "advance", fail)
        with pytest.raises(DataError, match="does not decode"):
            train(FAST, runs, data, store, RecordingObserver(), side_by_side=3)
    again = train(FAST, runs, data, store, observer, side_by_side=3)
    assert observer.begun_at == resumed_at
    assert [comparable(record) for record in again] == [comparable(record) for record in whole]


def test_diverged_run_is_recorded(tmp_path):
    (record,) = train(TINY, [TINY.settings("sgd", 1e30)], make_data(), Store(tmp_path), RecordingObserver())
    assert record["curve"]["train_loss"][-1] is None
    assert record["curve"]["train_accuracy"][-1] is not None


@pytest.mark.gpu
@pytest.mark.parametrize("contender", ["nero", "adam", "madam", "resnet"])
def test_gpu_runs_resume_and_run_side_by_side(contender, tmp_path):
    data = make_data().to("cuda")
    runs = [TINY.settings(contender, seed=seed) for seed in (0, 1, 2)]
    alone = train(TINY, runs, data, Store(tmp_path / "alone"), RecordingObserver())
    store, observer = Store(tmp_path / "together"), RecordingObserver()
    observer.stepped = lambda training: training.steps_done == 4 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, runs, data, store, observer, side_by_side=3)
    together = train(TINY, runs, data, store, RecordingObserver(), side_by_side=3)
    for one, other in zip(alone, together, strict=True):
        assert one["curve"]["train_loss"] == pytest.approx(other["curve"]["train_loss"], rel=1e-3)


def test_signal_after_last_run_is_ignored(tmp_path):
    observer = RecordingObserver()
    observer.ended = lambda _: signal.raise_signal(signal.SIGTERM)
    (record,) = train(FAST, [FAST.settings("nero")], make_data(), Store(tmp_path), observer)
    assert record["optimiser"] == "nero"


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["_update", "_evaluate", "_begin_epoch"])
def test_interrupt_at_any_moment_saves_all_runs(where, asked, tmp_path, monkeypatch):
    data, runs = make_data(), [FAST.settings(name) for name in ("sigma-100", "nero")]
    undisturbed = train(FAST, runs, data, Store(tmp_path / "undisturbed"), RecordingObserver(), side_by_side=2)
    method, calls = getattr(Supervised, where), []

    def interrupt(self, *arguments):
        calls.append(None)
        if len(calls) == 3:
            signal.raise_signal(asked)
        return method(self, *arguments)

    observer, handler = RecordingObserver(), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Supervised, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(FAST, runs, data, Store(tmp_path / "stopped"), observer, side_by_side=2)
    assert observer.stop_requests == 1
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 2
    assert signal.getsignal(signal.SIGINT) == handler
    resumed = train(FAST, runs, data, Store(tmp_path / "stopped"), RecordingObserver(), side_by_side=2)
    assert [comparable(record) for record in resumed] == [comparable(record) for record in undisturbed]


def test_interrupt_within_step_is_announced_at_once(tmp_path, monkeypatch):
    """A step may take minutes on a CPU, and a second interrupt would lose it."""
    observer, update, announced = RecordingObserver(), Supervised._update, []

    def interrupt(self, *batch):
        signal.raise_signal(signal.SIGINT)
        announced.append(observer.stop_requests)
        update(self, *batch)

    monkeypatch.setattr(Supervised, "_update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(FAST, [FAST.settings("nero")], make_data(), Store(tmp_path), observer)
    assert announced == [1]
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1


def test_interrupt_within_print_saves_the_run(tmp_path):
    """A stream rejects a print within a print."""
    observer = RecordingObserver()

    def refuse():
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    observer.stopping = refuse
    observer.stepped = lambda _: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(FAST, [FAST.settings("nero")], make_data(), Store(tmp_path), observer)
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1


def test_second_interrupt_stops_at_once(tmp_path):
    observer = RecordingObserver()
    observer.stopping = lambda: signal.raise_signal(signal.SIGINT)
    observer.stepped = lambda _: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(FAST, [FAST.settings("nero")], make_data(), Store(tmp_path), observer)
    assert not list(tmp_path.rglob("*.checkpoint"))


def test_train_outside_main_thread_works(tmp_path):
    with ThreadPoolExecutor() as threads:
        arguments = FAST, [FAST.settings("sgd")], make_data(), Store(tmp_path), RecordingObserver()
        (record,) = threads.submit(train, *arguments).result()
    assert record["optimiser"] == "sgd"


def record(contender, lr, seed=0, **changes):
    task = {
        "task": TASK.name,
        "epochs": TASK.epochs,
        "batch": TASK.batch,
        "options": dict(TASK.contenders[contender].options),
    }
    curve = {"test_accuracy": [lr], "train_loss": [1.0]}
    return {**task, "optimiser": contender, "lr": lr, "seed": seed, "curve": curve, **changes}


def missing(cells, contender, part):
    (cell,) = [each for each in cells if (each.contender, each.part) == (contender, part)]
    return [(settings.lr, settings.seed) for settings in cell.missing], cell.wanted


@pytest.mark.parametrize("task", ["pong", "cifar10-vgg11"])
def test_best_rate_is_not_that_of_a_run_that_diverged(task: str):
    def record(lr: float, value: float, loss: float | None) -> dict[str, Any]:
        kinds = ("policy_loss", "value_loss") if task == "pong" else ("train_loss",)
        return {
            "optimiser": "sgd",
            "lr": lr,
            "curve": {TASKS[task].metric: [value], **{kind: [loss] for kind in kinds}},
        }

    assert best_rate(TASKS[task], [record(0.01, 0.1, 1.0), record(1.0, 0.2, None)]) == 0.01


def test_plan_finds_missing_rates_and_seeds():
    cells = cells_of([TASK], [record("nero", 0.01), record("nero", 0.01, 2), record("sgd", 0.1, 1)], None)
    assert missing(cells, "nero", "search") == ([(0.1, 0)], 2)
    assert missing(cells, "nero", "seeds") == ([(0.01, 1)], 3)
    assert missing(cells, "sgd", "search") == ([(0.01, 0), (0.1, 0)], 2)
    assert missing(cells, "sgd", "seeds") == ([(0.1, 0), (0.1, 2)], 3)
    assert [(cell.contender, cell.part) for cell in cells[:2]] == [("nero", "search"), ("nero", "seeds")]
    assert cells[-1][1:3] == ("sgd", "search")


def test_plan_of_mixed_seeds_asks_for_one_precision_but_for_no_run_twice():
    tf32 = [record("nero", 0.01, seed, precision="tf32") for seed in (0, 1)]
    mixed = [*tf32, record("nero", 0.01, 2, precision="float32")]
    assert missing(cells_of([TASK], mixed, "tf32"), "nero", "seeds") == ([(0.01, 2)], 3)
    assert missing(cells_of([TASK], mixed, "float32"), "nero", "seeds") == ([], 3)


@pytest.mark.parametrize(
    "changes", [{"epochs": 1}, {"options": {"beta": 0.5}}, {"task": "other"}, {"batch": 3}, {"data": "a stand-in"}]
)
def test_plan_ignores_runs_of_other_settings(changes):
    cells = cells_of([TASK], [record("nero", 0.01, **changes)], None)
    assert missing(cells, "nero", "seeds")[0] == [(0.01, 0), (0.01, 1), (0.01, 2)]


def test_plan_names_runs_on_a_stand_in_as_missing():
    data = "cats-3-classes-1200-images-of-64-0123abcd"
    _, nero, sgd, total, note = lines_of(cells_of([TASK], [record("nero", 0.01, data=data)], None), None)
    assert nero.split()[-4:] == ["1", "on", "a", "stand-in"]
    assert "stand-in" not in sgd
    assert total.startswith("8 runs are missing")
    assert f"{TASK.name} was run on cats (3 classes, 1,200 images)" in note


def test_plan_of_a_study_takes_the_best_rate_of_a_whole_search():
    task = replace(TASK, study="today", seeds=2)
    half = cells_of([task], [record("nero", 0.01)], None)
    assert missing(half, "nero", "seeds") == ([], 0)
    whole = cells_of([task], [record("nero", 0.01), record("nero", 0.1)], None)
    assert missing(whole, "nero", "seeds") == ([(0.1, 1)], 2)
    assert [*lines_of(half, None)][-1].startswith("0 of ?")


def test_plan_table_counts_each_missing_run_once():
    head, sgd, nero, total = lines_of(cells_of([TASK], [], "tf32"), "tf32")
    assert head.split() == ["TASK", "OPTIMISER", "RATES", "SEEDS", "MISSING", "ON", "A", "GPU"]
    for line in (sgd, nero):
        assert line.split()[2:9] == ["0", "of", "2", "0", "of", "3", "4"]  # a run of the search is also a seed
    assert total == "8 runs are missing: about 8 s on an NVIDIA H200, one by one"


def test_plan_of_every_study_is_made():
    for study in ("paper", "today"):
        tasks = [task for task in TASKS.values() if task.study == study]
        cells = cells_of(tasks, [], None)
        assert {cell.task.name for cell in cells} == {task.name for task in tasks}
        assert all(isinstance(settings, Settings) for cell in cells for settings in cell.missing)
        assert max(map(len, lines_of(cells, None))) <= 80


@pytest.mark.usefixtures("forked")
def test_processes_train_all_but_a_run_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "STATUS_EVERY_S", 0.0)
    runs, lines = [TASK.settings("nero", 0.01, seed) for seed in range(3)], []
    monkeypatch.setattr(pool, "BUSY_RETRY_S", 0.1)
    broken, other = replace(runs[0], optimiser="none"), Store(tmp_path)
    busy = "tiny, nero at 0.01, seed 0: another command makes it, so it comes last"

    def say(line):
        lines.append(line)
        if busy in lines and sum(": train" in each for each in lines) == 2:
            other.release(TASK, runs[0])

    other.claim(TASK, runs[0])
    with pytest.raises(StoreError, match="1 of 4 runs failed"):
        train_in_processes([broken, *runs], None, CPU, tmp_path, 2, minutes=9.0, say=say, find=find_fast)
    assert lines.count(busy) == 1
    assert lines.index(busy) < lines.index("tiny, nero at 0.01, seed 0: starts")
    lines.remove(busy)
    assert [line[:27] for line in lines if ": train" in line][-1] == "tiny, nero at 0.01, seed 0:"
    assert "tiny, none at 0.01, seed 0 failed: KeyError('none')" in lines
    assert lines[-1] == f"3 of 4 runs done; records in {tmp_path}"
    for first in (f"tiny, nero at 0.01, seed {seed}: " for seed in range(3)):
        start, end = (line for line in lines if line.startswith(first))
        assert start == f"{first}starts"
        assert re.fullmatch(rf"{first}train .*%, test .*% in \d+ s; \d of 4 done(, about \d+ s left)?", end)
    assert any(re.fullmatch(r"\d under way, at \d+%.*; \d of 4 done.*", line) for line in lines)
    assert any("; 1 of 4 done, about" in line for line in lines)
    alone = train(TASK, runs, make_data(), Store(tmp_path / "alone"), RecordingObserver())
    assert_close_records(read_records(tmp_path), alone)
    assert {record["side_by_side"] for record in read_records(tmp_path)} == {2}


@pytest.mark.usefixtures("forked")
def test_processes_interrupted_twice_save_their_runs(tmp_path):
    runs, lines = [TASK.settings("nero", 0.01, seed) for seed in range(2)], []

    def say(line):
        lines.append(line)
        if line.startswith("stopping"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_in_processes(runs, None, CPU, tmp_path, 1, minutes=9.0, say=say, find=find_and_interrupt)
    assert lines[-1] == "stopping to save the runs"
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1
    assert not list(tmp_path.rglob("*.json"))
    train(TASK, runs, make_data(), Store(tmp_path), RecordingObserver())
    assert [record["resumed"] > 0 for record in read_records(tmp_path)] == [True, False]


def test_interrupt_from_the_keyboard_spares_processes_that_start(tmp_path):
    """A terminal sends it to all processes of its foreground group."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os, signal, sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from lab.helpers import CPU, FAST, find_slow\n"
        "from nero_lab import pool\n"
        "if __name__ == '__main__':\n"
        "    sent = pool._Report.sent\n"
        "    pool._Report.sent = lambda *given: (sent(*given), os.killpg(0, signal.SIGINT))\n"
        "    try:\n"
        "        runs = [FAST.settings('nero')]\n"
        "        pool.train_in_processes(runs, None, CPU, Path(), 1, minutes=9.0, say=print, find=find_slow)\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(130)\n"
    )
    command = [sys.executable, script]
    done = subprocess.run(command, timeout=120, check=False, cwd=tmp_path, start_new_session=True, capture_output=True)
    assert done.returncode == 130, done.stderr
    assert b"Traceback" not in done.stderr
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1


@pytest.mark.usefixtures("forked")
def test_runs_are_saved_when_a_process_dies(tmp_path):
    runs = [TASK.settings("nero", 0.01, seed) for seed in range(3)]
    with pytest.raises(StoreError, match="a process died while it trained tiny"):
        train_in_processes(runs, tmp_path, CPU, tmp_path, 2, minutes=9.0, say=print, find=find_and_die)
    assert [path.name for path in tmp_path.rglob("*.checkpoint")] == ["nero-lr0.01-seed1.checkpoint"]
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_save_and_end_when_the_command_dies(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from lab.helpers import CPU, FAST, find_orphaned\n"
        "from nero_lab.pool import train_in_processes\n"
        "if __name__ == '__main__':\n"
        "    runs = [FAST.settings('nero')]\n"
        "    train_in_processes(runs, None, CPU, Path(), 1, minutes=9.0, say=print, find=find_orphaned)\n"
    )
    done = subprocess.run([sys.executable, script], timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    worker, deadline = int((tmp_path / "worker").read_text()), time.monotonic() + 60
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(worker)
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie has ended


def test_no_run_starts_after_the_minutes(tmp_path):
    runs, lines = [TASK.settings("nero")], []
    assert train_in_processes(runs, None, CPU, tmp_path, 1, minutes=0.0, say=lines.append, find=find_fast) == 0
    assert lines[0] == "1 run in 1 process on cpu, for 0 s"
    assert lines[-1] == "1 run unfinished: repeat the command to continue"


@pytest.mark.usefixtures("forked")
def test_runs_under_way_are_saved_after_the_minutes(tmp_path, monkeypatch):
    runs, lines, begun = [TASK.settings("nero", 0.01, seed) for seed in range(2)], [], time.monotonic()

    def clock():  # the time is over as soon as a run is under way
        return begun if not any(line.endswith("starts") for line in lines) else begun + 61

    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=clock))
    assert train_in_processes(runs, None, CPU, tmp_path, 1, minutes=1.0, say=lines.append, find=find_slow) == 0
    assert lines[-3:] == [
        "the time is over: saving the runs",
        f"0 of 2 runs done; records in {tmp_path}",
        "2 runs unfinished: repeat the command to continue",
    ]
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1
    train_in_processes(runs, None, CPU, tmp_path, 1, minutes=9.0, say=lines.append, find=find_fast)
    assert any(line.startswith("tiny, nero at 0.01, seed 0: continues at ") for line in lines)
    assert [record["resumed"] > 0 for record in read_records(tmp_path)] == [True, False]


@pytest.mark.parametrize(("processes", "has_mps", "is_told"), [(2, False, True), (2, True, False), (1, False, False)])
def test_processes_on_a_gpu_without_mps_say_so(processes, has_mps, is_told, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if has_mps:
        (tmp_path / "control").touch()
    lines = []
    train_in_processes([], None, torch.device("cuda"), tmp_path, processes, minutes=0.0, say=lines.append)
    assert any("MPS is not running" in line for line in lines) == is_told
