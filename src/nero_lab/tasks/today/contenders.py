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

#: Steps as long as before, relative to the neuron, but no constraint; gains take steps of a tenth of the angle.
FREE = {"momentum": 0.9, "nesterov": True, "beta": 0.95, "fix_mean": False, "fix_norm": False, "scale": 0.1}

#: Rates of a variant of a contender: around the contender's best.
VARIANT_RATES = {"nero": (0.01, 0.02, 0.04), "muon": (0.04, 0.08)}

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
    "nero-momentum-free": contender("nero", 0.03, **FREE),
    "nero-auto": contender("nero", 0.1, **AUTO),
    "nero-momentum-auto": contender("nero", 0.1, **MOMENTUM, **AUTO),
}


def _variant(optimiser: str, **options: Any) -> Contender:
    rates = VARIANT_RATES[optimiser]
    base = MOMENTUM if optimiser == "nero" else {"weight_decay": 0.0}
    return Contender(optimiser, rates[len(rates) // 2], {**base, **options}, grid=rates)


#: What the parts of Nero with momentum, and of balanced Muon, matter. "gains" take steps of a share of the angle.
VARIANTS: dict[str, Contender] = {
    "momentum-0.9": _variant("nero", momentum=0.9),
    "momentum-0.98": _variant("nero", momentum=0.98),
    "beta-0.9": _variant("nero", beta=0.9),
    "beta-0.99": _variant("nero", beta=0.99),
    "beta-0.999": _variant("nero", beta=0.999),
    "without-nesterov": _variant("nero", nesterov=False),
    "free-means": _variant("nero", fix_mean=False),
    "initial-norms": _variant("nero", fix_norm="initial"),
    "initial-norms-free-means": _variant("nero", fix_norm="initial", fix_mean=False),
    "gains-0.3": _variant("nero", scale=0.3),
    "gains-0.1": _variant("nero", scale=0.1),
    "initial-norms-free-means-gains-0.3": _variant("nero", fix_norm="initial", fix_mean=False, scale=0.3),
    "muon-balanced-blocks": _variant("muon", balanced="blocks"),
    "muon-balanced-embedding": _variant("muon", balanced="embedding"),
    "muon-balanced-head": _variant("muon", balanced="head"),
}
