"""Script of each of two processes that train together; `loops/test_distributed_training.py` starts them."""

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lab.helpers import finish
from lab.photo_cases import SMALL, TASK, decoded, shallow
from rich.console import Console
from torch import distributed as dist
from torch import nn

from nero_lab import cli, distributed
from nero_lab.data import photos
from nero_lab.loops.supervised import Supervised
from nero_lab.loops.training import copy_to_cpu
from nero_lab.protocol import SettingError
from nero_lab.session import training_session
from nero_lab.store import Store
from nero_lab.tasks import TASKS

#: Printed by the first process before the sweep.
SWEEP_STARTS = "sweep starts"
CPU = torch.device("cpu")


def sweep_and_save_weights(arguments: Sequence[str], out: Path) -> object:
    """Run `nero sweep` on a network whose result does not depend on the number of processes; save its weights.

    The network has no batch norm, whose statistics are of one process's share only. Return the exit code.
    """

    def save(model: nn.Module, _: object) -> dict[str, float]:
        torch.save(copy_to_cpu(dict(model.state_dict())), out / f"weights{distributed.rank()}")
        return {"processes": distributed.world_size()}

    TASKS["imagenet"] = replace(TASK, model=partial(shallow, norm=False), batch=7, verdict=save)
    sys.argv = ["nero", *arguments, "--out", str(out)]
    # of 7 test images, the first of two processes has one more batch than the second
    with patch.object(photos, "EVAL_BATCH", 3), pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def start_in_different_states(folder: Path) -> None:
    """Have the processes differ in epoch, weights, settings and records; write the error messages to a file."""
    data, task = decoded(folder / "made"), replace(SMALL, model=shallow)
    settings = task.settings("nero", epochs=2)
    training = Supervised(task, settings, data)
    states = [training.state() for _ in range(2)]
    states[0] |= {"epoch": 1, "curve": {name: [0.5] for name in training.curve}}
    next(iter(states[1]["model"].values()))[0] += 1e-6
    is_second = distributed.rank() == 1
    cases = [(settings, state if is_second else None) for state in states]
    cases.append((replace(settings, lr=0.5) if is_second else settings, None))
    messages = []
    for case_settings, state in cases:
        with pytest.raises(SettingError, match="processes differ in state") as error:
            Supervised(task, case_settings, data, state)
        messages.append(str(error.value))
    with (
        patch.object(distributed, "process_group", lambda *_, **__: nullcontext()),
        patch.object(Store, "record", lambda *_: {} if is_second else None),  # the second finds its run done
        pytest.raises(SettingError, match="do not have the same runs to make"),
        training_session(Console(quiet=True), task, folder / "made", "cpu", folder / "out", "float32", 1) as runs,
    ):
        runs([settings], False)
    (folder / f"messages{distributed.rank()}").write_text("\n".join(messages))


def save_and_resume(folder: Path, contender: str) -> None:
    """Start, or continue from the state that the replicas have saved. Finish, and again from a state on the way."""
    data, task, ends = decoded(folder / "made"), replace(SMALL, model=shallow), []
    settings, file = task.settings(contender, epochs=2), folder / f"state-{contender}"
    saved = torch.load(file, weights_only=True) if distributed.is_sharded() else None
    training = Supervised(task, settings, data, saved)
    for _ in range(1 if saved else 4):  # past the end of the first epoch
        training.advance()
    state = training.state()
    if distributed.rank() == 0 and not saved:
        torch.save(state, file)
    for each in (training, Supervised(task, settings, data, state)):
        found = finish(each).state()
        ends.append({"optimiser": found["optimiser"]["state"], **{name: found[name] for name in ("model", "curve")}})
    torch.save(ends, folder / f"{'sharded' if saved else 'replicas'}-{contender}{distributed.rank()}")


@contextmanager
def new_group(port: str, **options: bool) -> Iterator[None]:
    os.environ["MASTER_PORT"] = port
    with distributed.process_group(CPU, **options):
        yield


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200)  # the fixture ends the processes after 240 s
    gc.disable()  # a process group that it frees may wait for a thread that waits for the interpreter
    root, ports, *sweep = sys.argv[1:]
    folder, port = Path(root), iter(ports.split(","))
    with new_group(next(port)):
        start_in_different_states(folder)
        for contender in ("nero-tuned", "sgd-decay"):
            save_and_resume(folder, contender)
    with new_group(next(port), shard=True):
        for contender in ("nero-tuned", "sgd-decay"):
            save_and_resume(folder, contender)  # from the replicas' state
    if os.environ["RANK"] == "0":
        print(SWEEP_STARTS, flush=True)
    os.environ["MASTER_PORT"] = next(port)
    assert not (code := sweep_and_save_weights(sweep, folder / "two")), code
    os.environ["MASTER_PORT"] = next(port)
    advance, is_asked = Supervised.advance, os.environ["RANK"] == "1"

    def interrupt(training: Supervised) -> None:
        if training.steps_done == 2 and is_asked:
            signal.raise_signal(signal.SIGTERM)  # reaches one process, and stops both
        advance(training)

    with patch.object(Supervised, "advance", interrupt):
        code = sweep_and_save_weights([*sweep, "--shard"], folder / "sharded")
    assert code == 128 + signal.SIGTERM, code
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = next(port)
    assert not (code := sweep_and_save_weights([*sweep, "--shard"], folder / "sharded")), code
