"""Nero, the neuronal rotator: each step turns every neuron through an angle and keeps it balanced.

Example:
    >>> import nero, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    >>> optimiser = nero.Nero(model)
    >>> model(torch.randn(4, 8)).square().mean().backward()
    >>> optimiser.step()
    >>> nero.is_balanced(model)
    True
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nero import jax as jax
    from nero import theory as theory
    from nero.after_step import balance_after_step
    from nero.auto.depth import depth_of
    from nero.balance import CentredWeightNorm, balance_, centred_weight_norm, is_balanced
    from nero.description import Description, describe
    from nero.groups import param_groups
    from nero.optimiser import Nero
    from nero.role import Role
    from nero.roles import roles_of
    from nero.watching import Watch, watch

__version__ = "0.2.0"

__all__ = [
    "CentredWeightNorm",
    "Description",
    "Nero",
    "Role",
    "Watch",
    "balance_",
    "balance_after_step",
    "centred_weight_norm",
    "depth_of",
    "describe",
    "is_balanced",
    "param_groups",
    "roles_of",
    "watch",
]


if not TYPE_CHECKING:
    _HOMES = {
        "auto.depth": ["depth_of"],
        "after_step": ["balance_after_step"],
        "balance": ["CentredWeightNorm", "balance_", "centred_weight_norm", "is_balanced"],
        "description": ["Description", "describe"],
        "groups": ["param_groups"],
        "optimiser": ["Nero"],
        "role": ["Role"],
        "roles": ["roles_of"],
        "watching": ["Watch", "watch"],
    }
    _HOME_OF = {name: f"nero.{home}" for home, names in _HOMES.items() for name in names}
    _SUBPACKAGES = ("jax", "theory")

    def __getattr__(name: str) -> object:
        """Import a public name on first use, so that ``import nero.jax`` needs no torch."""
        if name in _SUBPACKAGES:
            return import_module(f"nero.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_SUBPACKAGES})
