"""The time of a step where the limit is harder to reach: shapes that no tile was tuned on, half precision, momentum."""

from functools import partial

import torch
from contenders import REFERENCES, SGD_BYTES_PER_PARAMETER, Contender, nero_by
from shapes import Shapes, convnext, deep_mlp, efficientnet, gpt2, llama, odd, small, vit
from step import check_steps, measure
from timing import Bench, Job, Row

from nero.backends import backends_for

MOMENTUM = 0.9
#: The least bytes of a float32 step with momentum: it also reads and writes the buffer.
MOMENTUM_BYTES_PER_PARAMETER = SGD_BYTES_PER_PARAMETER + 8


def jobs(bench: Bench) -> list[Job]:
    """Return one job per set of shapes."""
    return [partial(_measure, shapes, bench) for shapes in shape_sets(bench)]


def _measure(shapes: Shapes, bench: Bench) -> list[Row]:
    check_steps(shapes.distinct, bench.device, [backends_for(bench.device)[-1]], momentum=MOMENTUM)
    return measure(shapes, contenders(shapes.dtype), bench)


def shape_sets(bench: Bench) -> list[Shapes]:
    """Return the networks; the large ones only on a GPU."""
    if bench.is_quick:
        return [small(10), odd(100)._replace(dtype=torch.bfloat16)]
    light = [deep_mlp(), efficientnet(), convnext(), small(), odd()]
    if bench.device.type == "cpu":
        return light
    heavy = [vit(), llama(), llama()._replace(dtype=torch.bfloat16), gpt2(transposed=True)]
    return [*light, *heavy, gpt2(transposed=True)._replace(dtype=torch.bfloat16)]


def contenders(dtype: torch.dtype) -> list[Contender]:
    """Return torch's optimisers, and Nero with its options that cost time."""
    found = [
        *REFERENCES,
        nero_by("auto", "Nero"),
        nero_by("auto", "Nero with momentum", MOMENTUM_BYTES_PER_PARAMETER, momentum=MOMENTUM),
    ]
    if dtype == torch.float32:
        return found
    bytes_of = {
        "Nero, stochastic": SGD_BYTES_PER_PARAMETER,
        "Nero with momentum, stochastic": MOMENTUM_BYTES_PER_PARAMETER,
    }
    return found + [
        nero_by("auto", name, size, rounding="stochastic", momentum=MOMENTUM if "momentum" in name else 0.0)
        for name, size in bytes_of.items()
    ]
