"""The mode of Triton in the tests: compiled on a GPU, or interpreted on the CPU. Import before Triton."""

import os

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"


def few(backend: str, many: int, enough: int = 20) -> int:
    """Return how many steps or examples to try: fewer of an interpreted kernel, which is a thousand times slower."""
    return enough if backend == "triton" and INTERPRETED else many
