"""Counts the depth of a model when it first runs, and gives it to the optimiser's groups."""

import math
import warnings
import weakref
from collections.abc import Container, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from nero.groups import Part
from nero.preserve import MeasurementHook


class HasGroups(Protocol):
    """The part of an optimiser that the counter reads."""

    param_groups: list[dict[str, Any]]

    def parts(self) -> Iterator[Part]:
        """Yield every parameter with its role and group."""
        ...


class DepthCounter:
    """Sets ``depth="auto"`` groups of an optimiser to the depth of a model, counted when the model first runs.

    Args:
        optimiser: holds the counter; only a weak reference is kept.
    """

    def __init__(self, optimiser: HasGroups) -> None:
        self._optimiser = weakref.ref(optimiser)
        self._reason = ""  # why the last count failed
        self._uncounted: dict[Tensor, float] = {}  # neurons that had no part in the depth of their group

    def watch(self, model: nn.Module) -> None:
        """Count when the model next runs with gradients.

        Raises:
            TypeError: if ``model`` is not a module.
            ValueError: if no group has a parameter of it, or if it is scripted.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
        check_countable(model)
        groups = list(self._groups_of(self._shared_with(model)))
        if not groups:
            raise ValueError("no parameter of this model is in the optimiser: give the model that it trains")
        for group in groups:
            group["depth"] = "auto"
        _CountOnce(model, self)
        self._reason = ""

    def join(self, group: dict[str, Any]) -> None:
        """Note a group that joined after the count, and took the depth of the others."""
        neurons = [part for part in self._parts() if part.group is group and part.role.kind == "neuron"]
        self._uncounted.update(dict.fromkeys((part.parameter for part in neurons), group["depth"]))

    def check(self) -> None:
        """Raise if a group still waits for its depth."""
        optimiser = self._optimiser()
        if optimiser is not None and any(group["depth"] == "auto" for group in optimiser.param_groups):
            raise RuntimeError(
                f"the depth of the model is not known yet{self._reason}: run the whole model, not compiled, before the "
                "first step; call optimiser.count_depth(model) first if the optimiser was copied or loaded, or has "
                "parameters of another model; or count before compiling or sharding, and give depth=nero.depth_of("
                "nero.balance_(model), inputs) with lr=0.1 and longest_step=3"
            )

    def warn(self) -> None:
        """Warn once when neurons that had no part in the count first have a gradient."""
        if not any(neuron.requires_grad and neuron.grad is not None for neuron in self._uncounted):
            return
        late = [
            part.name
            for part in self._parts()
            if part.parameter.grad is not None and self._uncounted.get(part.parameter) == part.group["depth"]
        ]
        self._uncounted = {}
        if late:
            more = f" and {len(late) - 1} more" if len(late) > 1 else ""
            warnings.warn(
                f"{late[0]}{more} had no part in the depth that the angle is divided by: call "
                "optimiser.count_depth(model), and the model's next run counts again; or set the depth of the group",
                stacklevel=5,
            )

    def wanted(self, model: nn.Module) -> set[int]:
        """Return the ids of the parameters to count; none if no group waits for this model."""
        shared = self._shared_with(model)
        return shared if any(group["depth"] == "auto" for group in self._groups_of(shared)) else set()

    def take(self, depth: float | str, counted: Container[int]) -> None:
        """Set the depth of the groups of these parameters, or note why the count failed."""
        if isinstance(depth, str):
            self._reason = f" ({depth})"
            return
        for group in self._groups_of(counted):
            if group["depth"] == "auto":
                group["depth"] = depth
        for part in self._parts():
            if id(part.parameter) in counted:
                self._uncounted.pop(part.parameter, None)
                if part.role.kind == "neuron" and not part.parameter.requires_grad:
                    self._uncounted[part.parameter] = depth

    def _parts(self) -> list[Part]:
        optimiser = self._optimiser()
        return [] if optimiser is None else list(optimiser.parts())

    def _shared_with(self, model: nn.Module) -> set[int]:
        own = {id(parameter) for parameter in model.parameters()}
        return {id(part.parameter) for part in self._parts() if id(part.parameter) in own}

    def _groups_of(self, shared: Container[int]) -> Iterator[dict[str, Any]]:
        optimiser = self._optimiser()
        for group in [] if optimiser is None else optimiser.param_groups:
            if any(id(parameter) in shared for parameter in group["params"]):
                yield group


def check_countable(model: nn.Module) -> None:
    """Raise if a model has no forward pre-hooks, which the count needs."""
    if isinstance(model, ScriptModule):
        raise ValueError(
            "a scripted model runs no hooks, so its depth cannot be counted then: count it before, as in "
            "nero.Nero(model, lr=0.1, longest_step=3, depth=nero.depth_of(nero.balance_(model), inputs))"
        )


class _CountOnce(MeasurementHook):
    """A forward pre-hook that counts a model's depth just before it first runs with gradients, then removes itself."""

    def __init__(self, model: nn.Module, counter: DepthCounter) -> None:
        self._counter: Any = weakref.ref(counter)  # the model must not keep the optimiser alive
        model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"_counter": None}  # a copy of the model counts nothing

    def __call__(self, model: nn.Module, inputs: Any, named: Any = None) -> None:
        from nero.auto.depth import count

        # ``named`` is missing if another hook removed this one while hooks were running
        is_traced = torch.compiler.is_compiling() or torch._C._is_tracing()
        is_traced = is_traced or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        if named is None or is_traced or not torch.is_grad_enabled():
            return
        counter = self._counter() if self._counter is not None else None
        wanted = counter.wanted(model) if counter is not None else ()
        if counter is not None and wanted:
            try:
                found: float | str = count(model, inputs, named, wanted)
            except Exception as error:  # the model's own run, or the next step, reports it
                found = f"{type(error).__name__}: {error}"
            found = _agreed(model, found)
            counter.take(found, wanted)
            if isinstance(found, str):
                return  # the next run may succeed
        for key, hook in list(model._forward_pre_hooks.items()):
            if hook is self:
                del model._forward_pre_hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)


def _agreed(model: nn.Module, found: float | str) -> float | str:
    """Return the greatest depth that any process of DistributedDataParallel has counted.

    Processes count on different batches, and with different depths their copies of the weights would drift apart. So
    outside of DistributedDataParallel, one of several processes does not count at all.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return found
    if torch.distributed.get_world_size() == 1:
        return found
    wrapper = nn.parallel.DistributedDataParallel
    together = model if isinstance(model, wrapper) else wrapper._active_ddp_module
    if together is None:
        return "this is one of several processes, which agree on a depth where DistributedDataParallel runs the model"
    mine = math.inf if isinstance(found, str) else found
    depth = torch.tensor(mine, dtype=torch.float64, device=next(model.parameters()).device)
    torch.distributed.all_reduce(depth, torch.distributed.ReduceOp.MAX, together.process_group)
    if isinstance(found, str):
        return found
    return depth.item() if depth.isfinite() else "another process could not count it"
