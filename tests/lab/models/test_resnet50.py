"""ResNet-50 against the one of transformers."""

import math

import pytest
import torch
from torch import nn

from nero_lab.models.resnet import resnet50


def test_resnet50_matches_transformers():
    """The model of transformers has the same blocks as torchvision's."""
    with torch.device("meta"):
        whole = resnet50()
    assert sum(parameter.numel() for parameter in whole.parameters()) == 25_557_032
    assert len(list(whole.parameters())) == 161
    assert [tuple(layer.shape) for layer in (whole[0].weight, whole[-1].weight)] == [(64, 3, 7, 7), (1000, 2048)]
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[16, 32, 64, 128], depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=5
    )
    torch.manual_seed(0)
    theirs, ours = transformers.ResNetForImageClassification(config).eval(), resnet50(5, width=1 / 16).eval()
    layers = theirs.resnet.encoder.stages
    blocks = [block for stage in layers for block in stage.layers]
    in_order = [theirs.resnet.embedder, *(part for block in blocks for part in (block.layer, block.shortcut))]
    values = [value for part in [*in_order, theirs.classifier] for value in part.state_dict().values()]
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    inputs = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        torch.testing.assert_close(ours(inputs), theirs(inputs).logits, rtol=1e-5, atol=1e-5)


def test_resnet50_initial_weights_match_torchvision():
    torch.manual_seed(0)
    model = resnet50(10, width=0.5)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.out_channels * layer.kernel_size[0] ** 2
            assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
        if isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all()
            assert (layer.bias == 0).all()
