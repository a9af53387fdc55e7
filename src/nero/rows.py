"""The projection on a GPU: a neuron that lies whole in memory is read once and written once."""

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

#: The longest neuron that a program holds.
LONGEST = 16384


def project_(
    tensor: Tensor, axes: tuple[int, ...], *, fix_mean: bool, fix_norm: bool, radius: float | Tensor = 1.0
) -> bool:
    """Do to a tensor in place what :func:`nero.balance.project` does, if there is a kernel for it; else say so."""
    if not (fix_mean or fix_norm) or not _plain(tensor) or not works(tensor.device):
        return False
    form = _form(tensor, axes)
    if form is None or (isinstance(radius, Tensor) and not (_plain(radius) and radius.numel() == form[0])):
        return False
    neurons, fan_in, apart = form
    from nero import rows_kernel

    width = max(16, 1 << (fan_in - 1).bit_length())
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        rows_kernel.project[(neurons,)](
            tensor,
            radius.reshape(-1).to(tensor.device) if isinstance(radius, Tensor) else tensor,
            fan_in,
            apart,
            1.0 if isinstance(radius, Tensor) else float(radius),
            FIX_MEAN=fix_mean and fan_in != 2,
            FIX_NORM=fix_norm,
            RADII=isinstance(radius, Tensor),
            WIDTH=width,
            num_warps=min(16, max(1, width // 512)),
        )
    torch.autograd.graph.increment_version(tensor)  # which torch has not seen change
    return True


@cache
def works(device: torch.device) -> bool:
    """Whether Triton can compile and launch a kernel there."""
    if device.type != "cuda":
        return False
    try:
        from nero import rows_kernel

        with torch.cuda.device(device):
            some = torch.zeros(16, device=device)
            rows_kernel.project[(1,)](some, some, 16, 16, 1.0, FIX_MEAN=True, FIX_NORM=True, RADII=False, WIDTH=16)
    except torch.OutOfMemoryError:
        raise  # which says nothing of Triton
    except Exception:  # not installed, no compiler for its launcher, a GPU that it does not know, ...
        return False
    return True


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is its memory and nothing else, and nobody watches what is done to it."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:  # who trace the plain projection
        return False
    if type(tensor) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return tensor.dtype == torch.float32 and tensor.numel() > 0 and not tensor.is_neg() and not frozen


def _form(tensor: Tensor, axes: tuple[int, ...]) -> tuple[int, int, int] | None:
    """How many neurons, how long, and how far apart; None if they do not lie one after the other, each in one piece."""
    fan_in = 1
    for stride, size in sorted((tensor.stride(axis), tensor.shape[axis]) for axis in axes):
        if size > 1 and stride != fan_in:
            return None
        fan_in *= size
    across = [(n, tensor.stride(axis)) for axis, n in enumerate(tensor.shape) if axis not in axes and n > 1]
    if len(across) > 1 or fan_in > LONGEST:
        return None
    neurons, apart = across[0] if across else (1, fan_in)
    return (neurons, fan_in, apart) if apart >= fan_in else None
