"""The mode of Triton in the tests: compiled on a GPU, or interpreted on the CPU. Import before Triton."""

import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"


def few(backend: str, many: int, enough: int = 20) -> int:
    """Return how many steps or examples to try: fewer of an interpreted kernel, which is a thousand times slower."""
    return enough if backend == "triton" and INTERPRETED else many


def patch_language_once() -> None:
    """Make interpreted kernels faster: Triton replaces its built-in functions anew at every call within a kernel.

    They stay replaced from the first call of each module on, and the types of tensors and of numpy are made once.
    """
    from triton.language import core
    from triton.runtime import interpreter

    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    patched: dict[int, Any] = {}
    dtypes: dict[str, Any] = {}

    def patch_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in patched:
            patched[id(names)] = names  # held, so that no other module gets its number
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    def find_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        return dtypes[name] if name in dtypes else dtypes.setdefault(name, dtype_of(kind))

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, find_dtype

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self)
        self.__dict__ = types[key]

    def tensor_of_known_type(self: Any, handle: Any, kind: Any) -> None:
        if str(kind) not in tensors:
            make_tensor(self, handle, kind)
            tensors[str(kind)] = dict(vars(self))
        vars(self).update(tensors[str(kind)], handle=handle)

    core.block_type.__init__, core.tensor.__init__ = type_once, tensor_of_known_type


if INTERPRETED and find_spec("triton"):
    patch_language_once()
