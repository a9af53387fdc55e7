"""The same step at different speeds: every backend computes what :mod:`nero.rule` defines.

This is the only door: a :class:`Plan` steps groups of parameters, a :class:`Projector` balances neurons.
"""

from nero.backends.available import backends_for, check_backend
from nero.backends.job import Cut, Group, Member, Neurons
from nero.backends.plan import Plan, step_eagerly
from nero.backends.projection import Projector

__all__ = [
    "Cut",
    "Group",
    "Member",
    "Neurons",
    "Plan",
    "Projector",
    "backends_for",
    "check_backend",
    "step_eagerly",
]
