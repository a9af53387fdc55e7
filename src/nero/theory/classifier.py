"""A network, its training data, and the margins by which it gets them right while its neurons turn."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nero.preserve import put
from nero.theory.layers import Layer
from nero.theory.rotations import Caps

#: How many examples go through the network at once.
BATCH = 1000


@dataclass(frozen=True)
class Classifier:
    """A network with zero training error, and the caps in which its neurons turn.

    Attributes:
        model: in evaluation mode; its weights are whatever was tried last.
        inputs: one example a row.
        labels: which output should be largest; of a network with one output, its sign, as 1 or 0 or as 1 or -1.
        caps: one for each layer, by the parameter's name.
        poles: the weights that the network came with, less what rounding left of a mean, for the layers with caps.
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    caps: Mapping[str, Caps]
    poles: Mapping[str, Tensor]

    def random(self, angle: float, generator: torch.Generator) -> dict[str, Tensor]:
        """Weights with all neurons drawn at once, each uniformly from its cap."""
        return {name: caps.random(angle, generator) for name, caps in self.caps.items()}

    def least(self, gradients: Mapping[str, Tensor], angle: float, near: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights in the caps at which a linear function of those gradients is least."""
        return {name: caps.least(gradients[name], angle, near[name]) for name, caps in self.caps.items()}

    @torch.no_grad()
    def margins(self, weights: Mapping[str, Tensor]) -> Tensor:
        """By how much each example is right with those weights; zero or less is an error."""
        return torch.cat(list(self._margins(weights)))

    @torch.no_grad()
    def first_error(self, weights: Mapping[str, Tensor]) -> int | None:
        """Which example is an error with those weights, if any is."""
        for number, margins in enumerate(self._margins(weights)):
            wrong = (~(margins > 0)).nonzero()
            if len(wrong):
                return number * BATCH + int(wrong[0])
        return None

    def gradients(self, weights: Mapping[str, Tensor], example: int) -> tuple[float, dict[str, Tensor]]:
        """The margin of one example, and its gradients in those weights.

        Raises:
            ValueError: a margin without gradients, or gradients that are not finite.
        """
        self._load(weights)
        parameters = {name: caps.layer.parameter for name, caps in self.caps.items()}
        with torch.enable_grad():
            margin = self._margin(slice(example, example + 1)).sum()
            if not margin.requires_grad:
                raise ValueError(
                    "what the model gives has no gradient, which says where to turn its neurons: let it run without "
                    "torch.no_grad() or detach() on the way"
                )
            found = torch.autograd.grad(margin, list(parameters.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
            for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
        }
        for name, gradient in gradients.items():
            if not bool(gradient.isfinite().all()):
                raise ValueError(
                    f"the gradient of {name!r}, in the margin of example {example}, holds values that are infinite or "
                    "not a number: the model is not smooth there, or overflows"
                )
        return float(margin.detach()), gradients

    def _margins(self, weights: Mapping[str, Tensor]) -> Iterator[Tensor]:
        self._load(weights)
        for start in range(0, len(self.labels), BATCH):
            yield self._margin(slice(start, start + BATCH))

    def _margin(self, part: slice) -> Tensor:
        outputs = self.model(self.inputs[part].clone())  # lest a model that works in place change the data
        return margin_between(outputs, outputs, self.labels[part])

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, caps in self.caps.items():
            put(caps.layer.parameter, weights[name])


def margin_between(low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
    """By how much the right output, at its lowest, is above all others at their highest."""
    low, high = (each.reshape(len(labels), -1) for each in (low, high))
    if low.shape[1] == 1:  # one neuron: the sign of its output decides
        return torch.where(labels > 0, low[:, 0], -high[:, 0])
    right = low.gather(1, labels[:, None])[:, 0]
    others = high.scatter(1, labels[:, None], -math.inf).amax(1)
    return right - others


def classifier(model: nn.Module, layers: Iterable[Layer], data: Any, fix_mean: bool) -> Classifier:
    """The network with its data, if they are such that Definition 6 says something of them.

    From here on its weights are written over; whoever asks puts them back.

    Raises:
        TypeError: data that is no pair of tensors, labels that are not whole numbers, half precision.
        ValueError: neurons that have a mean, an empty batch or one that the model does not run on, labels without an
            output, errors on the training data.
    """
    layers = list(layers)
    for layer in layers:
        if layer.parameter.dtype.itemsize < 4:
            raise TypeError(f"{layer.name!r} is {layer.parameter.dtype}, too coarse for angles: model.float() first")
    caps = {layer.name: Caps.around(layer, fix_mean) for layer in layers}
    if any(each.off_centre > 1e-5 for each in caps.values()):
        raise ValueError(
            "the neurons' means are not zero: balance the model first (nero.balance_), or give fix_mean=False "
            "to turn its neurons in all directions"
        )
    if not isinstance(data, tuple | list) or len(data) != 2 or not all(isinstance(each, Tensor) for each in data):
        raise TypeError("data must be a pair of tensors, (inputs, labels)")
    inputs, labels = data
    if labels.is_floating_point() or labels.is_complex() or labels.dim() != 1:
        raise TypeError(f"labels must be whole numbers, one an example, not {labels.dtype} of {tuple(labels.shape)}")
    if not inputs.dim():
        raise TypeError("inputs must be one example a row, not a single number")
    if not len(labels) or len(inputs) != len(labels):
        raise ValueError(
            f"there are {len(inputs)} inputs and {len(labels)} labels"
            + (": the batch is empty" if not len(labels) else ", and must be as many of both")
        )
    labels = labels.long()
    try:
        with torch.no_grad():
            outputs = model(inputs[:1].clone())
    except (RuntimeError, IndexError) as error:  # the latter of a table without such a row
        raise ValueError(
            f"the model does not run on an example of {inputs.dtype}, shaped {(1, *inputs.shape[1:])}: {error}"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.dim() not in (1, 2) or len(outputs) != 1:
        raise TypeError("the model must give one row of outputs an example, one for each class")
    if outputs.dtype.itemsize < 4:
        raise TypeError(f"the model's outputs are {outputs.dtype}, too coarse for angles: measure it without autocast")
    _check_labels(labels, outputs.numel())
    came = {layer.name: layer.parameter.detach().clone() for layer in layers}
    made = Classifier(model, inputs, labels, caps, {name: each.weights for name, each in caps.items()})
    _check_fit(made, came)
    return made


def _check_labels(labels: Tensor, outputs: int) -> None:
    least, most = int(labels.min()), int(labels.max())
    if outputs == 1:
        if not set(labels.tolist()) <= {0, 1} and not set(labels.tolist()) <= {-1, 1}:
            raise ValueError(
                f"the labels run from {least} to {most}, but the model has one output, whose sign tells 1 from 0, "
                "or 1 from -1: give it an output for each class"
            )
    elif least < 0 or most >= outputs:
        raise ValueError(
            f"the labels run from {least} to {most}, but the model has {outputs} outputs: "
            f"classes are 0 to {outputs - 1}"
        )


def _check_fit(solution: Classifier, came: Mapping[str, Tensor]) -> None:
    wrong = int((~(solution.margins(came) > 0)).sum())
    if not wrong:
        if not bool((solution.margins(solution.poles) > 0).all()):
            raise ValueError(
                "what is left of the neurons' means, small as it is, decides examples: balance the model first "
                "(nero.balance_), give inputs of smaller means, or fix_mean=False to turn neurons in all directions"
            )
        return
    _, same = torch.unique(solution.inputs.reshape(len(solution.labels), -1), dim=0, return_inverse=True)
    pairs = torch.unique(torch.stack([same, solution.labels], 1), dim=0)
    clash = len(pairs) > len(torch.unique(same))
    raise ValueError(
        f"the model makes {wrong:,} errors on {len(solution.labels):,} examples, and only solutions without any are "
        "α-robust (Definition 6)" + (": equal inputs with different labels, which no network fits" if clash else "")
    )
