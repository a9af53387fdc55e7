"""The optimisers of the CIFAR-10 speed-run: Muon and SGD as Jordan published them, and Nero in Muon's place.

The loss is the sum over a batch, as published.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import nero
from nero_lab.baselines.batched import Batched

#: Momentum of SGD, always Nesterov's.
SGD_MOMENTUM = 0.85
#: By this, the rate of SGD is divided: 1024 examples, times the length that momentum adds to a step (decoupled form).
SGD_UNIT = 1024 * (1 + 1 / (1 - SGD_MOMENTUM))
#: The rate of SGD for biases, relative to that for weights.
SGD_BIAS_RATIO = 64.0
#: Decay of SGD per step and example, whatever the rate; in the paper's decoupled form, 0.0153 / SGD_UNIT.
DECAY_PER_EXAMPLE = 2e-6
#: Rates of SGD beside Muon.
BIAS_RATE, HEAD_RATE = 0.053, 0.67
MUON_MOMENTUM = 0.6
#: Newton-Schulz iterations: fewer than Muon's usual five, as published for this network.
MUON_ITERATIONS = 3
#: Muon's polynomial a X + b XX'X + c XX'XX'X, steep at zero: singular values end near one, not at it.
QUINTIC = (3.4445, -4.7750, 2.0315)


def make(name: str, model: nn.Module, lr: float, batch: int, options: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """Make the optimisers of all trainable parameters, the named one first, with the peak rate in each of their groups.

    Args:
        name: ``"filter-muon"``, for the filters, beside SGD for head and biases; ``"sgd"``, for all; or ``"nero"``, for
            filters and head, beside SGD for biases.
        model: the network, with ``whitening``, ``blocks`` and ``head``.
        lr: peak rate of the named optimiser.
        batch: examples per step.
        options: of Muon, ``balanced``: hold each neuron to zero mean and unit norm, instead of each tensor to a norm.
            Of Nero, any option of :class:`nero.Nero`.
    """
    blocks = model.get_submodule("blocks")
    filters = [weight for weight in blocks.parameters() if weight.dim() == 4]
    biases = [bias for bias in blocks.parameters() if bias.dim() == 1 and bias.requires_grad]
    whitening, head = [model.get_parameter("whitening.bias")], [model.get_parameter("head.weight")]
    if name == "sgd":
        rate = lr / SGD_UNIT
        fast = SGD_BIAS_RATIO * rate
        return [_sgd([([*filters, *head], rate), (biases, fast), (whitening, fast)], batch)]
    main: torch.optim.Optimizer
    others = [(biases, BIAS_RATE), (whitening, BIAS_RATE)]
    if name == "filter-muon":
        main = FilterMuon(filters, lr, is_norm_fixed=not options.get("balanced", False))
        others.append((head, HEAD_RATE))
        if options.get("balanced", False):
            nero.balance_after_step(main, blocks)
    else:
        main = nero.Nero(_neurons(model), lr=lr, **options)
    return [main, _sgd(others, batch)]


class FilterMuon(Batched):
    """Muon for convolutions, each filter flattened to a row: Nesterov's momentum, orthogonalised.

    Args:
        params: weights of two or more axes.
        lr: learning rate, the spectral norm of an update.
        momentum: factor of the running sum of gradients.
        is_norm_fixed: before each update, scale every tensor to the norm of a matrix with rows of norm one.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float | Tensor,
        momentum: float = MUON_MOMENTUM,
        *,
        is_norm_fixed: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "is_norm_fixed": is_norm_fixed})

    def start(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    def update(
        self, options: dict[str, Any], weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        for weight, grad, state in zip(weights, grads, states, strict=True):
            velocity = state["momentum_buffer"].mul_(options["momentum"]).add_(grad)
            update = orthogonalised(torch.add(grad, velocity, alpha=options["momentum"]).flatten(1))
            if options["is_norm_fixed"]:
                weight.mul_(len(weight) ** 0.5 / weight.norm())
            weight.sub_(options["lr"] * update.view(weight.shape))


def orthogonalised(matrix: Tensor, iterations: int = MUON_ITERATIONS) -> Tensor:
    """Bring all singular values of a matrix near one by Newton-Schulz iterations; in bfloat16 on a GPU.

    Args:
        matrix: a matrix of any scale; zero stays zero.
        iterations: number of iterations. More bring smaller singular values near one, to between 0.7 and 1.2.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    values: Tensor = matrix.T if tall else matrix
    values = values / (values.norm() + torch.finfo(values.dtype).tiny)  # spectral norm at most one
    values = values.bfloat16() if values.is_cuda else values
    a, b, c = QUINTIC
    for _ in range(iterations):
        gram = values @ values.T
        values = a * values + (b * gram + c * gram @ gram) @ values
    return (values.T if tall else values).to(matrix.dtype)


def _neurons(model: nn.Module) -> list[dict[str, Any]]:
    """Return Nero's groups of trained neurons."""
    groups = [group for group in nero.param_groups(model) if group["role"] == "neuron"]
    return [{**group, "params": [pair for pair in group["params"] if pair[1].requires_grad]} for group in groups]


def _sgd(parts: Iterable[tuple[list[nn.Parameter], float]], batch: int) -> torch.optim.Optimizer:
    # torch multiplies the decay by the rate
    groups = [
        {"params": parameters, "lr": rate, "weight_decay": DECAY_PER_EXAMPLE * batch / rate}
        for parameters, rate in parts
    ]
    return torch.optim.SGD(groups, momentum=SGD_MOMENTUM, nesterov=True, fused=True)
