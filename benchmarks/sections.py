"""Sections of the benchmark beside known networks: harder limits, growth by size, and momentum."""

from collections.abc import Sequence
from functools import partial

import torch
from contenders import ADAM_BYTES_PER_PARAMETER, REFERENCES, SGD_BYTES_PER_PARAMETER, Contender, nero_by
from shapes import Shapes, convnext, deep_mlp, efficientnet, flat, gpt2, gpt2_xl, llama, matrices, odd, small, vit
from step import check_steps, measure
from timing import Bench, Job, Row

from nero.backends import backends_for

MOMENTUM = 0.9
#: The least bytes of a float32 step with momentum: it also reads and writes the buffer.
MOMENTUM_BYTES_PER_PARAMETER = SGD_BYTES_PER_PARAMETER + 8
#: Above this many parameters, foreach is not measured beside a faster backend.
MAX_FOREACH_PARAMETERS = 300_000_000
NERO = nero_by("auto", "Nero")
NERO_WITH_MOMENTUM = nero_by("auto", "Nero with momentum", MOMENTUM_BYTES_PER_PARAMETER, momentum=MOMENTUM)


def limits(bench: Bench) -> list[Job]:
    """Return one job per set of shapes that no tile was tuned on; the large ones only on a GPU."""
    sets = [deep_mlp(), efficientnet(), convnext(), small(), odd()]
    if bench.is_quick:
        sets = [small(10), odd(100)._replace(dtype=torch.bfloat16)]
    elif bench.device.type == "cuda":
        heavy = [vit(), llama(), llama()._replace(dtype=torch.bfloat16), gpt2(transposed=True)]
        sets += [*heavy, gpt2(transposed=True)._replace(dtype=torch.bfloat16)]
    stochastic = [
        nero_by("auto", "Nero, stochastic", rounding="stochastic"),
        nero_by(
            "auto",
            "Nero with momentum, stochastic",
            MOMENTUM_BYTES_PER_PARAMETER,
            rounding="stochastic",
            momentum=MOMENTUM,
        ),
    ]
    contenders = [*REFERENCES, NERO, NERO_WITH_MOMENTUM]
    return [
        partial(_measure, shapes, contenders + stochastic * (shapes.dtype != torch.float32), bench) for shapes in sets
    ]


def momentum(bench: Bench) -> list[Job]:
    """Return one job per GPT-2, with torch's optimisers with momentum beside Nero; the largest only on a GPU."""
    sets = [gpt2(False, 1, 32, 64, "GPT-2 tiny")] if bench.is_quick else [gpt2()]
    if bench.device.type == "cuda" and not bench.is_quick:
        sets.append(gpt2_xl())
    contenders = [
        *REFERENCES,
        Contender("AdamW (fused)", lambda p: torch.optim.AdamW(flat(p), fused=True), ADAM_BYTES_PER_PARAMETER),
        Contender(
            "SGD with momentum (fused)",
            lambda p: torch.optim.SGD(flat(p), momentum=MOMENTUM, fused=True),
            MOMENTUM_BYTES_PER_PARAMETER,
        ),
        NERO,
        NERO_WITH_MOMENTUM,
    ]
    return [partial(_measure, shapes, contenders, bench) for shapes in sets]


def _measure(shapes: Shapes, contenders: Sequence[Contender], bench: Bench) -> list[Row]:
    for nesterov in (True, False):
        check_steps(
            shapes.distinct, bench.device, [backends_for(bench.device)[-1]], momentum=MOMENTUM, nesterov=nesterov
        )
    return measure(shapes, contenders, bench)


def growth(bench: Bench) -> list[Job]:
    """Return one job per size: by the number of parameters, and by the number of tensors."""
    return [partial(_measure_size, by, shapes, bench) for by, shapes in sizes(bench)]


def _measure_size(by: str, shapes: Shapes, bench: Bench) -> list[Row]:
    contenders = [*REFERENCES, NERO]
    is_foreach_fastest = backends_for(bench.device)[-1] == "foreach"
    if not is_foreach_fastest and shapes.total <= MAX_FOREACH_PARAMETERS:
        contenders.append(nero_by("foreach"))
    return [{"by": by, **row} for row in measure(shapes, contenders, bench)]


def sizes(bench: Bench) -> list[tuple[str, Shapes]]:
    """Return matrices of 1024 by 1024, from 1 M to 2 G parameters, then 10 to 10,000 tensors of one total size."""
    if bench.is_quick:
        counts, total, tensors = [1, 2], 10_000, [1, 10]
    elif bench.device.type == "cuda":
        counts, total, tensors = [1, 4, 16, 64, 256, 1024, 2048], 100_000_000, [10, 30, 100, 300, 1000, 3000, 10_000]
    else:
        counts, total, tensors = [1, 4, 16, 64], 16_000_000, [10, 100, 1000, 10_000]
    width = 64 if bench.is_quick else 1024
    growing = [("parameters", matrices(count * width**2, count)) for count in counts]
    return growing + [("tensors", matrices(total, count)) for count in tensors]
