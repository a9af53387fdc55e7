"""Script of each of two processes that train together; `loops/test_distributed_training.py` starts them."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lab.photo_cases import SMALL, TASK, decoded, shallow
from torch import nn

from nero_lab import cli, distributed
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import SettingError
from nero_lab.store import Store
from nero_lab.tasks import TASKS

#: Printed by the first process before the sweep.
SWEEP_STARTS = "sweep starts"


def sweep_and_save_weights(arguments: Sequence[str], out: Path) -> None:
    """Run `nero sweep` on a network whose result does not depend on the number of processes; save its weights.

    The network has no batch norm, whose statistics are of one process's share only.
    """

    def save(model: nn.Module, _: object) -> dict[str, float]:
        torch.save(model.state_dict(), out / f"weights{distributed.rank()}")
        return {"processes": distributed.world_size()}

    TASKS["imagenet"] = replace(TASK, model=partial(shallow, norm=False), batch=7, verdict=save)
    sys.argv = ["nero", *arguments, "--out", str(out)]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code, end.value.code


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
        patch.object(distributed, "process_group", lambda _: nullcontext()),
        patch.object(Store, "record", lambda *_: {} if is_second else None),  # the second finds its run done
        pytest.raises(SettingError, match="do not have the same runs to make"),
        cli._training_session(task, folder / "made", "cpu", folder / "out", "float32", 1) as runs,
    ):
        runs([settings], False)
    (folder / f"messages{distributed.rank()}").write_text("\n".join(messages))


if __name__ == "__main__":
    root, second_port, *sweep = sys.argv[1:]
    with distributed.process_group(torch.device("cpu")):
        start_in_different_states(Path(root))
    if os.environ["RANK"] == "0":
        print(SWEEP_STARTS, flush=True)
    os.environ["MASTER_PORT"] = second_port
    sweep_and_save_weights(sweep, Path(root) / "two")
