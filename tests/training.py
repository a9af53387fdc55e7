"""A small network, its gradients and comparisons, shared by the tests of the optimiser."""

import torch
from torch import nn


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
