"""What a backend is given: groups of parameters, and one job per parameter and step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero import rule
from nero.options import FixNorm, Rounding
from nero.roles import Role
from nero.rule import Number, statistics_dtype
from nero.scalars import as_float

#: The state of a parameter, with dtypes; None for that of its statistics.
STATE_DTYPES = {"grad_norm": None, "scale": None, "radius": None, "step": torch.float32, "skipped": torch.int64}


class Member(NamedTuple):
    """A parameter of a group, with its state."""

    name: str
    parameter: Tensor
    role: Role
    state: dict[str, Tensor]


class Group(NamedTuple):
    """A parameter group: its options, which may change between steps, and its members."""

    options: Mapping[str, Any]
    members: Sequence[Member]


class Job(NamedTuple):
    """One parameter's step: neurons if it has fan-in axes, else gains or biases."""

    parameter: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    axes: tuple[int, ...]
    pull: float


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a group that the rule reads; ``lr`` is the signed angle of a step."""

    lr: Number
    beta: float
    fix_mean: bool
    fix_norm: FixNorm
    scale: float | None
    rounding: Rounding
    longest: float


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Read the settings of a group from its options."""
    lr = options["lr"].reshape(()) if isinstance(options["lr"], Tensor) else float(options["lr"])
    lr = lr if options["depth"] == 1 else lr / float(options["depth"])
    return Settings(
        -lr if options["maximize"] else lr,
        options["beta"],
        options["fix_mean"],
        options["fix_norm"],
        options["scale"],
        options["rounding"],
        as_float(options["longest_step"]),
    )


def jobs_of(group: Group) -> list[Job]:
    """Make a job for every member that has a gradient."""
    return [
        job_of(member, member.parameter.grad, group.options)
        for member in group.members
        if member.parameter.grad is not None and member.parameter.requires_grad and member.parameter.numel()
    ]


def job_of(member: Member, grad: Tensor, options: Mapping[str, Any]) -> Job:
    """Make the job of a member with this gradient."""
    role, state = member.role, member.state
    dtype = statistics_dtype(member.parameter.dtype)
    if state["grad_norm"].dtype != dtype:  # the parameter was cast since its last step
        state.update({key: state[key].to(dtype) for key in ("grad_norm", "scale", "radius") if key in state})
    if role.fan_in_groups > 1:
        grad = role.view(grad.to_dense() if grad.is_sparse else grad)
    pull = -options["gain_penalty"] if options["maximize"] else options["gain_penalty"]
    return Job(role.view(member.parameter), grad, state, role.axes, pull if role.kind == "gain" else 0.0)


def apply_rule(job: Job, settings: Settings) -> rule.Update:
    """Apply the rule to a job whose step is already counted."""
    state, lr, beta, longest = job.state, settings.lr, settings.beta, settings.longest
    if not job.axes:
        scale = state["scale"] if settings.scale is None else settings.scale
        return rule.nudge(
            job.parameter,
            job.grad,
            state["grad_norm"],
            state["step"],
            lr=lr,
            beta=beta,
            scale=scale,
            longest=longest,
            pull=job.pull,
        )
    return rule.turn(
        job.parameter,
        job.grad,
        state["grad_norm"],
        state["step"],
        axes=job.axes,
        lr=lr,
        beta=beta,
        longest=longest,
        fix_mean=settings.fix_mean,
        fix_norm=bool(settings.fix_norm),
        scale=settings.scale,
        radius=state["radius"] if settings.fix_norm == "initial" else 1.0,
    )


def has_compiled_state(job: Job) -> bool:
    """Return whether the state has the device, dtypes and memory format that compiled code assumes."""
    here, wide = job.parameter.device, statistics_dtype(job.parameter.dtype)
    for key, value in job.state.items():
        if key in STATE_DTYPES and not (
            value.dtype is (STATE_DTYPES[key] or wide) and value.device == here and value.is_contiguous()
        ):
            return False
    return True


def flat(tensor: Tensor) -> Tensor:
    """Reshape to a vector."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def shaped(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """View vectors in the shapes of other tensors."""
    return [part if other.dim() == 1 else part.view(other.shape) for part, other in zip(parts, like, strict=True)]
