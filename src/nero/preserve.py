"""Forward passes that leave a model as it was."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


class MeasurementHook:
    """Base class of forward pre-hooks that only observe; :func:`preserved` removes them for its duration."""


@contextmanager
def preserved(model: nn.Module, parameters: Iterable[str] = (), evaluating: bool = False) -> Iterator[None]:
    """Restore a model exactly on exit: its buffers, modes and some parameters, and torch's random number generators.

    Parameters are restored in place, since ``torch.func.functional_call`` fails to restore a module that is used
    twice. Modes are set without ``train()`` or ``eval()``, which some modules override, such as to merge weights. The
    forward pass may replace buffers as well as write to them.

    Args:
        model: the model to restore.
        parameters: the names of the parameters to restore.
        evaluating: whether the model is in evaluation mode meanwhile.
    """
    named = dict(model.named_parameters())
    weights = [(named[name], named[name].detach().clone()) for name in parameters]
    devices = {each.device for each in (*named.values(), *model.buffers()) if each.is_cuda}
    with _restored_buffers(model), _restored_modes(model, evaluating), _without_measurement_hooks(model):
        try:
            with torch.random.fork_rng(list(devices)):
                yield
        finally:
            for parameter, value in weights:
                overwrite(parameter, value)


def overwrite(parameter: Tensor, value: Tensor) -> None:
    """Set the values of a parameter, and drop the copies that autocast has cached.

    A pending backward pass does not notice, so the parameter must be restored before it.
    """
    parameter.data.copy_(value)
    torch.clear_autocast_cache()


def copy_inputs(inputs: Any) -> Any:
    """Copy the inputs of a forward pass that may write to them.

    Containers and tensors are copied; parameters are not. A tensor that occurs twice is copied once, and a view of
    another input becomes a view of its copy. Copies have no autograd history, but the same need for gradients.
    """
    from torch.utils._pytree import tree_leaves, tree_map  # slow to import, and not needed for training

    ids = {id(leaf) for leaf in tree_leaves(inputs)}
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = copy_view(leaf) if id(leaf._base) in ids else clone(leaf)
            vars(copies[id(leaf)]).update(vars(leaf))
        return copies[id(leaf)]

    def clone(tensor: Tensor) -> Tensor:
        detached = tensor.detach()
        if tensor.is_leaf:
            return detached.clone().requires_grad_(tensor.requires_grad)
        return detached.requires_grad_().clone()  # not a leaf, so that it can be written to

    def copy_view(view: Tensor) -> Tensor:
        base = view._base
        if base is None or not base.is_contiguous() or base.dtype != view.dtype:
            return clone(view)
        copied: Tensor = copy(base)
        return copied.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset())

    with torch.enable_grad():
        return tree_map(copy, inputs)


@contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[None]:
    homes = [(module, dict(module._buffers)) for module in model.modules()]
    saved = [
        (buffer, buffer.detach().clone(), 0 if _is_dense(buffer) else buffer._version) for buffer in model.buffers()
    ]
    try:
        yield
    finally:
        for module, own in homes:
            for name in dict(module._buffers):
                if name not in own:
                    del module._buffers[name]
            for name, buffer in own.items():
                module._buffers[name] = buffer
        for buffer, value, version in saved:
            if _is_dense(buffer) and (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer.data = value  # a copy would not fit
            elif _is_dense(buffer) and not torch.equal(buffer, value):
                buffer.data.copy_(value)  # .data, so that a pending backward pass does not fail
            elif not _is_dense(buffer) and buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(value)  # the .data of a sparse tensor is another tensor


@contextmanager
def _restored_modes(model: nn.Module, evaluating: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, mode in modes:
            module.training = mode and not evaluating
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _without_measurement_hooks(model: nn.Module) -> Iterator[None]:
    removed = [
        (cast(OrderedDict[int, object], module._forward_pre_hooks), key, hook)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, MeasurementHook)
    ]
    try:
        for hooks, key, _ in removed:
            hooks.pop(key, None)  # copies of a module share their hooks
        yield
    finally:
        for hooks, key, hook in reversed(removed):
            hooks[key] = hook
            hooks.move_to_end(key, last=False)  # first, to see the inputs before other hooks change them


def _is_dense(buffer: Tensor) -> bool:
    """Return whether torch.equal can compare a buffer; the writes to a sparse one are counted instead."""
    return buffer.layout == torch.strided
