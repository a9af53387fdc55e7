"""Counts the depth of a model when it first runs, and gives it to the optimiser's groups."""

import math
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from nero.groups import Part
from nero.messages import and_more, warn
from nero.preserve import MeasurementHook
from nero.process import is_capturing, is_one_of_several
from nero.sharding import agreed, is_sharded

#: What to write if a model cannot count its depth when it first runs.
_BY_HAND = "nero.Nero(model, lr=0.1, longest_step=3, depth=nero.depth_of(nero.balance_(model), inputs))"


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
        self._hook: _CountOnce | None = None
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
        self._reason = ""
        trained = [part for part in self._parts() if part.role.kind == "neuron" and part.parameter.requires_grad]
        self._hook = _CountOnce(model, self, {id(part.parameter) for part in trained})

    def join(self, group: dict[str, Any]) -> None:
        """Note a group that joined after the count, and took the depth of the others."""
        neurons = [part for part in self._parts() if part.group is group and part.role.kind == "neuron"]
        self._uncounted.update(dict.fromkeys((part.parameter for part in neurons), group["depth"]))

    def run(self, closure: Callable[[], Any]) -> Any:
        """Run a closure, and count the depth of its loss if a model waits and no run of the whole model counts it."""
        model = None if self._hook is None or torch.compiler.is_compiling() else self._hook.model()
        wanted = self.wanted(model) if model is not None else set()
        if model is None or not wanted or is_capturing() or is_one_of_several():
            return closure()
        from nero.auto.depth import run_and_count

        loss, found = run_and_count(closure, model, wanted)
        if self.wanted(model):
            self.take(found, wanted)
        return loss

    def check(self) -> None:
        """Raise if a group still waits for its depth."""
        waiting = [group for group in self._groups() if group["depth"] == "auto"]
        if waiting:
            raise RuntimeError(f"the depth of the model is not known yet{self._cause(waiting)}")

    def _cause(self, waiting: list[dict[str, Any]]) -> str:
        """Say why groups still wait for their depth, and which line to write."""
        if self._reason:
            if "sharded model" in self._reason:
                return f" ({self._reason}): count it before you compile or shard the model, as in {_BY_HAND}"
            from nero.auto.depth import REMEDY  # the reason came from there

            return f" ({self._reason})" + ("" if REMEDY in self._reason else f": {REMEDY}")
        hook = self._hook
        model = None if hook is None else hook.model()
        if hook is not None and model is None:
            return (
                ", since the module that the optimiser was made with is gone: keep it, and run it as a whole; or count "
                f"by {_BY_HAND}"
            )
        own = set() if model is None else self._shared_with(model)
        if hook is None or model is None or not any(id(each) in own for group in waiting for each in group["params"]):
            return (
                ": call optimiser.count_depth(model) and run the model once more, since the optimiser was copied or "
                "loaded, or has parameters of another model"
            )
        name = type(model).__name__
        if hook.is_compiled:
            return f", since {name} ran compiled: run model(inputs) once before you compile it; or count by {_BY_HAND}"
        if hook.is_swapped:
            return (
                f", since {name} ran within torch.func or torch.vmap, or with other tensors as its parameters: run "
                "model(inputs) once before the first step"
            )
        if isinstance(model, nn.ModuleList | nn.ModuleDict):
            return (
                f", since a {name} has no forward pass: call optimiser.count_depth(model) with the whole model and run "
                "it once more, or set depth"
            )
        return (
            f", since the forward pass of {name} has not run with gradients, or ran compiled: run the whole model, as "
            f"self(inputs) does in a training_step; or count by {_BY_HAND}"
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
            warn(
                f"{and_more(late)} had no part in the depth that the angle is divided by: call "
                "optimiser.count_depth(model), and the model's next run counts again; or set the depth of the group"
            )

    def wanted(self, model: nn.Module) -> set[int]:
        """Return the ids of the parameters to count; none if no group waits for this model."""
        shared = self._shared_with(model)
        return shared if any(group["depth"] == "auto" for group in self._groups_of(shared)) else set()

    def has_none_of(self, model: nn.Module) -> bool:
        """Return whether no parameter of a model is in the optimiser, as while torch.func replaces them."""
        return not self._shared_with(model)

    def take(self, depth: float | str, counted: Container[int]) -> None:
        """Set the depth of the groups of these parameters, or note why the count failed."""
        if isinstance(depth, str):
            self._reason = depth
            return
        for group in self._groups_of(counted):
            if group["depth"] == "auto":
                group["depth"] = depth
        for part in self._parts():
            if id(part.parameter) in counted:
                self._uncounted.pop(part.parameter, None)
                if part.role.kind == "neuron" and not part.parameter.requires_grad:
                    self._uncounted[part.parameter] = depth

    def _groups(self) -> list[dict[str, Any]]:
        optimiser = self._optimiser()
        return [] if optimiser is None else optimiser.param_groups

    def _parts(self) -> list[Part]:
        optimiser = self._optimiser()
        return [] if optimiser is None else list(optimiser.parts())

    def _shared_with(self, model: nn.Module) -> set[int]:
        own = {id(parameter) for parameter in model.parameters()}
        return {id(part.parameter) for part in self._parts() if id(part.parameter) in own}

    def _groups_of(self, shared: Container[int]) -> Iterator[dict[str, Any]]:
        for group in self._groups():
            if any(id(parameter) in shared for parameter in group["params"]):
                yield group


def check_countable(model: nn.Module) -> None:
    """Raise if a model has no forward pre-hooks, which the count needs."""
    if isinstance(model, ScriptModule):
        raise ValueError(
            f"a scripted model runs no hooks, so its depth cannot be counted then: count it before, as in {_BY_HAND}"
        )


class _CountOnce(MeasurementHook):
    """A forward pre-hook that counts a model's depth just before it first runs with gradients, then removes itself.

    The model may be a shell, such as a LightningModule, whose own forward pass never runs. So the hook is also on the
    modules inside it that hold all of its neurons. The first of them to run is counted.
    """

    def __init__(self, model: nn.Module, counter: DepthCounter, neurons: set[int]) -> None:
        self._counter: Any = weakref.ref(counter)  # the model must not keep the optimiser alive
        self.model: Any = weakref.ref(model)
        self.is_compiled = False  # whether the model ran compiled
        self.is_swapped = False  # whether the model ran with other tensors in the place of its parameters
        self._compiled: list[tuple[nn.Module, Any]] = []
        for module in _shells(model, neurons):
            module.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
            if module._compiled_call_impl is not None:  # model.compile() would compile the hook as well
                self._compiled.append((module, module._compiled_call_impl))
                module._compiled_call_impl = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_counter": None, "_compiled": []}  # a copy of the model counts nothing

    def __call__(self, module: nn.Module, inputs: Any, named: Any = None) -> None:
        from nero.auto.depth import count

        if torch.compiler.is_compiling():
            self.is_compiled = True
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:  # within torch.vmap and others
            self.is_swapped = True
            return
        # ``named`` is missing if another hook removed this one while hooks were running
        if named is None or torch._C._is_tracing() or is_capturing() or not torch.is_grad_enabled():
            return
        counter = self._counter() if self._counter is not None else None
        model = None if counter is None else self.model()
        if model is None:  # not by its truth value: a model's length may be undefined
            model = module
        wanted = counter.wanted(model) if counter is not None else ()
        if counter is not None and wanted:
            parameters = list(module.parameters())  # FSDP2 may leave others in their place
            try:
                found: float | str = count(module, inputs, named, wanted)
            except Exception as error:  # the model's own run, or the next step, reports it
                found = f"{type(error).__name__}: {error}"
            found = _agreed(module, parameters, found)
            counter.take(found, wanted)
            if isinstance(found, str):  # the next run may succeed
                self._remove(*(inner for inner in module.modules() if inner is not module))
                return
        elif counter is not None and counter.has_none_of(model):
            self.is_swapped = True
            return
        for inner, compiled in self._compiled:
            inner._compiled_call_impl = inner._compiled_call_impl or compiled
        self._compiled = []
        self._remove(*model.modules())

    def _remove(self, *modules: nn.Module) -> None:
        for module in modules:
            for key, hook in list(module._forward_pre_hooks.items()):
                if hook is self:
                    del module._forward_pre_hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


def _shells(model: nn.Module, neurons: set[int]) -> Iterator[nn.Module]:
    """Yield a model and the modules inside it that hold all of its neurons, the outermost first."""
    own = neurons & {id(parameter) for parameter in model.parameters()}
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        inner = next(
            (
                child
                for child in inner.children()
                if own and own <= {id(parameter) for parameter in child.parameters()}
                if not isinstance(child, ScriptModule)
            ),
            None,
        )


def _agreed(model: nn.Module, parameters: Sequence[Tensor], found: float | str) -> float | str:
    """Return the greatest depth that any process has counted that shares the model.

    Processes count on different batches, and with different depths their copies of the weights would drift apart. So
    where the model is neither sharded nor in DistributedDataParallel, one of several processes does not count at all.
    """
    if not is_one_of_several():
        return found
    mine = torch.tensor(math.inf if isinstance(found, str) else found, dtype=torch.float64, device="cpu")
    if any(map(is_sharded, parameters)):
        return _answer(found, agreed(mine, parameters))
    wrapper = nn.parallel.DistributedDataParallel
    together = model if isinstance(model, wrapper) else wrapper._active_ddp_module
    if together is None:
        return (
            "this is one of several processes, which agree on a depth where DistributedDataParallel or fully_shard has "
            "the model"
        )
    depth = mine.to(parameters[0].device)
    torch.distributed.all_reduce(depth, torch.distributed.ReduceOp.MAX, together.process_group)
    return _answer(found, depth)


def _answer(found: float | str, depth: Tensor) -> float | str:
    if isinstance(found, str):
        return found
    return depth.item() if depth.isfinite() else "another process could not count it"
