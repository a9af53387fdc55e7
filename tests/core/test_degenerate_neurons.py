"""Neurons that cannot be balanced: fan-in 1, zero, constant, and padding rows (ruling 3)."""

import pytest
import torch
from torch import Tensor, nn

import nero
from nero.rule import project


def angle(one: Tensor, other: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=1).clamp(-1, 1).acos()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(1, 6),
        lambda: nn.Conv2d(6, 6, 1, groups=6),
        lambda: nn.ParameterList([nn.Parameter(torch.ones(6, 1, 1))]),
    ],
    ids=["Linear(1, n)", "1x1 depthwise", "(C, 1, 1)"],
)
@pytest.mark.parametrize("from_module", [True, False], ids=["module", "parameters"])
def test_weight_with_fan_in_one_steps_as_a_gain(backend: str, make, from_module: bool):
    module = make()
    weight = next(module.parameters())
    start = weight.detach().clone()
    optimiser = nero.Nero(module if from_module else module.parameters(), backend=backend)
    assert torch.equal(weight, start), "gains are not projected"
    for _ in range(5):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimiser.step()
    assert weight.isfinite().all()
    assert not torch.equal(weight, start)
    size = float(start.abs().mean())
    assert (weight - start).abs().max() <= 5 * 3 * 0.01 * size, "steps are relative to the initial size"


def test_zero_neuron_waits_for_its_first_gradient(backend: str):
    """As in a zero-initialised head, or B of LoRA: the first step points against the gradient."""
    head = nn.Linear(7, 4)
    nn.init.zeros_(head.weight)
    optimiser = nero.Nero(head, backend=backend)
    head.weight.grad = torch.zeros(4, 7)
    optimiser.step()
    assert torch.equal(head.weight, torch.zeros(4, 7))
    grad = torch.randn(4, 7)
    grad[2] = 0
    head.weight.grad = grad
    optimiser.step()
    assert torch.equal(head.weight[2], torch.zeros(7))
    moved = [0, 1, 3]
    torch.testing.assert_close(head.weight[moved], project(-grad[moved], (1,)).tensor, rtol=0, atol=1e-5)


def test_zero_neuron_with_free_norm_takes_a_small_norm():
    for fix_norm, size in (("initial", 0.01), (False, 0.01 * 0.01)):
        weight = nn.Parameter(torch.zeros(3, 8))
        optimiser = nero.Nero([weight], fix_norm=fix_norm)
        weight.grad = torch.randn(3, 8)
        weight.grad -= weight.grad.mean(1, keepdim=True)
        optimiser.step()
        torch.testing.assert_close(weight.norm(dim=1), torch.full((3,), size), rtol=1e-5, atol=0)


def test_zero_padding_row_stays_zero_while_others_learn(backend: str):
    table = nn.Embedding(5, 8, padding_idx=2)
    optimiser = nero.Nero(table, backend=backend)
    for _ in range(4):
        optimiser.zero_grad()
        before = table.weight.detach().clone()
        (table(torch.arange(5)) * torch.randn(8)).sum().backward()
        optimiser.step()
        assert torch.equal(table.weight[2], torch.zeros(8))
        assert table.weight.isfinite().all()
        assert (angle(table.weight, before)[[0, 1, 3, 4]] > 1e-3).all()


def test_nonzero_padding_row_is_balanced_and_not_trained(backend: str):
    table = nn.Embedding.from_pretrained(3 * torch.randn(5, 8), freeze=False, padding_idx=2)
    optimiser = nero.Nero(table, backend=backend)
    assert nero.is_balanced(table)
    entered = table.weight[2].detach().clone()
    for _ in range(3):
        optimiser.zero_grad()
        (table(torch.arange(5)) * torch.randn(8)).sum().backward()
        optimiser.step()
    assert torch.equal(table.weight[2], entered)


@pytest.mark.parametrize("value", [1.0, 0.1, -3e20, 1e-20])
def test_constant_neuron_waits_for_its_first_gradient(backend: str, value: float):
    weight = nn.Parameter(torch.full((3, 9), value))
    optimiser = nero.Nero([weight], backend=backend)
    assert torch.equal(weight, torch.full((3, 9), value)), "a constant neuron has no projection"
    weight.grad = torch.randn(3, 9)
    optimiser.step()
    torch.testing.assert_close(weight, project(-weight.grad, (1,)).tensor, rtol=0, atol=1e-3)


def test_zero_neuron_with_constant_gradient_stays_zero(backend: str):
    weight = nn.Parameter(torch.zeros(3, 9))
    optimiser = nero.Nero([weight], backend=backend)
    for _ in range(3):
        weight.grad = torch.full((3, 9), 0.1)
        optimiser.step()
    assert torch.equal(weight, torch.zeros(3, 9))


def test_one_neuron_over_all_axes_is_balanced(backend: str):
    weight = nn.Parameter(torch.randn(5, 6))
    optimiser = nero.Nero([{"params": [weight], "fan_in_axes": (0, 1)}], backend=backend)
    for _ in range(3):
        weight.grad = torch.randn(5, 6)
        optimiser.step()
    assert optimiser.state[weight]["grad_norm"].shape == (1, 1)
    assert float(weight.detach().norm()) == pytest.approx(1, abs=1e-5)
