"""Madam: every weight is multiplied by a factor, and so changes relative to itself."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from nero_lab.baselines.batched import Batched, alike
from nero_lab.launch import kernels_work, on

#: Weights that a program of the kernel steps.
BLOCK = 1024


class Madam(Batched):
    r"""Madam as the paper ran it.

    Every weight :math:`w` with gradient :math:`g` makes the step

    .. math::
        v &\leftarrow \beta v + (1 - \beta) \, g^2, \qquad
        n = \operatorname{clip}\!\big(g \big/ \sqrt{v / (1 - \beta^t)}, \pm c\big) \\
        w &\leftarrow w \exp(-\eta \operatorname{sign}(w) \, n)

    with 0/0 = 0, and is then held to at most ``p_scale`` times the root mean square that its tensor
    had at construction. A weight at zero stays there.

    Args:
        params: parameters, named parameters or groups.
        lr: η, a float, or a tensor of one element on the parameters' device.
        beta: β, the decay of the running average of g².
        clip: c, the largest normalised gradient.
        p_scale: the greatest weight, relative to its tensor's root mean square at construction.

    Example:
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimiser = Madam(layer.parameters(), lr=0.01)
        >>> layer(torch.randn(2, 8)).square().sum().backward()
        >>> optimiser.step()

    Reference:
        Bernstein et al., "Learning compositional functions via multiplicative weight updates", 2020.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        beta: float = 0.999,
        clip: float = 10.0,
        p_scale: float = 3.0,
    ) -> None:
        # capturable: torch keeps "step" on the device when it loads a checkpoint
        super().__init__(params, {"lr": lr, "beta": beta, "clip": clip, "p_scale": p_scale, "capturable": True})

    @torch.no_grad()
    def start(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        rms = torch.linalg.vector_norm(parameter, dtype=wide).item() / math.sqrt(max(parameter.numel(), 1))
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            "limit": options["p_scale"] * rms,  # a float: torch._foreach_clamp_max_ broadcasts no tensor
        }

    def update(
        self, options: dict[str, Any], weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        beta, clip, lr = options["beta"], options["clip"], options["lr"]
        dtype, device = weights[0].dtype, weights[0].device
        squares = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        limits = [state["limit"] for state in states]
        torch._foreach_add_(steps, 1)
        # expm1: at the first step the subtraction 1 - β^t would cost float32 three digits
        decay = math.log(beta) if beta else -math.inf
        corrections = torch.expm1(torch.stack(steps).to(dtype) * decay).neg().sqrt()
        if kernels_work(device) and all(map(alike, weights, grads, squares)):
            rate = lr.to(device, dtype) if isinstance(lr, Tensor) else torch.full((), lr, dtype=dtype, device=device)
            with on(device):
                for each in zip(weights, grads, squares, corrections.unbind(), limits, strict=True):
                    _launch(*each, rate, beta, clip)
            torch.autograd.graph.increment_version(weights)  # torch did not see the kernel write
            return

        torch._foreach_mul_(squares, beta)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_clamp_min_(roots, torch.finfo(dtype).tiny)  # smaller than any root but zero, so that 0/0 = 0
        turns = torch._foreach_div(grads, roots)
        torch._foreach_mul_(turns, corrections.unbind())
        torch._foreach_clamp_max_(turns, clip)
        torch._foreach_clamp_min_(turns, -clip)

        torch._foreach_mul_(turns, torch._foreach_sign(weights))
        torch._foreach_mul_(turns, -lr.to(device, dtype).reshape(()) if isinstance(lr, Tensor) else -lr)
        torch._foreach_exp_(turns)
        torch._foreach_mul_(weights, turns)
        torch._foreach_clamp_max_(weights, limits)
        torch._foreach_clamp_min_(weights, [-limit for limit in limits])


def _launch(
    weight: Tensor, grad: Tensor, square: Tensor, correction: Tensor, limit: float, lr: Tensor, beta: float, clip: float
) -> None:
    """Step one tensor in one pass; the plain step makes twenty."""
    from nero_lab import kernels

    count, tiny = weight.numel(), torch.finfo(weight.dtype).tiny
    kernels.madam[(-(-count // BLOCK),)](
        weight,
        grad,
        square,
        correction,
        lr,
        count,
        beta,
        1 - beta,
        clip,
        limit,
        tiny,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )
