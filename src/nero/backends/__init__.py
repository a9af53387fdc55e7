"""The same step, at different speeds: every backend gives what :mod:`nero.rule` gives."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

from nero.backends import eager, foreach, triton
from nero.backends.job import Job, Settings

Backend: TypeAlias = Literal["auto", "eager", "foreach", "triton"]
CHOICES: tuple[Backend, ...] = ("auto", "eager", "foreach", "triton")
BACKENDS: dict[str, Callable[[Sequence[Job], Settings], None]] = {"eager": eager.step, "foreach": foreach.step}


def step(backend: Backend, jobs: Sequence[Job], settings: Settings) -> None:
    """Take one step with every job, but for those that Triton's kernels take (:class:`nero.backends.triton.Sweep`).

    A compiler gets the plain rule to fuse.
    """
    chosen = backend if backend in BACKENDS else "foreach"
    BACKENDS["eager" if torch.compiler.is_compiling() else chosen](jobs, settings)


def available(device: torch.device) -> list[str]:
    """The backends that can step parameters on that device, the fastest last."""
    kernels = has_triton() and triton.why_not(torch.empty(0, device=device)) is None
    return [*BACKENDS, *(["triton"] if kernels else [])]


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


__all__ = ["BACKENDS", "CHOICES", "Backend", "Job", "Settings", "available", "has_triton", "step", "triton"]
