"""A network with its training data, and its margins while its neurons turn."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nero.preserve import overwrite
from nero.theory.layers import Layer
from nero.theory.rotations import LayerCaps

#: The number of examples per forward pass.
BATCH_SIZE = 1000
#: The largest distance of a neuron from zero mean, relative to its norm, that counts as rounding.
MAX_OFF_CENTRE = 1e-5


@dataclass(frozen=True)
class Classifier:
    """A network with zero training error, and the caps in which its neurons turn.

    Attributes:
        model: the network in evaluation mode; it holds the weights tried last.
        inputs: one example per row.
        labels: the index of the output that should be largest. For a network with one output, the sign that it should
            have, as 1 or 0, or as 1 or -1.
        caps: the caps of each layer, by parameter name.
        poles: the initial weights of the layers with caps, centred exactly.
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    caps: Mapping[str, LayerCaps]
    poles: Mapping[str, Tensor]

    def random(self, angle: float, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw weights: every neuron uniformly from its cap."""
        return {name: caps.random(angle, generator) for name, caps in self.caps.items()}

    def minimum(self, gradients: Mapping[str, Tensor], angle: float, near: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights in the caps that minimise the linear function with these gradients."""
        return {name: caps.minimum(gradients[name], angle, near[name]) for name, caps in self.caps.items()}

    @torch.no_grad()
    def margins(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the margin of every example with these weights; a margin of zero or less is an error."""
        return torch.cat(list(self._margins(weights)))

    @torch.no_grad()
    def first_error(self, weights: Mapping[str, Tensor]) -> int | None:
        """Return the index of the first example that these weights get wrong, or ``None``."""
        for number, margins in enumerate(self._margins(weights)):
            wrong = (~(margins > 0)).nonzero()
            if len(wrong):
                return number * BATCH_SIZE + int(wrong[0])
        return None

    def gradients(self, weights: Mapping[str, Tensor], example: int) -> tuple[float, dict[str, Tensor]]:
        """Return the margin of one example, and its gradients with respect to these weights.

        Raises:
            ValueError: if the margin has no gradients, or gradients that are not finite.
        """
        self._load(weights)
        parameters = {name: caps.layer.parameter for name, caps in self.caps.items()}
        with torch.enable_grad():
            margin = self._margin(slice(example, example + 1)).sum()
            if not margin.requires_grad:
                raise ValueError(
                    "the outputs of the model have no gradient: run its forward pass without torch.no_grad() or "
                    "detach()"
                )
            found = torch.autograd.grad(margin, list(parameters.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
            for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
        }
        for name, gradient in gradients.items():
            if not bool(gradient.isfinite().all()):
                raise ValueError(
                    f"the gradient of {name!r}, in the margin of example {example}, holds NaN or infinite values: the "
                    "model is not smooth there, or overflows"
                )
        return float(margin.detach()), gradients

    def _margins(self, weights: Mapping[str, Tensor]) -> Iterator[Tensor]:
        self._load(weights)
        for start in range(0, len(self.labels), BATCH_SIZE):
            yield self._margin(slice(start, start + BATCH_SIZE))

    def _margin(self, part: slice) -> Tensor:
        outputs = self.model(self.inputs[part].clone())  # clone: the model may work in place
        return margin_between(outputs, outputs, self.labels[part])

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, caps in self.caps.items():
            overwrite(caps.layer.parameter, weights[name])


def margin_between(low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
    """Return the lowest value of the right output minus the highest value of all others."""
    low, high = (each.reshape(len(labels), -1) for each in (low, high))
    if low.shape[1] == 1:  # one neuron: the sign of its output decides
        return torch.where(labels > 0, low[:, 0], -high[:, 0])
    right = low.gather(1, labels[:, None])[:, 0]
    others = high.scatter(1, labels[:, None], -math.inf).amax(1)
    return right - others


def make_classifier(model: nn.Module, layers: Iterable[Layer], data: Any, fix_mean: bool) -> Classifier:
    """Combine a network with its data, after checking that Definition 6 applies to them.

    The classifier overwrites the weights of the model; the caller restores them.

    Raises:
        TypeError: if the data are not a pair of tensors, labels are not integers, or the network is in half precision.
        ValueError: if neurons are not centred, the data are empty or do not fit the model, a label has no output, or
            the network makes an error on the data.
    """
    layers = list(layers)
    for layer in layers:
        if layer.parameter.dtype.itemsize < 4:
            raise TypeError(f"{layer.name!r} is {layer.parameter.dtype}, too coarse for angles: call model.float()")
    caps = {layer.name: LayerCaps.around(layer, fix_mean) for layer in layers}
    if any(each.off_centre > MAX_OFF_CENTRE for each in caps.values()):
        raise ValueError(
            "the means of the neurons are not zero: call nero.balance_(model), or give fix_mean=False to turn neurons "
            "in all directions"
        )
    inputs, labels = _checked_data(data)
    _check_labels(labels, _count_outputs(model, inputs))
    initial = {layer.name: layer.parameter.detach().clone() for layer in layers}
    solution = Classifier(model, inputs, labels, caps, {name: each.weights for name, each in caps.items()})
    _check_fit(solution, initial)
    return solution


def _checked_data(data: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(data, tuple | list) or len(data) != 2 or not all(isinstance(each, Tensor) for each in data):
        raise TypeError("data must be a pair of tensors, (inputs, labels)")
    inputs, labels = data
    if labels.is_floating_point() or labels.is_complex() or labels.dim() != 1:
        raise TypeError(f"labels must be integers, one per example, got {labels.dtype} of shape {tuple(labels.shape)}")
    if not inputs.dim():
        raise TypeError("inputs must have one example per row, got a single number")
    if not len(labels) or len(inputs) != len(labels):
        raise ValueError(f"data must have as many inputs as labels, at least one, got {len(inputs)} and {len(labels)}")
    return inputs, labels.long()


def _count_outputs(model: nn.Module, inputs: Tensor) -> int:
    """Run the model on one example, and return the number of its outputs."""
    try:
        with torch.no_grad():
            outputs = model(inputs[:1].clone())
    except (RuntimeError, IndexError) as error:  # an embedding raises IndexError for an unknown token
        raise ValueError(
            f"the model fails on an example of {inputs.dtype} and shape {(1, *inputs.shape[1:])}: {error}"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.dim() not in (1, 2) or len(outputs) != 1:
        raise TypeError("the model must return one row of outputs per example, with one output per class")
    if outputs.dtype.itemsize < 4:
        raise TypeError(f"the outputs of the model are {outputs.dtype}, too coarse for angles: run without autocast")
    return outputs.numel()


def _check_labels(labels: Tensor, outputs: int) -> None:
    least, most = int(labels.min()), int(labels.max())
    if outputs == 1:
        if not set(labels.tolist()) <= {0, 1} and not set(labels.tolist()) <= {-1, 1}:
            raise ValueError(
                f"labels must be 0 and 1, or -1 and 1, for a model of one output, got {least} to {most}: give the "
                "model an output for each class"
            )
    elif least < 0 or most >= outputs:
        raise ValueError(
            f"labels must be from 0 to {outputs - 1} for a model of {outputs} outputs, got {least} to {most}"
        )


def _check_fit(solution: Classifier, initial: Mapping[str, Tensor]) -> None:
    wrong = int((~(solution.margins(initial) > 0)).sum())
    if not wrong:
        if not bool((solution.margins(solution.poles) > 0).all()):
            raise ValueError(
                "rounding errors of the neurons' means decide some examples: call nero.balance_(model), centre the "
                "inputs, or give fix_mean=False to turn neurons in all directions"
            )
        return
    _, same = torch.unique(solution.inputs.reshape(len(solution.labels), -1), dim=0, return_inverse=True)
    pairs = torch.unique(torch.stack([same, solution.labels], 1), dim=0)
    has_clash = len(pairs) > len(torch.unique(same))
    raise ValueError(
        f"the model makes {wrong:,} errors on {len(solution.labels):,} examples, but only a solution without errors "
        "can be α-robust (Definition 6)" + (": equal inputs have different labels" if has_clash else "")
    )
