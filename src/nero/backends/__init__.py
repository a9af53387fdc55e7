"""The same step at different speeds: every backend computes what :mod:`nero.rule` defines.

This is the only door: a :class:`Plan` steps groups of parameters, a :func:`projector` balances neurons.
"""

from typing import TYPE_CHECKING

from nero.backends.available import backends_for, check_backend
from nero.backends.job import Group, Member, Neurons, has_entered
from nero.backends.plan import Plan, step_eagerly
from nero.backends.shards import member_of

if TYPE_CHECKING:
    from nero.backends.projection import Projector

__all__ = [
    "Group",
    "Member",
    "Neurons",
    "Plan",
    "backends_for",
    "check_backend",
    "has_entered",
    "member_of",
    "projector",
    "step_eagerly",
]


def projector(*, fix_mean: bool, fix_norm: bool) -> "Projector":
    """Make a projector to zero mean, to a radius, or both."""
    from nero.backends.projection import Projector  # imported where used, with the code of its devices

    return Projector(fix_mean=fix_mean, fix_norm=fix_norm)
