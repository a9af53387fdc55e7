"""Progress of runs: bars in a terminal, lines in a log, and TensorBoard's files."""

import errno
import re
import threading
from dataclasses import replace

import pytest
import torch
from lab.helpers import FAST, checkpoint_every_step, make_data, make_display
from torch import nn

from nero_lab import progress
from nero_lab.loops.supervised import READ_DELAY_STEPS, Supervised
from nero_lab.loops.training import Snapshot
from nero_lab.protocol import Seconds
from nero_lab.store import Store
from nero_lab.sweep import train
from nero_lab.tasks import TASKS


@pytest.fixture
def verbose(monkeypatch):
    """Show and log every step."""
    monkeypatch.setattr(progress, "REFRESH_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)


@pytest.mark.parametrize(("is_installed", "runs_done", "is_announced"), [(1, 0, 0), (0, 0, 1), (0, 1, 0)])
def test_plan_missing_tool_is_announced(is_installed, runs_done, is_announced, monkeypatch, tmp_path):
    task = TASKS["translation"]
    monkeypatch.setattr(progress, "find_spec", lambda _: is_installed or None)
    display, stream = make_display(False, tmp_path)
    display.plan(task, [task.settings("nero")], [{"curve": {}}] * runs_done)
    hint = "no BLEU without sacrebleu: pip install '.[lab]' in a clone of nero-optim"
    assert (hint in stream.getvalue()) == is_announced


@pytest.mark.usefixtures("verbose")
def test_terminal_shows_bars_with_metric_and_time(tmp_path, monkeypatch):
    display, stream = make_display(True, tmp_path)
    updates = []
    monkeypatch.setattr(display.progress, "update", lambda _, **fields: updates.append(fields))
    with display:
        train(FAST, [FAST.settings("sgd")], make_data(), Store(tmp_path), display)
    assert [fields["completed"] for fields in updates] == list(range(1, 10))
    assert updates[0]["metric"].endswith("so far")
    assert updates[-1]["metric"].startswith("train ")
    assert ", test " in updates[-1]["metric"]
    assert "sgd-lr0.1-seed0" in stream.getvalue()
    kinds = {type(column).__name__ for column in display.progress.columns}
    assert {"BarColumn", "TimeRemainingColumn", "TimeElapsedColumn"} <= kinds


@pytest.mark.parametrize(("precision", "time"), [("float32", "10 s in float32"), ("tf32", "3 s in tf32")])
def test_plan_names_the_time_of_the_precision(precision, time, tmp_path):
    task = replace(FAST, seconds=Seconds(10, 3, 500))
    display, stream = make_display(False, tmp_path)
    display.device = torch.device("cuda")
    display.plan(task, [task.settings("sgd", precision=precision)], [])
    assert f"{time} on an NVIDIA H200" in stream.getvalue()


def visible(written):
    """Return the lines that a terminal shows after text with rich's cursor movements; the last is the cursor's."""
    lines, row = [""], 0
    for code, text in re.findall(r"\x1b\[([?\d;]*[A-Za-z])|([^\x1b])", written):
        if text == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif code == "2K":
            lines[row] = ""
        elif code.endswith("A"):
            row -= int(code[:-1])
        elif text != "\r":
            lines[row] += text
    return lines[: row + 1]


@pytest.mark.usefixtures("verbose")
def test_interrupted_display_leaves_no_bar(tmp_path, monkeypatch):
    display, stream = make_display(True, tmp_path)
    stepped = display.stepped

    def interrupt(training):
        stepped(training)
        display.progress.refresh()
        shown.append(visible(stream.getvalue()))
        raise KeyboardInterrupt

    shown = []
    monkeypatch.setattr(display, "stepped", interrupt)
    with pytest.raises(KeyboardInterrupt), display:
        train(FAST, [FAST.settings("sgd")], make_data(), Store(tmp_path), display)
    assert "1/9" in shown[0][-1]
    assert not any("sgd-lr" in line for line in visible(stream.getvalue()))
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")  # the cursor is visible


@pytest.mark.usefixtures("verbose")
def test_snapshots_show_what_the_run_shows(tmp_path):
    """Snapshots arrive from other processes, and start again in another one after the first has died."""
    training = Supervised(FAST, FAST.settings("sgd"), make_data())
    (direct, one), (remote, other) = (make_display(False, tmp_path / name) for name in ("direct", "remote"))
    with direct, remote:
        remote.begun(Snapshot.of(training))
        for display, run in ((direct, training), (remote, Snapshot.of(training))):
            display.begun(run)
            assert len(display.progress.tasks) == 1
        while not training.is_finished:
            training.advance()
            direct.stepped(training)
            remote.stepped(Snapshot.of(training))
        direct.ended(training)
        remote.ended(Snapshot.of(training))
    shown, wanted = (re.sub(r"\d+ s|direct|remote", "", stream.getvalue()) for stream in (other, one))
    assert shown == wanted
    assert "test" in shown


@pytest.mark.usefixtures("verbose")
def test_log_names_a_run_that_diverged(tmp_path):
    task = replace(FAST, model=lambda: nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10)))
    display, stream = make_display(False, tmp_path)
    with display:
        train(task, [task.settings("sgd", lr=1e38, epochs=1)], make_data(), Store(tmp_path), display)
    assert re.search(r"diverged, train [\d.]+%, test [\d.]+% after 1 epoch", stream.getvalue())


@pytest.mark.usefixtures("verbose")
def test_log_shows_lines_and_resumption(tmp_path):
    store, settings = Store(tmp_path), FAST.settings("sgd")
    unfinished = Supervised(FAST, settings, make_data())
    for _ in range(4):
        unfinished.advance()
    store.save(unfinished)
    display, stream = make_display(False, tmp_path)
    with display:
        train(FAST, [settings], make_data(), store, display)
        display.stopping()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "tiny: 1 run to do on cpu"
    assert "sgd-lr0.1-seed0: continues from epoch 1, step 1" in lines
    step = re.compile(r"sgd-lr0.1-seed0: epoch 1 of 3, 56%, train .*% so far, .* s, .* s left")
    assert any(map(step.fullmatch, lines))
    assert lines[-2].startswith("sgd-lr0.1-seed0: train ")
    assert lines[-2].endswith("tiny/sgd-lr0.1-seed0.json")
    assert lines[-1] == "stopping after this step to save the runs; interrupt again to stop at once"


@pytest.mark.usefixtures("verbose")
def test_gpu_within_epoch_is_not_synchronised(tmp_path, monkeypatch):
    """Within an epoch, a line shows the share of the steps and the numbers of the last epoch."""
    monkeypatch.setattr(Supervised, "running_metrics", None)  # it would wait for the GPU
    training = Supervised(FAST, FAST.settings("sgd"), make_data())
    training.device = torch.device("cuda")  # read by the display only
    display, stream = make_display(False, tmp_path)
    with display:
        display.begun(training)
        for _ in range(4):
            training.advance()
            display.stepped(training)
    first, second, third, fourth = stream.getvalue().splitlines()
    for line, share in ((first, "11%"), (second, "22%")):
        assert re.fullmatch(rf"sgd-lr0.1-seed0: epoch 0 of 3, {share}, .* s, .* s left", line)
        assert "train" not in line
    numbers = re.search("train .*%, test .*%", third.partition("33%")[2])
    assert f"epoch 1 of 3, 44%, {numbers[0]}, " in fourth


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("stop_after", [None, 2, 3, 4, 5])
def test_tensorboard_has_every_epoch_once(stop_after, lag, tmp_path, monkeypatch):
    """Also after a stop at a step when an epoch's numbers were not read yet."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setitem(READ_DELAY_STEPS, "cpu", lag)
    checkpoint_every_step(monkeypatch)
    settings = FAST.settings("sgd")
    if stop_after:
        display, _ = make_display(False, tmp_path)
        show_step = display.stepped

        def stepped(training):
            show_step(training)
            if training.steps_done == stop_after:
                raise KeyboardInterrupt

        display.stepped = stepped
        with pytest.raises(KeyboardInterrupt), display:
            train(FAST, [settings], make_data(), Store(tmp_path), display)
        # TensorBoard orders files by the time in their names, in seconds: make this one older
        (path,) = (tmp_path / "tensorboard").rglob("*tfevents.*")
        path.rename(path.with_name(path.name.replace("tfevents.", "tfevents.0")))
    display, _ = make_display(False, tmp_path)
    with display:
        (record,) = train(FAST, [settings], make_data(), Store(tmp_path), display)
    events = EventAccumulator(str(tmp_path / "tensorboard/tiny/sgd-lr0.1-seed0"))
    events.Reload()
    for name, values in record["curve"].items():
        scalars = events.Scalars(name.replace("_", "/"))
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("when", ["opened", "written", "closed"])
def test_tensorboard_failure_does_not_stop_the_run(when, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "opened":
        monkeypatch.setattr(progress, "SummaryWriter", fail)
    else:
        monkeypatch.setattr(progress.SummaryWriter, {"written": "add_scalar", "closed": "close"}[when], fail)
    display, stream = make_display(False, tmp_path)
    with display:
        (record,) = train(FAST, [FAST.settings("sgd")], make_data(), Store(tmp_path), display)
    assert len(record["curve"]["train_loss"]) == 3
    assert stream.getvalue().count("the run continues without it") == 1


@pytest.mark.parametrize(("writes_for", "is_printed"), [("tensorboard.summary", False), ("elsewhere", True)])
def test_thread_of_tensorboard_that_fails_prints_nothing(writes_for, is_printed, tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    thread = type("Writer", (threading.Thread,), {"__module__": writes_for, "run": fail})()
    with make_display(False, tmp_path)[0]:
        thread.start()
        thread.join()
    assert bool(printed) == is_printed
    assert threading.excepthook == printed.append
