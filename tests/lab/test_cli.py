"""The command `nero`: its subcommands, error messages and interrupts."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from lab.helpers import make_data, run_command
from matplotlib.figure import Figure

import nero
import nero_lab.command
from nero_lab import cli, session
from nero_lab.data import DataError, load
from nero_lab.loops.supervised import Supervised
from nero_lab.models.mlp import mlp
from nero_lab.provenance import commit
from nero_lab.store import Store, read_records
from nero_lab.tasks import TASKS

#: Arguments of a short run.
SHORT = ("mnist-reparameterised", "--epochs", 1, "--device", "cpu")


@pytest.fixture
def command(monkeypatch):
    """Run `nero ...` in this process, on made-up data. Return its exit code and what it printed."""
    monkeypatch.setattr(session, "load", lambda name, *_, **__: make_data(name))

    return partial(run_command, monkeypatch)


def test_nero_list_names_all_tasks(command):
    code, printed = command("list")
    assert code == 0
    assert all(name in printed for name in TASKS)
    assert max(map(len, printed.splitlines())) <= 80


def test_nero_list_names_the_folder_of_all_data(command):
    _, _, folders = command("list")[1].partition("\nDATA ")
    assert {task.dataset for task in TASKS.values()} == {line.split()[0] for line in folders.splitlines()[1:]}
    assert re.search("^books +classic-books$", folders, re.MULTILINE)


def test_nero_list_has_a_time_per_precision(command):
    _, printed = command("list")
    (line,) = (line for line in printed.splitlines() if line.startswith("cifar10-vgg11 "))
    assert re.split(" {2,}", line)[-3:] == ["7 min", "2 min", "6 days"]


def test_nero_list_groups_tasks_by_study(command, monkeypatch):
    mine = replace(TASKS["mnist-deep"], name="my-task", shows="", study="mine")
    monkeypatch.setitem(TASKS, "my-task", mine)
    _, printed = command("list")
    papers, _, others = printed.partition("OF STUDY mine")
    assert "my-task" not in papers
    assert "my-task" in others


@pytest.mark.parametrize("option", [(), ("--run", 2)])
def test_nero_plan_compares_the_committed_records(command, option):
    results = Path(__file__).parents[2] / "results"
    code, printed = command("plan", "mnist-deep", "--records", results, *option)
    assert code == 0
    assert printed.splitlines()[-1] == "0 runs are missing"
    assert printed.count("3 of 3") == len(TASKS["mnist-deep"].contenders)


def test_nero_plan_leaves_out_data_that_cannot_be_loaded(command, monkeypatch, tmp_path):
    def load_data(_, name, folder):
        if name == "wikitext2":
            raise DataError(f"{folder} lacks it")

    given = []
    monkeypatch.setattr(cli, "load_data", load_data)
    monkeypatch.setattr(cli, "train_in_processes", lambda runs, *_, **__: given.extend(runs))
    code, printed = command("plan", "wikitext2", "mnist-deep", "--records", tmp_path, "--run", 2, "--data", tmp_path)
    left = len(TASKS["wikitext2"].contenders) * (len(TASKS["wikitext2"].grid) + 2)
    assert code == f"nero: {left} runs were left out: see above"
    assert f"left out, all runs on wikitext2: {tmp_path} lacks it" in printed.splitlines()
    assert {settings.task for settings in given} == {"mnist-deep"}


def test_nero_plan_makes_missing_runs(command, monkeypatch, tmp_path):
    given, loaded = [], []
    monkeypatch.setattr(cli, "load_data", lambda _, name, folder: loaded.append((name, folder)))
    monkeypatch.setattr(cli, "train_in_processes", lambda *arguments, **options: given.append((arguments, options)))
    assert command("plan", "mnist-deep", "--records", tmp_path, "--run", 8, "--minutes", 20, "--device", "cpu")[0] == 0
    (runs, _, device, root, processes), options = given[0]
    assert (device.type, root, processes, options["minutes"]) == ("cpu", tmp_path, 8, 20)
    assert loaded == [("mnist", None)]
    task = TASKS["mnist-deep"]
    assert len(runs) == len(set(runs)) == len(task.contenders) * (len(task.grid) + 2)
    assert [settings.optimiser for settings in runs[: len(task.grid)]] == ["nero"] * len(task.grid)


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        (("--study", "none"), "there is no study 'none': take paper, today, depth or claims"),
        (("--precision", "int8"), "the precision must be one of"),
        (("no-task",), "there is no task 'no-task'"),
        (("mnist-deep", "--study", "today"), "name tasks or a --study, not both"),
        (("mnist-deep", "--records", "no-folder"), "there is no folder no-folder"),
        (("mnist-deep", "--device", "foo"), "there is no device 'foo'"),
        (("mnist-deep", "--minutes", 5), "--minutes needs --run"),
        (("mnist-deep", "--run", 1, "--precision", "tf32", "--device", "cpu"), "tf32 needs an NVIDIA GPU"),
    ],
)
def test_nero_plan_refuses_bad_input(command, option, fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _ = command("plan", *option)
    assert fault in str(code)


def test_report_task_without_published_numbers_is_skipped(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    record, *_ = read_records(Path(__file__).parents[2] / "results")
    other = {**record, "task": "my-task", "epochs": 1, "curve": {"score": [1]}}
    arguments = "report", "--records", tmp_path, "--out", tmp_path / "pages"
    (tmp_path / "runs.jsonl").write_text(json.dumps(other))
    assert "is of a task of the paper" in command(*arguments)[0]
    assert not (tmp_path / "pages").exists()
    (tmp_path / "runs.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(other)}")
    code, printed = command(*arguments)
    assert code == 0
    assert "without published numbers: my-task (1)" in printed


def test_nero_version_prints_versions(command):
    assert command("--version") == (0, f"nero {nero.__version__}, torch {torch.__version__}\n")


def test_nero_run_is_recorded_and_skipped_when_done(command, tmp_path):
    code, printed = command("run", *SHORT, "--out", tmp_path)
    assert code == 0
    result = re.compile(r"^sigma-1-lr0.01-seed0-epochs1: train .*%, test .*%", re.MULTILINE)
    assert result.search(printed)
    (record,) = read_records(tmp_path)
    assert record["task"] == "mnist-reparameterised"
    assert record["versions"]["torch"] == torch.__version__
    assert record["commit"] == commit()
    assert list((tmp_path / "tensorboard").rglob("events*"))
    code, printed = command("run", *SHORT, "--out", tmp_path)
    assert code == 0
    assert "1 done before" in printed
    assert result.search(printed)
    assert not list(tmp_path.rglob("*.pt"))


def test_optimiser_option_has_two_spellings(command, tmp_path):
    assert command("run", *SHORT, "--optimizer", "sigma-100", "--out", tmp_path)[0] == 0
    code, printed = command("sweep", *SHORT, "--optimizer", "sigma-100", "--seeds", 1, "--out", tmp_path)
    assert (code, printed.count("0 runs to do")) == (0, 2)
    assert [(record["optimiser"], record["seed"]) for record in read_records(tmp_path)] == [("sigma-100", 0)]


@pytest.mark.parametrize("optimiser", [[], ["--optimiser", "nero"], ["--optimiser", "unbounded"]])
def test_run_with_lr_auto_divides_by_depth(optimiser, command, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "mnist-deep", replace(TASKS["mnist-deep"], model=partial(mlp, 3)))
    code, _ = command(
        "run", "mnist-deep", "--lr", "auto", *optimiser, "--epochs", 1, "--device", "cpu", "--out", tmp_path
    )
    assert code == 0
    (record,) = read_records(tmp_path)
    assert (record["optimiser"], record["lr"]) == ("unbounded" if "unbounded" in optimiser else "auto", 0.1)
    assert record["options"]["depth"] == "auto"


def test_nero_run_with_weights_saves_them(command, tmp_path):
    assert command("run", *SHORT, "--out", tmp_path, "--weights")[0] == 0
    assert [path.name for path in tmp_path.rglob("*.pt")] == ["sigma-1-lr0.01-seed0-epochs1.pt"]


def test_nero_report_of_own_run_writes_pages(command, tmp_path, monkeypatch):
    """The tests of the report render the figures, which takes seconds."""
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: file.write(b"figure"))
    assert command("run", *SHORT, "--out", tmp_path / "out")[0] == 0
    code, printed = command("report", "--records", tmp_path / "out", "--out", tmp_path / "pages")
    assert code == 0
    assert {path.name for path in (tmp_path / "pages").iterdir()} == {
        "README.md",
        "figures",
        "mnist-reparameterised.md",
    }
    assert str(tmp_path / "pages" / "mnist-reparameterised.md") in printed
    assert "not run, so without a page: mnist-deep, cifar10-vgg11, " in printed
    assert "left out of results and figures, with fewer epochs than their tasks: 1" in printed
    assert (tmp_path / "pages" / "figures" / "mnist-reparameterised.png").read_bytes() == b"figure"


def test_nero_sweep_searches_grid_and_runs_seeds(command, tmp_path):
    arguments = ["sweep", *SHORT, "--out", tmp_path, "--seeds", 2]
    code, printed = command(*arguments)
    assert code == 0
    assert "sigma-100: best of the grid is 0.01; the paper's best is 0.01" in printed
    assert len(read_records(tmp_path)) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nonsense"], "take one of mnist-deep"),
        (["run", "mnist-deep", "--optimiser", "adagrad"], "take one of nero, lamb, adam, sgd"),
        (["run", "mnist-deep", "--optimizer", "sgd", "--lr", "auto"], "take --optimiser nero"),
        (["run", "cifar10-ablation", "--optimiser", "nero-mean", "--lr", "auto"], "take --optimiser nero-both"),
        (["run", "mnist-reparameterised", "--lr", "auto"], "is not trained by Nero"),
        (["run", "mnist-deep", "--lr", "fast"], "a number, or auto, got 'fast'"),
        (["run", "mnist-deep", "--device", "toaster"], "take cpu, cuda or auto"),
        (["run", "mnist-deep", "--device", "cuda:99"], "torch finds no cuda:99"),
        (["run", "mnist-deep", "--precision", "tf32", "--device", "cpu"], "tf32 needs an NVIDIA GPU"),
        (["run", "mnist-deep", "--precision", "int4"], "one of float32, tf32"),
        (["run", "mnist-deep", "--epochs", 99, "--device", "cpu"], "1 to 50 epochs"),
        (["sweep", "mnist-deep", "--optimiser", "adagrad"], "take one of nero"),
        (["run", "mnist-deep", "--optimiser", "nero", "--optimizer", "sgd"], "one value, got 2: use `nero sweep`"),
        (["run", "mnist-deep", "--seed", 0, "--seed=1"], "--seed takes one value, got 2: use `nero sweep`"),
        (["plan", "--data", "a", "--data", "b"], "--data takes one value, got 2: give one"),
        (["run", "imagenet", "--shard", "--device", "cpu"], "start them with torchrun"),
        (["report", "--records", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_bad_argument_error_names_remedy(command, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _ = command(*arguments)
    assert message in str(code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["run", "sweep"])
def test_command_without_data_creates_no_files(command, what, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "load", load)
    monkeypatch.chdir(tmp_path)
    for task in ("mnist-deep", "imagenet"):
        code, _ = command(what, task, "--device", "cpu", "--data", tmp_path / "nowhere")
        assert f"the data folder {tmp_path / 'nowhere'} does not exist" in str(code)
    assert list(tmp_path.iterdir()) == []


def test_command_is_an_entry_point():
    (script,) = entry_points(group="console_scripts", name="nero")
    assert script.load() is nero_lab.command.main


@pytest.mark.parametrize("when", ["torch", "typer", "arguments"])
def test_interrupt_during_import_ends_in_one_line(when):
    (script,) = entry_points(group="console_scripts", name="nero")
    module, function = script.module, script.attr
    code = f"""if True:
        import contextlib, signal, sys
        def interrupt(*_):
            with contextlib.suppress(BaseException):  # torch suppresses errors while it imports numpy
                signal.raise_signal(signal.SIGINT)
        class Interrupt:
            def find_spec(name, path=None, target=None):
                if name == {when!r}:
                    interrupt()
        sys.meta_path.insert(0, Interrupt)
        if {when!r} == "arguments":
            from typer.core import TyperGroup
            TyperGroup.parse_args = interrupt
        from {module} import {function}
        sys.exit({function}())
    """
    done = subprocess.run([sys.executable, "-c", code, "list"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "nero: stopped\n")


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["default", "ignored"])
def test_interrupt_handler_is_restored_in_command(before, command, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "duration", lambda _: seen.append(signal.getsignal(signal.SIGINT)) or "")
    handler = signal.signal(signal.SIGINT, before)
    try:
        command("list")
        assert set(seen) == {before}
        command("--no-such-option")  # an error before the command begins
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_after_grid_stops_the_sweep(number, status, command, tmp_path, monkeypatch):
    """The user was printed that training stops after this step."""
    finish = Store.finish
    monkeypatch.setattr(Store, "finish", lambda *given: (finish(*given), signal.raise_signal(number))[0])
    arguments = ["sweep", *SHORT, "--optimiser", "sigma-1"]
    code, printed = command(*arguments, "--out", tmp_path)
    assert code == status
    assert printed.count("stopped: run the same command again to continue") == 1
    assert [record["seed"] for record in read_records(tmp_path)] == [0]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_command_says_how_to_continue(number, status, command, tmp_path, monkeypatch, capsys):
    advance = Supervised.advance
    monkeypatch.setattr(Supervised, "advance", lambda self: (signal.raise_signal(number), advance(self)))
    code, printed = command("run", "mnist-reparameterised", "--out", tmp_path, "--epochs", 2, "--device", "cpu")
    assert code == status
    assert printed.count("stopped") == printed.count("stopped: run the same command again to continue") == 1
    assert "stopped" not in capsys.readouterr().err
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1


@pytest.mark.parametrize(
    ("where", "asked"),
    [
        ("cli.duration", ["list"]),
        ("cli.read_records", ["report"]),
        ("session.load", ["run", "mnist-deep", "--device", "cpu"]),
        ("session.load", ["sweep", "mnist-deep", "--device", "cpu"]),
    ],
)
def test_interrupt_before_training_ends_in_one_line(where, asked, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"nero_lab.{where}", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    code, _ = command(*asked)
    assert (code, capsys.readouterr().err) == (130, "nero: stopped\n")


def test_full_gpu_ends_in_one_line(command, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Supervised, "advance", full)
    code, _ = command("run", *SHORT, "--out", tmp_path)
    assert "--side-by-side" in code


def test_data_loading_shows_progress(command, tmp_path, monkeypatch):
    def slow(name, _, progress):
        progress("downloading file.gz", 10, 2_000_000)
        progress("downloading file.gz", 2_000_000, 2_000_000)
        progress("tokenising other.gz", 5, 0)
        return make_data(name)

    monkeypatch.setattr(session, "load", slow)
    code, printed = command("run", *SHORT, "--out", tmp_path)
    assert code == 0
    assert printed.splitlines()[:2] == ["downloading file.gz, 2.0 MB", "tokenising other.gz"]


def test_report_without_records_names_remedy(command, tmp_path):
    code, _ = command("report", "--records", tmp_path, "--out", tmp_path / "pages")
    assert "make some with `nero sweep TASK" in code
