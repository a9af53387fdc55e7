"""The parts of sharded parameters on this process, which a step takes for ordinary parameters."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from nero.backends.job import STATISTICS, Cut, Member
from nero.role import Role
from nero.rounding import cast
from nero.rule import statistics_dtype
from nero.sharding import MeshSharding, is_sharded, local_of

_grad, _requires_grad, _version = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("_version")
_local, _spec = attrgetter("_local_tensor"), attrgetter("_spec")


def member_of(name: str, parameter: Tensor, role: Role, state: dict[str, Any]) -> Member:
    """Make the member of a group from a parameter, or from the local part of a sharded one."""
    if not is_sharded(parameter):
        return Member(name, parameter, role, state, parameter)
    shard, cut = Shard(parameter, role, state), None
    if shard.sharding.is_cut:
        cut = Cut(role.fan_in(parameter.shape), shard.sharding.reduction, shard.sharding.group_of_row)
    return Member(name, shard.local, shard.role, shard.state, shard, cut)


class Shard:
    """A sharded parameter's part on this process, as an ordinary parameter with its own state.

    Args:
        parameter: the DTensor.
        role: its role.
        state: its state.

    Attributes:
        sharding: how the parameter is sharded.
        local: the part, with whole fan-in groups on an axis of their own.
        grad: the part of the gradient, during a step.
        role: the role of the part.
        state: the state as plain tensors, which share the memory of the parameter's state.
    """

    def __init__(self, parameter: Any, role: Role, state: dict[str, Any]) -> None:
        self.sharding, self.parameter, self.whole_state = MeshSharding(parameter, role), parameter, state
        self.grad: Tensor | None = None
        part = local_of(parameter).detach()
        self.local = nn.Parameter(part if self.sharding.is_cut else self.sharding.view(part), parameter.requires_grad)
        self.role = role if self.sharding.is_cut else replace(role, fan_in_axes=role.axes, fan_in_groups=1)
        dtype = statistics_dtype(parameter.dtype)
        for key in state.keys() & STATISTICS:
            state[key] = state[key].to(dtype)  # itself, unless the parameter was cast since its last step
        if "momentum_buffer" in state:
            state["momentum_buffer"] = cast(state["momentum_buffer"], parameter.dtype)
        self.state = {key: local_of(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        if "momentum_buffer" in state and not self.sharding.is_cut:
            self.state["momentum_buffer"] = self.sharding.view(self.state["momentum_buffer"])

    def take_gradient(self, grad: Any) -> None:
        """Take the local part of a gradient. Redistribute the gradient if it is sharded unlike the parameter."""
        if not is_sharded(grad):
            shape = tuple(grad.shape)
            raise TypeError(f"a sharded parameter has a plain tensor of shape {shape} as its gradient: give a DTensor")
        placements = self.parameter.placements
        if grad.placements != placements:
            grad = grad.redistribute(self.parameter.device_mesh, placements)
        self.grad = local_of(grad).view(self.local.shape)


class Shards:
    """All sharded parameters of an optimiser. Checks run over lists, since checks per tensor are slow on the host.

    Args:
        shards: the parts of the parameters.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = list(shards)
        self._parameters = [shard.parameter for shard in shards]
        self._sources: list[Tensor] = list(map(_local, self._parameters))
        self._addresses = list(map(Tensor.data_ptr, self._sources))
        self._states = [shard.whole_state for shard in shards]
        self._values = [value for state in self._states for value in state.values()]
        self._trained = list(map(_requires_grad, self._parameters))
        self._views = [shard for shard in shards if shard.local.shape != local_of(shard.parameter).shape]
        # backends skip empty parts, but their step counters must advance
        self._empty = [shard for shard in shards if not shard.local.numel() and not shard.sharding.is_cut]
        self._has_versions = any(shard.local.is_cpu for shard in shards)  # only CPU backends read them
        self._versions: list[int] = []
        self._specs: list[Any] = []  # of gradients that were found to be sharded like their parameters
        self._moving: list[Any] = []

    def are_current(self) -> bool:
        """Return whether the parameters and their state still are the same tensors."""
        return (
            all(map(is_, map(_local, self._parameters), self._sources))
            and list(map(Tensor.data_ptr, self._sources)) == self._addresses
            and sum(map(len, self._states)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, self._states)), self._values))
        )

    def take_gradients(self) -> None:
        """Give every part its gradient."""
        with torch._C.DisableTorchFunctionSubclass():  # attributes of a DTensor are several times faster
            grads, trained = list(map(_grad, self._parameters)), list(map(_requires_grad, self._parameters))
            versions = list(map(_version, self._parameters)) if self._has_versions else []
        if versions != self._versions:  # an operation on a DTensor does not raise its part's version
            increment_version(self._sources)
        if trained != self._trained:
            self._trained = trained
            for shard, is_trained in zip(self._shards, trained, strict=True):
                shard.local.requires_grad_(is_trained)
        if not self._take_quickly(grads):
            self._moving = [
                shard.parameter
                for shard, grad, is_trained in zip(self._shards, grads, trained, strict=True)
                if grad is not None and is_trained
            ]
            for shard, grad in zip(self._shards, grads, strict=True):
                if grad is not None and shard.local.requires_grad:
                    shard.take_gradient(grad)
            is_alike = all(
                grad is not None and grad.placements == shard.parameter.placements
                for shard, grad in zip(self._shards, grads, strict=True)
            )
            self._specs = list(map(_spec, grads)) if is_alike and all(trained) else []
        for shard in self._empty:
            if shard.grad is not None and shard.local.requires_grad:
                shard.state["step"].add_(1)

    def _take_quickly(self, grads: Sequence[Any]) -> bool:
        """Take the gradients if all have the specs of an earlier step; return whether they have."""
        if not self._specs or any(map(is_, grads, repeat(None))):
            return False
        if not all(map(is_, map(_spec, grads), self._specs)):
            return False
        parts = list(map(_local, grads))
        if set(map(type, parts)) != {Tensor}:  # other types wait for a collective
            return False
        for shard, part in zip(self._shards, parts, strict=True):
            shard.grad = part
        for shard in self._views:
            assert shard.grad is not None
            shard.grad = shard.grad.view(shard.local.shape)
        self._moving = self._parameters
        return True

    def finish(self) -> None:
        """Release the gradients, so that the user can free them, and mark the parameters as changed."""
        for shard in self._shards:
            shard.grad = None
        if self._moving:
            increment_version(self._moving)
        if self._has_versions:
            self._versions = list(map(_version, self._parameters))
