"""LAMB: each tensor steps in Adam's direction, relative to its own norm."""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from nero_lab.baselines.batched import Batched, alike
from nero_lab.launch import kernels_work, on

#: The greatest norm of a tensor that the trust ratio counts.
MAX_NORM = 10.0
#: Tensors with fewer elements are stepped together, without kernels of their own.
MIN_KERNEL_ELEMENTS = 1 << 19
#: Programs of lamb_look, and elements that a program holds at a time.
PROGRAMS, BLOCK = 1024, 1024
#: A weight with its gradient and its state.
Member: TypeAlias = tuple[Tensor, Tensor, dict[str, Any]]


class Lamb(Batched):
    r"""LAMB as the paper ran it: without bias correction and weight decay.

    Every tensor :math:`w` with gradient :math:`g` makes the step

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) \, g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) \, g^2, \qquad
        u = m \big/ (\sqrt v + \epsilon) \\
        w &\leftarrow w - \eta \, \frac{\min(\|w\|, 10)}{\|u\|} \, u

    with the ratio replaced by one where either norm is zero. LAMB of ``pytorch_optimizer`` (4.1) is not used: by
    default it corrects for bias on the host, it adds ε to the norm of u, and it creates its state at the first step.

    Args:
        params: parameters, named parameters or groups.
        lr: η, a float, or a tensor of one element on the parameters' device.
        betas: the decay of the running averages of g and g².
        eps: ε.

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

    def start(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        zeros = torch.zeros_like(parameter, requires_grad=False)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update(
        self, options: dict[str, Any], weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        device, kernels = weights[0].device, kernels_work(weights[0].device)
        large: list[Member] = []
        small: list[Member] = []
        for member in zip(weights, grads, states, strict=True):
            (large if kernels and _is_large(*member) else small).append(member)
        if large:
            with on(device):
                _step_by_kernels(options, large)
        if small:
            _step_together(options, small)


def _is_large(weight: Tensor, grad: Tensor, state: dict[str, Any]) -> bool:
    return weight.numel() >= MIN_KERNEL_ELEMENTS and alike(weight, grad, *state.values())


def _step_together(options: dict[str, Any], members: list[Member]) -> None:
    """Step any tensors of one device and dtype by operations over all of them."""
    beta1, beta2 = options["betas"]
    weights, grads, states = (list(column) for column in zip(*members, strict=True))
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


def _rates(options: dict[str, Any], weight_norms: Tensor, update_norms: Tensor) -> Tensor:
    """Return the factors of the updates, from the norms of tensors and of their updates."""
    weight_norms = weight_norms.clamp(max=MAX_NORM)
    trust = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
    lr = options["lr"]
    return trust * (lr.reshape(()) if isinstance(lr, Tensor) else lr)


def _step_by_kernels(options: dict[str, Any], large: list[Member]) -> None:
    """Step large tensors in two passes each; :func:`_step_together` makes nine."""
    from nero_lab import kernels

    (beta1, beta2), eps = options["betas"], options["eps"]
    sums = torch.empty(len(large), PROGRAMS, 2, device=large[0][0].device)
    for (weight, grad, state), parts in zip(large, sums.unbind(), strict=True):
        averages = state["exp_avg"], state["exp_avg_sq"]
        betas = beta1, 1 - beta1, beta2, 1 - beta2
        kernels.lamb_look[(PROGRAMS,)](
            weight,
            grad,
            *averages,
            parts,
            weight.numel(),
            *betas,
            eps,
            PROGRAMS=PROGRAMS,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )
    weight_norms, update_norms = sums.sum(1).sqrt().unbind(1)
    rates = _rates(options, weight_norms, update_norms).to(torch.float32)
    for (weight, _, state), rate in zip(large, rates.unbind(), strict=True):
        count = weight.numel()
        kernels.lamb_move[(-(-count // BLOCK),)](
            weight, state["exp_avg"], state["exp_avg_sq"], rate, count, eps, BLOCK=BLOCK, enable_fp_fusion=True
        )
    torch.autograd.graph.increment_version([weight for weight, _, _ in large])  # torch did not see the kernels write
