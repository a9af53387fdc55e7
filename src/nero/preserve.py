"""Measuring changes nothing: whatever is done to a model within is undone after."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


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
    buffers = [
        (buffer, buffer.detach().clone(), 0 if _dense(buffer) else buffer._version) for buffer in model.buffers()
    ]
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
            hooks.pop(key, None)  # modules may share them
        for module, mode in modes:
            module.training = mode and not evaluating
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        for hooks, key, hook in reversed(away):
            hooks[key] = hook
            hooks.move_to_end(key, last=False)  # to see what the model is given, before others change it
        for module, mode in modes:
            module.training = mode
        for parameter, value in weights:
            put(parameter, value)
        for module, own in homes:
            for name in dict(module._buffers):
                if name not in own:
                    del module._buffers[name]
            for name, buffer in own.items():
                module._buffers[name] = buffer
        for buffer, value, writes in buffers:
            if _dense(buffer) and not torch.equal(buffer, value):
                buffer.data.copy_(value)  # of which a backward that is due takes no notice
            elif not _dense(buffer) and buffer._version != writes:
                with torch.no_grad():
                    buffer.copy_(value)  # its data are another tensor


def _dense(buffer: Tensor) -> bool:
    """Whether torch can compare it with another: it compares none that are sparse, of which it counts the writes."""
    return buffer.layout == torch.strided


def put(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter other values to try. What autocast has cast of it, and would take again, is forgotten.

    A backward that is due takes no notice: until then the parameter is put back.
    """
    parameter.data.copy_(value)
    torch.clear_autocast_cache()


def copied(given: Any) -> Any:
    """Inputs for a run that may spend them: containers and tensors of its own, where what was one tensor still is one.

    So is a part of one that is given as well. A tensor's history is cut off, yet what could be written to can be.
    Parameters are no copies, but themselves.
    """
    from torch.utils._pytree import tree_leaves, tree_map  # which most training does not need

    numbers = {id(each) for each in tree_leaves(given)}
    copies: dict[int, Tensor] = {}

    def copy(each: Any) -> Any:
        if not isinstance(each, Tensor) or isinstance(each, nn.Parameter):
            return each
        if id(each) not in copies:
            copies[id(each)] = part_of_another(each) if id(each._base) in numbers else alone(each)
            vars(copies[id(each)]).update(vars(each))
        return copies[id(each)]

    def alone(each: Tensor) -> Tensor:
        cut, asked = each.detach(), each.requires_grad
        return cut.clone().requires_grad_(asked) if each.is_leaf else cut.requires_grad_().clone()

    def part_of_another(each: Tensor) -> Tensor:
        whole = each._base
        if whole is None or not whole.is_contiguous() or whole.dtype != each.dtype:
            return alone(each)
        own: Tensor = copy(whole)
        return own.as_strided(each.shape, each.stride(), each.storage_offset() - whole.storage_offset())

    with torch.enable_grad():
        return tree_map(copy, given)
