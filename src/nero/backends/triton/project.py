"""The projection on a GPU: every contiguous neuron is read once and written once."""

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from nero.backends.available import triton_works
from nero.backends.layout import layout_of

#: The longest neuron that one program holds.
MAX_FAN_IN = 16384


def project_(
    tensor: Tensor, axes: tuple[int, ...], *, fix_mean: bool, fix_norm: bool, radius: float | Tensor = 1.0
) -> bool:
    """Balance a tensor in place, if the kernel supports it; return whether it did."""
    if not _is_plain(tensor) or not triton_works(tensor.device):
        return False
    layout = layout_of(tensor.shape, tensor.stride(), axes)
    if layout is None or layout.run != layout.fan_in or layout.stride != 1 or layout.inner != layout.neurons:
        return False
    row_stride = layout.inner_stride if layout.neurons > 1 else layout.fan_in
    if layout.fan_in > MAX_FAN_IN or row_stride < layout.fan_in:
        return False
    if isinstance(radius, Tensor) and not (_is_plain(radius) and radius.numel() == layout.neurons):
        return False
    from nero.backends.triton.project_kernel import launch

    with torch.cuda.device(tensor.device) if tensor.is_cuda else torch.no_grad():
        launch(tensor, layout.neurons, layout.fan_in, row_stride, fix_mean=fix_mean, fix_norm=fix_norm, radius=radius)
    torch.autograd.graph.increment_version(tensor)  # torch did not see the kernel write
    return True


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is an ordinary float32 tensor that nothing traces or transforms."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    if type(tensor) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    read_only = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return tensor.dtype == torch.float32 and tensor.numel() > 0 and not tensor.is_neg() and not read_only
