"""Pretrained models: a warning where balancing would change what they have learnt."""

import math
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from nero.groups import Part
from nero.known_layers import ADAPTERS
from nero.messages import and_more, warn
from nero.parameters import can_read
from nero.radius import MIN_CHANGE, balance_change

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def is_loaded_by_diffusers(model: nn.Module) -> bool:
    """Return whether diffusers loaded a part of the model. It marks models; transformers marks parameters."""
    parts = (module for module in model.modules() if type(module).__module__.startswith("diffusers."))
    return any(cast(dict[str, str], getattr(part, "config", {})).get("_name_or_path") for part in parts)


def warn_if_balanced(
    parts: Iterable[Part],
    cause: str = "pretrained",
    *,
    remedy: str = "keep the weights with nero.Nero(..., pretrained=True), or balance them without this warning with "
    "pretrained=False",
    is_known: bool = False,
    state: Mapping[Tensor, dict[str, Any]] | None = None,
) -> None:
    """Warn if parameters are about to be balanced that should perhaps stay as they are.

    Args:
        parts: parameters that enter the optimiser.
        cause: what they are, for the message.
        remedy: what to do instead, for the message.
        is_known: whether they are known to be that; otherwise marks and names tell.
        state: the state of parameters that have entered before, with the norms that neurons are held to.
    """
    entering = list(parts)
    named = {part.name: part.parameter for part in entering}
    marked = [part for part in entering if part.role.kind == "neuron" and (is_known or _looks_pretrained(part, named))]
    change = relative_change(marked, state)
    if change > MIN_CHANGE:
        moved = [part.name for part in marked if relative_change([part], state) > MIN_CHANGE]
        warn(
            f"the values of {and_more(moved)} are {cause}, and balancing moves the weights by "
            f"{change:.0%} of their norm, which changes what the model computes: {remedy}"
        )


@torch.no_grad()
def relative_change(parts: Iterable[Part], state: Mapping[Tensor, dict[str, Any]] | None = None) -> float:
    """Return the norm of the change that balancing makes to neurons, relative to the norm of the neurons."""
    neurons = [part for part in parts if part.role.kind == "neuron" and part.parameter.numel()]
    moved = total = 0.0
    for part in neurons:
        if can_read(part.parameter):
            radius = (state or {}).get(part.parameter, {}).get("radius")
            options = part.group["fix_mean"], part.group["fix_norm"]
            change, norm = balance_change(part.parameter, part.role, *options, radius)
            moved, total = math.hypot(moved, change), math.hypot(total, norm)
    return moved / total if total else 0.0


def warn_if_redundant(parts: Iterable[Part]) -> None:
    """Warn if ZeroRedundancyOptimizer makes this optimiser, whose processes balance different parameters each."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _ZERO:
        frame = frame.f_back
    if frame is not None and relative_change(parts) > MIN_CHANGE:
        warn(
            "each process of ZeroRedundancyOptimizer balances its own share of the parameters, so the processes start "
            "with different models: call nero.balance_(model) before, on all of them; or shard with fully_shard"
        )


def _looks_pretrained(part: Part, named: Mapping[str, Tensor]) -> bool:
    factor = named.get(part.name.replace("lora_B", "lora_E"), part.parameter)
    if factor is not part.parameter and can_read(factor) and not factor.any():  # AdaLoRA's new B is random, its E zero
        return False
    is_loaded = getattr(part.parameter, "_is_hf_initialized", False)  # set by from_pretrained of transformers 5
    return is_loaded or any(name in part.name for name in ADAPTERS)
