"""Small networks, their training and comparisons, for the tests of the optimiser and of watching."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import nero


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    ).to(dtype)


def fill_grads(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: range) -> None:
    for seed in steps:
        fill_grads(model, seed)
        optimiser.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    a, b = one.state_dict()["state"], other.state_dict()["state"]
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].keys() == b[key].keys()
        for name in a[key]:
            assert a[key][name].dtype == b[key][name].dtype
            assert torch.equal(a[key][name], b[key][name])


def watched_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))


def train_on_noise(model, optimiser, steps, seed=1):
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
    model = model or watched_network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    for seed in range(readings):
        train_on_noise(model, optimiser, 2, seed)
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
