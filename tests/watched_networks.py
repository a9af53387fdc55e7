"""Small watched networks for the tests of watching."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import nero


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))


def train(model, optimiser, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(16, 6, generator=generator)).square().mean().backward()
        optimiser.step()


def angles_between(before, after):
    """Return the angle of each neuron in float64, from the cosine, which is accurate for large angles."""
    cosines = (
        np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)
        for one, other in zip(before, after, strict=True)
    )
    return [math.acos(min(1.0, max(-1.0, cosine))) for cosine in cosines]


def check_spread(spread, values, tolerance=1e-6):
    assert spread == pytest.approx(tuple(np.quantile(values, [0.1, 0.5, 0.9])), rel=1e-9, abs=tolerance)


class ScalarLog:
    """A writer that remembers its scalars."""

    def __init__(self):
        self.written = {}

    def add_scalar(self, tag, scalar_value, global_step):
        self.written[tag, global_step] = scalar_value


def watched_run(model=None, readings=3):
    model = model or network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    for seed in range(readings):
        train(model, optimiser, 2, seed)
        watched.read()
    return watched


def charts_of(watched):
    from matplotlib.axes import Axes

    from nero.watching.picture import draw

    return [axes for part in draw(watched.readings).subfigs for axes in part.findobj(Axes)]


def assert_readings_close(one, other):
    """Compare two readings, to the rounding of float32."""
    for mine, its in zip(one.layers, other.layers, strict=True):
        assert mine[:5] == its[:5]
        for spread, wanted in zip(mine[5:8], its[5:8], strict=True):
            assert spread == pytest.approx(wanted, rel=1e-4, abs=1e-5, nan_ok=True)
        assert mine[8:] == pytest.approx(its[8:], nan_ok=True)
