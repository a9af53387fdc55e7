"""The same step, at different speeds: every backend gives what :mod:`nero.rule` gives."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch

from nero.backends import eager, foreach
from nero.backends.job import Job, Settings

Backend: TypeAlias = Literal["auto", "eager", "foreach", "numba"]


def _numba_step(jobs: Sequence[Job], settings: Settings) -> None:
    """Compiled loops; numba is imported when they are first asked for."""
    try:
        from nero.backends import numba
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "backend='numba' needs numba: pip install 'nero-optim[cpu]', or use backend='foreach'", name=error.name
        ) from error
    numba.step(jobs, settings)


BACKENDS: dict[str, Callable[[Sequence[Job], Settings], None]] = {
    "eager": eager.step,
    "foreach": foreach.step,
    "numba": _numba_step,
}


def step(backend: Backend, jobs: Sequence[Job], settings: Settings) -> None:
    """Take one step with every job. ``"auto"`` is foreach; a compiler gets the plain rule to fuse."""
    chosen = "foreach" if backend == "auto" else backend
    BACKENDS["eager" if torch.compiler.is_compiling() else chosen](jobs, settings)


__all__ = ["BACKENDS", "Backend", "Job", "Settings", "step"]
