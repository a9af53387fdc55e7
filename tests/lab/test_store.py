"""The store: records, checkpoints and weights of runs, their provenance, atomic writes, and unusable files."""

import errno
import fcntl
import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from lab.helpers import CPU, FAST, TINY, RecordingObserver, make_data, start_run

from nero_lab import atomic, provenance, sweep
from nero_lab.loops import adversarial
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import Contender
from nero_lab.store import (
    BusyError,
    ReadOnlyStore,
    Store,
    StoreError,
    pack_records,
    read_json_lines,
    read_records,
    write_atomically,
)
from nero_lab.sweep import train


def save_one_step(store, settings, task=FAST):
    """Save a run after one step, and return the path of its checkpoint."""
    training = Supervised(task, settings, make_data())
    training.advance()
    store.save(training)
    return store.path(task, settings, ".checkpoint")


def test_checkpoint_holds_no_code_and_damage_is_reported(tmp_path):
    store, settings = Store(tmp_path), FAST.settings("nero")
    path = save_one_step(store, settings)
    assert torch.load(path, weights_only=True)["step"] == 1
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match=r"cannot be read .*: delete it to start this run again"):
        store.begin(FAST, settings, CPU)


def test_claimed_run_is_refused_to_others_until_released(tmp_path):
    """Locks belong to open files, so a second store is like a second process."""
    store, other, (first, second) = Store(tmp_path), Store(tmp_path), (FAST.settings(name) for name in ("nero", "adam"))
    store.claim(FAST, first)
    with pytest.raises(BusyError, match=rf"process {os.getpid()} on \S+ makes .*/tiny/nero-lr0\.01-seed0$"):
        other.claim(FAST, first)
    ReadOnlyStore(tmp_path).claim(FAST, first)
    Store(tmp_path / "elsewhere").claim(FAST, first)
    other.claim(FAST, second)
    other.release(FAST, first)  # not its own
    assert len(list((tmp_path / "tiny").glob("*.lock"))) == 2
    store.release(FAST, first)
    other.claim(FAST, first)
    for settings in (first, second):
        other.release(FAST, settings)
    assert not list((tmp_path / "tiny").iterdir())


def test_lock_that_somebody_removed_is_made_anew(tmp_path, monkeypatch):
    store, other, settings, lock, calls = Store(tmp_path), Store(tmp_path), FAST.settings("nero"), fcntl.flock, []
    path = store.path(FAST, settings, ".lock")

    def flock(file, how):
        calls.append(how)
        if len(calls) == 1:
            path.unlink()  # as its last holder does
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    store.claim(FAST, settings)
    assert len(calls) == 2
    path.unlink()
    other.claim(FAST, settings)
    store.release(FAST, settings)
    assert path.exists()  # it is the other's


@pytest.mark.parametrize(("code", "is_busy"), [(errno.ENOLCK, False), (errno.EACCES, True), (errno.EAGAIN, True)])
def test_lock_on_other_file_systems(code, is_busy, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(BusyError, match="another process makes") if is_busy else nullcontext():
        Store(tmp_path).claim(FAST, FAST.settings("nero"))


def test_lock_of_another_user_is_only_read(tmp_path, monkeypatch):
    store, settings, open_file = Store(tmp_path), FAST.settings("nero"), os.open
    path = store.path(FAST, settings, ".lock")
    path.parent.mkdir()
    path.write_text("process 1 on an old machine")

    def open_as_other(name, flags, *_):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(name, flags)

    monkeypatch.setattr(os, "open", open_as_other)
    store.claim(FAST, settings)
    with pytest.raises(BusyError, match="makes"):
        Store(tmp_path).claim(FAST, settings)


def test_lock_needs_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write .*\.lock: Not a directory; choose another folder"):
        Store(tmp_path / "file").claim(FAST, FAST.settings("nero"))


def test_run_of_another_process_comes_last_and_is_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "BUSY_RETRY_S", 0.0)
    monkeypatch.setattr(sweep, "POLL_EVERY_S", 0.0)
    runs, other, observer = (
        [FAST.settings(name) for name in ("nero", "sgd", "adam")],
        Store(tmp_path),
        RecordingObserver(),
    )
    order, reasons, looks = [], [], []
    observer.ended = lambda training: order.append(training.settings.optimiser)
    observer.blocked = reasons.append

    def sleep(_):  # the others are made, and this one has only to wait
        looks.append(list(order))
        if len(looks) == 2:
            other.release(FAST, runs[0])
        if len(looks) == 3:
            pytest.fail("it waits for nothing")

    monkeypatch.setattr(sweep.time, "sleep", sleep)
    other.claim(FAST, runs[0])
    with pytest.raises(BusyError, match=r"process \d+ on .* makes .*nero-lr0\.01-seed0"):
        train(FAST, runs[:1], make_data(), Store(tmp_path), observer, waits=False)
    records = train(FAST, runs, make_data(), Store(tmp_path), observer)
    assert order == ["sgd", "adam", "nero"]
    assert looks == [["sgd", "adam"]] * 2
    assert len(reasons) == 1
    assert [record["optimiser"] for record in records] == ["nero", "sgd", "adam"]


def test_run_that_another_process_finishes_is_taken_over(tmp_path):
    runs, observer = [FAST.settings(name) for name in ("sgd", "nero")], RecordingObserver()

    class LateStore(Store):
        """Store that claims a run just after another process has finished it."""

        def claim(self, task, settings):
            if settings == runs[1]:
                train(FAST, runs[1:], make_data(), Store(tmp_path), RecordingObserver())
            super().claim(task, settings)

    records = train(FAST, runs, make_data(), LateStore(tmp_path), observer)
    assert observer.begun_at == [0]
    assert [record["optimiser"] for record in records] == ["sgd", "nero"]
    assert not list(tmp_path.rglob("*.lock"))


def test_interrupt_ends_the_wait_for_another_process(tmp_path, monkeypatch):
    settings, other = FAST.settings("nero"), Store(tmp_path)
    monkeypatch.setattr(sweep.time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
    other.claim(FAST, settings)
    with pytest.raises(KeyboardInterrupt):
        train(FAST, [settings], make_data(), Store(tmp_path), RecordingObserver())


@pytest.mark.parametrize(
    ("task", "settings", "device", "what"),
    [
        (FAST, FAST.settings("adam", seed=1), CPU, "seed 0 instead of 1"),
        (FAST, FAST.settings("adam"), torch.device("cuda"), "device 'cpu' instead of 'cuda'"),
        (replace(FAST, batch=4), FAST.settings("adam"), CPU, "batch 8 instead of 4"),
        (replace(FAST, contenders={"adam": Contender("adam", 0.001)}), FAST.settings("adam"), CPU, "options .*"),
    ],
)
def test_checkpoint_of_another_run_raises(task, settings, device, what, tmp_path):
    store = Store(tmp_path)
    save_one_step(store, FAST.settings("adam")).rename(store.path(task, settings, ".checkpoint"))
    with pytest.raises(StoreError, match=rf"another run, with {what}: delete it"):
        store.begin(task, settings, device)


def test_checkpoint_of_another_version_raises(tmp_path, monkeypatch):
    store, settings = Store(tmp_path), FAST.settings("adam")
    save_one_step(store, settings)
    monkeypatch.setattr("nero.__version__", "9.9")
    with pytest.raises(StoreError, match=r"written by nero .*, and this is nero 9\.9: delete it"):
        store.begin(FAST, settings, CPU)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files.: fix that, and run again"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "lack of memory: free some, and run again"),
        (MemoryError(), "too little memory.: fix that, and run again"),
        (RuntimeError("PytorchStreamReader failed"), "RuntimeError.: delete it"),
    ],
)
def test_checkpoint_is_condemned_only_if_damaged(error, message, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    store, settings = Store(tmp_path), FAST.settings("adam")
    save_one_step(store, settings)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(StoreError, match=message):
        store.begin(FAST, settings, CPU)


def test_checkpoint_with_unknown_setting_raises(tmp_path):
    store, settings = Store(tmp_path), FAST.settings("adam")
    path = save_one_step(store, settings)
    state = torch.load(path, weights_only=True)
    torch.save({**state, "run": {**state["run"], "colour": "red"}}, path)
    with pytest.raises(StoreError, match=r"another run, with colour 'red' instead of None: delete it"):
        store.begin(FAST, settings, CPU)


@pytest.mark.parametrize("key", ["run", "curve", "seconds", "model", "optimiser", "generator", "totals"])
def test_checkpoint_without_key_raises(key, tmp_path):
    store, settings = Store(tmp_path), FAST.settings("adam")
    path = save_one_step(store, settings)
    state = torch.load(path, weights_only=True)
    del state[key]
    torch.save(state, path)
    with pytest.raises(StoreError, match=rf"{path} lacks '{key}', .*: delete it to start this run again"):
        train(FAST, [settings], make_data(), store, RecordingObserver())


@pytest.mark.parametrize("loop", ["supervised", "adversarial", "agent"])
def test_store_with_weights_saves_state_dict(loop, tmp_path, monkeypatch):
    """The weights load into a new network. A record without weights does not count as done."""
    monkeypatch.setattr(adversarial, "EVALUATED_IMAGES", 100)
    store, observer = Store(tmp_path, weights=True), RecordingObserver()
    task, settings, data = start_run(loop, store, epochs=1)
    train(task, [settings], data, store, observer)
    network = task.model()
    network.load_state_dict(torch.load(store.path(task, settings, ".pt"), weights_only=True))
    trained = observer.ended_runs[0].network.state_dict()
    assert trained
    assert all(torch.equal(value, trained[name]) for name, value in network.state_dict().items())
    assert len(train(task, [settings], data, store, observer)) == 1
    store.path(task, settings, ".pt").unlink()
    with pytest.raises(StoreError, match=r"\.json is the record of a run without saved weights: move it away"):
        train(task, [settings], data, store, observer)
    assert len(train(task, [settings], data, Store(tmp_path), observer)) == 1
    assert len(observer.ended_runs) == 1


def test_record_of_another_run_raises(tmp_path):
    store = Store(tmp_path)
    runs = [FAST.settings("sgd", rate) for rate in (0.01234567, 0.01234572)]
    assert len({store.path(FAST, settings, ".json") for settings in runs}) == 2
    train(FAST, runs[:1], make_data(), store, RecordingObserver())
    store.path(FAST, runs[0], ".json").rename(store.path(FAST, runs[1], ".json"))
    with pytest.raises(StoreError, match=r"another run with lr 0\.01234567: move it away"):
        train(FAST, runs[1:], make_data(), store, RecordingObserver())
    store.path(FAST, runs[1], ".json").rename(store.path(FAST, runs[0], ".json"))
    with pytest.raises(StoreError, match="another run with batch 8: move it away"):
        train(replace(FAST, batch=4), runs[:1], make_data(), store, RecordingObserver())


def test_record_without_precision_counts_as_float32(tmp_path):
    store, settings = Store(tmp_path), FAST.settings("sgd")
    (record,) = train(FAST, [settings], make_data(), store, RecordingObserver())
    del record["precision"]
    store.path(FAST, settings, ".json").write_text(json.dumps(record))
    assert store.record(FAST, settings) == record
    pack_records(tmp_path)
    assert Store(tmp_path).record(FAST, settings)["seed"] == 0


@pytest.mark.parametrize("values", [[0.1, 0.2], None])
def test_record_with_short_curve_raises(values, tmp_path):
    """A sweep needs the last value to choose its learning rate."""
    store, settings = Store(tmp_path), FAST.settings("sgd")
    (record,) = train(FAST, [settings], make_data(), store, RecordingObserver())
    del record["curve"]["test_accuracy"]
    record["curve"] |= {"test_accuracy": values} if values else {}
    path = store.path(FAST, settings, ".json")
    path.write_text(json.dumps(record))
    count = len(values or [])
    with pytest.raises(StoreError, match=rf"{path}.* has {count} values of test_accuracy for 3 epochs.* move it away"):
        train(FAST, [settings], make_data(), store, RecordingObserver())


def test_abandoned_part_files_are_removed(tmp_path):
    store = Store(tmp_path)
    old, new = (tmp_path / "tiny" / f"sgd-lr0.1-seed0.checkpoint.{process}.part" for process in (1, 2))
    old.parent.mkdir()
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    store.check(FAST, 1)
    assert [old.exists(), new.exists()] == [False, True]
    train(FAST, [FAST.settings("sgd")], make_data(), store, RecordingObserver())
    assert not new.exists()


def test_part_file_removed_by_another_process_is_ignored(tmp_path, monkeypatch):
    gone = tmp_path / "tiny" / "sgd-lr0.1-seed0.checkpoint.1.part"
    monkeypatch.setattr(Path, "glob", lambda *_: [gone])
    Store(tmp_path).check(FAST, 1)


def test_record_lists_resumes_and_commits(tmp_path, monkeypatch):
    monkeypatch.setenv("NERO_COMMIT", "one")
    observer = RecordingObserver()
    observer.stepped = lambda training: training.steps_done == 4 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(FAST, [FAST.settings("sgd")], make_data(), Store(tmp_path), observer)
    monkeypatch.setenv("NERO_COMMIT", "two")
    (record,) = train(FAST, [FAST.settings("sgd")], make_data(), Store(tmp_path), RecordingObserver())
    assert record["commit"] == "one, two"
    assert record["resumed"] == 1


def test_folder_unwritable_or_full_raises(tmp_path):
    Store(tmp_path).check(TINY, 1)
    with pytest.raises(StoreError, match="make room"):
        Store(tmp_path).check(TINY, 10**18)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="--out"):
        Store(tmp_path / "file" / "below").check(TINY, 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tiny").touch()
    with pytest.raises(StoreError, match="--out"):
        Store(tmp_path / "out").check(TINY, 1)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(StoreError, match="--out"):
        Store(tmp_path / "link" / "below").check(TINY, 1)


def test_folder_is_created_on_first_write(tmp_path):
    store = Store(tmp_path / "some" / "out")
    store.check(FAST, 1)
    with pytest.raises(StoreError, match="make room"):
        store.check(FAST, 10**18)
    assert list(tmp_path.iterdir()) == []
    train(FAST, [FAST.settings("sgd")], make_data(), store, RecordingObserver())
    assert len(read_records(tmp_path / "some" / "out")) == 1


def test_read_records_reads_json_and_json_lines(tmp_path):
    def record(seed):
        return {
            "task": "tiny",
            "optimiser": "sgd",
            "lr": 0.1,
            "seed": seed,
            "epochs": 1,
            "curve": {"train_loss": [0.5]},
        }

    for name in ("tiny/b.json", "tiny/a.json", "tiny/deeper/c.json", "tiny/d.jsonl", "e.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record(0 if "a" in path.name else 1)))
    (tmp_path / "study.jsonl").write_text(f"{json.dumps(record(2))}\n\n{json.dumps(record(3))}\n")
    found = read_records(tmp_path)
    assert [(one["path"], one["seed"]) for one in found] == [
        (f"{tmp_path}/tiny/a.json", 0),
        (f"{tmp_path}/tiny/b.json", 1),
        (f"{tmp_path}/study.jsonl:1", 2),
        (f"{tmp_path}/study.jsonl:3", 3),
    ]


@pytest.mark.parametrize("name", ["tiny/broken.json", "broken.jsonl"])
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 99_999,
        "[]",
        "{}",
        '{"task": "tiny", "optimiser": "sgd", "lr": 0.1, "seed": 0, "curve": {}}',
        '{"task": "tiny", "optimiser": "sgd", "lr": 0.1, "seed": 0, "epochs": 1, "curve": {}}',
        '{"task": "tiny", "optimiser": "sgd", "lr": 0.1, "seed": 0, "epochs": 1, "curve": null}',
        '{"task": "tiny", "optimiser": "sgd", "lr": [1], "seed": 0, "epochs": 1, "curve": {"loss": [1]}}',
        '{"task": "tiny", "optimiser": "sgd", "lr": 0.1, "seed": 0, "epochs": 5, "curve": {"loss": [1]}}',
        '{"task": "tiny", "optimiser": "sgd", "lr": 0.1, "seed": 0, "epochs": 1, "curve": {"loss": ["1"]}}',
    ],
    ids=["cut", "deep", "list", "empty", "no-epochs", "no-curve", "null-curve", "lr", "short", "text"],
)
def test_damaged_record_raises_with_its_path(name, text, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / name).write_text(text)
    with pytest.raises(StoreError, match=rf"{name}(:1)? is not a record of `nero run`: .*, or move it away"):
        read_records(tmp_path)


def test_unreadable_record_raises_with_its_path(tmp_path):
    (tmp_path / "tiny/folder.json").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"cannot read .*folder\.json: Is a directory"):
        read_records(tmp_path)


def test_unreadable_folder_raises_with_its_path(tmp_path, monkeypatch):
    def refuse(folder: Path) -> None:  # root may read all folders
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / "tiny"))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StoreError, match=r"cannot read .*tiny: Permission denied"):
        read_records(tmp_path)


def test_half_written_line_of_a_study_is_named(tmp_path):
    path = tmp_path / "study.jsonl"
    path.write_text('{"study": 1}\n{"stu')
    with pytest.raises(StoreError, match=r"study\.jsonl:2 is not a record: .*delete that line"):
        read_json_lines(path)


def test_read_records_without_folder_raises(tmp_path):
    with pytest.raises(StoreError, match="there is no folder"):
        read_records(tmp_path / "nowhere")


def test_packed_records_are_found_and_not_run_again(tmp_path):
    store, observer = Store(tmp_path), RecordingObserver()
    runs = [FAST.settings("sgd", seed=seed, epochs=1) for seed in (0, 1)]
    records = train(FAST, runs, make_data(), store, observer)
    pack_records(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.json*")] == ["runs.jsonl"]
    assert [{**found, "path": None} for found in read_records(tmp_path)] == [{**each, "path": None} for each in records]
    store = Store(tmp_path)  # which reads packed records once
    assert store.record(FAST, FAST.settings("sgd", seed=2, epochs=1)) is None
    again = train(FAST, runs, make_data(), store, observer)
    assert [found["seconds"] for found in again] == [record["seconds"] for record in records]
    with pytest.raises(StoreError, match=r"\.jsonl:1 is the record of a run without saved weights: delete that line"):
        Store(tmp_path, weights=True).record(FAST, runs[0])


def test_packing_that_was_interrupted_adds_no_record_twice(tmp_path, monkeypatch):
    train(FAST, [FAST.settings("sgd", epochs=1)], make_data(), Store(tmp_path), RecordingObserver())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda _: None)  # as if it had died before
        pack_records(tmp_path)
    pack_records(tmp_path)
    assert len(read_records(tmp_path)) == 1


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a" / "file"
    write_atomically(path, lambda file: file.write(b"first"))

    def write_half(file):
        file.write(b"hal")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match=r"the disk is full; make room"):
        write_atomically(path, write_half)
    assert path.read_bytes() == b"first"
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, lambda file: file.write(b"second"))
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    assert path.read_bytes() == b"first"


def test_error_of_the_given_type_passes_unchanged(tmp_path):
    def write():
        with atomic.replacing(tmp_path / "file", raises=StoreError, remedy="wait") as part:
            part.write_bytes(b"bad")
            raise StoreError("checksum differs")

    with pytest.raises(StoreError, match=r"^checksum differs$"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full; make room"),
        (errno.EDQUOT, "the disk is full; make room"),
        (errno.EFBIG, "File too large; fix that"),
    ],
)
def test_disk_error_behind_torch_save_is_reported(number, reason, tmp_path, monkeypatch):
    """torch.save raises its own error when it closes the file, after the disk's."""

    class FullDisk(BytesIO):
        def write(self, content):
            if self.tell() > 2**16:
                raise OSError(number, os.strerror(number))
            return super().write(content)

    def open_full(path, *_):
        path.touch()
        return FullDisk()

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(StoreError, match=rf"cannot write .*{reason}, then run the same command again"):
        write_atomically(tmp_path / "file", lambda file: torch.save({"weights": torch.zeros(2**16)}, file))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pathlib of Python 3.10 keeps its own os.mkdir")
def test_disk_error_behind_mkdir_is_reported(tmp_path, monkeypatch):
    """Path.mkdir creates missing parents after a first error; the second error is the one to report."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"cannot write .*File exists: .*/link'"):
        write_atomically(tmp_path / "link/task/file", lambda file: file.write(b"content"))

    def mkdir(path):
        number = errno.ENOENT if str(path).endswith("task") else errno.EDQUOT
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", lambda path, *_: mkdir(path))
    with pytest.raises(StoreError, match="the disk is full; make room"):
        write_atomically(tmp_path / "new/task/file", lambda file: file.write(b"content"))


def test_interrupt_behind_torch_save_is_raised(tmp_path):
    def write(_):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 1 vs 2")  # torch's writer raises this when it closes

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", write)
    assert list(tmp_path.iterdir()) == []


def test_commit_of_another_repository_is_none(monkeypatch):
    monkeypatch.delenv("NERO_COMMIT", raising=False)
    answers = {"rev-parse": "somewhere/else", "describe": "abc"}
    monkeypatch.setattr(provenance, "_git", lambda _, command, *__: answers[command])
    assert provenance.commit() is None
    monkeypatch.setattr(provenance, "_git", lambda *_: None)
    assert provenance.commit() is None


def test_commit_from_the_environment_takes_precedence(monkeypatch):
    monkeypatch.setenv("NERO_COMMIT", "given")
    assert provenance.commit() == "given"
