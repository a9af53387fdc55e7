"""Training by several processes."""

import os
import random
import re
import socket
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("PIL")
from lab import distributed_script
from lab.photo_cases import SMALL, TASK, decoded, write_class_folder, write_image
from rich.console import Console

from nero_lab import distributed
from nero_lab.data import decoding
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import SettingError
from nero_lab.session import training_session
from nero_lab.store import read_records
from nero_lab.tasks import TASKS

ROOT = Path(__file__).parents[3]


class Outcome(NamedTuple):
    """Folder, sweep arguments, and output of the sweep by the first of two processes."""

    folder: Path
    sweep: list[str]
    output: str


def free_ports(count: int) -> list[str]:
    """Find ports below those that the system gives to outgoing connections, which could take them meanwhile."""
    ports: list[str] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(str(port))
    return ports


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run `distributed_script.py` in two processes, once for all tests, with the environment that torchrun sets."""
    folder = tmp_path_factory.mktemp("two")
    write_class_folder(folder / "made")  # batches of 7 and 5: shares of 4 and 3, 3 and 2
    write_image(folder / "made" / "val" / "a" / "2.JPEG")  # 7 test images: shares of 4 and 3
    sweep = ["sweep", "imagenet", "--optimiser", "nero-tuned", "--optimiser", "sgd-decay", "--seeds", "1"]
    sweep += ["--epochs", "2", "--device", "cpu", "--data", str(folder / "made")]
    ports = free_ports(5)
    command = [sys.executable, distributed_script.__file__, str(folder), ",".join(ports), *sweep]
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"TORCHELASTIC_RUN_ID": "none", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(2):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"out{rank}").open("w") as out, (folder / f"errors{rank}").open("w") as errors:
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=errors))
    deadline = time.monotonic() + 240
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.returncode for process in processes):
            break  # the other would wait for it
        time.sleep(0.1)
    for process in processes:
        process.kill()
    codes = [process.wait() for process in processes]
    assert codes == [0, 0], "\n".join((folder / f"errors{rank}").read_text() for rank in range(2))
    assert not (folder / "out1").read_text()
    return Outcome(folder, sweep, (folder / "out0").read_text().partition(distributed_script.SWEEP_STARTS)[2])


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def one(two: Outcome) -> Path:
    """Make the same sweep in one process. Return its folder."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gain_penalty")  # the network without norms has no gains
        patch.setitem(TASKS, "imagenet", TASK)  # restores what the script replaces
        patch.setattr(sys, "argv", [])
        patch.setattr(decoding, "default_count", lambda _: 0)
        assert not distributed_script.sweep_and_save_weights(two.sweep, two.folder / "one")
    return two.folder / "one"


@pytest.mark.parametrize("how", ["two", "sharded"])
def test_two_processes_match_one(how: str, two: Outcome, one: Path):
    for alone, other in zip(read_records(one), read_records(two.folder / how), strict=True):
        assert (alone["processes"], other["processes"]) == (1, 2)
        for name, values in alone["curve"].items():
            assert other["curve"][name] == pytest.approx(values, rel=2e-4), name
    first, second = (load(two.folder / how / f"weights{rank}") for rank in range(2))
    for name, value in load(one / "weights0").items():
        assert torch.equal(first[name], second[name])  # both apply the same reduced gradient
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-5)


def test_signal_to_one_process_saves_and_stops_both(two: Outcome):
    assert [record["resumed"] for record in read_records(two.folder / "sharded")] == [1, 0]
    assert two.output.count("stopped: run the same command again to continue") == 1
    assert ": continues from epoch 1, step 1" in two.output


@pytest.mark.parametrize("contender", ["nero-tuned", "sgd-decay"])
@pytest.mark.parametrize("how", ["replicas", "sharded"])
def test_processes_resume_bit_for_bit(how: str, contender: str, two: Outcome):
    (first, resumed), (second, _) = (load(two.folder / f"{how}-{contender}{rank}") for rank in range(2))
    torch.testing.assert_close(resumed, first, rtol=0, atol=0)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("contender", ["nero-tuned", "sgd-decay"])
def test_checkpoint_of_replicas_continues_in_shards(contender: str, two: Outcome):
    replicas, sharded = (load(two.folder / f"{how}-{contender}0")[0] for how in ("replicas", "sharded"))
    assert len(sharded["curve"]["train_loss"]) == 2
    assert sharded["curve"]["train_loss"] == pytest.approx(replicas["curve"]["train_loss"], rel=1e-3)
    # not the bias before batch norm, whose gradient is rounding error
    torch.testing.assert_close(sharded["model"]["0.weight"], replicas["model"]["0.weight"], rtol=1e-3, atol=1e-4)


def test_first_process_alone_prints_and_writes(two: Outcome):
    # two sweeps, one of them in two parts
    assert two.output.count(", a stand-in for ImageNet: 12 training and 7 test images of 3 classes") == 3
    assert two.output.count(" can be loaded for each of 2 processes\n") == 3 + 4
    assert two.output.count("images a second, start included; ") == 4
    assert "nero-tuned: the paper's best is 0.02" in two.output  # no grid was searched
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
    assert done.stdout.startswith("TASKS OF THE PAPER ")


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
        workplace = training_session(Console(quiet=True), other, tmp_path, "cpu", tmp_path, "float32", side_by_side)
        with pytest.raises(SettingError, match=message):
            workplace.__enter__()
