"""The step of an optimiser on this process: sharded parameters are stepped as their local parts.

A local part is an ordinary parameter, with a gradient and state of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from nero import backends
from nero.groups import name_of
from nero.roles import Role
from nero.rounding import cast
from nero.rule import statistics_dtype
from nero.sharding import MeshSharding, Noise, is_sharded, local_of, noise_of
from nero.state import match_momentum, match_radius
from nero.user_warnings import warn

RoleIn = Callable[[dict[str, Any], Tensor], Role]

_grad, _requires_grad, _version = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("_version")
_local, _spec = attrgetter("_local_tensor"), attrgetter("_spec")
#: The state in the dtype of a parameter's statistics.
_STATISTICS = frozenset({"grad_norm", "radius", "scale"})


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
        for key in _STATISTICS & state.keys():
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


def groups_of(
    param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]], role_in: RoleIn
) -> tuple[list[backends.Group], list[Shard]]:
    """Return the parameters that have state, as backends see them, and the shards among them.

    Args:
        param_groups: the optimiser's groups.
        state: the optimiser's state.
        role_in: returns the role of a parameter of a group.
    """
    groups: list[backends.Group] = []
    shards: list[Shard] = []
    generators: dict[Noise, torch.Generator] = {}
    is_switched_on = False
    for group in param_groups:
        members: dict[Noise | None, list[backends.Member]] = {}
        for index, parameter in enumerate(group["params"]):
            own, role = state.get(parameter), role_in(group, parameter)
            if not backends.has_entered(own):
                continue
            if role.kind == "neuron":
                match_radius(parameter, role, own, group["fix_norm"])
            if match_momentum(parameter, role, own, group["momentum"]) and "max_momentum" in group:
                is_switched_on = True
            member = backends.Member(name_of(param_groups, group, index), parameter, role, own)
            if is_sharded(parameter):
                shards.append(Shard(parameter, role, own))
                member = _part(member, shards[-1])
            noise = noise_of(parameter, role) if group["rounding"] == "stochastic" else None
            members.setdefault(noise, []).append(member)
        for noise, alike in (members or {None: []}).items():
            generator = noise and generators.setdefault(noise, noise.generator())
            groups.append(backends.Group(group, alike, generator))
    if is_switched_on and not torch.compiler.is_compiling():
        warn(
            "a scheduler has switched on momentum, which nero.Nero was made without: give the scheduler "
            "cycle_momentum=False, or give nero.Nero a momentum"
        )
    return groups, shards


def _part(member: backends.Member, shard: Shard) -> backends.Member:
    cut = None
    if shard.sharding.is_cut:
        fan_in = member.role.fan_in(member.parameter.shape)
        cut = backends.Cut(fan_in, shard.sharding.reduction, shard.sharding.group_of_row)
    return backends.Member(member.name, shard.local, shard.role, shard.state, cut, shard)


class LocalPlan:
    """The plan of an optimiser's step on this process. Built once, used until the parameters change.

    Args:
        param_groups: the optimiser's groups.
        state: the optimiser's state.
        role_in: returns the role of a parameter of a group.
        before: the plan that this one replaces.

    Attributes:
        has_shards: whether any parameter is sharded.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, dict[str, Any]],
        role_in: RoleIn,
        before: "LocalPlan | None" = None,
    ) -> None:
        groups, shards = groups_of(param_groups, state, role_in)
        self._shards = Shards(shards) if shards else None
        self.has_shards = bool(shards)
        self._plan: backends.Plan = backends.Plan(param_groups, state, groups, None if before is None else before._plan)
        distributed = torch.distributed
        self._may_be_idle = not shards and distributed.is_available() and distributed.is_initialized()

    def covers(self, param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]] | None) -> bool:
        """Return whether the plan still holds, as :meth:`nero.backends.Plan.covers` does, also for shards."""
        return self._plan.covers(param_groups, state) and (self._shards is None or self._shards.are_current())

    def retire(self) -> None:
        """Invalidate the plan after a change of options."""
        self._plan.retire()

    def step(self) -> None:
        """Step every parameter that has a gradient."""
        if self._shards is None:
            self._plan.step()
            return
        try:
            self._shards.take_gradients()
            self._plan.step()
        finally:
            self._shards.finish()

    def warn_if_idle(self, parameters: Sequence[Tensor]) -> None:
        """Warn, once, if a distributed run has no sharded parameter, and its first step no gradient."""
        if self._may_be_idle and all(parameter.grad is None for parameter in parameters):
            warn(
                "no parameter of the optimiser has a gradient, so this step changes nothing: if fully_shard "
                "replaced the model's parameters, make the optimiser after fully_shard"
            )
        self._may_be_idle = False
