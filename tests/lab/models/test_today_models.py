"""The networks of today's study on CIFAR-10: sizes, roles, and the parts that differ from torch's layers."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

pytest.importorskip("typer")

from lab.helpers import finish, make_data
from lab.loop_cases import saved_and_loaded

import nero
from nero_lab.loops.supervised import Supervised
from nero_lab.models.airbench import Airbench
from nero_lab.models.vit import SelfAttention, VisionTransformer
from nero_lab.tasks import TASKS


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


def correlated_images(number=200, side=8):
    """Make images whose neighbouring pixels and channels are alike."""
    noise = torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(0))
    return noise.cumsum(2).cumsum(3) / 2 + noise.mean(1, keepdim=True)


def test_vit_sizes_and_roles_are_as_designed():
    model = VisionTransformer()
    blocks = 6 * (12 * 256**2 + 2 * 256)
    assert count(model.parameters()) == blocks + 256 * (48 + 1) + 64 * 256 + 256 + 10 * 257 == 4_753_418
    roles = nero.roles_of(VisionTransformer(width=64, layers=1))
    assert {name: role.kind for name, role in roles.items() if role.kind != "neuron"} == {
        "patches.bias": "bias",
        "blocks.0.attention.0.weight": "gain",
        "blocks.0.feed_forward.0.weight": "gain",
        "norm.weight": "gain",
        "head.bias": "bias",
    }
    assert roles["positions"].fan_in_axes == (2,)
    assert roles["patches.weight"].fan_in_axes == (1, 2, 3)


def test_vit_patches_are_told_apart_by_position_alone():
    torch.manual_seed(0)
    model = VisionTransformer(5, width=32, head_width=16, layers=2, side=8)
    images = torch.randn(3, 3, 8, 8)
    outputs = model(images)
    assert outputs.shape == (3, 5)
    swapped = torch.cat([images[..., 4:], images[..., :4]], 3)
    assert not torch.allclose(model(swapped), outputs, atol=1e-4)
    nn.init.zeros_(model.positions)
    torch.testing.assert_close(model(swapped), model(images))


def test_vit_attention_ignores_the_scale_of_queries():
    torch.manual_seed(0)
    layer, inputs = SelfAttention(32, 16), torch.randn(2, 5, 32)
    expected = layer(inputs)
    queries, keys, values = (part.unflatten(2, (2, 16)).transpose(1, 2) for part in layer.into(inputs).chunk(3, 2))
    queries, keys = (4 * F.normalize(part, dim=3) for part in (queries, keys))  # root-mean-square one of 16 elements
    attended = (queries @ keys.mT / 4).softmax(3) @ values
    torch.testing.assert_close(layer.out(attended.transpose(1, 2).flatten(2)), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        layer.into.weight[:64] *= 3
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("contender", TASKS["vit"].contenders)
def test_vit_task_trains_and_resumes(contender):
    task, data = TASKS["vit"], make_data(examples=8, tests=5)
    task = replace(task, batch=4, model=partial(VisionTransformer, width=64, layers=1))
    assert task.settings(contender).precision == "bf16"
    settings = task.settings(contender, epochs=2, precision="float32")  # bf16 is slow on processors without it
    whole = Supervised(task, settings, data)
    for _ in range(3):
        whole.advance()
    resumed = finish(Supervised(task, settings, data, saved_and_loaded(whole.state())))
    finish(whole)
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    assert all(parameter.isfinite().all() for parameter in whole.model.parameters())
    assert whole.curve == resumed.curve
    assert nero.is_balanced(whole.model) == (contender.startswith("nero") and not contender.endswith("free"))


def test_airbench_sizes_match_the_paper():
    model = Airbench()
    assert round(count(model.parameters()) / 1e6, 2) == 1.97
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert count(trained) == convolutions + 24 + 2 * (64 + 256 + 256) + 2560
    assert model.whitening.weight.shape == (24, 3, 2, 2)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 6
    assert not any(norm.weight.requires_grad for norm in norms)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_airbench_filters_start_as_identity():
    torch.manual_seed(0)
    model, inputs = Airbench(width=1 / 4), torch.randn(2, 24, 7, 7)
    first, second = model.blocks[1].first, model.blocks[1].second
    assert first.weight.shape[:2] == (64, 16)
    torch.testing.assert_close(first(inputs[:, :16])[:, :16], inputs[:, :16])
    torch.testing.assert_close(second(inputs.repeat(1, 3, 1, 1)[:, :64]), inputs.repeat(1, 3, 1, 1)[:, :64])
    assert first.weight[16:].std() > 0.01


def test_airbench_head_start_and_scale_are_given():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)
    model = Airbench(width=1 / 4, output_scale=0.5, head_std=1.0).eval()
    assert math.isclose(model.head.weight.std().item(), 1.0, rel_tol=0.1)
    outputs = model(images)
    model.output_scale.fill_(1.0)
    torch.testing.assert_close(model(images), 2 * outputs)


def test_whitening_outputs_are_uncorrelated_of_unit_variance():
    images = correlated_images()
    model = Airbench(width=1 / 8)
    model.whiten(images)
    outputs = F.conv2d(images, model.whitening.weight).transpose(0, 1).flatten(1)
    covariance = torch.cov(outputs)
    assert (torch.cov(F.unfold(images, 2).transpose(0, 1).flatten(1)) - torch.eye(12)).abs().max() > 1
    torch.testing.assert_close(covariance[:12, :12], torch.eye(12), rtol=0, atol=0.02)
    torch.testing.assert_close(model.whitening.weight[12:], -model.whitening.weight[:12])
    assert not model.whitening.weight.requires_grad


def test_compiled_airbench_serves_all_runs_of_a_process():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, images = CompileCounter(), torch.randn(2, 3, 32, 32)
    for scale in (1.0, 1 / 9, 1 / 256):
        model = Airbench(width=1 / 16, output_scale=scale)
        model.compile(backend=counter, dynamic=False)
        model(images).sum().backward()
    assert counter.frame_count == 1
