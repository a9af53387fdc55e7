"""Nero in other libraries, where a line of the recipes does not do: timm's registry of optimisers."""

from functools import wraps
from typing import Any

from torch import nn

from nero.groups import param_groups
from nero.optimiser import Nero

__all__ = ["register_timm"]


def register_timm() -> None:
    """Let ``timm.optim.create_optimizer_v2(model, "nero")`` make a :class:`nero.Nero` with the roles of the layers.

    timm hands groups of plain parameters to an optimiser, which do not tell the roles. For ``"nero"`` the groups are
    those of :func:`nero.param_groups`, or of ``param_group_fn`` if that is given. timm's own ``momentum``, which is 0.9
    unless given, does not reach Nero. Needs timm 1.0.12 or newer.

    Raises:
        ValueError: by ``create_optimizer_v2(model, "nero", layer_decay=...)``, since timm would group by depth.
    """
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    if default_registry.list_optimizers("nero"):
        return
    default_registry.register(OptimInfo("nero", Nero, description="Nero, the neuronal rotator", has_eps=False))
    create = default_registry.create_optimizer

    @wraps(create)
    def create_with_roles(model_or_params: Any, opt: str, **options: Any) -> Any:
        if isinstance(model_or_params, nn.Module) and opt.lower().split("_")[-1] == "nero":
            if options.get("layer_decay") is not None:
                raise ValueError("layer_decay groups parameters without their roles: give a param_group_fn instead")
            options["param_group_fn"] = options.get("param_group_fn") or param_groups
        return create(model_or_params, opt, **options)

    default_registry.create_optimizer = create_with_roles
