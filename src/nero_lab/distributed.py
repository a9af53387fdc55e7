"""Processes that train one network together, one a GPU, as ``torchrun`` starts them. One alone is the common case.

Gradients are summed by one call over all of them in a row, and not by DistributedDataParallel: that call is captured
in the graph of a step like any other kernel, where DistributedDataParallel has hooks and a reducer that has to see
eleven steps first. What is lost is the overlap of the sum with the backward pass.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


def count() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is; the first alone writes and shows."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def on_this_machine() -> int:
    """How many of them share this machine's cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started() else 1


def started() -> bool:
    """Whether torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def gpu() -> torch.device:
    """The GPU of this process."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if started() else torch.device("cuda")


@contextmanager
def joined(place: torch.device) -> Iterator[None]:
    """Together with the other processes, if torchrun started any."""
    if not started():
        yield
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    on_gpu = place.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=place if on_gpu else None)
    yield
    wait()  # none leaves while another is still at it; but if this one fails, it waits for nobody
    dist.destroy_process_group()


def for_each() -> str:
    """What there is to add to a number that is of this process alone, for people."""
    return f" for each of {count()} processes" if count() > 1 else ""


def alike(what: object) -> bool:
    """Whether every process has an equal one; they wait for each other, and all get the same answer."""
    if count() == 1:
        return True
    found: list[object] = [None] * count()
    dist.all_gather_object(found, what)
    return all(each == found[0] for each in found)


def wait() -> None:
    """Until all have come here."""
    if count() > 1:
        dist.barrier()


def share(start: int, stop: int) -> slice:
    """What this process takes of places in a row: every so many-th."""
    return slice(start + rank(), stop, count())


def average(gradients: Sequence[Tensor], totals: Tensor) -> Tensor:
    """Make gradients of means over shares the gradient of the mean over the batch, in place and on all alike.

    Args:
        gradients: of this process's mean loss.
        totals: numbers of its share to sum, the last of them how many examples it has.

    Returns:
        the totals of all shares.
    """
    weighed = torch._foreach_mul(list(gradients), totals[-1].float())
    flat = torch.cat([*(each.flatten() for each in weighed), totals.float()])
    dist.all_reduce(flat)
    rest = len(flat) - len(totals)
    pieces = torch.split(flat[:rest] / flat[-1], [each.numel() for each in gradients])
    torch._foreach_copy_(list(gradients), [new.view(old.shape) for new, old in zip(pieces, gradients, strict=True)])
    return flat[rest:].to(totals.dtype)


def add_up(totals: Tensor) -> Tensor:
    """The sum of what each process has, on all alike."""
    if count() > 1:
        dist.all_reduce(totals)
    return totals


def take_firsts(tensors: Sequence[Tensor]) -> None:
    """Have what the first process has."""
    if count() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
