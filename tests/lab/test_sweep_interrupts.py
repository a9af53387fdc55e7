"""Interrupts of training: all runs are saved, and the display announces the stop."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from lab.helpers import FAST, RecordingObserver, comparable, make_data

from nero_lab import distributed
from nero_lab.loops.supervised import Supervised
from nero_lab.store import ReadOnlyStore, Store
from nero_lab.sweep import train


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


@pytest.mark.parametrize("asked", [False, True])
def test_other_process_signalled_reports_interrupt(asked, tmp_path, monkeypatch):
    def fail(_):
        if asked:
            signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(Supervised, "advance", fail)
    with pytest.raises(KeyboardInterrupt if asked else RuntimeError) as error:
        train(FAST, [FAST.settings("nero")], make_data(), ReadOnlyStore(tmp_path), RecordingObserver())
    assert error.value.args == ((signal.SIGTERM,) if asked else ("Connection closed by peer",))


def test_train_outside_main_thread_works(tmp_path):
    with ThreadPoolExecutor() as threads:
        arguments = FAST, [FAST.settings("sgd")], make_data(), Store(tmp_path), RecordingObserver()
        (record,) = threads.submit(train, *arguments).result()
    assert record["optimiser"] == "sgd"
