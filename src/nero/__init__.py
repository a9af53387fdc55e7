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

from nero.balance import CentredWeightNorm, balance_, balance_after_step, centred_weight_norm, is_balanced
from nero.describe import Description, describe
from nero.groups import param_groups
from nero.optimiser import Nero
from nero.roles import Role, roles_of

if TYPE_CHECKING:
    from nero.auto.depth import depth_of
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

    def __getattr__(name: str) -> object:
        """Import on first use what most training does not need."""
        if name == "theory":
            return import_module("nero.theory")
        home = {"Watch": "nero.watching", "watch": "nero.watching", "depth_of": "nero.auto.depth"}.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "theory"})
