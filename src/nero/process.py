"""The state of this process: whether it captures a CUDA graph, is traced, or trains with other processes."""

import sys

import torch


def is_capturing() -> bool:
    """Return whether a CUDA graph is captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_traced() -> bool:
    """Return whether torch.compile traces calls made here, even if it could not compile this function."""
    return "torch._dynamo" in sys.modules and torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def is_distributed() -> bool:
    """Return whether there is a process group, even of this process alone."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_one_of_several() -> bool:
    """Return whether several processes train together."""
    return is_distributed() and torch.distributed.get_world_size() > 1
