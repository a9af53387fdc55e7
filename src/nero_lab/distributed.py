"""Training of one network by several processes, one per GPU, as ``torchrun`` starts them.

All functions also work in a single process, where the collectives do nothing.

One all-reduce over the concatenated gradients replaces DistributedDataParallel. A CUDA graph captures that call like
any other kernel, whereas DistributedDataParallel needs hooks and eleven warm-up steps. The price: the all-reduce does
not overlap with the backward pass.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the index of this process. Only rank 0 prints and writes."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def local_world_size() -> int:
    """Return the number of processes that share this machine's cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched() else 1


def is_launched() -> bool:
    """Return whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def local_gpu() -> torch.device:
    """Return the GPU of this process."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_launched() else torch.device("cuda")


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the other processes that torchrun started, if any, and leave them at the end."""
    if not is_launched():
        yield
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    yield
    barrier()  # reached on success only: a failed process waits for nobody
    dist.destroy_process_group()


def per_process() -> str:
    """Return a suffix for printed numbers that describe one process of several."""
    return f" for each of {world_size()} processes" if world_size() > 1 else ""


def all_equal(value: object) -> bool:
    """Return whether the value is equal on all processes. All processes must call this, and get the same answer."""
    if world_size() == 1:
        return True
    found: list[object] = [None] * world_size()
    dist.all_gather_object(found, value)
    return all(each == found[0] for each in found)


def barrier() -> None:
    """Wait until all processes have called this."""
    if world_size() > 1:
        dist.barrier()


def local_slice(start: int, stop: int) -> slice:
    """Return this process's part of ``range(start, stop)``: every ``world_size()``-th index."""
    return slice(start + rank(), stop, world_size())


def average_gradients(gradients: Sequence[Tensor], totals: Tensor) -> Tensor:
    """Replace gradients of the mean loss of each process's examples by the gradient of the mean over the whole batch.

    Works in place, and gives all processes the same bits.

    Args:
        gradients: the gradients of this process's mean loss.
        totals: numbers to sum over the processes; the last one is this process's number of examples.

    Returns:
        the sums of ``totals`` over all processes.
    """
    weighted = torch._foreach_mul(list(gradients), totals[-1].float())
    flat = torch.cat([*(gradient.flatten() for gradient in weighted), totals.float()])
    dist.all_reduce(flat)
    size = len(flat) - len(totals)
    pieces = torch.split(flat[:size] / flat[-1], [gradient.numel() for gradient in gradients])
    torch._foreach_copy_(list(gradients), [new.view(old.shape) for new, old in zip(pieces, gradients, strict=True)])
    return flat[size:].to(totals.dtype)


def all_sum(totals: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place, and return it."""
    if world_size() > 1:
        dist.all_reduce(totals)
    return totals


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with those of the first process."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
