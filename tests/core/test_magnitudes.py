"""Values over the whole range of float32: nothing overflows, underflows or depends on a scale (ruling 5)."""

import copy

import pytest
import torch
from interpreter import few
from torch import nn

import nero


@pytest.mark.parametrize("factor", [1e-25, 1e25])
@pytest.mark.parametrize("through", ["gradient", "loss"])
def test_gradient_scale_does_not_change_the_trajectory(backend: str, factor: float, through: str):
    results = []
    for scale in (1.0, factor):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimiser = nero.Nero(model, backend=backend)
        for _ in range(few(backend, 30, 2)):
            optimiser.zero_grad()
            loss = (model(torch.randn(8, 6)) - torch.randn(8, 3)).square().mean()
            (loss * scale if through == "loss" else loss).backward()
            if through == "gradient":
                for parameter in model.parameters():
                    parameter.grad *= scale
            optimiser.step()
        results.append([each.detach() for each in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert ((a - b).norm() / a.norm()) < 1e-4


@pytest.mark.parametrize("factor", [1e-20, 1e20, 1e-30, 1e30])
@pytest.mark.parametrize("axes", [(1,), (0,)])
def test_initial_weight_scale_does_not_matter(factor: float, axes: tuple[int, ...]):
    weight = torch.randn(8, 6)
    plain, scaled = nn.Parameter(weight.clone()), nn.Parameter(weight * factor)
    for parameter in (plain, scaled):
        nero.Nero([{"params": [parameter], "role": "neuron", "fan_in_axes": axes}])
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-6)


def test_norm_beyond_float32_keeps_weights_finite(backend: str):
    """The elements are finite, their norm is not; found by hypothesis."""
    weight = nn.Parameter(torch.tensor([[0.0, 2.4062e38, 2.4062e38], [1.0, 2.0, 4.0]]))
    optimiser = nero.Nero([weight], fix_norm="initial", backend=backend)
    for grad in (torch.zeros(2, 3), torch.ones(2, 3).tril(), torch.full((2, 3), 1e30).triu()):
        weight.grad = grad
        optimiser.step()
        assert weight.isfinite().all()
    torch.testing.assert_close(weight[1].norm(), torch.tensor(21.0).sqrt())


def test_gradient_after_huge_one_with_beta_zero_stays_finite(backend: str):
    """With beta = 0, a careless average computes infinity times zero."""
    for shape in ((3,), (3, 4)):
        parameter = nn.Parameter(torch.randn(shape))
        optimiser = nero.Nero([parameter], beta=0.0, backend=backend)
        for size in (1e25, 1.0, 1e-25, 1.0):
            parameter.grad = torch.randn(shape) * size
            optimiser.step()
            assert parameter.isfinite().all()
            assert optimiser.state[parameter]["grad_norm"].isfinite().all()


@pytest.mark.parametrize("factor", [1e25, 1e20, 1.0, 1e-20, 1e-25])
def test_fix_norm_initial_keeps_any_norm(backend: str, factor: float):
    weight = nn.Parameter(torch.randn(4, 8) * factor)
    size = weight.detach().double().norm(dim=1)
    optimiser = nero.Nero([weight], fix_norm="initial", backend=backend)
    for _ in range(3):
        weight.grad = torch.randn(4, 8)
        optimiser.step()
    torch.testing.assert_close(weight.detach().double().norm(dim=1), size, rtol=1e-5, atol=0)


def test_huge_step_of_gains_stays_finite(backend: str):
    layer = nn.LayerNorm(5)
    optimiser = nero.Nero(layer, lr=1e30, scale=1e30, backend=backend)
    layer.weight.grad = torch.randn(5)
    optimiser.step()
    assert layer.weight.isfinite().all()


def test_zero_lr_and_zero_gradients_change_no_bit():
    """torch.distributed.checkpoint does this to create an optimiser's state."""
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    optimiser = nero.Nero(model)
    before = copy.deepcopy(model.state_dict())
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value.view(torch.int32), before[name].view(torch.int32))
