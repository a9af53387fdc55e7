"""Parameters in half precision: accurate over many steps, and saturated instead of infinite (ruling 7)."""

import math

import pytest
import torch
from interpreter import few
from torch import nn
from torch.nn.functional import cosine_similarity

import nero


@pytest.mark.no_cover  # many steps run the lines of one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_accurate_over_many_steps(backend: str, dtype: torch.dtype):
    """The running average stays within 1 %, and the angle per step within 5 %."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 128, generator=generator).to(dtype))
    optimiser = nero.Nero([weight], lr=0.01, backend=backend)
    mean_square, angles = torch.zeros(8, dtype=torch.float64), []
    # a bfloat16 average of half its final value would not grow any more: 600 steps reach that
    for _ in range(few(backend, 600, 20)):
        before = weight.detach().clone()
        weight.grad = (torch.randn(8, 128, generator=generator) * 1e-2).to(dtype)
        mean_square = 0.999 * mean_square + 0.001 * weight.grad.double().square().sum(1)
        optimiser.step()
        cosine = cosine_similarity(before.double(), weight.detach().double(), dim=1)
        angles.append(cosine.clamp(-1, 1).acos().mean())
    found = optimiser.state[weight]["grad_norm"].flatten().double()
    torch.testing.assert_close(found, mean_square.sqrt(), rtol=0.01, atol=0)
    assert torch.stack(angles).mean() == pytest.approx(math.atan(0.01), rel=0.05)
    torch.testing.assert_close(weight.double().norm(dim=1), torch.ones(8).double(), rtol=0.01, atol=0)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_step_beyond_the_largest_half_saturates(backend: str, rounding: str):
    """For gains, and for neurons of free or initial norm, along rows and along columns."""
    largest = torch.finfo(torch.float16).max
    gain, free, across, own = (nn.Parameter(torch.zeros(4, 4, dtype=torch.float16)) for _ in range(4))
    with torch.no_grad():
        gain[0, 0] = free[0, 0] = across[0, 0] = 0.99 * largest
        own[0] = torch.tensor([0.9, -0.9, -0.01, 0.01]) * largest
    optimiser = nero.Nero(
        [
            {"params": [gain], "role": "gain"},
            {"params": [free], "fix_norm": False, "fix_mean": False},
            {"params": [across], "fix_norm": False, "fix_mean": False, "fan_in_axes": (0,)},
            {"params": [own], "fix_norm": "initial"},
        ],
        lr=0.5,
        backend=backend,
        rounding=rounding,
    )
    for _ in range(2):
        for each in (gain, free, across, own):
            each.grad = torch.full_like(each, -1)
        own.grad[:, 2:] = 1
        optimiser.step()
        for each in (gain, free, across, own):
            assert each.isfinite().all()
            assert each[0, 0] == largest


@pytest.mark.parametrize("by_nero", [True, False])
def test_balancing_beyond_the_largest_half_saturates(by_nero: bool):
    """Centring at a constant norm can make elements larger than any element before."""
    layer = nn.Linear(4, 1, bias=False).half()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[6e4, 6e4, 6e4, 5.9e4]]))
    if by_nero:
        nero.Nero(layer, fix_norm="initial")
    else:
        nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer, fix_norm="initial")
    assert layer.weight.isfinite().all()
    assert layer.weight[0, 3] == -torch.finfo(torch.float16).max
