"""Common parts of the examples of sharded training: processes, a small network, random data, and the loop."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

BATCH, INPUTS, CLASSES = 256, 64, 10


class Block(nn.Module):
    """A residual block: a norm and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the output of the layers to the inputs."""
        change: Tensor = self.down(functional.relu(self.up(self.norm(inputs))))
        return inputs + change


class Network(nn.Sequential):
    """A classifier of residual blocks."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        blocks = [Block(width) for _ in range(depth)]
        super().__init__(nn.Linear(INPUTS, width), *blocks, nn.Linear(width, CLASSES))

    @property
    def blocks(self) -> list[Block]:
        """The residual blocks."""
        return [layer for layer in self if isinstance(layer, Block)]


class Result(NamedTuple):
    """The loss of the first and of the last step, and the collectives of the last call of ``optimiser.step``."""

    first: float
    last: float
    collectives: int

    def __str__(self) -> str:
        return f"loss {self.first:.3f} -> {self.last:.3f}; collectives in optimiser.step: {self.collectives}"


def start() -> torch.device:
    """Join the other processes of torchrun; return the device of this one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same weights everywhere
    return device


def batches(device: torch.device, steps: range, part: int = 0, parts: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch, or one of several parts of it, for each step: inputs, and labels by a random linear map."""
    linear_map = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(0))
    for step in steps:
        inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(1 + step))
        own = inputs.tensor_split(parts)[part]
        yield own.to(device), (own @ linear_map).argmax(1).to(device)


def train(model: nn.Module, optimiser: torch.optim.Optimizer, data: Iterator[tuple[Tensor, Tensor]]) -> Result:
    """Train on all batches. The losses are means over all processes."""
    losses: list[Tensor] = []
    collectives = 0
    for inputs, labels in data:
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
            optimiser.step()
        collectives = counted.get_total_counts()
        losses.append(loss.detach())
    means = torch.stack([losses[0], losses[-1]]) / distributed.get_world_size()
    distributed.all_reduce(means)
    first, last = means.tolist()
    return Result(first, last, collectives)


def local_bytes(tensors: Any) -> int:
    """Return the bytes of tensors, and of the parts of sharded tensors, on this process."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def memory(model: nn.Module, optimiser: torch.optim.Optimizer) -> str:
    """Say how much the weights and the state of the optimiser take on this process."""
    state = [value for own in optimiser.state.values() for value in own.values() if isinstance(value, Tensor)]
    weights = local_bytes(model.parameters())
    return f"rank {distributed.get_rank()}: weights {weights:,} bytes, state {local_bytes(state):,} bytes"


def say(text: str) -> None:
    """Print in the first process."""
    if distributed.get_rank() == 0:
        print(text, flush=True)
