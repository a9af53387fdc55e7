"""Memory of a rank for a model of 7 B parameters, sharded by FSDP2: weights, gradients and the state of an optimiser.

Computed from the shapes of Llama-2-7B, on the meta device. State is that of torch's Adam and Muon, in the dtype of the
parameters, and of Nero. Muon leaves the embedding, the head and all gains to Adam.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

import nero

OPTIMISERS = ("Adam", "Muon", "Nero")
RANKS = (1, 8, 64)


class Held(NamedTuple):
    """Bytes on one rank."""

    weights: int
    state: int

    @property
    def total(self) -> int:
        """The weights, as many bytes of gradients, and the state."""
        return 2 * self.weights + self.state


def llama(vocabulary: int = 32000, width: int = 4096, layers: int = 32, hidden: int = 11008) -> nn.Module:
    """Return a module with the parameters of Llama-2, on the meta device. It cannot run."""

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False)

    with torch.device("meta"):
        blocks = [
            nn.ModuleDict(
                {
                    "attention_norm": nn.RMSNorm(width),
                    **{name: linear(width, width) for name in ("query", "key", "value", "output")},
                    "norm": nn.RMSNorm(width),
                    **{name: linear(width, hidden) for name in ("gate", "up")},
                    "down": linear(hidden, width),
                }
            )
            for _ in range(layers)
        ]
        embedding = nn.Embedding(vocabulary, width)
        return nn.ModuleDict(
            {
                "embedding": embedding,
                "blocks": nn.ModuleList(blocks),
                "norm": nn.RMSNorm(width),
                "head": linear(width, vocabulary),
            }
        )


def held(model: nn.Module, optimiser: str, dtype: torch.dtype, ranks: int) -> Held:
    """Return what the first rank holds of a model whose parameters are sharded along axis 0.

    Args:
        model: a module with the names ``"embedding"`` and ``"head"``.
        optimiser: one of :data:`OPTIMISERS`.
        dtype: of the parameters.
        ranks: the number of processes.
    """
    roles = nero.roles_of(model)
    weights = state = 0
    for name, parameter in model.named_parameters():
        elements = _local(parameter.shape, ranks)
        weights += elements * dtype.itemsize
        state += _state(optimiser, name, parameter, roles, dtype, ranks)
    return Held(weights, state)


def _state(
    optimiser: str, name: str, parameter: nn.Parameter, roles: Mapping[str, nero.Role], dtype: torch.dtype, ranks: int
) -> int:
    """Return the bytes of the state of one parameter."""
    elements = _local(parameter.shape, ranks)
    is_hidden = parameter.dim() == 2 and not name.startswith(("embedding", "head"))
    if optimiser == "Muon" and is_hidden:
        return elements * dtype.itemsize  # momentum
    if optimiser in ("Adam", "Muon"):
        return 2 * elements * dtype.itemsize + torch.float32.itemsize  # two averages and the step
    role = roles[name]
    averages = _local(role.state_shape(parameter.shape), ranks) * torch.float32.itemsize
    counts = torch.float32.itemsize + torch.int64.itemsize  # the step, and the updates skipped
    scale = 0 if role.kind == "neuron" else torch.float32.itemsize
    return averages + counts + scale


def _local(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of the first shard along axis 0."""
    return math.ceil(shape[0] / ranks) * math.prod(shape[1:])
