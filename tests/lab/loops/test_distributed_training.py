"""Training by several processes."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("PIL")
from lab import distributed_script
from lab.photo_cases import SMALL, TASK, decoded, write_class_folder, write_image

from nero_lab import cli, distributed
from nero_lab.data import decoder_pool
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import SettingError
from nero_lab.store import read_records
from nero_lab.tasks import TASKS

ROOT = Path(__file__).parents[3]


class Outcome(NamedTuple):
    """Folder, sweep arguments, and output of the sweep by the first of two processes."""

    folder: Path
    sweep: list[str]
    output: str


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run `distributed_script.py` in two processes, once for all tests, with the environment that torchrun sets."""
    folder = tmp_path_factory.mktemp("two")
    write_class_folder(folder / "made")  # batches of 7 and 5: shares of 4 and 3, 3 and 2
    write_image(folder / "made" / "val" / "a" / "2.JPEG")  # 7 test images: shares of 4 and 3
    sweep = ["sweep", "imagenet", "--optimiser", "nero-tuned", "--optimiser", "sgd-decay", "--seeds", "1"]
    sweep += ["--epochs", "2", "--device", "cpu", "--data", str(folder / "made")]
    first_port, second_port = free_ports(2)
    command = [sys.executable, distributed_script.__file__, str(folder), second_port, *sweep]
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": first_port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"TORCHELASTIC_RUN_ID": "none", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    assert not outputs[1][0]
    return Outcome(folder, sweep, outputs[0][0].partition(distributed_script.SWEEP_STARTS)[2])


@pytest.mark.filterwarnings("ignore:gain_penalty")  # the network without norms has no gains
def test_two_processes_match_one(two: Outcome, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TASKS, "imagenet", TASK)  # restores what the script replaces
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(decoder_pool, "default_count", lambda _: 0)
    distributed_script.sweep_and_save_weights(two.sweep, two.folder / "one")
    for one, other in zip(read_records(two.folder / "one"), read_records(two.folder / "two"), strict=True):
        assert (one["processes"], other["processes"]) == (1, 2)
        for name, values in one["curve"].items():
            assert other["curve"][name] == pytest.approx(values, rel=2e-4), name
    alone, first, second = (
        torch.load(two.folder / where, weights_only=True) for where in ("one/weights0", "two/weights0", "two/weights1")
    )
    for name, value in alone.items():
        assert torch.equal(first[name], second[name])  # both apply the same reduced gradient
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-5)


def test_first_process_alone_prints_and_writes(two: Outcome):
    assert two.output.count(", a stand-in for ImageNet: 12 training and 7 test images of 3 classes") == 1
    assert two.output.count(" can be loaded for each of 2 processes\n") == 3
    assert two.output.count("images a second, start included; ") == 2
    assert "nero-tuned: the paper has 0.02 as its best" in two.output  # no grid was searched
    assert len(list((two.folder / "two" / "tensorboard").rglob("events*"))) == 2


def test_processes_in_different_states_all_raise(two: Outcome):
    first, second = ((two.folder / f"messages{rank}").read_text().splitlines() for rank in range(2))
    assert len(first) == len(second) == 3
    assert "at epoch 0, step 0 of nero-lr0.01-seed0-epochs2: start all by the same command" in first[0]
    assert "at epoch 1, step 0 of" in second[0]


def test_torchrun_command_of_the_page_starts():
    """Takes the page's command with one process, and lists the tasks."""
    page = (ROOT / "docs" / "paper" / "imagenet.md").read_text()
    (command,) = re.findall(r"^torchrun --nproc_per_node=4 (.* nero) run imagenet", page, re.M)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split(), "list"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TASK ")


def test_unsupported_process_counts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = decoded(write_class_folder(tmp_path))
    task = replace(SMALL, batch=6)
    state = Supervised(task, task.settings("nero"), data).state()
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    with pytest.raises(SettingError, match="was started by 1 processes, got 3: start 1 again"):
        Supervised(task, task.settings("nero"), data, state)
    with pytest.raises(SettingError, match="3 processes needs two images of a batch, got a batch of 5: start 2"):
        Supervised(replace(SMALL, batch=5), SMALL.settings("nero"), data)
    for other, side_by_side, message in (
        (TASKS["mnist-deep"], 1, "mnist-deep is trained by one process"),
        (SMALL, 2, "several processes make one run at a time"),
    ):
        workplace = cli._training_session(other, tmp_path, "cpu", tmp_path, "float32", side_by_side)
        with pytest.raises(SettingError, match=message):
            workplace.__enter__()
