"""The choice of a backend for every parameter."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nero.backends import eager, foreach
from nero.backends.job import Group, has_entered, job_of, jobs_of, settings_of
from nero.backends.planner import Planner, uses_numba
from nero.process import is_capturing
from nero.scalars import are_same

if TYPE_CHECKING:
    from nero.backends.cut import Work

#: Seeds of the noise of consecutive steps are this far apart.
SEED_STRIDE = 0x9E3779B97F4A7C15
MAX_SEED = 1 << 63

_PARAMS = itemgetter("params")


def step_eagerly(groups: Sequence[Group]) -> None:
    """Step all groups by the plain rule, which a compiler traces and fuses."""
    for group in groups:
        eager.step(jobs_of(group), settings_of(group.options))


class Plan:
    """The backend of every parameter of an optimiser. Built once, used until the parameters change.

    Args:
        param_groups: the optimiser's groups.
        state: the optimiser's state.
        groups: the same groups with only the parameters that have state. Several may share the options of one.
        before: the plan that this one replaces.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, dict[str, Any]],
        groups: Sequence[Group],
        before: "Plan | None" = None,
    ) -> None:
        self._counts = list(map(len, map(_PARAMS, param_groups)))
        self._parameters: list[Tensor] = list(chain.from_iterable(map(_PARAMS, param_groups)))
        self._states = list(state.values())
        self._entered = [member.state for group in groups for member in group.members]
        self._idle = [parameter for parameter in self._parameters if not has_entered(state.get(parameter))]
        self._param_groups = list(param_groups)
        self._groups = [_part(group, is_cut=False) for group in groups]
        self._cut_groups = [part for group in groups if (part := _part(group, is_cut=True)).members]
        self._is_retired = False
        self._planner: Planner = Planner(self._groups, None if before is None else before._planner)
        generators = {id(group.generator): group.generator for group in groups if group.generator is not None}
        self._noise = [(generator, generator.initial_seed()) for generator in generators.values()]
        # read once: the noise of a step depends on its number alone, so a resumed run draws the same
        self._steps = int(max(state["step"] for state in self._entered)) if self._noise and self._entered else 0

    def covers(self, param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]] | None) -> bool:
        """Return whether the optimiser still holds the same groups, parameters and state, and none waits to enter.

        Args:
            param_groups: the optimiser's groups.
            state: the optimiser's state; ``None`` if it cannot have changed.
        """
        return (
            not self._is_retired
            and are_same(param_groups, self._param_groups)
            and list(map(len, map(_PARAMS, param_groups))) == self._counts
            and all(map(is_, chain.from_iterable(map(_PARAMS, param_groups)), self._parameters))
            and (state is None or self._has_state(state))
            and not any(parameter.grad is not None and parameter.requires_grad for parameter in self._idle)
        )

    def _has_state(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        return (
            len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and all(map(has_entered, self._entered))  # not if someone cleared it
            and self._planner.has_state()
        )

    def retire(self) -> None:
        """Cover nothing any more: options have changed."""
        self._is_retired = True

    def step(self) -> None:
        """Step every parameter that has a gradient."""
        sweeps = self._planner.ready()
        # build every job first, so that an error leaves all parameters unchanged
        jobs = [jobs_of(group) for group in self._planner.rest]
        works = [work for group in self._cut_groups for work in _works(group)]
        is_captured = bool(self._noise) and is_capturing()
        for generator, seed in () if is_captured else self._noise:
            generator.manual_seed((seed + self._steps * SEED_STRIDE) % MAX_SEED)
        self._steps += 1
        self._planner.launch(sweeps)
        for group, own in zip(self._planner.rest, jobs, strict=True):
            if own:
                settings = settings_of(group.options, None if is_captured else group.generator)
                (eager if group.options["backend"] == "eager" else foreach).step(own, settings)
        if works:
            from nero.backends import cut

            cut.step(works)


def _part(group: Group, *, is_cut: bool) -> Group:
    return group._replace(members=[member for member in group.members if (member.cut is not None) == is_cut])


def _works(group: Group) -> "list[Work]":
    """Make the work of a group whose neurons are cut, on all processes alike: an empty part has its share of sums."""
    from nero.backends import cut

    settings = settings_of(group.options, group.generator)
    loops: Any = None
    if uses_numba(group):
        from nero.backends.numba import rows

        loops = rows
    return [
        cut.Work(job_of(member, grad, group.options), settings, member.cut, loops)
        for member in group.members
        if member.cut is not None and (grad := member.grad) is not None
    ]
