"""LAMB: each tensor steps in Adam's direction, relative to its own norm."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from nero_lab.baselines.batched import Batched, alike, check_beta, check_lr, check_number, kernels_work, on

#: No weight counts for more than this in the trust ratio.
LARGEST_NORM = 10.0
#: From so many weights on a tensor is worth two launches of its own.
LARGE = 1 << 19
#: Programs of the kernel that looks at a tensor, and the weights that one holds at a time.
PROGRAMS, BLOCK = 1024, 1024


class Lamb(Batched):
    r"""LAMB as the paper ran it: without bias correction and weight decay.

    Every tensor :math:`w` with gradient :math:`g` makes the step

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) \, g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) \, g^2, \qquad
        u = m \big/ (\sqrt v + \epsilon) \\
        w &\leftarrow w - \eta \, \frac{\min(\|w\|, 10)}{\|u\|} \, u

    with the ratio replaced by one where either norm is zero. That of ``pytorch_optimizer`` (4.1) is not used: by
    default it corrects for bias on the host, it adds ε to the norm of u, and it makes its state at the first step only.

    Args:
        params: parameters, named parameters or groups.
        lr: η, a number, or a tensor of one element on the parameters' device.
        betas: how much of the running averages of g and g² is kept in a step.
        eps: ε.

    Raises:
        ValueError: an option that makes no sense.

    Example:
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimiser = Lamb(layer.parameters(), lr=0.01)
        >>> layer(torch.randn(2, 8)).square().sum().backward()
        >>> optimiser.step()

    Reference:
        You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        betas = options["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, like (0.9, 0.999), but it is {betas!r}")
        check_beta("betas[0]", betas[0])
        check_beta("betas[1]", betas[1])
        check_number("eps", options["eps"], "finite and positive, like 1e-6", lambda x: 0 < x < math.inf)

    def start(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        zeros = torch.zeros_like(parameter, requires_grad=False)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update(
        self, options: dict[str, Any], weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        if kernels_work(weights[0].device):
            every = list(zip(weights, grads, states, strict=True))
            large = [each for each in every if each[0].numel() >= LARGE and alike(*each[:2], *each[2].values())]
            if large:
                with on(weights[0].device):
                    _by_kernels(options, large)
                every = [each for each in every if all(each[0] is not other[0] for other in large)]
                if not every:
                    return
                weights, grads, states = (list(column) for column in zip(*every, strict=True))
        beta1, beta2 = options["betas"]
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, options["eps"])
        updates = torch._foreach_div(averages, roots)
        rates = _rates(options, torch.stack(torch._foreach_norm(weights)), torch.stack(torch._foreach_norm(updates)))
        torch._foreach_addcmul_(weights, updates, rates.unbind(), value=-1)


def _rates(options: dict[str, Any], sizes: Tensor, lengths: Tensor) -> Tensor:
    """What the updates are multiplied by, from the norms of tensors and of their updates."""
    sizes = sizes.clamp(max=LARGEST_NORM)
    trust = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, 1.0)
    lr = options["lr"]
    return trust * (lr.reshape(()) if isinstance(lr, Tensor) else lr)


def _by_kernels(options: dict[str, Any], each: list[tuple[Tensor, Tensor, dict[str, Any]]]) -> None:
    """The step of large tensors in two passes, where the other way makes nine."""
    from nero_lab.baselines import kernels

    (beta1, beta2), eps = options["betas"], options["eps"]
    sums = torch.empty(len(each), PROGRAMS, 2, device=each[0][0].device)
    for (weight, grad, state), parts in zip(each, sums.unbind(), strict=True):
        averages = state["exp_avg"], state["exp_avg_sq"]
        betas = beta1, 1 - beta1, beta2, 1 - beta2
        kernels.lamb_look[(PROGRAMS,)](
            weight, grad, *averages, parts, weight.numel(), *betas, eps, PROGRAMS=PROGRAMS, BLOCK=BLOCK
        )
    sizes, lengths = sums.sum(1).sqrt().unbind(1)
    rates = _rates(options, sizes, lengths).to(torch.float32)
    for (weight, _, state), rate in zip(each, rates.unbind(), strict=True):
        count = weight.numel()
        kernels.lamb_move[(-(-count // BLOCK),)](
            weight, state["exp_avg"], state["exp_avg_sq"], rate, count, eps, BLOCK=BLOCK
        )
    torch.autograd.graph.increment_version([weight for weight, _, _ in each])  # which torch has not seen change
