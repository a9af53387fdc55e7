"""Deals parameters out to Triton sweeps, one per device."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from nero.backends.available import check_backend, triton_works, why_not_triton
from nero.backends.job import Group, Member, Rates, has_expected_state, job_of, rates_of, settings_of
from nero.backends.layout import layout_of
from nero.backends.triton.sweep import Sweep, has_strides
from nero.backends.triton.tables import MAX_COUNT, Line
from nero.scalars import IMMUTABLE, are_same

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
        return [(sweep, found_at) for sweep, found_at in zip(self._sweeps, found, strict=True) if found_at is not None]

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
        lines: dict[tuple[torch.device, torch.Generator | None], list[Line]] = {}
        self.rest: list[Group] = []
        for number, group in enumerate(self._groups):
            left = []
            for member in group.members:
                line = line_of(member, group.options, number)
                if line is None:
                    left.append(member)
                else:
                    lines.setdefault((member.parameter.device, group.generator), []).append(line)
            if left:
                self.rest.append(group._replace(members=left))
        if lines and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("take a step with these parameters before capturing one in a graph, as torch asks")
        self._sweeps = [Sweep(own, generator) for (_, generator), own in lines.items()]

    def _can_join(self) -> bool:
        """Return whether a member of the rest has become one that a sweep could step."""
        return any(
            line_of(member, group.options, 0) is not None
            for group in self.rest
            if group.options["backend"] in ("auto", "triton")
            for member in group.members
            if member.parameter.is_cuda or group.options["backend"] == "triton"
        )

    def _retired(self) -> list[Sweep]:
        """Return the sweeps whose tables a CUDA graph still uses."""
        return self._captured + [sweep for sweep in self._sweeps if sweep.captured]


def line_of(member: Member, options: Mapping[str, Any], group: int) -> Line | None:
    """Make the line of a member in a sweep; ``None`` if the kernels cannot step it.

    Raises:
        ValueError: if the backend was chosen by name and cannot step the member's dtype, device or gradient.
    """
    parameter = member.parameter
    is_chosen = options["backend"] == "triton"
    if not parameter.numel() or not (
        is_chosen or (options["backend"] == "auto" and parameter.is_cuda and triton_works(parameter.device))
    ):
        return None
    grad = member.grad
    tensors = [parameter] if grad is None else [parameter, grad]
    if any(map(why_not_triton, tensors)):
        if is_chosen and parameter.requires_grad:
            check_backend("triton", member.name, *tensors)
        return None
    job = job_of(member, parameter if grad is None else grad, options)
    layout = layout_of(job.parameter.shape, job.parameter.stride(), job.axes)
    if layout is None or layout.neurons != job.state["grad_norm"].numel() or not has_expected_state(job):
        return None
    if max(layout.neurons, layout.fan_in) > MAX_COUNT:
        return None
    if job.buffer is not None and not has_strides(job.buffer, job.parameter.stride()):
        if member.holder is not None:  # a part, whose state shares the memory of the whole
            return None
        job = job._replace(buffer=_move_buffer(member))
    holder = parameter if member.holder is None else member.holder
    return Line(parameter, holder, job, layout, settings_of(options), group)


@torch.inference_mode(False)  # tensors created in inference mode are read-only outside it
def _move_buffer(member: Member) -> Tensor:
    """Give the momentum buffer the strides of its parameter, which may be a view with gaps, or was transposed."""
    parameter, before = member.parameter, member.state["momentum_buffer"]
    buffer = torch.empty_strided(parameter.shape, parameter.stride(), dtype=before.dtype, device=before.device)
    member.state["momentum_buffer"] = buffer.copy_(before)
    return buffer
