"""Ways to start a neuron at the origin, and a gain near zero, as one small optimiser to compare them."""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

#: What happens to a neuron that starts at zero: it jumps to the unit sphere at its first gradient; its norm grows by
#: the angle at each step; it moves freely until its norm reaches one, and is held there; or its norm stays at most one.
Start: TypeAlias = Literal["jump", "forced", "held", "ball"]


class Variant(torch.optim.Optimizer):
    """Algorithm 1 of the paper in plain operations, with a choice of how neurons and gains start.

    Args:
        groups: parameter groups of :func:`nero.param_groups`.
        lr: the angle.
        start: see :data:`Start`.
        gain_scale: the least scale of a gain; zero for the paper's, the mean absolute value at the start.
        centre: hold neurons that start at zero to zero mean, too.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float = 0.01,
        *,
        start: Start = "ball",
        gain_scale: float = 1.0,
        centre: bool = True,
    ) -> None:
        super().__init__(groups, {"lr": lr, "beta": 0.999})
        self.start, self.centre = start, centre
        for group in self.param_groups:
            axes = group["fan_in_axes"]
            for weight in group["params"]:
                if not weight.requires_grad:
                    continue
                state = self.state[weight]
                state["step"] = 0
                state["square"] = torch.zeros_like(weight.sum(axes, keepdim=True) if axes else weight)
                if axes:
                    norm = _norm(weight.detach(), axes)
                    state["from_zero"], state["radius"] = norm == 0, torch.zeros_like(norm)
                    weight.data.copy_(torch.where(norm == 0, weight, _balanced(weight.detach(), axes)))
                else:
                    mean = weight.detach().abs().mean()
                    state["scale"] = torch.where(mean > 0, mean, 0.01)
                    if group["role"] == "gain":
                        state["scale"] = state["scale"].clamp_min(gain_scale) if gain_scale else state["scale"]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no caller has a closure
        """Turn every neuron, and nudge every gain and bias."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, group)

    def _move(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, axes, beta, lr = self.state[weight], group["fan_in_axes"], group["beta"], group["lr"]
        state["step"] += 1
        square = grad.square().sum(axes, keepdim=True) if axes else grad.square()
        state["square"].lerp_(square, 1 - beta)
        divisor = (state["square"] / (1 - beta ** state["step"])).sqrt()
        direction = torch.where(divisor > 0, grad / divisor, 0.0)
        if not axes:
            weight.sub_(lr * state["scale"] * direction)
            return
        norm = _norm(weight, axes)
        if self.start == "jump":
            turned = weight - lr * torch.where(norm > 0, norm, 0.01) * direction
            weight.copy_(torch.where(square > 0, _balanced(turned, axes), weight))
            return
        grown = weight - lr * direction
        if self.centre:
            grown = grown - grown.mean(axes, keepdim=True)
        size = _norm(grown, axes)
        if self.start == "forced":
            state["radius"].add_(lr).clamp_max_(1)
            grown = grown / size.clamp_min(1e-30) * state["radius"]
        else:
            grown = grown / size.clamp_min(1)
        turned = torch.where(state["from_zero"], grown, _balanced(weight - lr * norm * direction, axes))
        weight.copy_(torch.where(square > 0, turned, weight))
        if self.start == "held":
            state["from_zero"] &= size < 1


def _balanced(weight: Tensor, axes: tuple[int, ...]) -> Tensor:
    centred = weight - weight.mean(axes, keepdim=True)
    return centred / _norm(centred, axes).clamp_min(1e-30)


def _norm(weight: Tensor, axes: tuple[int, ...]) -> Tensor:
    return weight.square().sum(axes, keepdim=True).sqrt()
