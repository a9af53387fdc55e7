"""The mode of Triton in the tests: compiled on a GPU, or interpreted on the CPU. Import before Triton."""

import os
from importlib.util import find_spec
from typing import Any

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"


def few(backend: str, many: int, enough: int = 20) -> int:
    """Return how many steps or examples to try: fewer of an interpreted kernel, which is a thousand times slower."""
    return enough if backend == "triton" and INTERPRETED else many


def patch_language_once_per_launch() -> None:
    """Make interpreted kernels faster: Triton replaces its built-in functions anew at every call within a kernel.

    They stay replaced until the launch ends, so the first call from each module is enough.
    """
    from triton.runtime import interpreter

    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def execute_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        execute(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, execute_afresh


if INTERPRETED and find_spec("triton"):
    patch_language_once_per_launch()
