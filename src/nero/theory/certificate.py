"""A proof, layer by layer, that a perceptron makes no error while its neurons turn."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nero.theory.classifier import BATCH, Classifier, margin_between
from nero.theory.rotations import Caps

#: Layers that keep order, entry by entry, when they evaluate.
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
#: Those that do if they are set so. Softplus falls where it turns into the identity: by 2e-9 as torch sets it.
_MONOTONE_IF: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.ELU: lambda layer: layer.alpha >= 0,
    nn.LeakyReLU: lambda layer: layer.negative_slope >= 0,
    nn.Softplus: lambda layer: layer.beta > 0 and layer.threshold >= 20,
}


def chain_of(model: nn.Module) -> list[nn.Module] | None:
    """The layers of a plain perceptron in order; nothing for any other network."""
    if type(model) is nn.Sequential:
        parts = [chain_of(part) for part in model]
        chain = [layer for part in parts if part is not None for layer in part]
        return None if None in parts or _is_altered(model) else chain
    plain = type(model) is nn.Linear or _is_monotone(model)
    return [model] if plain and not _is_altered(model) else None


@torch.no_grad()
def certified(solution: Classifier, chain: list[nn.Module], angle: float) -> bool:
    r"""Whether no rotation of all neurons by up to an angle makes an error, proved up to rounding.

    Every activation is held in an interval around its value. A neuron w at an angle φ from its input x that turns
    by up to α moves its output :math:`\|w\| \|x\| \cos\varphi` within
    :math:`\|w\| \|x\| \cos(\varphi \pm \alpha)`, and its input's own error e adds at most
    :math:`\min(\|w\| \|e\|, \sum_i |w_i| |e_i| + 2 \sin\frac\alpha2 \|w\| \|e\|)`.
    Of one layer that is the truth; of more it is a lower bound, the looser the deeper.
    """
    turning = {id(caps.layer.parameter): (caps, solution.poles[name]) for name, caps in solution.caps.items()}
    for start in range(0, len(solution.labels), BATCH):
        part = slice(start, start + BATCH)
        # one each, and none of them the data: an activation may work in place
        value, low, high = (solution.inputs[part].to(torch.float64, copy=True) for _ in range(3))
        for layer in chain:
            if isinstance(layer, nn.Linear):
                caps, weight = turning.get(id(layer.weight), (None, layer.weight))
                bias = 0.0 if layer.bias is None else layer.bias.double()
                value, low, high = (each + bias for each in _bounds(weight.double(), caps, angle, value, low, high))
            else:
                value, low, high = (layer(each) for each in (value, low, high))
        if not bool((margin_between(low, high, solution.labels[part]) > 0).all()):
            return False
    return True


def _bounds(
    weight: Tensor, caps: Caps | None, angle: float, value: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's sums, and the least and the most that they can be for inputs between low and high."""
    error = torch.maximum(high - value, value - low)
    if caps is not None and caps.centred:  # a neuron without a mean sees no mean
        value = value - value.mean(-1, keepdim=True)
    spread, sums = error @ weight.abs().T, value @ weight.T
    if caps is None:  # its neurons stay
        return sums, sums - spread, sums + spread
    lengths = caps.lengths.double().T
    whole = lengths * error.norm(dim=-1, keepdim=True)
    spread = torch.minimum(whole, spread + 2 * math.sin(angle / 2) * whole)
    most = lengths * value.norm(dim=-1, keepdim=True)
    between = torch.where(most > 0, sums / most, 0.0).clamp(-1, 1).acos()
    lowest = most * (between + angle).clamp(max=math.pi).cos()
    highest = most * (between - angle).clamp(min=0).cos()
    return sums, lowest - spread, highest + spread


def _is_monotone(layer: nn.Module) -> bool:
    return type(layer) in _MONOTONE or _MONOTONE_IF.get(type(layer), lambda _: False)(layer)


def _is_altered(module: nn.Module) -> bool:
    """Whether a module may do something else than its class says: by a hook, or by what was set on it alone.

    A weight or a bias that was set there is no parameter, but may be made of one that turns.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks or vars(module).keys() & {"forward", "weight", "bias"})
