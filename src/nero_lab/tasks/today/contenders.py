"""The optimisers of the study, each with a grid of seven learning rates."""

from typing import Any

from nero_lab.protocol import Contender

#: Rates of a grid, and the ratio of each to the next.
GRID_SIZE, GRID_RATIO = 7, 2.0


def grid(middle: float) -> tuple[float, ...]:
    """Return seven rates around a middle one, each twice the last."""
    return tuple(float(f"{middle * GRID_RATIO ** (i - GRID_SIZE // 2):.4g}") for i in range(GRID_SIZE))


def contender(optimiser: str, best: float, **options: Any) -> Contender:
    """Return a contender whose grid surrounds our guess of its best rate."""
    return Contender(optimiser, best, options, grid=grid(best))


#: Momentum as Muon has it, over about twenty steps, with the running average of the same length.
MOMENTUM = {"momentum": 0.95, "nesterov": True, "beta": 0.95}
#: ``lr="auto"`` as :mod:`nero_lab.tasks.depth` runs it: the rate is the trust, which the depth divides.
AUTO = {"depth": "auto", "longest_step": 3.0}

#: Balance replaces weight decay, which balanced neurons would undo. Lion's rates are a sixth of AdamW's, and its decay
#: is six times as strong, so that the product of both is the same.
CONTENDERS: dict[str, Contender] = {
    "adamw": contender("adamw", 0.003),
    "muon": contender("muon", 0.02),
    "normuon": contender("normuon", 0.02),
    "soap": contender("soap", 0.003),
    "lion": contender("lion", 0.0005, weight_decay=0.6),
    "muon-balanced": contender("muon", 0.02, weight_decay=0.0, balanced=True),
    "adamw-balanced": contender("adamw", 0.003, weight_decay=0.0, balanced=True),
    "nero": contender("nero", 0.02),
    "nero-momentum": contender("nero", 0.01, **MOMENTUM),
    "nero-auto": contender("nero", 0.1, **AUTO),
    "nero-momentum-auto": contender("nero", 0.1, **MOMENTUM, **AUTO),
}
