"""The backends that can step a tensor here, and the reasons of those that cannot."""

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nero.messages import how_to_install, warn

#: The dtypes that the Triton kernels read and write.
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The dtypes of parameters that numba's loops are compiled for.
NUMBA_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_INSTEAD = "use backend='foreach', or 'auto' for the fastest that works here"


@cache
def is_installed(library: str) -> bool:
    """Return whether a library is installed."""
    return find_spec(library) is not None


@cache
def numba_works() -> bool:
    """Return whether numba is installed, compiles, matches the installed numpy, and finds a cache folder."""
    try:
        from nero.backends.numba import loops
    except Exception:
        return False
    return hasattr(loops.do_pieces, "py_func")  # compiled: without NUMBA_DISABLE_JIT


@cache
def triton_works(device: torch.device) -> bool:
    """Return whether Triton compiles and launches a kernel on a device; warn if a GPU has to do without."""
    if device.type != "cuda":
        return False
    try:
        from nero.backends.triton.project_kernel import probe

        with torch.cuda.device(device):
            probe(torch.zeros(1, 16, device=device))
    except torch.OutOfMemoryError:
        raise  # a full GPU says nothing about Triton
    except Exception as error:  # no Triton, no C compiler for its launcher, an unknown GPU, ...
        warn(
            f"Triton does not run on {device} ({error!r}), so Nero runs by torch operations there, several times "
            "slower: install triton and a C compiler"
        )
        return False
    return True


class Compiled(NamedTuple):
    """A backend that needs a library: the device it serves, a probe, and how to install the library."""

    device: str
    works: Callable[[], bool]
    install: str


#: The backends that need a library. On a GPU, ``triton_works`` also tells whether kernels launch.
COMPILED: dict[str, Compiled] = {
    "numba": Compiled("cpu", lambda: numba_works(), how_to_install("cpu")),
    "triton": Compiled("cuda", lambda: is_installed("triton"), "pip install triton"),
}


def backends_for(device: torch.device) -> list[str]:
    """List the backends that can step parameters on a device, the fastest last."""
    compiled = [name for name, backend in COMPILED.items() if backend.device == device.type and backend.works()]
    return ["eager", "foreach", *compiled]


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels, which then run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(tensor: Tensor) -> str | None:
    """Explain what keeps a parameter or gradient from the Triton kernels; ``None`` if nothing does."""
    if tensor.device.type != "cuda" and not (tensor.device.type == "cpu" and is_interpreted()):
        return f"on {tensor.device}, and the kernels run on CUDA devices"
    if tensor.layout is not torch.strided:
        return "sparse, and the kernels take dense tensors"
    wrapped: bool = is_traceable_wrapper_subclass(tensor)
    if wrapped:
        return f"a {type(tensor).__name__}, and the kernels take plain tensors"
    if tensor.dtype not in TRITON_DTYPES:
        return f"{tensor.dtype}, and the kernels support float32, bfloat16 and float16"
    return None


def check_backend(backend: str, name: str, *tensors: Tensor) -> None:
    """Raise if a backend chosen by name cannot step a parameter.

    Args:
        backend: a value of the option ``backend``.
        name: the parameter's name.
        tensors: the parameter, and its gradient if there is one.
    """
    if backend in COMPILED and not COMPILED[backend].works():
        raise ModuleNotFoundError(
            f"backend={backend!r}, chosen for {name}, needs {backend} ({COMPILED[backend].install}); {_INSTEAD}"
        )
    if backend == "triton":
        for tensor, what in zip(tensors, (name, f"the gradient of {name}"), strict=False):
            reason = why_not_triton(tensor)
            if reason is not None:
                raise ValueError(f"backend='triton' cannot step {name}: {what} is {reason}; {_INSTEAD}")
