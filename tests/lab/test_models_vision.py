"""Perceptrons, VGG-11, ResNet-18 and dropout."""

import math

import pytest
import torch
from torch import nn

from nero_lab.models.dropout import Dropout
from nero_lab.models.mlp import ScaledReLU, mlp, reparameterised
from nero_lab.models.resnet import resnet18
from nero_lab.models.vgg import vgg11


def test_networks_sizes_match_the_paper():
    def count(model):
        return sum(parameter.numel() for parameter in model.parameters())

    with torch.device("meta"):
        assert count(mlp(100)) == 99 * (784 * 784 + 784) + 784 * 10 + 10
        assert count(mlp(5, bias=False)) == 4 * 784 * 784 + 7840
        vgg, resnet = vgg11(), resnet18()
    convolutions = sum(
        9 * a * b
        for a, b in zip((3, 64, 128, 256, 256, 512, 512, 512), (64, 128, 256, 256, 512, 512, 512, 512), strict=True)
    )
    assert count(vgg) == convolutions + 513 * 4096 + 4097 * 4096 + 4097 * 10
    assert count(resnet) == 11_173_962  # the commonly stated size of this variant


def test_scaled_relu_scales_outputs_and_gradients():
    inputs = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    outputs = ScaledReLU()(inputs)
    outputs.sum().backward()
    assert outputs.tolist() == pytest.approx([0, 0, 3 * math.sqrt(2)])
    assert inputs.grad.tolist() == pytest.approx([0, 0, math.sqrt(2)])


def test_vgg_relu_and_pooling_commute():
    torch.manual_seed(0)
    model, inputs = vgg11(width=1 / 8, dropout=0.0), torch.randn(2, 3, 32, 32)
    layers = list(model)
    pools = [index for index, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
    assert len(pools) == 5
    for index in pools:
        layers[index], layers[index + 1] = layers[index + 1], layers[index]
    torch.testing.assert_close(nn.Sequential(*layers)(inputs), model(inputs))


def test_reparameterised_mlp_any_scale_is_same_function():
    outputs = []
    for sigma in (1.0, 100.0):
        torch.manual_seed(0)
        outputs.append(reparameterised(5, sigma, width=48)(torch.linspace(-1, 1, 48).expand(1, 48)))
    assert torch.allclose(*outputs, rtol=1e-4)


def test_dropout_draws_from_its_own_generator():
    layer, inputs = Dropout(0.25), torch.ones(10_000)
    layer.generator = torch.Generator().manual_seed(1)
    first = layer(inputs)
    torch.rand(3)  # torch's global generator must not matter
    layer.generator.manual_seed(1)
    assert torch.equal(layer(inputs), first)
    assert sorted(set(first.tolist())) == pytest.approx([0.0, 4 / 3])
    assert (first == 0).float().mean() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(layer.eval()(inputs), inputs)
