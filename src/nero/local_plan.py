"""The step of an optimiser on this process: sharded parameters are stepped as their local parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nero import backends
from nero.groups import name_of
from nero.roles import Role
from nero.sharding import Noise, is_sharded, noise_of
from nero.shards import Shard, Shards
from nero.state import match_momentum, match_radius
from nero.user_warnings import warn

RoleIn = Callable[[dict[str, Any], Tensor], Role]


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
        self._may_be_idle = distributed.is_available() and distributed.is_initialized()

    def covers(self, param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]] | None) -> bool:
        """Return whether the optimiser still holds the same groups, parameters and state, with none to add.

        Args:
            param_groups: the optimiser's groups.
            state: the optimiser's state; ``None`` if it cannot have changed.
        """
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
        """Warn, once, if none of the parameters has a gradient in a distributed run."""
        if self._may_be_idle and all(parameter.grad is None for parameter in parameters):
            warn(
                "no parameter of the optimiser has a gradient, so this step changes nothing: if fully_shard "
                "replaced the model's parameters, make the optimiser after fully_shard"
            )
        self._may_be_idle = False
