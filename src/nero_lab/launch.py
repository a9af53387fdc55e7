"""Launches of Triton kernels: on which devices they work, and how to make one current."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


def kernels_work(device: torch.device) -> bool:
    """Tell whether Triton's kernels run on the device. Under torch.compile the plain operations are fused instead."""
    return not torch.compiler.is_compiling() and _launches(device)


@cache
def _launches(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        from nero_lab import kernels

        with on(device):
            some = torch.zeros(16, device=device)
            kernels.madam[(1,)](
                some, some, some, some, some, 16, 0.9, 0.1, 1.0, 1.0, 1e-30, BLOCK=16, enable_fp_fusion=True
            )
    except torch.OutOfMemoryError:
        raise  # Triton may still work
    except Exception:  # not installed, no C compiler, an unknown GPU, ...
        return False
    return True


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make the device current: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
