"""The rule, tensor by tensor."""

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from nero import rule
from nero.backends.job import Job, Settings
from nero.rounding import rounded


def step(jobs: Sequence[Job], settings: Settings) -> None:
    """Step every job."""
    for job in jobs:
        job.state["step"].add_(1)
        finish(job, settings)


def finish(job: Job, settings: Settings) -> None:
    """Apply the rule to a job whose step is already counted, and write the result."""
    if job.grad.layout is torch.sparse_coo:
        # torch.compile cannot follow sparse tensors; where it is not imported, importing it would take a second
        if "torch._dynamo" in sys.modules:
            torch.compiler.disable(_finish_sparse)(job, settings)  # type: ignore[no-untyped-call]
        else:
            _finish_sparse(job, settings)
        return
    update = apply_rule(job, settings)
    job.parameter.copy_(rounded(update.parameter, job.parameter.dtype, settings.rounding, settings.generator))
    job.state["grad_norm"].copy_(update.grad_norm)
    if job.buffer is not None and update.momentum_buffer is not None:
        job.buffer.copy_(rounded(update.momentum_buffer, job.buffer.dtype, settings.rounding, settings.generator))
    job.state["skipped"].add_(update.skipped.sum())


def apply_rule(job: Job, settings: Settings) -> rule.Update:
    """Apply the rule to a job whose step is already counted."""
    state, lr, beta, longest = job.state, settings.angle, settings.beta, settings.longest
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
            momentum=job.momentum(settings),
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
        radius=state.get("radius", 1.0),
        momentum=job.momentum(settings),
    )


def _finish_sparse(job: Job, settings: Settings) -> None:
    """Take the dense step on the rows that have a gradient; the averages of all rows decay."""
    grad = job.grad.coalesce()
    if grad.sparse_dim() != 1 or 0 in job.axes or job.pull:
        finish(job._replace(grad=grad.to_dense()), settings)
        return
    rows = grad.indices()[0]
    by_row: dict[str, Tensor] = {name: job.state[name][rows] for name in ("grad_norm", "radius") if name in job.state}
    touched = job._replace(parameter=job.parameter[rows], grad=grad.values(), state={**job.state, **by_row})
    update = apply_rule(touched, settings)
    job.parameter.index_copy_(
        0, rows, rounded(update.parameter, job.parameter.dtype, settings.rounding, settings.generator)
    )
    job.state["grad_norm"].mul_(math.sqrt(settings.beta)).index_copy_(0, rows, update.grad_norm)
    job.state["skipped"].add_(update.skipped.sum())
