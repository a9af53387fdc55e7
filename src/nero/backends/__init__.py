"""The same step at different speeds: every backend computes what :mod:`nero.rule` defines.

This is the only door: a :class:`Plan` steps groups of parameters, :func:`project_` balances one tensor.
"""

from torch import Tensor

from nero.backends.available import backends_for, check_backend
from nero.backends.job import Cut, Group, Member
from nero.backends.plan import Plan, step_eagerly

__all__ = ["Cut", "Group", "Member", "Plan", "backends_for", "check_backend", "project_", "step_eagerly"]


def project_(
    tensor: Tensor, axes: tuple[int, ...], *, fix_mean: bool, fix_norm: bool, radius: float | Tensor = 1.0
) -> bool:
    """Balance a tensor in place by a kernel, if there is one for it; return whether there was."""
    from nero.backends.triton import project

    return project.project_(tensor, axes, fix_mean=fix_mean, fix_norm=fix_norm, radius=radius)
