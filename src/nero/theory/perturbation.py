"""Perturbations of weights, and their sizes relative to the weights."""

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from nero.rule import norm

#: A change of weights, ΔW, by parameter name. Parameters that it does not name stay unchanged.
Perturbation: TypeAlias = Mapping[str, Tensor]


def check_perturbation(model: nn.Module, perturbation: Perturbation) -> None:
    """Raise unless a perturbation fits the trained parameters of a model and moves at least one of them.

    Raises:
        TypeError: if it is not a mapping from names to dense floating-point tensors.
        ValueError: if a parameter is unknown or frozen, a shape differs, a value is not finite, or all are zero.
    """
    if not isinstance(perturbation, Mapping) or not all(isinstance(each, Tensor) for each in perturbation.values()):
        raise TypeError("a perturbation must be a dict from parameter names to tensors of the parameters' shapes")
    parameters = dict(model.named_parameters())
    for name, change in perturbation.items():
        if name not in parameters or not parameters[name].requires_grad:
            known = ", ".join(list(parameters)[:4])
            raise ValueError(f"{name!r} is not a trained parameter of the model, which has {known}")
        if not change.is_floating_point() or change.layout != torch.strided:
            raise TypeError(
                f"the perturbation of {name!r} must be a dense floating-point tensor, got {change.dtype} with layout "
                f"{change.layout}"
            )
        if change.shape != parameters[name].shape:
            raise ValueError(
                f"the perturbation of {name!r} must have shape {tuple(parameters[name].shape)}, "
                f"got {tuple(change.shape)}"
            )
        if not bool(change.isfinite().all()):
            raise ValueError(f"the perturbation of {name!r} holds NaN or infinite values")
    if not any(bool(change.any()) for change in perturbation.values()):
        raise ValueError("the perturbation is zero everywhere: it has neither a direction nor a size")


def check_gradients_enabled() -> None:
    """Raise in inference mode, where no gradient can be computed."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("torch.inference_mode() records no gradients: call this outside of it")


def frobenius_norm(tensor: Tensor) -> float:
    """Return the Frobenius norm in float64, without overflow or underflow of the squares."""
    wide = tensor.detach().double().flatten()
    return float(norm(wide, (0,))) if wide.numel() else 0.0


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, with 0 / 0 = 0 and x / 0 = inf."""
    if whole == 0:
        return math.inf if part > 0 else 0.0
    return part / whole
