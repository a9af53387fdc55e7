"""The optimisers of the study, each with a grid of seven learning rates."""

from dataclasses import replace
from typing import Any

from nero_lab.protocol import Contender

#: Rates of a grid, and the ratio of each to the next.
GRID_SIZE, GRID_RATIO = 7, 2.0


def grid(middle: float, size: int = GRID_SIZE) -> tuple[float, ...]:
    """Return rates around a middle one, each twice the last."""
    return tuple(float(f"{middle * GRID_RATIO ** (i - size // 2):.4g}") for i in range(size))


def contender(optimiser: str, best: float, **options: Any) -> Contender:
    """Return a contender whose grid surrounds our guess of its best rate."""
    return Contender(optimiser, best, options, grid=grid(best))


#: Momentum as Muon has it, over about twenty steps, with the running average of the same length.
MOMENTUM = {"momentum": 0.95, "nesterov": True, "beta": 0.95}
#: ``lr="auto"`` as :mod:`nero_lab.tasks.depth` runs it: the rate is the trust, which the depth divides.
AUTO = {"depth": "auto", "longest_step": 3.0}

#: Steps as long as before, relative to the neuron, but no constraint; gains take steps of a tenth of the angle.
FREE = {"momentum": 0.9, "nesterov": True, "beta": 0.95, "fix_mean": False, "fix_norm": False, "scale": 0.1}

#: Balance replaces weight decay, which balanced neurons would undo. Lion's rates are a sixth of AdamW's, and its decay
#: is six times as strong, so that the product of both is the same.
CONTENDERS: dict[str, Contender] = {
    "adamw": contender("adamw", 0.003),
    "adamw-clipped": contender("adamw", 0.003, clip=1.0),
    "muon": contender("muon", 0.02),
    "normuon": contender("normuon", 0.02),
    "soap": contender("soap", 0.003),
    "lion": contender("lion", 0.0005, weight_decay=0.6),
    "muon-balanced": contender("muon", 0.02, weight_decay=0.0, balanced=True),
    "adamw-balanced": contender("adamw", 0.003, weight_decay=0.0, balanced=True),
    "nero": contender("nero", 0.02),
    "nero-momentum": contender("nero", 0.01, **MOMENTUM),
    "nero-momentum-free": contender("nero", 0.03, **FREE),
    "nero-auto": contender("nero", 0.1, **AUTO),
    "nero-momentum-auto": contender("nero", 0.1, **MOMENTUM, **AUTO),
}


#: Where the search on the small GPT has found the best rate at another place than the middle of its grid.
FOUND = {"muon": 0.04, "muon-balanced": 0.04, "nero": 0.04, "nero-momentum": 0.02}


def around(name: str, size: int, best: float | None = None) -> Contender:
    """Return a contender with few rates, around a given one, or around the best one of the small GPT."""
    best = best or FOUND.get(name, CONTENDERS[name].best)
    return replace(CONTENDERS[name], best=best, grid=grid(best, size))


def _free(*rates: float, **options: Any) -> Contender:
    return Contender("nero", rates[-1], {**FREE, **options}, grid=rates)


def _balanced(part: str) -> Contender:
    return Contender("muon", 0.04, {"weight_decay": 0.0, "balanced": part}, grid=(0.04,))


#: What the parts of free Nero with momentum, and of balanced Muon, matter. "gains" take steps of a share of the angle.
VARIANTS: dict[str, Contender] = {
    "momentum-0.8": _free(0.015, 0.03, momentum=0.8),
    "momentum-0.95": _free(0.015, 0.03, momentum=0.95),
    "beta-0.9": _free(0.015, 0.03, beta=0.9),
    "beta-0.99": _free(0.015, 0.03, beta=0.99),
    "without-nesterov": _free(0.015, 0.03, nesterov=False),
    "bounded-by-1": _free(0.015, 0.03, longest_step=1.0),
    "gains-1": _free(0.015, 0.03, scale=1.0),
    "gains-0.3": _free(0.015, 0.03, scale=0.3),
    "fixed-means": _free(0.015, 0.03, fix_mean=True),
    "fixed-norms": _free(0.015, 0.03, fix_norm=True),
    "fixed-both": _free(0.015, 0.03, fix_mean=True, fix_norm=True),
    "steps-of-the-first-norm": _free(0.015, 0.03, 0.06, fixed_scale=True),
    "steps-of-one": _free(0.005, 0.01, 0.02, neuron_scale=1.0),
    "muon-without-decay": Contender("muon", 0.04, {"weight_decay": 0.0}, grid=(0.04,)),
    "muon-balanced-blocks": _balanced("blocks"),
    "muon-balanced-embedding": _balanced("embedding"),
    "muon-balanced-head": _balanced("head"),
}
