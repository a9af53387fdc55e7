"""How deep a network is to a step that turns all of its neurons: what ``lr="auto"`` divides by.

Deep relative trust (Definition 4) lets a network of L layers change by (1 + η)^L - 1 if each changes by η: a step that
is to change the network by so much has to be about L times shorter in each layer. That is for layers in a row. Here L
is counted along the network's own operations, as it runs on some input.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nero.roles import roles_of

#: By how much a step may change the whole network, if ``lr="auto"``. See docs/auto.md.
TRUST = 0.04
#: Operations that add what two branches say.
_SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})
#: What operations are called that bring the variance to one.
_NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")


class _Signal(NamedTuple):
    """What is known of a tensor: by how many layers a change of all of them has grown in it, and its variance."""

    depth: float
    variance: float


class _Weights(NamedTuple):
    """A tensor that is made of parameters and buffers alone."""

    neurons: bool


def depth_of(model: nn.Module, *inputs: Any, **named: Any) -> float:
    """The depth of a network, as a step that turns all of its neurons sees it.

    It is counted while the model runs on the inputs, once and in evaluation mode. Layers in a row
    count one each; of branches, the deepest counts. Where branches are added, as around a residual block, each
    counts by its share of the variance: of depths a and b and variances u and v the sum has the depth
    √((u a² + v b²) / (u + v)) and the variance u + v. A norm layer makes the variance one.

    Args:
        model: whose layers to count.
        *inputs: what to run it on.
        **named: the same, by name.

    Raises:
        ValueError: if no layer is found on the way from the inputs to what the model gives.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> depth_of(model, torch.randn(2, 8))
        3.0
    """
    training = {module: module.training for module in model.modules()}
    tracer = tracer_of(model)
    try:
        model.eval()
        with torch.enable_grad(), tracer:  # without gradients torch may run several layers as one operation
            found = model(*inputs, **named)
    finally:
        for module, mode in training.items():
            module.training = mode
    depth: float = tracer.depth(found)
    return depth


def tracer_of(model: nn.Module) -> Any:
    """A mode that follows what the model does while it is on, and then tells how deep an output is."""
    # imported when first asked for: training at a given rate does not need it
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    roles = roles_of(model)

    class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            # tensors are held, lest another get the number of one that is gone
            self.known: dict[int, tuple[Tensor, _Signal | _Weights]] = {
                id(own): (own, _Weights(name in roles and roles[name].kind == "neuron"))
                for name, own in (*model.named_buffers(), *model.named_parameters())
            }

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            given = [self._of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            if given:
                what = _after(func.overloadpacket.__name__, given)
                for each in tree_leaves(found):
                    if isinstance(each, Tensor):
                        self.known[id(each)] = each, what
            return found

        def depth(self, found: Any) -> float:
            """The largest of all that the model gave."""
            signals = [self._of(each) for each in tree_leaves(found) if isinstance(each, Tensor)]
            depth = max((each.depth for each in signals if isinstance(each, _Signal)), default=0.0)
            if not depth:
                raise ValueError(
                    "no layer was found between the model's inputs and what it gives, so its depth is not known: "
                    "give a learning rate as a number, or depth=... as you count it"
                )
            return depth

        def _of(self, tensor: Tensor) -> _Signal | _Weights:
            return self.known[id(tensor)][1] if id(tensor) in self.known else _Signal(0.0, 1.0)

    return Tracer()


def _after(name: str, given: Sequence[_Signal | _Weights]) -> _Signal | _Weights:
    """What an operation makes of what it is given."""
    signals = [each for each in given if isinstance(each, _Signal)]
    neurons = any(isinstance(each, _Weights) and each.neurons for each in given)
    if not signals:
        return _Weights(neurons)
    if name in _SUMS:
        branches = [*signals, *([_Signal(1.0, 1.0)] if neurons else [])]  # a table of places, say
        variance = sum(each.variance for each in branches)
        return _Signal(math.sqrt(sum(each.variance * each.depth**2 for each in branches) / variance), variance)
    depth = max(each.depth for each in signals) + neurons
    variance = 1.0 if any(norm in name for norm in _NORMS) else max(each.variance for each in signals)
    return _Signal(depth, variance)


class Once:
    """Counts a model's depth when it first runs, tells somebody, and is gone.

    Args:
        model: to count the layers of.
        tell: a method, which is not held.
    """

    def __init__(self, model: nn.Module, tell: Callable[[float], None]) -> None:
        self._tell: Any = weakref.WeakMethod(tell)
        self._tracer: Any = None
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"_tell": None, "_tracer": None, "_hooks": []}  # a copy of the model counts nothing

    def _begin(self, model: nn.Module, _: Any) -> None:
        if self._tracer is None and self._tell is not None and not torch.compiler.is_compiling():
            self._tracer = tracer_of(model)
            self._tracer.__enter__()

    def _end(self, _: nn.Module, __: Any, found: Any) -> None:
        if self._tracer is None or torch.compiler.is_compiling():
            return
        tracer, self._tracer = self._tracer, None
        tracer.__exit__(None, None, None)
        if found is None:  # it has failed, and says so itself
            return
        for hook in self._hooks:
            hook.remove()
        tell = self._tell()
        if tell is not None:
            tell(tracer.depth(found))
