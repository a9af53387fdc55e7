"""The options that docs/guide advises for pretrained networks, adapters and large targets."""

import copy

import pytest
import torch
from torch import nn
from training import network

import nero

PRETRAINED = {"fix_norm": "initial", "fix_mean": False}
ADAPTER = {"fix_norm": False, "fix_mean": False, "scale": 1.0}
FREE_LAYER = {"fix_norm": False, "fix_mean": False}


def test_pretrained_network_with_advised_options_is_unchanged():
    inputs = torch.randn(16, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    trained = network().eval()
    with torch.no_grad():
        said = trained(inputs)
        for options, stays in ((PRETRAINED, True), ({"fix_norm": "initial"}, False), ({}, False)):
            model = copy.deepcopy(trained)
            nero.Nero(model, **options)
            assert torch.allclose(model(inputs), said, atol=1e-5) is stays


def test_adapter_with_advised_options_grows_slowly():
    """LoRA's B starts at zero: it jumps to norm one, is held to 0.01, or grows step by step."""
    sizes: dict[object, list[float]] = {}
    for options in ({"fix_norm": True}, {"fix_norm": "initial"}, ADAPTER):
        torch.manual_seed(0)
        base = nn.Linear(6, 5).requires_grad_(False)
        a, b = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.zeros(5, 3))
        optimiser = nero.Nero([a, b], **options)
        for _ in range(20):
            optimiser.zero_grad()
            inputs = torch.randn(32, 6)
            (base(inputs) + inputs @ a.T @ b.T - inputs @ torch.ones(6, 5)).square().mean().backward()
            optimiser.step()
            sizes.setdefault(options["fix_norm"], []).append(b.norm(dim=1).mean().item())
    assert sizes[True] == pytest.approx([1.0] * 20)
    assert sizes["initial"] == pytest.approx([0.01] * 20)
    assert 0 < sizes[False][0] <= 0.01 + 1e-6
    assert sizes[False][0] < sizes[False][9] < sizes[False][19]


def test_large_targets_are_reached_by_a_free_last_layer():
    """Targets of variance one are learnt sooner. Errors are relative to the variance of the targets."""
    found = []
    for size, options in ((100.0, {}), (100.0, FREE_LAYER), (1.0, {})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        inputs = torch.randn(256, 10)
        targets = (inputs @ torch.randn(10, 1)).tanh()
        targets = size * (targets - targets.mean()) / targets.std()
        optimiser = nero.Nero([{"params": model[:-1].parameters()}, {"params": model[-1].parameters(), **options}])
        for _ in range(500):
            optimiser.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimiser.step()
        found.append(loss.item() / size**2)
    held, free, plain = found
    assert held > 0.4
    assert free < 0.15
    assert plain < 0.02
