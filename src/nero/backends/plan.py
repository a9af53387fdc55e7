"""The plan of a step: which backend steps each parameter."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nero.backends import eager, foreach
from nero.backends.available import NUMBA_DTYPES, numba_works, triton_works
from nero.backends.job import Group, Job, Member, Rates, has_entered, job_of, jobs_of, rates_of, settings_of
from nero.backends.shards import Shard, Shards
from nero.backends.sweep import Line, Sweep, line_of
from nero.process import is_capturing
from nero.scalars import IMMUTABLE, are_same

if TYPE_CHECKING:
    from nero.backends.cut import Work

#: From this many elements on, numba's loops are worth the time to compile or load them. The calls of torch for a tensor
#: take as long as for this many elements more.
MIN_NUMBA_ELEMENTS, ELEMENTS_PER_TENSOR = 1 << 20, 1 << 13
#: Seeds of the noise of consecutive steps are this far apart.
SEED_STRIDE = 0x9E3779B97F4A7C15
MAX_SEED = 1 << 63

_params = itemgetter("params")
_rate_options = itemgetter("lr", "depth", "maximize", "momentum", "nesterov")


def step_eagerly(groups: Sequence[Group]) -> None:
    """Step all groups by the plain rule, which a compiler traces and fuses."""
    for group in groups:
        eager.step(jobs_of(group), settings_of(group.options))


class Plan:
    """The backend of every parameter of an optimiser. Built once, used until the parameters change.

    Compiled code steps whatever it can in sweeps: Triton one per device, numba one per group and dtype. Neurons that
    are cut over processes are stepped by :mod:`nero.backends.cut`, and all others as jobs, one group at a time.

    Args:
        param_groups: the optimiser's groups.
        state: the optimiser's state.
        groups: the same groups with only the parameters that have state. Several may share the options of one.
        before: the plan that this one replaces.

    Attributes:
        has_shards: whether any parameter is sharded.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, dict[str, Any]],
        groups: Sequence[Group],
        before: "Plan | None" = None,
    ) -> None:
        self._param_groups = list(param_groups)
        self._counts = list(map(len, map(_params, param_groups)))
        self._parameters: list[Tensor] = list(chain.from_iterable(map(_params, param_groups)))
        self._states = list(state.values())
        members = [member for group in groups for member in group.members]
        self._entered = [member.state for member in members]
        self._waiting = [parameter for parameter in self._parameters if not has_entered(state.get(parameter))]
        self._is_retired = False
        shards = [member.holder for member in members if isinstance(member.holder, Shard)]
        self._shards, self.has_shards = Shards(shards) if shards else None, bool(shards)
        self._groups = [_selected(group, is_cut=False) for group in groups]
        self._cut_groups = [cut for group in groups if (cut := _selected(group, is_cut=True)).members]
        self._options = [group.options for group in self._groups]
        self._rates: list[Rates] = []
        self._rate_options: list[Any] = []
        self._sweeps: list[Sweep] = []
        self._captured = [] if before is None else before._captured_sweeps()
        self._deal()
        self._noise = _noise_of(groups)

    def covers(self, param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]] | None) -> bool:
        """Return whether the optimiser still holds the same groups, parameters and state, and none waits to enter.

        Args:
            param_groups: the optimiser's groups.
            state: the optimiser's state; ``None`` if it cannot have changed.
        """
        return (
            not self._is_retired
            and are_same(param_groups, self._param_groups)
            and list(map(len, map(_params, param_groups))) == self._counts
            and all(map(is_, chain.from_iterable(map(_params, param_groups)), self._parameters))
            and (state is None or self._has_state(state))
            and not any(parameter.grad is not None and parameter.requires_grad for parameter in self._waiting)
            and (self._shards is None or self._shards.are_current())
        )

    def _has_state(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        return (
            len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and all(map(has_entered, self._entered))  # not if someone cleared it
            and all(sweep.has_state() for sweep in self._sweeps)
        )

    def retire(self) -> None:
        """Cover nothing any more: options have changed."""
        self._is_retired = True

    def step(self) -> None:
        """Step every parameter that has a gradient."""
        if self._shards is None:
            self._step()
            return
        try:
            self._shards.take_gradients()
            self._step()
        finally:
            self._shards.finish()

    def _step(self) -> None:
        sweeps = self._look()
        # build every job first, so that an error leaves all parameters unchanged
        jobs = [jobs_of(group) for group, _ in self._rest]
        works = [work for group in self._cut_groups for work in _works(group)]
        is_captured = bool(self._noise) and is_capturing()
        if self._noise and not is_captured:
            self._seed_noise(sweeps, jobs, works)
        if sweeps:
            rates = self._read_rates()
            for sweep, addresses in sweeps:
                sweep.launch(addresses, rates)
        for (group, _), own in zip(self._rest, jobs, strict=True):
            if own:
                settings = settings_of(group.options, None if is_captured else group.generator)
                (eager if group.options["backend"] == "eager" else foreach).step(own, settings)
        if works:
            from nero.backends import cut

            cut.step(works)

    def _look(self) -> list[tuple[Sweep, list[int]]]:
        """Pair every sweep with the addresses of its gradients; deal anew if tensors have changed."""
        found = [sweep.look() for sweep in self._sweeps]
        if None in found or (self._rest and self._can_join()):
            self._captured = self._captured_sweeps()
            self._deal()
            found = [sweep.look() for sweep in self._sweeps]
        addresses = [each for each in found if each is not None]  # all: the sweeps are new, or have found no change
        return list(zip(self._sweeps, addresses, strict=True))

    def _read_rates(self) -> list[Rates]:
        """Return the rates of all groups: the list of the last step, if no option has changed since."""
        options = list(chain.from_iterable(map(_rate_options, self._options)))
        if not (are_same(options, self._rate_options) and IMMUTABLE.issuperset(map(type, options))):
            self._rates, self._rate_options = list(map(rates_of, self._options)), options
        return self._rates

    def _deal(self) -> None:
        """Deal parameters out to sweeps, and note the rest, with whether numba steps what it can of their group."""
        lines: dict[tuple[type[Sweep], torch.Generator | None, object], list[Line]] = {}
        rest: list[tuple[Group, bool]] = []
        for number, group in enumerate(self._groups):
            left, is_numba = [], uses_numba(group)
            for member in group.members:
                kind = _kind(member, group.options, is_numba)
                line = None if kind is None else line_of(member, group.options, number, kind)
                if kind is None or line is None:
                    left.append(member)
                else:
                    lines.setdefault((kind, group.generator, kind.key(line)), []).append(line)
            if left:
                rest.append((group._replace(members=left), is_numba))
        if lines and is_capturing():
            raise RuntimeError("take a step with these parameters before capturing one in a graph, as torch asks")
        # assigned last: an error above leaves every member where it was
        self._sweeps = [kind(own, generator) for (kind, generator, _), own in lines.items()]
        self._rest = rest

    def _can_join(self) -> bool:
        """Return whether a sweep could now step a member of the rest. Its state is then ready for that."""
        return any(
            (kind := _kind(member, group.options, is_numba)) is not None
            and line_of(member, group.options, 0, kind) is not None
            for group, is_numba in self._rest
            for member in group.members
        )

    def _captured_sweeps(self) -> list[Sweep]:
        """Return the sweeps whose tables a CUDA graph still uses."""
        return self._captured + [sweep for sweep in self._sweeps if sweep.captured]

    def _seed_noise(
        self, sweeps: Sequence[tuple[Sweep, list[int]]], jobs: Sequence[list[Job]], works: "Sequence[Work]"
    ) -> None:
        """Seed the generators that draw in this step, and count the step for them."""
        drawing = {sweep.generator for sweep, addresses in sweeps if any(addresses)}
        drawing |= {group.generator for (group, _), own in zip(self._rest, jobs, strict=True) if own}
        drawing |= {work.settings.generator for work in works}
        for generator in drawing:
            if generator is not None:
                seed, steps = self._noise[generator]
                generator.manual_seed((seed + steps * SEED_STRIDE) % MAX_SEED)
                self._noise[generator] = seed, steps + 1


def uses_numba(group: Group) -> bool:
    """Return whether numba steps what it can of a group on the CPU."""
    if group.options["backend"] != "auto":
        return bool(group.options["backend"] == "numba")
    own = (member.parameter for member in group.members)
    sizes = (each.numel() + ELEMENTS_PER_TENSOR for each in own if each.is_cpu and each.dtype in NUMBA_DTYPES)
    return sum(sizes) >= MIN_NUMBA_ELEMENTS and numba_works()


def _kind(member: Member, options: Mapping[str, Any], is_numba: bool) -> type[Sweep] | None:
    """Return the kind of sweep for a member, imported where used: that takes milliseconds or, by numba, seconds."""
    parameter, backend = member.parameter, options["backend"]
    if backend == "triton" or (backend == "auto" and parameter.is_cuda and triton_works(parameter.device)):
        from nero.backends.triton.sweep import TritonSweep

        return TritonSweep
    if is_numba and parameter.is_cpu and parameter.dtype in NUMBA_DTYPES:
        from nero.backends.numba.sweep import HalfSweep, NumbaSweep

        return HalfSweep if parameter.dtype == torch.bfloat16 else NumbaSweep
    return None


def _selected(group: Group, *, is_cut: bool) -> Group:
    return group._replace(members=[member for member in group.members if (member.cut is not None) == is_cut])


def _works(group: Group) -> "list[Work]":
    """Make the work of a group whose neurons are cut, on all processes alike: an empty part has its share of sums."""
    from nero.backends import cut

    settings = settings_of(group.options, group.generator)
    loops: Any = None
    if uses_numba(group):
        from nero.backends.numba import loops
    return [
        cut.Work(job_of(member, grad, group.options), settings, member.cut, loops)
        for member in group.members
        if member.cut is not None and (grad := member.grad) is not None
    ]


def _noise_of(groups: Sequence[Group]) -> dict[torch.Generator, tuple[int, int]]:
    """Return the seed of every generator of noise, and the steps that its parameters have made.

    The noise of a step depends on these numbers alone, so a resumed run draws the same.
    """
    noise: dict[torch.Generator, tuple[int, int]] = {}
    for group in groups:
        if group.generator is not None:
            _, before = noise.get(group.generator, (0, 0))
            steps = [int(member.state["step"]) for member in group.members]
            noise[group.generator] = group.generator.initial_seed(), max([before, *steps])
    return noise
