"""The mean and variance of every layer's pre-activations, which balance standardises (Section 3.1)."""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from nero.preserve import copy_inputs, preserved
from nero.text import text_table
from nero.theory.layers import layers_of

#: Layers whose channels come before these many spatial axes.
_SPATIAL_AXES: dict[type[nn.Module], int] = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of the pre-activations of one layer.

    Attributes:
        name: the name of the layer.
        layer: its class.
        samples: the number of pre-activations per neuron: examples times spatial positions.
        means: the mean of each neuron's pre-activations.
        variances: the variance of each neuron's pre-activations.
    """

    name: str
    layer: str
    samples: int
    means: Tensor
    variances: Tensor

    @property
    def mean(self) -> float:
        """The mean over all neurons."""
        return float(self.means.mean())

    @property
    def spread(self) -> float:
        """The root mean square of the neurons' means."""
        return float(self.means.square().mean().sqrt())

    @property
    def variance(self) -> float:
        """The mean variance over all neurons."""
        return float(self.variances.mean())


@dataclass(frozen=True, eq=False)
class Preactivations:
    """Statistics of the pre-activations of every layer on a batch; prints as a table.

    Attributes:
        layers: one :class:`LayerStatistics` for each layer, in the order in which they ran. Layers that share a
            weight have one each.
        left_out: names of neurons' parameters whose weighted sums cannot be observed, such as those of a recurrent
            layer or of a layer that does not return a tensor.
    """

    layers: tuple[LayerStatistics, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            (
                each.name,
                each.layer,
                f"{each.means.numel():,}",
                _format(each.mean, beside=math.sqrt(each.variance)),
                _format(each.spread, beside=math.sqrt(each.variance)),
                f"{each.variance:.3g}",
                f"{float(each.variances.min()):.3g} to {float(each.variances.max()):.3g}",
            )
            for each in self.layers
        ]
        header = ("layer", "class", "neurons", "mean", "rms of means", "variance", "min to max")
        return text_table(header, rows) + (f"\n\nnot measured: {', '.join(self.left_out)}" if self.left_out else "")


@torch.no_grad()
def preactivations(model: nn.Module, batch: Any) -> Preactivations:
    r"""Measure the mean and variance of every neuron's pre-activations on a batch.

    Section 3.1: a balanced neuron :math:`y = \sum_i w_i x_i` (Definition 1:
    :math:`\sum_i w_i = 0`, :math:`\sum_i w_i^2 = 1`) with inputs that are uncorrelated, of mean μ and variance 1,
    has a standardised output:

    .. math::
        E[y] = \mu \sum_i w_i = 0, \qquad \operatorname{Var}[y] = \sum_i w_i^2 = 1 .

    "While the assumptions on the inputs are unlikely to hold exactly, under more general conditions the
    constraints may at least encourage the standardisation of activation statistics." The report shows how far.

    A pre-activation is the output of a layer, bias included. For a convolution every spatial position counts as
    an example. Frozen layers are measured, too. The model runs in its current mode, uncompiled; its buffers and the
    random number generators are restored.

    Args:
        model: a module with linear or convolutional layers.
        batch: the input of the model: a tensor, or a tuple of arguments.

    Raises:
        ValueError: if the batch has fewer than two examples, if the model has no neurons or none whose sums can be
            observed, or if a sum is not finite.

    Example:
        >>> import nero
        >>> _ = torch.manual_seed(0)
        >>> model = nero.balance_(nn.Sequential(nn.Linear(100, 50, bias=False), nn.ReLU(), nn.Linear(50, 10)))
        >>> report = preactivations(model, 3 + torch.randn(1000, 100))
        >>> [layer.name for layer in report.layers], round(report.layers[0].variance, 1)
        (['0', '2'], 1.0)
    """
    arguments = batch if isinstance(batch, tuple) else (batch,)
    if not arguments or any(isinstance(each, Tensor) and not each.numel() for each in arguments):
        raise ValueError("the batch is empty: give at least two examples")
    owners = _owners(model)
    modules = dict(model.named_modules())
    sums: dict[str, list[Tensor]] = {}

    def observer(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):  # clone: the next layer may work in place
                sums.setdefault(name, []).append(_by_neuron(module, output).clone())

        return hook

    handles = [modules[name].register_forward_hook(observer(name)) for name in owners if _returns_sums(modules[name])]
    try:
        with preserved(model), _uncompiled():
            model(*copy_inputs(arguments))
    finally:
        for handle in handles:
            handle.remove()
    if not sums:
        raise ValueError("no pre-activations can be observed: only linear and convolutional layers return them")
    left_out = [name for owner, names in owners.items() if owner not in sums for name in names]
    return Preactivations(
        tuple(_statistics(name, modules[name], torch.cat(parts)) for name, parts in sums.items()), tuple(left_out)
    )


def _owners(model: nn.Module) -> dict[str, list[str]]:
    """Map the modules that use neurons to the names of these parameters."""
    neurons = {id(layer.parameter) for layer in layers_of(model, frozen=True)}
    owners: dict[str, list[str]] = {}
    for home, module in model.named_modules():
        for name, parameter in module.named_parameters(home, recurse=False):
            if id(parameter) in neurons:  # a tied parameter has several owners
                before, parametrised, _ = f".{name}".partition(".parametrizations.")
                owners.setdefault(before[1:] if parametrised else home, []).append(name)
    return owners


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled modules eagerly, since code compiled earlier skips the hooks."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing dynamo takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _format(number: float, beside: float) -> str:
    return "0" if abs(number) < 1e-6 * beside else f"{number:.3g}"  # rounding noise of larger numbers


def _returns_sums(module: nn.Module) -> bool:
    """Return whether the output of a layer is the weighted sums of its neurons."""
    known = (nn.Linear, nn.Bilinear, *_SPATIAL_AXES)
    return isinstance(module, known) or type(module).__name__ == "Conv1D"  # the linear layer of GPT-2


def _by_neuron(module: nn.Module, output: Tensor) -> Tensor:
    """Return the output of a layer with one column per neuron."""
    axes = next((axes for kind, axes in _SPATIAL_AXES.items() if isinstance(module, kind)), 0)
    return output.movedim(-1 - axes, -1).flatten(0, -2) if output.dim() > 1 else output[None]


def _statistics(name: str, module: nn.Module, sums: Tensor) -> LayerStatistics:
    if sums.shape[0] < 2:
        raise ValueError(f"layer {name or 'the model'!r} saw one example, which has no variance: give at least two")
    variances, means = torch.var_mean(sums.double(), 0, correction=0)
    if not bool(variances.isfinite().all()):
        raise ValueError(
            f"layer {name or 'the model'!r} returns NaN or infinite values: check the batch and the weights"
        )
    return LayerStatistics(name, type_before_parametrizations(module).__name__, sums.shape[0], means, variances)
