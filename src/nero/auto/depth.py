"""The depth of a network, by which ``lr="auto"`` divides the angle.

Deep relative trust (Definition 4) lets a network of L layers change by (1 + η)^L - 1 if each layer changes by η. To
change the whole network by a given amount, a step must be about L times smaller in each layer. For layers in a row L
is their number. Here it is counted along the operations of a forward pass, for any network.
"""

import math
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nero.preserve import copy_inputs, preserved
from nero.roles import roles_of
from nero.sharding import whole

#: The relative change that lr="auto" allows to the whole network, and its longest step in multiples of the angle
#: (docs/guide/auto.md).
TRUST = 0.1
LONGEST_STEP = 3.0
REMEDY = "give lr as a number, or give depth=..."
#: Operations that add two branches.
_SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})
#: Operations that put tensors side by side, such as a learned token and words: weights are then a branch of depth one.
_JOINS = frozenset({"cat", "stack", "where", "copy_", "index_put", "index_put_", "masked_scatter", "masked_scatter_"})


class _Signal(NamedTuple):
    """A tensor that is not made of weights alone: its depth, and whether it depends on trained weights."""

    depth: float
    trained: bool


class _Weights(NamedTuple):
    """A tensor made of parameters and buffers alone, and whether trained neurons are among them."""

    neurons: bool


_Source = _Signal | _Weights
_CONSTANT = _Signal(0.0, trained=False)


def depth_of(model: nn.Module, *inputs: Any, **named: Any) -> float:
    r"""Count the depth of a network in one forward pass.

    The model runs once, in its current mode, on copies of the inputs; its buffers and the random number generators are
    restored. Trained layers in a row count one each. Of branches, the deepest counts. If branches are
    added, as around a residual block, each counts by its share: for depths a and b and mean squares u and
    v, the sum has the depth :math:`\sqrt{(u a^2 + v b^2) / (u + v)}`. A branch that no trained layer has touched does
    not count. A trained branch that is zero, as many are at the start, counts like the other.
    The shares depend on the weights, so balance them first: make the optimiser, or call :func:`nero.balance_`.

    Args:
        model: the network.
        *inputs: the positional inputs of its forward pass.
        **named: the keyword inputs of its forward pass.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if there is no trained layer between the inputs and the outputs, if the operations cannot be
            traced, if added branches hold NaN, if all inputs are empty, or if the model is on the meta device.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> depth_of(model, torch.randn(2, 8))
        3.0
    """
    return count(model, inputs, named, None)


def count(model: nn.Module, inputs: Any, named: Any, trained: Container[int] | None) -> float:
    """Count the depth as :func:`depth_of` does, of the parameters with these ids alone; ``None`` for all."""
    neurons = _trained_neurons(model, trained)
    with preserved(model), _separate_operations():
        # a buffer is part of the weights, unless the network runs on a buffer instead of an input
        depth = _traced_depth(model, inputs, named, neurons, buffers_are_inputs=False) or _traced_depth(
            model, inputs, named, neurons, buffers_are_inputs=True
        )
    return _found(depth)


def run_and_count(run: Callable[[], Any], model: nn.Module, trained: Container[int]) -> tuple[Any, float | str]:
    """Run a function that trains a model, once, and count the depth of the loss that it returns.

    Returns:
        What the function returns, and the depth or why it is unknown.
    """
    sources = _Sources()
    sources.record_weights(model, _trained_neurons(model, trained), buffers=_Weights(neurons=False))
    with _separate_operations(), _tracer(sources, skips_backward=True):
        loss = run()
    try:
        sources.check()
        source = sources.look_up(loss) if isinstance(loss, Tensor) else None
        return loss, _found((source.depth if isinstance(source, _Signal) else 0.0) or sources.deepest)
    except ValueError as error:
        return loss, str(error)


def _found(depth: float) -> float:
    if not depth:
        raise ValueError(f"no trained layer was found between the inputs and the outputs of the model: {REMEDY}")
    return depth


def _trained_neurons(model: nn.Module, trained: Container[int] | None) -> set[str]:
    roles = roles_of(model)
    if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model is on the meta device, but its depth depends on its values: allocate it (module.to_empty) and "
            f"initialise it first, or {REMEDY}"
        )
    return {
        name
        for name, parameter in model.named_parameters()
        if roles[name].kind == "neuron" and parameter.requires_grad and (trained is None or id(parameter) in trained)
    }


def _traced_depth(
    model: nn.Module, inputs: Any, named: Any, neurons: Container[str], buffers_are_inputs: bool
) -> float:
    from torch.utils._pytree import tree_leaves  # slow to import, and not needed to train at a given lr

    inputs, named = copy_inputs((inputs, named))
    tensors = [leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor)]
    if tensors and not any(tensor.numel() for tensor in tensors):
        raise ValueError(f"the inputs are empty, so added branches have no shares: give a batch, or {REMEDY}")
    sources = _Sources()
    sources.record_weights(model, neurons, buffers=_CONSTANT if buffers_are_inputs else _Weights(neurons=False))
    for tensor in tensors:
        sources.record(tensor, _Signal(0.0, tensor.requires_grad))
    with torch.enable_grad(), _without_saving_hooks(), _tracer(sources):
        outputs = model(*inputs, **named)
    sources.check()
    found = [sources.look_up(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    # outputs may hide their tensors; then take the deepest tensor made
    return max((source.depth for source in found if isinstance(source, _Signal)), default=0.0) or sources.deepest


def _without_saving_hooks() -> AbstractContextManager[Any]:
    """Hide this forward pass from the caller's hooks on saved tensors, such as activation checkpointing's.

    Hooks of our own replace them. They detach, since a saved output would form a cycle with its graph that is never
    freed. Where there are none to replace, a model may use ``torch.func``, which allows no hooks.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


class _Sources:
    """The source of every tensor of a forward pass."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, _Source]] = {}
        self._record_parameters: Callable[[], None] = lambda: None
        self.deepest = 0.0
        self.error: ValueError | None = None  # why tracing ended

    def check(self) -> None:
        """Raise if an operation could not be traced."""
        if self.error is not None:
            raise self.error

    def record_weights(self, model: nn.Module, neurons: Container[str], buffers: _Source) -> None:
        """Record the parameters of a model, and its buffers as this source."""
        for buffer in model.buffers():
            self.record(buffer, buffers)
        self._record_parameters = lambda: self._record_named(model, neurons)
        self._record_parameters()

    def _record_named(self, model: nn.Module, neurons: Container[str]) -> None:
        for name, parameter in model.named_parameters():
            self.record(parameter, _Weights(name in neurons))

    def record(self, tensor: Tensor, source: _Source) -> None:
        # weak reference: keeps nothing alive and detects a reused id()
        self._known[id(tensor)] = weakref.ref(tensor), source
        for inner in _inside(tensor):
            self._known[id(inner)] = weakref.ref(inner), source
        self.deepest = max(self.deepest, source.depth if isinstance(source, _Signal) else 0.0)

    def _find(self, *tensors: Tensor) -> _Source | None:
        for tensor in tensors:
            reference, source = self._known.get(id(tensor), (None, None))
            if reference is not None and reference() is tensor:
                return source
        return None

    def look_up(self, tensor: Tensor) -> _Source:
        """Return the source of a tensor; raise if it depends on trained weights in a way that was not traced."""
        if tensor.is_leaf and tensor.requires_grad and not isinstance(self._find(tensor), _Weights):
            self._record_parameters()  # FSDP2 replaces parameters while a layer runs
        source = self._find(tensor, *_inside(tensor))
        if source is None:
            source = _CONSTANT
        elif tensor.is_leaf:  # the model may have called requires_grad_() on it meanwhile
            return source._replace(trained=True) if tensor.requires_grad and isinstance(source, _Signal) else source
        if tensor.requires_grad and isinstance(source, _Signal) and not source.trained:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} comes from an operation that cannot be traced (a compiled or "
                f"sharded model, a custom kernel), so the depth is unknown: {REMEDY}"
            )
        return source


def _inside(tensor: Tensor) -> list[Tensor]:
    """Return the tensor inside a DTensor, or inside one that waits for a collective: operations unwrap it untraced."""
    found = []
    while (inner := getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))) is not None:
        found.append(inner)
        tensor = inner
    return found


def _tracer(sources: _Sources, skips_backward: bool = False) -> Any:
    """Return a context in which the source of every new tensor is recorded, until one cannot be traced."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_backward = torch._C._current_graph_task_id() != -1
            if sources.error is not None or (skips_backward and is_backward):
                return func(*args, **(kwargs or {}))
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            # before the operation, which may work in place
            name = getattr(func, "overloadpacket", func).__name__
            try:
                if not hasattr(func, "overloadpacket") and not name.startswith("flex_attention"):
                    raise ValueError(f"{name} may hold layers that cannot be seen: {REMEDY}")
                source = _source_of_result(name, given, [sources.look_up(tensor) for tensor in given], kwargs or {})
            except ValueError as error:  # the run itself goes on
                sources.error = error
                source = _CONSTANT
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    sources.record(leaf, source)
                    if any(leaf is tensor for tensor in given) and leaf._base is not None:  # written into a view
                        sources.record(leaf._base, source)
            return result

    return Tracer()  # type: ignore[no-untyped-call]


def _source_of_result(name: str, given: list[Tensor], sources: list[_Source], options: Any) -> _Source:
    """Return the source of the result of an operation on tensors with these sources."""
    signals = [source for source in sources if isinstance(source, _Signal)]
    has_neurons = any(isinstance(source, _Weights) and source.neurons for source in sources)
    if not sources or name.startswith("new_") or name.endswith("_like"):  # a new constant
        return _CONSTANT
    if not signals:
        return _Weights(has_neurons)
    trained = len(signals) < len(sources) or any(signal.trained for signal in signals)
    depths = [source.depth if isinstance(source, _Signal) else float(source.neurons) for source in sources]
    if name in _JOINS:
        return _Signal(max(depths), trained)
    if name not in _SUMS or len(given) < 2:
        return _Signal(max(signal.depth for signal in signals) + has_neurons, trained)
    if depths[0] == depths[1] or not min(depths):  # adding a constant, an input or a bias keeps the depth
        return _Signal(max(depths), trained)
    return _Signal(_depth_of_sum(name, given, depths, options), trained)


def _depth_of_sum(name: str, branches: list[Tensor], depths: list[float], options: Any) -> float:
    """Return the root mean square of the depths of added branches, weighted by their mean squares."""
    squares = _mean_squares(branches)
    squares[name != "rsub"] *= float(options.get("alpha", 1)) ** 2
    total = sum(squares)
    if math.isnan(total):
        raise ValueError(
            f"added branches hold NaN, so their shares and the depth are unknown: run other inputs, or {REMEDY}"
        )
    if not total or math.isinf(total):  # masked by -inf, for instance: there are no shares
        return max(depths)
    # a trained branch that starts at zero will open: it counts like the other
    squares = [square or (total if depth else 0.0) for square, depth in zip(squares, depths, strict=True)]
    total = sum(squares)
    return math.sqrt(sum(square * depth**2 for square, depth in zip(squares, depths, strict=True)) / total)


def _mean_squares(tensors: list[Tensor]) -> list[float]:
    """Return the mean squares in units of the largest element of all, which keeps them in range."""
    found = [whole(tensor.detach()) for tensor in tensors]
    found = [tensor.abs() if tensor.is_complex() else tensor for tensor in found]
    found = [tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in found]
    peak = max((tensor.abs().max().item() for tensor in found if tensor.numel()), default=0.0)
    unit = peak if 0 < peak < math.inf else 1.0
    return [(tensor / unit).square().mean().item() if tensor.numel() else 0.0 for tensor in found]


@contextmanager
def _separate_operations() -> Iterator[None]:
    """Disable what hides operations: torch.compile, the fast path of attention, and autocast's cache."""
    fast, cached = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        # without torch._dynamo, which takes a second to import, nothing is compiled
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_autocast_cache_enabled(cached)
