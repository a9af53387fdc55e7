"""Measuring changes nothing: whatever is done to a model within is undone after."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn


class Bystander:
    """A pre-hook of a module's run that has no part in it, and is away while the model is measured."""


@contextmanager
def keeping(model: nn.Module, parameters: Iterable[str] = (), evaluating: bool = False) -> Iterator[None]:
    """Put back, bit for bit, the model's buffers and modes, torch's random numbers, and parameters of those names.

    They are written in place: torch's functional_call leaves a module that is used twice with the weights it was given.
    Modes are, too, and neither train() nor eval() is called: some modules do more there, such as to merge weights.
    Buffers may be replaced as well as written to; those that stayed are not touched. Until then bystanders are away.

    Args:
        model: to be kept.
        parameters: the names of those to put back.
        evaluating: whether the model is in evaluation mode until then.
    """
    named = dict(model.named_parameters())
    homes = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    weights = [(named[name], named[name].detach().clone()) for name in parameters]
    modes = [(module, module.training) for module in model.modules()]
    devices = {each.device for each in (*named.values(), *model.buffers()) if each.is_cuda}
    away = [
        (cast(OrderedDict[int, object], module._forward_pre_hooks), key, hook)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, Bystander)
    ]
    try:
        for hooks, key, _ in away:
            del hooks[key]
        for module, mode in modes:
            module.training = mode and not evaluating
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        for hooks, key, hook in reversed(away):
            hooks[key] = hook
            hooks.move_to_end(key, last=False)  # to see what the model is given, before others change it
        for module, own in homes:
            for name in dict(module._buffers):
                if name not in own:
                    del module._buffers[name]
            for name, buffer in own.items():
                module._buffers[name] = buffer
        changed = [(buffer, value) for buffer, value in buffers if not torch.equal(buffer, value)]
        for tensor, value in (*changed, *weights):
            tensor.data.copy_(value)  # of which a backward that is due takes no notice
        for module, mode in modes:
            module.training = mode
