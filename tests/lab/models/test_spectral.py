"""Spectral norm, against singular values and power iteration."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nero_lab.models.spectral import with_spectral_norm


@pytest.mark.parametrize("layer", [nn.Linear(7, 5), nn.Conv2d(4, 6, 3), nn.Embedding(9, 4)])
def test_spectral_norm_converges_to_largest_singular_value(layer):
    torch.manual_seed(0)
    layer = with_spectral_norm(layer)
    original = layer.parametrizations.weight.original
    nn.init.normal_(original)
    vector = layer.parametrizations.weight[0].u
    for _ in range(300):
        seen = layer.weight
    largest = torch.linalg.matrix_norm(original.flatten(1), 2)
    torch.testing.assert_close(seen, original / largest)
    direction = torch.randn_like(original)
    ours = torch.autograd.grad((layer.weight * direction).sum(), original)[0]
    divided = original / torch.linalg.svdvals(original.flatten(1))[0]
    exact = torch.autograd.grad((divided * direction).sum(), original)[0]
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-5)
    nn.init.normal_(original)
    saved = vector.clone()
    layer.eval()
    assert torch.equal(layer.weight, layer.weight)
    assert torch.equal(vector, saved)
    layer.train()
    assert not torch.equal(layer.weight, layer.weight)
    assert not torch.equal(vector, saved)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("make", [partial(nn.Linear, 7, 5), partial(nn.Conv2d, 4, 6, 3), partial(nn.Embedding, 9, 4)])
def test_spectral_norm_pass_matches_power_iteration(make, memory_format):
    torch.manual_seed(0)
    layer = with_spectral_norm(make()).double().to(memory_format=memory_format)
    original, saved = layer.parametrizations.weight.original, layer.parametrizations.weight[0].u
    nn.init.normal_(original)
    matrix, u = original.flatten(1), saved.clone()
    for _ in range(3):
        with torch.no_grad():
            v = F.normalize(u @ matrix, dim=0)
            u = F.normalize(matrix @ v, dim=0)
        ours, expected = layer.weight, original / (u @ matrix @ v)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(saved, u)
        direction = torch.randn_like(original)
        grads = [torch.autograd.grad(seen, original, direction, retain_graph=True)[0] for seen in (ours, expected)]
        torch.testing.assert_close(*grads)
