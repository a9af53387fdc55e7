"""The same step, at different speeds: every backend gives what :mod:`nero.rule` gives."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

from nero.backends import eager, foreach, triton
from nero.backends.job import Job, Settings

Backend: TypeAlias = Literal["auto", "eager", "foreach", "numba", "triton"]
CHOICES: tuple[Backend, ...] = ("auto", "eager", "foreach", "numba", "triton")
#: From so many numbers on, numba's loops are worth the time that it takes to compile or load them.
MANY = 1 << 20


def _numba_step(jobs: Sequence[Job], settings: Settings) -> None:
    """Compiled loops; numba is imported when they are first asked for."""
    from nero.backends import numba

    numba.step(jobs, settings)


#: Those that take jobs as they come. Triton's kernels want them sorted out before: nero.backends.triton.Sweep.
BACKENDS: dict[str, Callable[[Sequence[Job], Settings], None]] = {
    "eager": eager.step,
    "foreach": foreach.step,
    "numba": _numba_step,
}


def step(backend: Backend, jobs: Sequence[Job], settings: Settings) -> None:
    """Take one step with every job. A compiler gets the plain rule to fuse."""
    if torch.compiler.is_compiling():
        eager.step(jobs, settings)
    elif backend in BACKENDS:
        BACKENDS[backend](jobs, settings)
    else:
        numbers = sum(job.parameter.numel() for job in jobs if job.parameter.is_cpu)
        BACKENDS["numba" if numbers >= MANY and _numba_works() else "foreach"](jobs, settings)


def available(device: torch.device) -> list[str]:
    """The backends that can step parameters on that device, the fastest last."""
    compiled = {"cpu": "numba", "cuda": "triton"}.get(device.type, "")
    return ["eager", "foreach", *([compiled] if compiled and has(compiled) else [])]


@cache
def _numba_works() -> bool:
    """Whether numba is there, goes with the numpy that is there, and finds a place for what it compiles."""
    try:
        from nero.backends import numba  # noqa: F401
    except Exception:
        return False
    return True


@cache
def has(library: str) -> bool:
    """Whether a library is installed."""
    return find_spec(library) is not None


__all__ = ["BACKENDS", "CHOICES", "Backend", "Job", "Settings", "available", "has", "step", "triton"]
