"""Deals parameters out to sweeps: by Triton one per device, by numba one per group and dtype."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from nero.backends.available import NUMBA_DTYPES, check_backend, numba_works, triton_works
from nero.backends.job import Group, Member, Rates, has_expected_state, job_of, rates_of, settings_of
from nero.backends.layout import layout_of
from nero.backends.sweep import Line, Sweep, has_strides, span
from nero.process import is_capturing
from nero.rule import statistics_dtype
from nero.scalars import IMMUTABLE, are_same

#: From this many elements on, numba's loops are worth the time to compile or load them. The calls of torch for a tensor
#: take as long as for this many elements more.
MIN_NUMBA_ELEMENTS, ELEMENTS_PER_TENSOR = 1 << 20, 1 << 13
#: A view with wider gaps than this many times its size is left to torch, if there is momentum.
MAX_SPAN = 4

_rate_options = itemgetter("lr", "depth", "maximize", "momentum", "nesterov")


class Planner:
    """The sweeps of all groups, and the members that are left to other backends.

    Args:
        groups: the groups to step.
        before: the planner that this one replaces.

    Attributes:
        rest: the groups that have members which no sweep steps, with only these.
    """

    def __init__(self, groups: Sequence[Group], before: "Planner | None" = None) -> None:
        self._groups = groups
        self._options = [group.options for group in groups]
        self._rates: list[Rates] = []
        self._rate_options: list[Any] = []
        self._sweeps: list[Sweep] = []
        self._captured = [] if before is None else before._retired()
        self._deal()

    def ready(self) -> list[tuple[Sweep, list[int]]]:
        """Pair every sweep with the addresses of its gradients; deal anew if tensors have changed."""
        found = [sweep.look() for sweep in self._sweeps]
        if None in found or (self.rest and self._can_join()):
            self._captured = self._retired()
            self._deal()
            found = [sweep.look() for sweep in self._sweeps]
        addresses = [each for each in found if each is not None]  # all: the sweeps are new, or have found no change
        return list(zip(self._sweeps, addresses, strict=True))

    def has_state(self) -> bool:
        """Return whether the sweeps hold the tensors of the state at their addresses."""
        return all(sweep.has_state() for sweep in self._sweeps)

    def launch(self, ready: Sequence[tuple[Sweep, list[int]]]) -> None:
        """Launch the sweeps, each with the addresses of its gradients."""
        if not ready:
            return
        rates = self._read_rates()
        for sweep, addresses in ready:
            sweep.launch(addresses, rates)

    def _read_rates(self) -> list[Rates]:
        """Return the rates of all groups: the list of the last step, if no option has changed since."""
        options = list(chain.from_iterable(map(_rate_options, self._options)))
        if not (are_same(options, self._rate_options) and IMMUTABLE.issuperset(map(type, options))):
            self._rates, self._rate_options = list(map(rates_of, self._options)), options
        return self._rates

    def _deal(self) -> None:
        lines: dict[tuple[type[Sweep], torch.Generator | None, object], list[Line]] = {}
        rest: list[tuple[Group, bool]] = []  # with whether numba steps what it can of the group
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
        # all at last: an error on the way leaves every member where it was
        self._sweeps = [kind(own, generator) for (kind, generator, _), own in lines.items()]
        self._left, self.rest = rest, [group for group, _ in rest]

    def _can_join(self) -> bool:
        """Return whether a sweep could now step a member of the rest. Its state is then ready for that."""
        return any(
            (kind := _kind(member, group.options, is_numba)) is not None
            and line_of(member, group.options, 0, kind) is not None
            for group, is_numba in self._left
            for member in group.members
        )

    def _retired(self) -> list[Sweep]:
        """Return the sweeps whose tables a CUDA graph still uses."""
        return self._captured + [sweep for sweep in self._sweeps if sweep.captured]


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
        from nero.backends.numba.sweep import NumbaSweep

        return NumbaSweep
    return None


def line_of(member: Member, options: Mapping[str, Any], group: int, kind: type[Sweep]) -> Line | None:
    """Make the line of a member in a sweep; ``None`` if the compiled code cannot step it.

    Raises:
        ValueError: if Triton was chosen by name and cannot step the member's dtype, device or gradient.
    """
    parameter, grad = member.parameter, member.grad
    tensors = [parameter] if grad is None else [parameter, grad]
    if not parameter.numel():
        return None
    if not all(map(kind.takes, tensors)):
        if parameter.requires_grad:
            check_backend(options["backend"], member.name, *tensors)  # raises if this is Triton, by name
        return None
    if parameter.is_neg() or tensors[-1].shape != parameter.shape:  # a wrong shape raises where torch sees it
        return None
    if grad is None and _is_to_be_cast(member):  # what has no gradient keeps its state
        return None
    job = job_of(member, parameter if grad is None else grad, options)
    layout = layout_of(job.parameter.shape, job.parameter.stride(), job.axes)
    if layout is None or layout.neurons != job.state["grad_norm"].numel() or not has_expected_state(job):
        return None
    if not kind.follows(layout, job.axes):
        return None
    if job.buffer is not None:
        if not kind.takes(job.buffer) or job.buffer.device != parameter.device or job.buffer.is_neg():
            return None
        if not has_strides(job.buffer, job.parameter.stride()):
            # a part, whose state shares the memory of the whole; or a view, whose gaps the buffer would have, too
            if member.holder is not None or span(parameter) > MAX_SPAN * parameter.numel():
                return None
            job = job._replace(buffer=_move_buffer(member))
    holder = parameter if member.holder is None else member.holder
    return Line(parameter, holder, job, layout, settings_of(options), group)


def _is_to_be_cast(member: Member) -> bool:
    """Return whether a step would cast the state, since the parameter was cast after its last step."""
    dtype, buffer = member.parameter.dtype, member.state.get("momentum_buffer")
    return member.state["grad_norm"].dtype != statistics_dtype(dtype) or (buffer is not None and buffer.dtype != dtype)


@torch.inference_mode(False)  # tensors created in inference mode are read-only outside it
def _move_buffer(member: Member) -> Tensor:
    """Give the momentum buffer the strides of its parameter, which may be a view with gaps, or was transposed."""
    parameter, before = member.parameter, member.state["momentum_buffer"]
    buffer = torch.empty_strided(parameter.shape, parameter.stride(), dtype=before.dtype, device=before.device)
    member.state["momentum_buffer"] = buffer.copy_(before)
    return buffer
