"""The optimisers of the study of today: their grids, rates, groups, state and runs that resume."""

import inspect

import pytest
import torch
from lab.helpers import finish, make_data
from lab.loop_cases import saved_and_loaded
from torch import nn

import nero
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import Seconds, Task, linear_decay
from nero_lab.tasks.today.contenders import CONTENDERS

HAS_MOMENTUM = "momentum" in inspect.signature(nero.Nero).parameters
NAMES = [name for name, contender in CONTENDERS.items() if HAS_MOMENTUM or "momentum" not in contender.options]
each_contender = pytest.mark.parametrize("name", NAMES)


class Block(nn.Module):
    """A residual block with a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 12, bias=False)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return signal + self.down(self.up(self.norm(signal)).relu())


class Network(nn.Module):
    """A linear embedding of patches, blocks and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Linear(3 * 16, 12), nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(12, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        signal = self.patches(nn.functional.avg_pool2d(images, 8).flatten(1))
        for block in self.blocks:
            signal = block(signal)
        return self.head(signal)


TASK = Task(
    name="small",
    shows="",
    title="",
    dataset="cifar10",
    model=Network,
    contenders=CONTENDERS,
    grid=(0.01,),
    epochs=2,
    batch=8,
    schedule=linear_decay(2),
    metric="test_accuracy",
    seconds=Seconds(),
)


@each_contender
def test_contender_resumed_run_equals_undisturbed(name):
    data, settings = make_data(examples=24), TASK.settings(name)
    whole = Supervised(TASK, settings, data)
    states = []
    while not whole.is_finished:
        states.append(whole.state())
        whole.advance()
    assert len(states) == 6
    for state in states[1:5:3]:
        again = finish(Supervised(TASK, settings, data, saved_and_loaded(state)))
        assert again.curve == whole.curve
        for key, value in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[key], value), key
