"""Which parameters Nero can train, with errors that name the fix."""

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

COMPLEX = "complex: hold it as a real parameter of twice the size (torch.view_as_real)"


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise if a parameter cannot be added to the optimiser; a frozen one may be of any dtype."""
    if is_lazy(parameter):
        raise ValueError(f"{name} has no shape yet: run a batch through the lazy layers before making the optimiser")
    if getattr(parameter, "_is_flat_param", False):
        raise TypeError(
            f"{name} is a flat parameter of FSDP1, which cuts through neurons: shard with "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if parameter.requires_grad:
        check_trainable(name, parameter)


def check_trainable(name: str, parameter: Tensor) -> None:
    """Raise if Nero cannot train the values of a parameter."""
    check_real(name, parameter)
    if parameter.dtype.itemsize < 2:
        raise TypeError(f"{name} is {parameter.dtype}: train it in bfloat16 or wider")
    if parameter.layout is not torch.strided:
        raise TypeError(f"{name} is laid out as {parameter.layout}: hold it as a dense parameter")
    check_memory(name, parameter)
    if not can_read(parameter):
        return
    if parameter.is_inference():
        raise ValueError(f"{name} was created under torch.inference_mode() and cannot be trained: create it outside")
    if not bool(parameter.detach().isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinite values: initialise it first")


def can_read(parameter: Tensor) -> bool:
    """Return whether values can be read: not on the meta device, in a compiled function or in a captured graph."""
    is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not (parameter.is_meta or torch.compiler.is_compiling() or is_captured)


def check_real(name: str, parameter: Tensor) -> None:
    """Raise if a parameter is complex."""
    if parameter.is_complex():
        raise TypeError(f"{name} is {COMPLEX}")


def check_memory(name: str, parameter: Tensor) -> None:
    """Raise if a parameter is on the meta device."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: allocate it (module.to_empty) and initialise it first")


def check_gradient(name: str, parameter: Tensor, *, is_new: bool) -> None:
    """Raise if a trainable parameter has a gradient that is not finite. Waits for the gradient.

    A parameter that is new to the optimiser is checked itself first.
    """
    grad = parameter.grad
    if grad is None or not parameter.requires_grad:
        return
    if is_new:
        check_trainable(name, parameter)
    values = grad.coalesce().values() if grad.is_sparse else grad
    if not bool(values.isfinite().all()):
        raise FloatingPointError(
            f"the gradient of {name} is not finite, and nothing was changed: find the cause, or skip such neurons with "
            "on_nonfinite='skip'"
        )
