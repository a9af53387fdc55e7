"""What balanced neurons do to activations (Section 3.1): the mean and variance of every layer's pre-activations."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from nero.preserve import copied, keeping
from nero.text_table import text_table
from nero.theory.layers import layers_of

_CHANNELS_FIRST: dict[type[nn.Module], int] = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """The pre-activations of one layer.

    Attributes:
        name: the layer's.
        layer: its class.
        samples: how many pre-activations of each neuron were seen: examples times places.
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
        """How far a neuron's mean is from zero: the root of the mean square."""
        return float(self.means.square().mean().sqrt())

    @property
    def variance(self) -> float:
        """A neuron's variance, on average."""
        return float(self.variances.mean())


@dataclass(frozen=True, eq=False)
class Preactivations:
    """The pre-activations of every layer on a batch; prints as a table.

    Attributes:
        layers: one :class:`LayerStatistics` for each, in the order in which they ran; layers that share a weight have
            one each.
        left_out: parameters of neurons whose weighted sums are not to be seen, such as a recurrent layer's, or those
            of a layer that gives something else than a tensor.
    """

    layers: tuple[LayerStatistics, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            (
                each.name,
                each.layer,
                f"{each.means.numel():,}",
                _short(each.mean),
                _short(each.spread),
                _short(each.variance),
                f"{_short(float(each.variances.min()))} to {_short(float(each.variances.max()))}",
            )
            for each in self.layers
        ]
        lines = text_table(
            ("layer", "class", "neurons", "mean", "rms of means", "variance", "from least to most"), rows
        )
        return lines + (f"\n\nnot seen: {', '.join(self.left_out)}" if self.left_out else "")


@torch.no_grad()
def preactivations(model: nn.Module, batch: Any) -> Preactivations:
    r"""The mean and variance, neuron by neuron, of every layer's pre-activations on a batch.

    Section 3.1: a balanced neuron :math:`y = \sum_i w_i x_i` (Definition 1:
    :math:`\sum_i w_i = 0`, :math:`\sum_i w_i^2 = 1`) with inputs that are uncorrelated, of mean μ and variance 1,
    has a standardised output:

    .. math::
        E[y] = \mu \sum_i w_i = 0, \qquad \operatorname{Var}[y] = \sum_i w_i^2 = 1 .

    "While the assumptions on the inputs are unlikely to hold exactly, under more general conditions the
    constraints may at least encourage the standardisation of activation statistics." This shows how far.

    A pre-activation is what the layer gives, its bias included; for a convolution every place counts as
    an example. Frozen layers are among them. The model runs in the mode it is in, and its buffers and torch's random
    numbers stay as they were. What is compiled runs as it stands.

    Args:
        model: any module with linear or convolutional layers.
        batch: what the model takes: a tensor, or a tuple of arguments.

    Raises:
        ValueError: an empty batch, a batch of one, a model without neurons or none whose sums can be seen, sums that
            are not finite.

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
        raise ValueError("the batch is empty: there are no pre-activations to measure")
    neurons = {id(layer.parameter) for layer in layers_of(model, frozen=True)}
    modules = dict(model.named_modules())
    owners: dict[str, list[str]] = {}
    for home, module in modules.items():
        for name, parameter in module.named_parameters(home, recurse=False):
            if id(parameter) in neurons:  # a tied one is, wherever it is met
                before, parametrised, _ = f".{name}".partition(".parametrizations.")
                owners.setdefault(before[1:] if parametrised else home, []).append(name)
    seen: dict[str, list[Tensor]] = {}

    def see(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):  # as it is now: what comes next may work in place
                seen.setdefault(name, []).append(_by_neuron(module, output).clone())

        return hook

    handles = [modules[name].register_forward_hook(see(name)) for name in owners if _gives_sums(modules[name])]
    try:
        with keeping(model), _as_it_stands():
            model(*copied(arguments))  # a model that works in place would change the data
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise ValueError("no layer's sums can be seen: only linear and convolutional layers show them")
    left_out = [name for owner, names in owners.items() if owner not in seen for name in names]
    return Preactivations(
        tuple(_statistics(name, modules[name], torch.cat(sums)) for name, sums in seen.items()), tuple(left_out)
    )


def _as_it_stands() -> AbstractContextManager[Any]:
    """Have no module run as it was compiled before, which would pass the hooks by."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it would take seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _short(number: float) -> str:
    """A number of three digits; what is nothing beside one is shown as zero."""
    return f"{round(number, 6) + 0.0:.3g}"


def _gives_sums(module: nn.Module) -> bool:
    """Whether a layer's output is its neurons' weighted sums."""
    known = (nn.Linear, nn.Bilinear, *_CHANNELS_FIRST)
    return isinstance(module, known) or type(module).__name__ == "Conv1D"  # GPT-2's linear layer


def _by_neuron(module: nn.Module, output: Tensor) -> Tensor:
    """A layer's output, one column a neuron."""
    axes = next((axes for kind, axes in _CHANNELS_FIRST.items() if isinstance(module, kind)), 0)
    return output.movedim(-1 - axes, -1).flatten(0, -2) if output.dim() > 1 else output[None]


def _statistics(name: str, module: nn.Module, sums: Tensor) -> LayerStatistics:
    if sums.shape[0] < 2:
        raise ValueError(f"layer {name or 'the model'!r} saw one example, which has no variance: give two or more")
    variances, means = torch.var_mean(sums.double(), 0, correction=0)
    if not bool(variances.isfinite().all()):
        raise ValueError(
            f"layer {name or 'the model'!r} gives values that are infinite or not a number: look for them in the "
            "batch, and in the weights"
        )
    return LayerStatistics(name, type_before_parametrizations(module).__name__, sums.shape[0], means, variances)
