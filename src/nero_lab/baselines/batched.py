"""The bases of our own optimisers: steps with a closure, state that exists from the start, and checks of options."""

import copy
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn


class ClosureStep(torch.optim.Optimizer, ABC):
    """An optimiser whose :meth:`step` evaluates the closure, if there is one, and then calls :meth:`step_all`."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Evaluate the closure, then step every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_all()
        return loss

    @abstractmethod
    def step_all(self) -> None:
        """Step every parameter that has a gradient."""


class Batched(ClosureStep):
    """An optimiser whose step never waits for the device, so that a CUDA graph can capture the first one.

    A subclass checks its options (:meth:`check`), creates the state of a parameter (:meth:`start`), and steps tensors
    of one device and dtype (:meth:`update`).
    """

    @abstractmethod
    def check(self, options: dict[str, Any]) -> None:
        """Raise a ValueError if an option of a group is invalid."""

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
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self.state[parameter] = self.start(parameter, group)

    def step_all(self) -> None:
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
        for parameter, state in self.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(
                        f"{name} of shape {tuple(value.shape)} does not fit a parameter of shape "
                        f"{tuple(parameter.shape)}: load the state of an optimiser of the same model"
                    )


def check_number(name: str, value: object, what: str, good: Callable[[float], bool]) -> None:
    """Raise if an option is not a real number, or an invalid one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not good(float(value)):
        raise ValueError(f"{name} must be {what}, got {value!r}")


def check_lr(lr: object) -> None:
    """Raise if a learning rate is neither a valid number nor a tensor of one."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr as a tensor must have one element, got shape {tuple(lr.shape)}")
    value = lr.item() if isinstance(lr, Tensor) else lr
    check_number("lr", value, "finite and not negative, like 0.01", lambda x: 0 <= x < math.inf)


def check_beta(name: str, beta: object) -> None:
    """Raise if the decay of a running average is not in [0, 1)."""
    check_number(name, beta, "in [0, 1), like 0.999", lambda x: 0 <= x < 1)


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
