"""How deep a network is to a step that turns all of its neurons: what ``lr="auto"`` divides by.

Deep relative trust (Definition 4) lets a network of L layers change by (1 + η)^L - 1 if each changes by η: a step that
is to change the network by so much has to be about L times shorter in each layer. That is for layers in a row. Here L
is counted along the network's own operations, as it runs on some input.
"""

import math
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nero.preserve import copied, keeping
from nero.roles import roles_of

#: By how much a step may change the whole network, if ``lr="auto"``, and how many times as long a single one may be.
#: See docs/guide/auto.md.
TRUST = 0.1
LONGEST_STEP = 3.0
#: What to do where no depth can be had.
_INSTEAD = "give a learning rate as a number, or depth=... as you count it"
#: Operations that add what two branches say.
_SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})


class _Signal(NamedTuple):
    """Of a tensor: by how many layers a change of all has grown in it, and whether it hangs on weights at all."""

    depth: float
    trained: bool


class _Weights(NamedTuple):
    """A tensor that is made of parameters and buffers alone, of neurons among them or not."""

    neurons: bool


def depth_of(model: nn.Module, *inputs: Any, **named: Any) -> float:
    """The depth of a network, as a step that turns all of its trained neurons sees it.

    It is counted while the model runs on copies of the inputs, once and in the mode that it is in; its buffers and
    torch's random numbers are put back. Layers in a row count one each; of branches, the deepest counts. Where
    branches are added, as around a residual block, each counts by its share: of depths a and b and mean squares u and
    v, the sum has the depth √((u a² + v b²) / (u + v)); what no layer has touched does not count. The shares are those
    of the weights that are there: make the optimiser first, or call :func:`nero.balance_`.

    Args:
        model: whose layers to count.
        *inputs: what to run it on.
        **named: the same, by name.

    Raises:
        TypeError: if it is no module.
        ValueError: if no trained layer is found on the way from the inputs to what the model gives, if the way
            cannot be followed, if branches that are added are not numbers, if all inputs are empty, or if the model
            is on the meta device.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> depth_of(model, torch.randn(2, 8))
        3.0
    """
    return count(model, inputs, named, None)


def count(model: nn.Module, inputs: Any, named: Any, trained: Container[int] | None) -> float:
    """As :func:`depth_of`, of parameters with these numbers alone (``id``), if there are any given."""
    roles = roles_of(model)
    if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model is on the meta device, and its depth hangs on its values: give it memory (module.to_empty) and "
            f"values first; or {_INSTEAD}"
        )
    neurons = {
        id(parameter)
        for name, parameter in model.named_parameters()
        if roles[name].kind == "neuron" and parameter.requires_grad and (trained is None or id(parameter) in trained)
    }
    with keeping(model), _one_by_one():
        # a network may run on a buffer of its own instead of an input; the other way to see one is as a part of weights
        depth = _traced(model, inputs, named, neurons, buffers=False) or _traced(
            model, inputs, named, neurons, buffers=True
        )
    if not depth:
        raise ValueError(
            "no trained layer was found between the model's inputs and what it gives, so its depth is not known: "
            + _INSTEAD
        )
    return depth


def _traced(model: nn.Module, inputs: Any, named: Any, neurons: Container[int], buffers: bool) -> float:
    # imported when first asked for: training at a given rate does not need it
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    inputs, named = copied((inputs, named))
    tensors = [each for each in tree_leaves((inputs, named)) if isinstance(each, Tensor)]
    if tensors and not any(each.numel() for each in tensors):
        raise ValueError(
            f"the inputs are empty, so that no branch has a share and the depth is not known: give some; or {_INSTEAD}"
        )
    known: dict[int, tuple[Any, _Signal | _Weights]] = {}
    deepest = 0.0

    def learn(tensor: Tensor, what: _Signal | _Weights) -> None:
        nonlocal deepest
        # not held, lest all that the model makes be; yet referred to: another may get the number of one that is gone
        known[id(tensor)] = weakref.ref(tensor), what
        deepest = max(deepest, what.depth if isinstance(what, _Signal) else 0.0)

    def recall(tensor: Tensor) -> _Signal | _Weights:
        place, what = known.get(id(tensor), (None, None))
        if what is None or place is None or place() is not tensor:
            what = _Signal(0.0, trained=False)
        elif tensor.is_leaf:  # somebody may have asked for its gradient on the way, and all that is made of it has one
            return what._replace(trained=True) if tensor.requires_grad and isinstance(what, _Signal) else what
        if tensor.requires_grad and isinstance(what, _Signal) and not what.trained:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} comes from where torch's operations cannot be followed (a "
                f"compiled or sharded model, a kernel of somebody's own), so the model's depth is not known: {_INSTEAD}"
            )
        return what

    class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            # before it is done: it may be done in place
            what = _after(func.overloadpacket.__name__, given, [recall(each) for each in given], kwargs or {})
            found = func(*args, **(kwargs or {}))
            for each in tree_leaves(found):
                if isinstance(each, Tensor):
                    learn(each, what)
                    if any(each is other for other in given) and each._base is not None:  # written into a part of it
                        learn(each._base, what)
            return found

    for own in model.buffers():
        learn(own, _Signal(0.0, trained=False) if buffers else _Weights(neurons=False))
    for parameter in model.parameters():
        learn(parameter, _Weights(id(parameter) in neurons))
    for each in tensors:
        learn(each, _Signal(0.0, each.requires_grad))
    # who keeps what a run saves for its backward, as activation checkpointing does, is not to count this one's
    unheeded = torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each)
    with torch.enable_grad(), unheeded, Tracer():  # type: ignore[no-untyped-call]
        found = model(*inputs, **named)
    given = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
    signals = [what for what in map(recall, given) if isinstance(what, _Signal)]
    return max((each.depth for each in signals), default=0.0) or deepest  # of what it gave or, if that is closed, made


def _after(name: str, given: list[Tensor], seen: list[_Signal | _Weights], options: Any) -> _Signal | _Weights:
    """What an operation makes of what it is given."""
    signals = [each for each in seen if isinstance(each, _Signal)]
    neurons = any(isinstance(each, _Weights) and each.neurons for each in seen)
    if not seen or name.startswith("new_") or name.endswith("_like"):  # made here, of nothing
        return _Signal(0.0, trained=False)
    if not signals:
        return _Weights(neurons)
    trained = len(signals) < len(seen) or any(each.trained for each in signals)
    depth = max(each.depth for each in signals) + neurons
    if name not in _SUMS or len(given) < 2:
        return _Signal(depth, trained)
    depths = [each.depth if isinstance(each, _Signal) else float(each.neurons) for each in seen]
    if depths[0] == depths[1] or not min(depths):  # a constant, an input or a bias leaves the other as deep as it was
        return _Signal(max(depths), trained)
    squares = _squares(given)
    squares[name != "rsub"] *= float(options.get("alpha", 1)) ** 2
    total = sum(squares)
    if math.isnan(total):
        raise ValueError(
            "branches that are added hold values that are not a number, so that their shares and the model's depth are "
            f"not known: run it on other inputs, or {_INSTEAD}"
        )
    if not total or math.isinf(total):  # what was masked, as by -inf, tells no share
        return _Signal(max(depths), trained)
    shared = sum(square * each**2 for square, each in zip(squares, depths, strict=True)) / total
    return _Signal(math.sqrt(shared), trained)


def _squares(tensors: list[Tensor]) -> list[float]:
    """The mean squares, in units of the largest entry of all: of the entries as they are, they may leave the range."""
    found = [each.detach().abs() if each.is_complex() else each.detach() for each in tensors]
    found = [each if each.dtype == torch.float64 else each.float() for each in found]
    peak = max((each.abs().max().item() for each in found if each.numel()), default=0.0)
    unit = peak if 0 < peak < math.inf else 1.0
    return [(each / unit).square().mean().item() if each.numel() else 0.0 for each in found]


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Have every layer run as it stands: several as one operation cannot be told apart, nor what was cast before."""
    fast, cached = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_autocast_cache_enabled(cached)
