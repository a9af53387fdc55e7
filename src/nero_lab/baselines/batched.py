"""The base of our own optimisers: their state exists from the start, and no step waits for the device."""

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class Batched(torch.optim.Optimizer, ABC):
    """An optimiser whose step never waits for the device, so that a CUDA graph can capture the first one.

    A subclass creates the state of a parameter (:meth:`start`), and steps tensors of one device and dtype
    (:meth:`update`).
    """

    @abstractmethod
    def start(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""

    @abstractmethod
    def update(
        self, options: dict[str, Any], weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        """Step tensors of one device and dtype."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and create their state, which a CUDA graph would create anew at every replay."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self.state[parameter] = self.start(parameter, group)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no caller has a closure
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    batches.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for weights in batches.values():
                grads = [weight.grad for weight in weights if weight.grad is not None]
                self.update(group, weights, grads, [self.state[weight] for weight in weights])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what :meth:`state_dict` gave; torch would go on writing into the original."""
        super().load_state_dict(copy.deepcopy(state_dict))


def alike(*tensors: Tensor) -> bool:
    """Tell whether all tensors lie in memory alike, without gaps or overlaps, as the kernels need."""
    first, elements = tensors[0], 1
    for stride, size in sorted(zip(first.stride(), first.shape, strict=True)):
        if size > 1 and stride != elements:
            return False
        elements *= size
    # the kernels index in int32 and look a little beyond the end
    return 0 < elements < 2**31 - 2**21 and all(
        type(each) in (Tensor, nn.Parameter)
        and each.dtype == torch.float32
        and each.shape == first.shape
        and each.stride() == first.stride()
        and not each.is_neg()
        for each in tensors
    )
