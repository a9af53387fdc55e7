"""Which parameters Nero can train, with errors that name the fix."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nero.messages import SHARD_BY_FSDP2, warn
from nero.process import is_capturing, is_distributed
from nero.roles import check_whole
from nero.sharding import agreed_flags, check_sharding, local_of

COMPLEX = "complex: hold it as a real parameter of twice the size (torch.view_as_real)"


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise if a parameter cannot be added to the optimiser; a frozen one of a module may be of any dtype."""
    if is_lazy(parameter):
        raise ValueError(f"{name} has no shape yet: run a batch through the lazy layers before making the optimiser")
    check_whole(name, parameter)
    if parameter.requires_grad:
        _check_kind(name, parameter)
    # quantised weights of a module are integers too, and stay frozen
    elif not isinstance(parameter, nn.Parameter) and not (parameter.is_floating_point() or parameter.is_complex()):
        raise TypeError(f"{name} is a tensor of {parameter.dtype}, which has no gradient: convert it with .float()")


def warn_if_untrainable(parameters: Iterable[Tensor]) -> None:
    """Warn if all parameters are frozen or empty, so that steps change nothing.

    No parameter at all is no fault: ZeroRedundancyOptimizer gives none to some processes.
    """
    can_train = [bool(parameter.requires_grad and parameter.numel()) for parameter in parameters]
    if can_train and not any(can_train):
        warn(
            "nothing to train: every parameter is frozen (requires_grad=False) or has no elements; "
            "call model.requires_grad_() on what you want to train"
        )


def warn_if_idle(parameters: Iterable[Tensor]) -> None:
    """Warn if a step of a distributed run, none of whose parameters is sharded, finds no gradient."""
    if is_distributed() and all(parameter.grad is None for parameter in parameters):
        warn(
            "no parameter of the optimiser has a gradient, so this step changes nothing: if fully_shard "
            "replaced the model's parameters, make the optimiser after fully_shard"
        )


def replaced(state: Mapping[Any, Mapping[str, Any]], groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters that have state, but are in no group any more.

    Raises:
        TypeError: if DeepSpeed's ZeRO seems to have replaced them: in a distributed run, some were matrices, and each
            group now has one new vector.
    """
    held = [group["params"] for group in groups if group["params"]]
    own = {id(parameter) for params in held for parameter in params}
    gone = [each for each in state if isinstance(each, Tensor) and id(each) not in own]
    # by the state, since the parameters that are gone may be empty by now
    had_matrices = any(state[each]["grad_norm"].dim() > 1 for each in gone if "grad_norm" in state[each])
    if had_matrices and is_distributed() and held and all(_is_new_vector(params, state) for params in held):
        raise TypeError(
            f"a flat parameter of shape {tuple(held[0][0].shape)} replaced those of the optimiser, as in DeepSpeed's "
            f"ZeRO, and cuts through neurons: {SHARD_BY_FSDP2}, or use ZeRO stage 0"
        )
    return gone


def _is_new_vector(params: Sequence[Tensor], state: Mapping[Any, Mapping[str, Any]]) -> bool:
    return len(params) == 1 and params[0].dim() == 1 and "grad_norm" not in state.get(params[0], {})


def check_trainable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if Nero cannot train the values of a parameter, on all processes that share sharded ones alike."""
    parameters = list(named)
    for name, parameter in parameters:
        _check_kind(name, parameter)
    readable = [(name, parameter) for name, parameter in parameters if can_read(parameter)]
    found = _first_nonfinite(readable)
    if found is not None:
        raise ValueError(f"{found} holds NaN or infinite values: initialise it first")


def _check_kind(name: str, parameter: Tensor) -> None:
    check_real(name, parameter)
    if parameter.dtype.itemsize < 2:
        raise TypeError(f"{name} is {parameter.dtype}: train it in bfloat16 or wider")
    if parameter.layout is not torch.strided:
        raise TypeError(f"{name} is laid out as {parameter.layout}: hold it as a dense parameter")
    check_memory(name, parameter)
    if _overlaps(parameter):
        raise ValueError(
            f"elements of {name} share memory, as after expand or as_strided: hold a copy, as in "
            "nn.Parameter(tensor.clone())"
        )
    if can_read(parameter) and parameter.is_inference():
        raise ValueError(f"{name} was created under torch.inference_mode() and cannot be trained: create it outside")
    check_sharding(name, parameter)


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory."""
    reach = 0  # offset of the last element along the axes of smaller strides
    axes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    for stride, size in axes if tensor.numel() else ():
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if sum(stride * (size - 1) for stride, size in axes) + 1 < tensor.numel():
        return True  # more elements than places
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")  # axes may interleave without overlap
    for stride, size in axes:
        offsets = torch.unique(offsets[:, None] + stride * torch.arange(size, device="cpu"))
    return offsets.numel() < tensor.numel()


def can_read(parameter: Tensor) -> bool:
    """Return whether values can be read: not on the meta device, in a compiled function or in a captured graph."""
    return not (parameter.is_meta or torch.compiler.is_compiling() or is_capturing())


def check_real(name: str, parameter: Tensor) -> None:
    """Raise if a parameter is complex."""
    if parameter.is_complex():
        raise TypeError(f"{name} is {COMPLEX}")


def check_memory(name: str, parameter: Tensor) -> None:
    """Raise if a parameter is on the meta device."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: allocate it (module.to_empty) and initialise it first")


def check_gradients(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if the gradient of a parameter is not finite, on all processes alike. Waits for gradients."""
    grads = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
    found = _first_nonfinite(grads)
    if found is not None:
        raise FloatingPointError(
            f"the gradient of {found} is not finite, and nothing was changed: find the cause, or skip such "
            "neurons with on_nonfinite='skip'"
        )


@torch.no_grad()
def _first_nonfinite(named: Sequence[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that is not finite. Processes that share a sharded one agree on it."""
    if not named:
        return None
    tensors = [tensor for _, tensor in named]
    device = local_of(tensors[0]).device  # one wait for all, where all are on one device
    flags = torch.stack([~_is_finite(tensor).to(device) for tensor in tensors])
    found = agreed_flags(flags.to(torch.int32), tensors).nonzero()
    names = [*(name for name, _ in named), "a parameter of another process"]
    return names[int(found[0])] if len(found) else None


def _is_finite(tensor: Tensor) -> Tensor:
    local = local_of(tensor).detach()
    values = local.coalesce().values() if local.is_sparse else local
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(torch.aminmax(values)).isfinite().all()  # a NaN spreads; isfinite of all is much slower
