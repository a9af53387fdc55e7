"""The optimisers of the experiments by name: the paper's as the paper ran them, and those from libraries."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

import nero
from nero_lab.baselines import library
from nero_lab.baselines.lamb import Lamb
from nero_lab.baselines.library import Together, clipped, missing
from nero_lab.baselines.madam import Madam

__all__ = ["EAGER", "Lamb", "Madam", "make", "missing", "prime", "set_rate"]

#: β of every running average of squares.
BETA = 0.999

#: Optimisers whose steps depend on counts of the host, so that a CUDA graph cannot hold them.
EAGER = frozenset({"soap"})


def make(name: str, model: nn.Module, lr: float | Tensor, **options: Any) -> torch.optim.Optimizer:
    """Make an optimiser for a model: one of the paper, by default without momentum and weight decay, or of a library.

    All optimisers but Nero take ``balanced``: hold the neurons to both constraints from the first step on, of the whole
    model or of the submodule that it names. The paper's baselines start from the model as it is; those of libraries
    balance it at once, as Nero does.

    Args:
        name: "nero", "sgd", "adam", "lamb" or "madam", or a function of :mod:`nero_lab.baselines.library`.
        model: the model to train; Nero balances it at once.
        lr: a float, or a tensor of one element on the model's device.
        options: options of the optimiser.

            - Nero: ``fix_mean`` and ``fix_norm``, as of :class:`nero.Nero`. ``fixed_scale``, the authors' form: the
              steps of a neuron are relative to the mean norm of its tensor at construction. ``scale``, σ_b of gains and
              biases, and ``neuron_scale``, σ of neurons. ``gain_penalty``, which pulls gains to one. ``depth``, which
              divides the rate. ``beta`` and ``longest_step``, ``momentum`` and ``nesterov``, as of :class:`nero.Nero`.
            - SGD: ``momentum``, ``weight_decay`` (of all parameters) and ``clip``, the greatest norm of the gradient of
              all parameters together.
            - Adam and LAMB: ``beta1`` (0 by default) and ``eps`` (1e-8 and 1e-6).
            - AdamW, Muon, NorMuon, Lion and SOAP: ``weight_decay`` of weights with two or more axes (0.1). AdamW has
              ``clip``, too. Muon and NorMuon train the hidden matrices, and AdamW all else at 0.15 times their rate.

    Raises:
        ValueError: a library that is not installed.

    Example:
        >>> optimiser = make("lamb", nn.Linear(8, 4), lr=0.01, beta1=0.9)
        >>> type(optimiser).__name__
        'Lamb'
    """
    if name == "nero":
        return _nero(model, lr, **options)
    balanced = options.pop("balanced", False)
    optimiser = _BASELINES[name](model, lr, **options)
    if balanced:
        part = model.get_submodule(balanced) if isinstance(balanced, str) else model
        nero.balance_after_step(optimiser, part, at_once=name in _LIBRARY)
    return optimiser


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of an optimiser from :func:`make`, without waiting for the device.

    A group with a ratio to the rate (AdamW beside Muon) gets its own rate. Tensors are filled in place, as CUDA graphs
    need.
    """
    filled = set()
    for group in optimiser.param_groups:
        value = rate * group.get("lr_ratio", 1.0)
        if not isinstance(group["lr"], Tensor):
            group["lr"] = value
        elif id(group["lr"]) not in filled:  # groups may share their tensor
            group["lr"].fill_(value)
            filled.add(id(group["lr"]))


@torch.no_grad()
def prime(optimiser: torch.optim.Optimizer) -> None:
    """Create the state that an optimiser of torch creates at its first step.

    A CUDA graph that captured the first step would create the state anew at every replay. Weights, gradients and
    learning rates stay as they are, and hooks do not run. An optimiser that has state, or needs none, is left alone.

    Args:
        optimiser: one from :func:`make`, before its first step.
    """
    for part in optimiser.parts if isinstance(optimiser, Together) else [optimiser]:
        if not any(parameter in part.state for group in part.param_groups for parameter in group["params"]):
            _prime(part)


def _prime(optimiser: torch.optim.Optimizer) -> None:
    # stand-ins of zeros take the step and hand on their state
    stand_ins = {
        parameter: torch.zeros_like(parameter, requires_grad=True)
        for group in optimiser.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    for stand_in in stand_ins.values():
        stand_in.grad = torch.zeros_like(stand_in)
    rebuild: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = type(optimiser)
    twin = rebuild(
        [
            {**group, "params": [stand_ins[each] for each in group["params"] if each in stand_ins]}
            for group in optimiser.param_groups
        ]
    )
    twin.step()
    for parameter, stand_in in stand_ins.items():
        for key, value in twin.state.get(stand_in, {}).items():
            optimiser.state[parameter][key] = value.zero_() if isinstance(value, Tensor) else value


def _nero(
    model: nn.Module,
    lr: float | Tensor,
    *,
    fixed_scale: bool = False,
    scale: float | None = None,
    neuron_scale: float | None = None,
    depth: float | Literal["auto"] = 1.0,
    beta: float = BETA,
    **options: Any,
) -> nero.Nero:
    constraints = {name: bool(options.get(name, True)) for name in ("fix_mean", "fix_norm")}
    groups = _at_fixed_scale(model, **constraints) if fixed_scale else nero.param_groups(model)
    for group in groups:
        of_role = neuron_scale if group["role"] == "neuron" else scale
        if of_role is not None:
            group["scale"] = of_role
    optimiser = nero.Nero(groups, lr=lr, beta=beta, **options)
    if depth == "auto":
        optimiser.count_depth(model)
    for group in optimiser.param_groups:
        group["lr"] = lr  # the loops fill this one tensor
        if depth != "auto":
            group["depth"] = depth
    return optimiser


@torch.no_grad()
def _at_fixed_scale(model: nn.Module, fix_mean: bool, fix_norm: bool) -> list[dict[str, Any]]:
    """Return groups for Nero in which every tensor of neurons has one fixed scale."""
    nero.balance_(model, fix_mean=fix_mean, fix_norm=fix_norm)
    roles = nero.roles_of(model)
    groups = []
    for group in nero.param_groups(model):
        if group["role"] != "neuron" or fix_norm:
            # balanced neurons have norm one; gains and biases keep their own scale
            groups.append({**group, "scale": 1.0} if group["role"] == "neuron" else group)
            continue
        for name, parameter in group["params"]:
            role = roles[name]
            norms = torch.linalg.vector_norm(role.view(parameter), dim=role.axes)
            scale = norms.mean().item() or 0.01  # the authors' stand-in for zero
            groups.append({**group, "params": [(name, parameter)], "scale": scale})
    return groups


def _sgd(
    model: nn.Module,
    lr: float | Tensor,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    fused = not any(hasattr(parameter, "device_mesh") for parameter in parameters)  # torch has no such step of shards
    optimiser = torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=fused)
    return clipped(optimiser, model, clip)


def _adam(model: nn.Module, lr: float | Tensor, beta1: float = 0.0, eps: float = 1e-8) -> torch.optim.Optimizer:
    # capturable changes nothing in a fused step, but torch captures no other in a CUDA graph
    return torch.optim.Adam(model.parameters(), lr=lr, betas=(beta1, BETA), eps=eps, fused=True, capturable=True)


def _lamb(model: nn.Module, lr: float | Tensor, beta1: float = 0.0, eps: float = 1e-6) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=lr, betas=(beta1, BETA), eps=eps)


def _madam(model: nn.Module, lr: float | Tensor) -> torch.optim.Optimizer:
    return Madam(model.parameters(), lr=lr, beta=BETA)


_LIBRARY: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": library.adamw,
    "muon": library.muon,
    "normuon": library.normuon,
    "lion": library.lion,
    "soap": library.soap,
}
_BASELINES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "lamb": _lamb,
    "madam": _madam,
    **_LIBRARY,
}
