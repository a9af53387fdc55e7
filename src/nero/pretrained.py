"""Pretrained models: a warning where balancing would change what they have learnt."""

import math
import warnings
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from nero.balance import balance_change
from nero.groups import Part
from nero.parameters import can_read

#: The relative change of weights from which balancing is worth a warning; rounding stays far below it.
MIN_CHANGE = 0.01
#: Parts of the names of PEFT's parameters that start at zero or as copies, and are trained where they are neither.
ADAPTERS = ("lora_B", "lora_embedding_B", "modules_to_save")


def is_pretrained(model: nn.Module) -> bool:
    """Return whether diffusers loaded a part of the model. It marks models; transformers marks parameters."""
    parts = (module for module in model.modules() if type(module).__module__.startswith("diffusers."))
    return any(cast(dict[str, str], getattr(part, "config", {})).get("_name_or_path") for part in parts)


def warn_if_balanced(parts: Iterable[Part], *, is_known: bool, stacklevel: int) -> None:
    """Warn if parameters that look pretrained are about to be balanced.

    Args:
        parts: parameters that enter the optimiser.
        is_known: whether they are known to be pretrained; otherwise marks and names tell.
        stacklevel: of the warning.
    """
    neurons = [part for part in parts if part.role.kind == "neuron" and part.parameter.requires_grad]
    marked = [part for part in neurons if is_known or _looks_pretrained(part)]
    change = relative_change(marked)
    if change > MIN_CHANGE:
        warnings.warn(
            f"{_listed(marked)} pretrained, and balancing moves the weights by {change:.0%} of their norm, which "
            "changes what the model computes: keep the weights with pretrained=True, or balance them without this "
            "warning with pretrained=False. Loading the checkpoint of a run with Nero next undoes the change",
            stacklevel=stacklevel + 1,
        )


def warn_if_unfrozen(parts: Iterable[Part], stacklevel: int) -> None:
    """Warn if parameters that were frozen until now are about to be balanced, which changes what they compute."""
    parts = [part for part in parts if part.role.kind == "neuron"]
    change = relative_change(parts)
    if change > MIN_CHANGE:
        warnings.warn(
            f"{_listed(parts)} unfrozen, and balancing moves the weights by {change:.0%} of their norm, which changes "
            "what the model computes: keep such weights with nero.Nero(..., pretrained=True), or balance them without "
            "this warning with pretrained=False",
            stacklevel=stacklevel + 1,
        )


@torch.no_grad()
def relative_change(parts: Iterable[Part]) -> float:
    """Return the norm of the change that balancing makes to neurons, relative to the norm of the neurons."""
    neurons = [part for part in parts if part.role.kind == "neuron" and part.parameter.numel()]
    moved = total = 0.0
    for part in neurons:
        if part.parameter.requires_grad and can_read(part.parameter):
            change, norm = balance_change(part.parameter, part.role, part.group["fix_mean"], part.group["fix_norm"])
            moved, total = math.hypot(moved, change), math.hypot(total, norm)
    return moved / total if total else 0.0


def _looks_pretrained(part: Part) -> bool:
    is_loaded = getattr(part.parameter, "_is_hf_initialized", False)  # set by from_pretrained of transformers 5
    return is_loaded or any(name in part.name for name in ADAPTERS)


def _listed(parts: list[Part]) -> str:
    more = f" and {len(parts) - 1} more are" if len(parts) > 1 else " is"
    return f"{parts[0].name}{more}"
