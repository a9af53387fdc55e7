"""Neurons turned within their caps."""

import copy
import math

import pytest
import torch
from torch import nn

import nero
from nero import theory
from nero.theory.layers import layers_of
from nero.theory.rotations import LayerCaps, cap_angles


@pytest.mark.parametrize("angle", [0.01, 1.0, 1.5, math.pi / 2])
@pytest.mark.parametrize("dim", [1, 2, 50, 10_000])
def test_cap_angles_are_uniform_on_the_cap(dim: int, angle: float):
    """Compare the empirical distribution of 20,000 draws with the measure, by Kolmogorov's distance."""
    generator = torch.Generator().manual_seed(dim)
    drawn = cap_angles(dim, angle, torch.zeros(20_000, dtype=torch.float64), generator).sort().values
    assert float(drawn.max()) <= angle
    whole = theory.cap_measure(dim, angle).log_measure
    for index in range(500, 20_000, 500):
        within = math.exp(theory.cap_measure(dim, float(drawn[index])).log_measure - whole)
        assert within == pytest.approx(index / 20_000, abs=0.015)


@pytest.mark.parametrize(
    "layer", [nn.Linear(7, 4), nn.Conv2d(3, 4, 2), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Linear(2, 4)], ids=str
)
def test_turned_neurons_stay_on_their_sphere(layer: nn.Module):
    nero.balance_(layer.double())
    start = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.mul_(3)
    (caps,) = [LayerCaps.around(each, centred=True) for each in layers_of(layer)]
    gradient, generator = torch.randn_like(layer.weight), torch.Generator().manual_seed(0)
    minimum = caps.minimum(gradient, 0.3, layer.weight)
    best = (minimum * gradient).sum()
    for turned in (minimum, *(caps.random(0.3, generator) for _ in range(50))):
        with torch.no_grad():
            layer.weight.copy_(turned / 3)
        assert nero.is_balanced(layer)
        moved = theory.relative_step(start, {"weight": layer.weight.detach() - start.weight.detach()}).neuron
        assert moved <= 2 * math.sin(0.15) + 1e-9
        assert (turned * gradient).sum() >= best


def test_minimum_over_cap_lies_inside_or_on_rim():
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
    caps = LayerCaps.around(layers_of(layer)[0], centred=False)
    gradient = torch.tensor([[-1.0, -1.0, 0.0]]).double()
    torch.testing.assert_close(caps.minimum(gradient, 1.2, layer.weight), -gradient / math.sqrt(2))
    at_rim = caps.minimum(gradient, 0.5, layer.weight)
    torch.testing.assert_close(at_rim, torch.tensor([[math.cos(0.5), math.sin(0.5), 0.0]]).double())
    assert caps.slope(gradient) == pytest.approx(1.0)
    elsewhere = torch.tensor([[math.cos(0.1), 0.0, math.sin(0.1)]]).double()
    assert torch.equal(caps.minimum(torch.zeros(1, 3).double(), 0.5, elsewhere), elsewhere)
    uphill = torch.tensor([[2.0, 0.0, 0.0]]).double()  # from the maximum all ways lead down: it takes the given one
    torch.testing.assert_close(
        caps.minimum(uphill, 0.5, elsewhere), torch.tensor([[math.cos(0.5), 0.0, math.sin(0.5)]]).double()
    )
    assert torch.equal(caps.minimum(-uphill, 0.5, elsewhere), layer.weight)
