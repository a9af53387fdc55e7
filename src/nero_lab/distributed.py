"""Training of one network by several processes, one per GPU, as ``torchrun`` starts them.

All functions also work in a single process, where the collectives do nothing.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_shards = False


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
def process_group(device: torch.device, *, shard: bool = False) -> Iterator[None]:
    """Join the other processes that torchrun started, if any, and leave them at the end.

    Args:
        device: the device of this process.
        shard: split every network over the processes; otherwise each holds a replica.
    """
    global _shards
    if not is_launched():
        yield
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    # gloo carries what the hosts agree on, without waiting for the GPUs
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    _shards = shard
    yield
    barrier()  # reached on success only: a failed process waits for nobody
    dist.destroy_process_group()
    _shards = False


def is_sharded() -> bool:
    """Return whether networks are split over the processes. Then all processes must take part to read a state."""
    return _shards


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


def join(model: nn.Module, device: torch.device) -> nn.Module:
    """Have the processes train one model together. Make its optimiser afterwards, from the model's own parameters.

    Returns:
        the module to call in training: its backward pass averages the gradients over the processes. It is the model
        itself if that was sharded (FSDP2), along the first axis of every parameter, or if there is one process.
    """
    if world_size() == 1:
        return model
    if not is_sharded():
        # all processes have built the same weights, and the loop checks that with a better message
        return nn.parallel.DistributedDataParallel(model, init_sync=False)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size(),))
    for block in model.children():
        if list(block.children()):  # gathered as one; single layers are gathered with the rest
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Hold all parameters of a sharded model, so that the processes may run it different numbers of times."""
    if not is_sharded():
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
    for block in parts[1:]:  # torch keeps the parameters of the outermost module, which comes first
        block.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for block in parts[1:]:
            block.set_reshard_after_forward(True)
        for part in parts:
            part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded."""
    # not isinstance: importing DTensor takes a second
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(value: Any, like: Any) -> Any:
    """Shard the tensors of nested dicts like the tensors in the same places of ``like``.

    Communicates nothing: all processes must have the same values.
    """
    if isinstance(value, dict) and isinstance(like, dict):
        return {key: shard_like(item, like.get(key)) for key, item in value.items()}
    if isinstance(value, Tensor) and hasattr(like, "device_mesh") and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


def agree(*values: int) -> list[int]:
    """Return the greatest of each value over all processes. All must call this; only the hosts wait, not the GPUs."""
    found = torch.tensor(values)
    if world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


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
