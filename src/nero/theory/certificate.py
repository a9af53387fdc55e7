"""A proof, layer by layer, that a perceptron makes no error while its neurons turn."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nero.theory.classifier import BATCH_SIZE, Classifier, margin_between
from nero.theory.rotations import LayerCaps

#: Layers that are monotone in every element in evaluation mode.
_MONOTONE = (
    nn.Identity,
    nn.Flatten,
    nn.Dropout,
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softsign,
    nn.SELU,
    nn.CELU,
    nn.LogSigmoid,
    nn.Hardsigmoid,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Tanhshrink,
)
#: Layers that are monotone for some options. Softplus falls by 2e-9 where it switches to the identity, at threshold 20.
_MONOTONE_IF: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.ELU: lambda layer: layer.alpha >= 0,
    nn.LeakyReLU: lambda layer: layer.negative_slope >= 0,
    nn.Softplus: lambda layer: layer.beta > 0 and layer.threshold >= 20,
}


def perceptron_layers(model: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a plain perceptron in order; ``None`` for any other network."""
    if type(model) is nn.Sequential:
        parts = [perceptron_layers(part) for part in model]
        layers = [layer for part in parts if part is not None for layer in part]
        return None if None in parts or _is_altered(model) else layers
    is_plain = type(model) is nn.Linear or _is_monotone(model)
    return [model] if is_plain and not _is_altered(model) else None


@torch.no_grad()
def is_certified(solution: Classifier, perceptron: list[nn.Module], angle: float) -> bool:
    r"""Return whether it is proved, up to rounding, that no rotation of all neurons by up to an angle makes an error.

    Every activation is enclosed in an interval around its value. A neuron w at an angle φ from its input x that turns
    by up to α moves its output :math:`\|w\| \|x\| \cos\varphi` within
    :math:`\|w\| \|x\| \cos(\varphi \pm \alpha)`. An error e of its input adds at most
    :math:`\min(\|w\| \|e\|, \sum_i |w_i| |e_i| + 2 \sin\frac\alpha2 \|w\| \|e\|)`.
    For one layer the intervals are exact. For several they are a lower bound, looser with depth.
    """
    turning = {id(caps.layer.parameter): (caps, solution.poles[name]) for name, caps in solution.caps.items()}
    for start in range(0, len(solution.labels), BATCH_SIZE):
        part = slice(start, start + BATCH_SIZE)
        # three copies, since an activation may work in place
        value, low, high = (solution.inputs[part].to(torch.float64, copy=True) for _ in range(3))
        for layer in perceptron:
            if isinstance(layer, nn.Linear):
                caps, weight = turning.get(id(layer.weight), (None, layer.weight))
                bias = 0.0 if layer.bias is None else layer.bias.double()
                value, low, high = (each + bias for each in _intervals(weight.double(), caps, angle, value, low, high))
            else:
                value, low, high = (layer(each) for each in (value, low, high))
        if not bool((margin_between(low, high, solution.labels[part]) > 0).all()):
            return False
    return True


def _intervals(
    weight: Tensor, caps: LayerCaps | None, angle: float, value: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of a layer, and their minimum and maximum for inputs between ``low`` and ``high``."""
    error = torch.maximum(high - value, value - low)
    if caps is not None and caps.centred:  # a centred neuron does not see the mean of its input
        value = value - value.mean(-1, keepdim=True)
    spread, sums = error @ weight.abs().T, value @ weight.T
    if caps is None:  # a frozen layer
        return sums, sums - spread, sums + spread
    lengths = caps.lengths.double().T
    largest_spread = lengths * error.norm(dim=-1, keepdim=True)
    spread = torch.minimum(largest_spread, spread + 2 * math.sin(angle / 2) * largest_spread)
    most = lengths * value.norm(dim=-1, keepdim=True)
    between = torch.where(most > 0, sums / most, 0.0).clamp(-1, 1).acos()
    lowest = most * (between + angle).clamp(max=math.pi).cos()
    highest = most * (between - angle).clamp(min=0).cos()
    return sums, lowest - spread, highest + spread


def _is_monotone(layer: nn.Module) -> bool:
    return type(layer) in _MONOTONE or _MONOTONE_IF.get(type(layer), lambda _: False)(layer)


def _is_altered(module: nn.Module) -> bool:
    """Return whether a module may differ from its class, by a hook or by an attribute set on the instance.

    A weight or bias set as an attribute is not a parameter, but may be computed from a neuron that turns.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks or vars(module).keys() & {"forward", "weight", "bias"})
