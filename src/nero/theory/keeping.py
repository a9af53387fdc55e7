"""Measuring changes nothing: whatever is done to a model within is undone after."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def keeping(model: nn.Module, parameters: Iterable[str] = (), evaluating: bool = False) -> Iterator[None]:
    """Put back, bit for bit, the model's buffers and modes, torch's random numbers, and parameters of those names.

    They are written in place: torch's functional_call leaves a module that is used twice with the weights it was given.
    Modes are, too, and neither train() nor eval() is called: some modules do more there, such as to merge weights.

    Args:
        model: to be kept.
        parameters: the names of those to put back.
        evaluating: whether the model is in evaluation mode until then.
    """
    named = dict(model.named_parameters())
    tensors = [*model.buffers(), *(named[name] for name in parameters)]
    saved = [tensor.detach().clone() for tensor in tensors]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device.index for parameter in named.values() if parameter.is_cuda})
    try:
        for module, mode in modes:
            module.training = mode and not evaluating
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
        for module, mode in modes:
            module.training = mode
