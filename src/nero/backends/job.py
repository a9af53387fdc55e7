"""What a backend is handed: one parameter's step, and the options of its group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nero import rule
from nero.balance import FixNorm, statistics_dtype
from nero.rounding import Rounding
from nero.rule import Number

#: What is kept of a parameter, and in which dtype, if not in that of its statistics.
KEPT = {"grad_norm": None, "scale": None, "radius": None, "step": torch.float32, "skipped": torch.int64}


class Job(NamedTuple):
    """One parameter with its gradient and state: to be turned if it has fan-in axes, else nudged."""

    parameter: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    axes: tuple[int, ...]
    pull: float


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a group that the rule asks for."""

    lr: Number
    beta: float
    fix_mean: bool
    fix_norm: FixNorm
    scale: float | None
    rounding: Rounding = "nearest"
    longest: float = math.inf


def apply_rule(job: Job, settings: Settings) -> rule.Update:
    """The rule's answer to a job whose step is counted already."""
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


def state_is_as_made(job: Job) -> bool:
    """Whether the state is what compiled code takes it for: others may have moved the parameter since."""
    here, wide = job.parameter.device, statistics_dtype(job.parameter.dtype)
    for key, value in job.state.items():  # asked at every step, of every tensor
        if key in KEPT and not (value.dtype is (KEPT[key] or wide) and value.device == here and value.is_contiguous()):
            return False
    return True


def flat(tensor: Tensor) -> Tensor:
    """The tensor as a vector."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def shaped(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Vectors in the shapes of other tensors."""
    return [part if each.dim() == 1 else part.view(each.shape) for part, each in zip(parts, like, strict=True)]
