"""The optimisers that the paper compares, in the forms in which it ran them, by name."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

import nero
from nero_lab.baselines.batched import check_beta, check_number
from nero_lab.baselines.lamb import Lamb
from nero_lab.baselines.madam import Madam

__all__ = ["OPTIONS", "Lamb", "Madam", "make", "prime"]

BETA = 0.999  # of every running average of squares

#: The optimisers' names, each with its options.
OPTIONS = {
    "nero": (
        "fix_mean",
        "fix_norm",
        "fixed_scale",
        "scale",
        "gain_penalty",
        "depth",
        "beta",
        "longest_step",
        "unbounded",
    ),
    "sgd": ("momentum", "weight_decay", "clip", "balanced"),
    "adam": ("beta1", "eps", "balanced"),
    "lamb": ("beta1", "eps", "balanced"),
    "madam": ("balanced",),
}


def make(name: str, model: nn.Module, lr: float | Tensor, **options: Any) -> torch.optim.Optimizer:
    """An optimiser of the paper for a model, without momentum and weight decay unless asked for.

    Args:
        name: ``"nero"``, ``"sgd"``, ``"adam"``, ``"lamb"`` or ``"madam"``.
        model: whose parameters to train; Nero balances it at once.
        lr: a number, or a tensor of one element on the model's device.
        options: for Nero ``fix_mean`` and ``fix_norm`` (by default both), and ``fixed_scale``, the
            authors' form: a neuron's step is relative to the mean norm of its tensor when the
            optimiser is made; ``scale``, what the steps of gains and biases are relative to (σ_b), ``gain_penalty``,
            which pulls gains to one, ``depth``, which the rate is divided by, ``beta`` (0.999, as the paper's),
            ``longest_step`` (none) and ``unbounded``, to whom it does not apply: to the words that are ``"read"``
            (tables of nn.Embedding), or to all ``"words"``, those that are said too (the neurons of an nn.Linear that
            has as many).
            For SGD ``momentum`` and ``weight_decay`` (of all parameters), and ``clip``: the gradient of all weights
            together is shortened to this norm, if it is longer. For Adam and LAMB ``beta1`` (0 by default) and ``eps``
            (1e-8 and 1e-6). For all but Nero ``balanced``: hold the neurons to both constraints from the first step on.

    Raises:
        ValueError: an unknown name or option, or a value that makes no sense.

    Example:
        >>> optimiser = make("lamb", nn.Linear(8, 4), lr=0.01, beta1=0.9)
        >>> type(optimiser).__name__
        'Lamb'
    """
    if name not in OPTIONS:
        raise ValueError(f"no optimiser is called {name!r}: use one of {', '.join(OPTIONS)}")
    if unknown := sorted(set(options) - set(OPTIONS[name])):
        raise ValueError(f"{name} has no option {', '.join(unknown)}: it has {', '.join(OPTIONS[name])}")
    for switch in ("balanced", "fix_mean", "fix_norm", "fixed_scale"):
        if not isinstance(options.get(switch, False), bool):
            raise ValueError(f"{switch} must be True or False, but it is {options[switch]!r}")
    if name == "nero":
        return _nero(model, lr, **options)
    balanced = options.pop("balanced", False)
    optimiser = _BASELINES[name](model, lr, **options)
    if balanced:
        nero.balance_after_step(optimiser, model, at_once=False)
    return optimiser


@torch.no_grad()
def prime(optimiser: torch.optim.Optimizer) -> None:
    """Make the state that an optimiser of torch makes at its first step, so that a graph need not.

    A graph that captures the first step would make the state anew at every replay. Weights,
    gradients and learning rates are not touched, and hooks do not run. An optimiser that has
    state, or that keeps none, is left alone.

    Args:
        optimiser: of :func:`make`, before its first step.
    """
    if optimiser.state:
        return
    # stand-ins at zero take the step, and their state is handed on
    stand_ins = {
        parameter: torch.zeros_like(parameter, requires_grad=True)
        for group in optimiser.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    for stand_in in stand_ins.values():
        stand_in.grad = torch.zeros_like(stand_in)
    again: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = type(optimiser)
    twin = again(
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
    fix_mean: bool = True,
    fix_norm: bool = True,
    fixed_scale: bool = False,
    scale: float | None = None,
    gain_penalty: float = 0.0,
    depth: float | Literal["auto"] = 1.0,
    beta: float = BETA,
    longest_step: float = math.inf,
    unbounded: Literal["read", "words"] | None = None,
) -> nero.Nero:
    groups = _at_fixed_scale(model, fix_mean, fix_norm) if fixed_scale else nero.param_groups(model)
    if unbounded is not None:
        if unbounded not in ("read", "words"):
            raise ValueError(f"unbounded must be 'read', 'words' or None, but it is {unbounded!r}")
        groups = _with_free_words(groups, model, said=unbounded == "words")
    for group in groups:
        if scale is not None and group["role"] != "neuron":
            group["scale"] = scale
    optimiser = nero.Nero(
        groups,
        lr=lr,
        beta=beta,
        longest_step=longest_step,
        fix_mean=fix_mean,
        fix_norm=fix_norm,
        gain_penalty=gain_penalty,
    )
    if depth == "auto":
        optimiser.count_depth(model)
    else:
        for group in optimiser.param_groups:
            group["depth"] = depth
    return optimiser


def _with_free_words(groups: list[dict[str, Any]], model: nn.Module, *, said: bool) -> list[dict[str, Any]]:
    """The groups, with words in some of their own, whose steps have no bound: those that are read, or all."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    sizes = {each.num_embeddings for each in tables}
    last = [each for each in model.modules() if isinstance(each, nn.Linear) and each.out_features in sizes]
    words = {id(each.weight) for each in (*tables, *(last if said else ()))}
    if not words:
        raise ValueError("there are no words in this model: it has no nn.Embedding")
    if words - {id(parameter) for group in groups for _, parameter in group["params"]}:
        raise ValueError("words can be unbounded where they are parameters, and not made by a parametrization")
    return [
        {**group, "params": members, **bound}
        for group in groups
        for free, bound in ((False, {}), (True, {"longest_step": math.inf}))
        if (members := [each for each in group["params"] if (id(each[1]) in words) == free])
    ]


@torch.no_grad()
def _at_fixed_scale(model: nn.Module, fix_mean: bool, fix_norm: bool) -> list[dict[str, Any]]:
    """Groups for Nero in which the step of every tensor of neurons has one scale, for good."""
    nero.balance_(model, fix_mean=fix_mean, fix_norm=fix_norm)
    roles = nero.roles_of(model)
    groups = []
    for group in nero.param_groups(model):
        if group["role"] != "neuron" or fix_norm:
            # balanced neurons have norm one; gains and biases have a fixed scale of their own
            groups.append({**group, "scale": 1.0} if group["role"] == "neuron" else group)
            continue
        for name, parameter in group["params"]:
            role = roles[name]
            norms = torch.linalg.vector_norm(role.view(parameter), dim=role.axes)
            scale = norms.mean().item() or 0.01  # what the authors take for zero
            groups.append({**group, "params": [(name, parameter)], "scale": scale})
    return groups


def _sgd(
    model: nn.Module,
    lr: float | Tensor,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> torch.optim.Optimizer:
    check_beta("momentum", momentum)
    check_number("weight_decay", weight_decay, "finite and not negative, like 1e-4", lambda x: 0 <= x < math.inf)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
    if clip is not None:
        check_number("clip", clip, "finite and positive, like 0.25", lambda x: 0 < x < math.inf)

        def shorten(*_: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)

        optimiser.register_step_pre_hook(shorten)
    return optimiser


def _adam(model: nn.Module, lr: float | Tensor, beta1: float = 0.0, eps: float = 1e-8) -> torch.optim.Optimizer:
    check_number("eps", eps, "finite and positive, like 1e-8", lambda x: 0 < x < math.inf)
    # capturable changes nothing in a fused step, but torch lets no other be captured
    return torch.optim.Adam(model.parameters(), lr=lr, betas=(beta1, BETA), eps=eps, fused=True, capturable=True)


def _lamb(model: nn.Module, lr: float | Tensor, beta1: float = 0.0, eps: float = 1e-6) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=lr, betas=(beta1, BETA), eps=eps)


def _madam(model: nn.Module, lr: float | Tensor) -> torch.optim.Optimizer:
    return Madam(model.parameters(), lr=lr, beta=BETA)


_BASELINES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "lamb": _lamb,
    "madam": _madam,
}
