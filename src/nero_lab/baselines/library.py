"""Optimisers from libraries, as people run them in 2026: AdamW, Muon beside AdamW, NorMuon, SOAP and Lion."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from nero.messages import how_to_install

#: Decay of weights with two or more axes, per step and relative to the learning rate.
WEIGHT_DECAY = 0.1
#: The learning rate of AdamW relative to that of Muon, which has the hidden matrices.
ADAMW_RATIO = 0.15
#: Averages of AdamW.
BETAS = (0.9, 0.95)
#: The module and the class of optimisers that an installation may lack; imported when used.
LIBRARIES = {
    "muon": ("torch.optim", "Muon"),
    "normuon": ("pytorch_optimizer", "NorMuon"),
    "lion": ("pytorch_optimizer", "Lion"),
    "soap": ("pytorch_optimizer", "SOAP"),
}


def adamw(
    model: nn.Module, lr: float | Tensor, weight_decay: float = WEIGHT_DECAY, clip: float | None = None
) -> torch.optim.Optimizer:
    """Make AdamW, which decays weights of two or more axes, of gradients clipped to a norm if there is one."""
    return clipped(_adamw(model.parameters(), lr, weight_decay), model, clip)


def muon(model: nn.Module, lr: float | Tensor, weight_decay: float = WEIGHT_DECAY) -> torch.optim.Optimizer:
    """Make torch's Muon for the hidden matrices, with AdamW for all other parameters."""
    make = _of_library("muon")

    def of_matrices(matrices: list[Tensor]) -> torch.optim.Optimizer:
        return _scale_steps(make(matrices, lr=lr, weight_decay=weight_decay))

    return _with_adamw(of_matrices, model, lr, weight_decay)


def normuon(model: nn.Module, lr: float | Tensor, weight_decay: float = WEIGHT_DECAY) -> torch.optim.Optimizer:
    """Make NorMuon for the hidden matrices, with AdamW for all other parameters."""
    make = _of_library("normuon")

    def of_matrices(matrices: list[Tensor]) -> torch.optim.Optimizer:
        return make([{"params": matrices, "lr": lr, "weight_decay": weight_decay, "use_muon": True}])

    return _with_adamw(of_matrices, model, lr, weight_decay)


def lion(model: nn.Module, lr: float | Tensor, weight_decay: float = WEIGHT_DECAY) -> torch.optim.Optimizer:
    """Make Lion, which decays weights of two or more axes."""
    return _of_library("lion")(_by_decay(model.parameters(), weight_decay), lr=lr)


def soap(model: nn.Module, lr: float | Tensor, weight_decay: float = WEIGHT_DECAY) -> torch.optim.Optimizer:
    """Make SOAP for all parameters, with a new basis every 10 steps; axes of more than 2048 elements keep Adam's."""
    return _of_library("soap")(
        _by_decay(model.parameters(), weight_decay),
        lr=lr.item() if isinstance(lr, Tensor) else lr,  # a tensor would make every step wait for the device
        precondition_frequency=10,
        max_precondition_dim=2048,
    )


def clipped(optimiser: torch.optim.Optimizer, model: nn.Module, clip: float | None) -> torch.optim.Optimizer:
    """Let an optimiser clip the gradient of all parameters together to a norm, if one is given."""
    if clip is not None:

        def clip_gradient(*_: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)

        optimiser.register_step_pre_hook(clip_gradient)
    return optimiser


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Return the weights that Muon is made for.

    These are the weights of linear layers, except the head and the embeddings: the last linear layer, or those whose
    name ends in ``head``; layers with ``embed`` or ``patch`` in their name; and a weight that an embedding shares.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    heads = [name for name in layers if name.endswith("head")] or list(layers)[-1:]
    tables: set[Tensor] = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    outer = tables | {layers[name].weight for name in layers if name in heads or "embed" in name or "patch" in name}
    weights = dict.fromkeys(layer.weight for layer in layers.values())  # shared ones once
    return [weight for weight in weights if weight.requires_grad and weight not in outer]


class Together(torch.optim.Optimizer):
    """Optimisers that step one after another, with one list of groups, one state and one checkpoint.

    The hooks of this object run once a step, before the first and after the last of its parts.

    Args:
        parts: optimisers of disjoint parameters, before their first step. They share their groups and their state with
            this one.

    Raises:
        ValueError: if two parts have a parameter in common.

    Example:
        >>> weight, bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        >>> optimiser = Together([torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([bias], lr=0.01)])
        >>> [group["lr"] for group in optimiser.param_groups]
        [0.1, 0.01]
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def step(self) -> None:  # type: ignore[override]  # no caller has a closure
        """Step every part."""
        for part in self.parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()  # a loaded state has other groups

    def _share(self) -> None:
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:stop], self.state
            start = stop


def _with_adamw(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], model: nn.Module, lr: float | Tensor, weight_decay: float
) -> torch.optim.Optimizer:
    """Give the hidden matrices to one optimiser, and all other parameters to AdamW at its own rate."""
    matrices = hidden_matrices(model)
    hidden = set(matrices)
    others = [parameter for parameter in model.parameters() if parameter not in hidden]
    rest = _adamw(others, lr * ADAMW_RATIO, weight_decay)
    for group in rest.param_groups:
        group["lr_ratio"] = ADAMW_RATIO
    return Together([make(matrices), rest])


def _scale_steps(optimiser: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let a tensor be the rate of an optimiser that would read it on the host, so that a CUDA graph can hold its steps.

    The optimiser makes a step at rate one, of which the hooks keep the share of the rate. This is the same step, since
    the steps of Muon are proportional to the rate, weight decay included.
    """
    kept: list[tuple[dict[str, Any], Any, list[Tensor]]] = []

    def start(*_: Any) -> None:
        for group in optimiser.param_groups:
            kept.append((group, group["lr"], [weight.detach().clone() for weight in group["params"]]))
            group["lr"] = 1.0

    @torch.no_grad()
    def end(*_: Any) -> None:
        for group, lr, before in kept:
            steps = torch._foreach_sub(group["params"], before)
            torch._foreach_mul_(steps, lr)
            torch._foreach_copy_(group["params"], before)
            torch._foreach_add_(group["params"], steps)
            group["lr"] = lr
        kept.clear()

    optimiser.register_step_pre_hook(start)
    optimiser.register_step_post_hook(end)
    return optimiser


def _adamw(parameters: Iterable[nn.Parameter], lr: float | Tensor, weight_decay: float) -> torch.optim.Optimizer:
    # torch captures only a capturable step in a CUDA graph
    return torch.optim.AdamW(_by_decay(parameters, weight_decay), lr=lr, betas=BETAS, fused=True, capturable=True)


def _by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters in groups: those of two or more axes decay."""
    parameters = list(parameters)
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def missing(name: str) -> str:
    """Tell what an optimiser lacks, and how to install it; empty if nothing."""
    module, kind = LIBRARIES.get(name, ("torch.optim", "Optimizer"))
    if module == "torch.optim":
        needs = f"torch 2.9 or newer, got {torch.__version__}: install a newer torch"
        return "" if hasattr(torch.optim, kind) else f"{name} needs {needs}"
    return "" if find_spec(module) else f"{name} needs {module}: {how_to_install('lab')}"


def _of_library(name: str) -> Callable[..., torch.optim.Optimizer]:
    if fault := missing(name):
        raise ValueError(fault)
    module, kind = LIBRARIES[name]
    found: Callable[..., torch.optim.Optimizer] = getattr(import_module(module), kind)
    return found
