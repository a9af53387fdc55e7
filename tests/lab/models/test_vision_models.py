"""Perceptrons, VGG-11, ResNets, networks of the GAN and of the actor-critic, and those of today's study on CIFAR-10."""

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
from nero_lab.models.actor_critic import ActorCritic
from nero_lab.models.airbench import Airbench
from nero_lab.models.biggan import Attention, ConditionalBatchNorm, Down, GANPair, SpectralNorm, Up, with_spectral_norm
from nero_lab.models.dropout import Dropout
from nero_lab.models.mlp import ScaledReLU, mlp, reparameterised
from nero_lab.models.resnet import resnet18, resnet50
from nero_lab.models.vgg import vgg11
from nero_lab.models.vit import SelfAttention, VisionTransformer
from nero_lab.tasks import TASKS


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_networks_sizes_match_the_paper():
    with torch.device("meta"):
        assert count(mlp(100)) == 99 * (784 * 784 + 784) + 784 * 10 + 10
        assert count(mlp(5, bias=False)) == 4 * 784 * 784 + 7840
        assert count(mlp(3, 64, inputs=49)) == (49 * 64 + 64) + (64 * 64 + 64) + 64 * 10 + 10
        assert count(mlp(1, 64, inputs=49)) == 49 * 10 + 10
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


def test_gan_pair_matches_the_paper():
    with torch.device("meta"):
        pair = GANPair()
    assert sum(each.numel() for each in pair.generator.parameters()) == 2_183_091
    assert sum(each.numel() for each in pair.discriminator.parameters()) == 2_644_129
    assert pair.generator.noise == 4 * 20
    tables = [pair.generator.classes.weight, pair.discriminator.classes.weight]
    assert [table.shape for table in tables] == [(80, 1000), (1000, 256)]
    norms = [each for each in pair.modules() if isinstance(each, ConditionalBatchNorm)]
    assert [each.gain.weight.shape for each in norms] == [(width, 80 + 20) for width in (256, 256, 256, 128, 128, 64)]
    assert all(each.bias.weight.shape == each.gain.weight.shape for each in norms)
    widths = [tuple(block.first.weight.shape[1::-1]) for block in pair.generator.blocks]
    assert widths == [(256, 256), (256, 128), (128, 64)]
    widths = [tuple(block.first.weight.shape[1::-1]) for block in pair.discriminator.blocks]
    assert widths == [(3, 64), (64, 128), (128, 256), (256, 256)]
    around = [isinstance(block.around, nn.Conv2d) for block in (*pair.generator.blocks, *pair.discriminator.blocks)]
    assert around == [False, True, True, True, True, True, False]
    assert not any("gamma" in name for name, _ in pair.named_parameters())
    torch.manual_seed(0)
    pair = GANPair(base=8)
    layers = [each for each in pair.modules() if isinstance(each, nn.Conv2d | nn.Linear | nn.Embedding)]
    assert all(type(each.parametrizations.weight[0]) is SpectralNorm for each in layers)
    for layer in layers:  # orthogonal: all singular values are one
        matrix = layer.parametrizations.weight.original.flatten(1)
        small = matrix @ matrix.mT if len(matrix) < matrix.shape[1] else matrix.mT @ matrix
        torch.testing.assert_close(small, torch.eye(len(small)), rtol=0, atol=1e-4)
    biases = torch.cat([value for name, value in pair.named_parameters() if name.endswith("bias")])
    assert biases.std().item() == pytest.approx(0.01, rel=0.05)


def test_gan_pair_roles_match_the_authors_code():
    """In the authors' code, a slice along axis 0 of a parameter with two axes or more is a neuron."""
    pair = GANPair(base=2, chunk=3, class_features=5, rows=12)
    roles = nero.roles_of(pair)
    for name, parameter in pair.named_parameters():
        expected = ("neuron", tuple(range(1, parameter.dim()))) if parameter.dim() > 1 else ("bias", ())
        expected = ("gain", ()) if name == "generator.last.0.weight" else expected
        assert (roles[name].kind, roles[name].fan_in_axes) == expected, name
        assert "unknown" not in roles[name].why
    before = {name: buffer.clone() for name, buffer in pair.named_buffers()}
    nero.roles_of(pair)
    assert all(torch.equal(buffer, before[name]) for name, buffer in pair.named_buffers())


def test_images_depend_on_class_and_every_noise_chunk():
    torch.manual_seed(0)
    generator, discriminator = GANPair(base=2, blocks=3).children()
    generator.eval()
    noise, labels = torch.randn(5, generator.noise), torch.arange(5)
    images = generator(noise, labels)
    assert images.shape == (5, 3, 32, 32)
    assert images.abs().max() < 1
    for chunk in range(4):
        other = noise.clone()
        other[0, 20 * chunk : 20 * chunk + 20] = 0
        changed = (generator(other, labels) != images).flatten(1).any(1)
        assert changed.tolist() == [True, False, False, False, False]
    assert (generator(noise, labels.flip(0)) != images).flatten(1).any(1).tolist() == [True, True, False, True, True]
    discriminator.eval()
    scores = discriminator(images, labels)
    assert ((discriminator(images, labels.flip(0)) != scores) == torch.tensor([1, 1, 0, 1, 1]).bool()).all()


def test_scores_match_scaled_projection():
    torch.manual_seed(0)
    discriminator = GANPair(base=2).discriminator.eval()
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([4, 0, 7])
    hidden = discriminator.blocks[1](discriminator.blocks[0](images))
    assert hidden.shape == (3, 4, 8, 8)  # where attention is
    hidden = discriminator.attention(hidden)
    for block in discriminator.blocks[2:]:
        hidden = block(hidden)
    features = hidden.relu().mean((2, 3))
    table, last = discriminator.classes.weight, discriminator.last
    expected = [10 * (last(features)[i, 0] + features[i] @ table[labels[i]]) for i in range(3)]
    torch.testing.assert_close(discriminator(images, labels), torch.stack(expected))


def test_blocks_match_biggan():
    """The shortcuts are in BigGAN's order: upsample, then convolve; convolve features, then pool."""
    torch.manual_seed(0)
    features, condition = torch.randn(2, 8, 4, 4), torch.randn(2, 6)
    for width in (8, 4):
        up, larger = Up(8, width, 6).eval(), F.interpolate(features, scale_factor=2)
        body = up.first(F.interpolate(up.norms[0](features, condition).relu(), scale_factor=2))
        body = up.second(up.norms[1](body, condition).relu())
        torch.testing.assert_close(up(features, condition), body + (larger if width == 8 else up.around(larger)))
    down = Down(8, 8, halved=True).eval()
    body = F.avg_pool2d(down.second(down.first(features.relu()).relu()), 2)
    torch.testing.assert_close(down(features), body + F.avg_pool2d(down.around(features), 2))
    same_size = Down(8, 8, halved=False).eval()
    body = same_size.second(same_size.first(features.relu()).relu())
    torch.testing.assert_close(same_size(features), body + features)
    pixels = torch.randn(2, 3, 4, 4)
    first = Down(3, 8, halved=True).eval()
    body = F.avg_pool2d(first.second(first.first(pixels).relu()), 2)  # no ReLU on pixels
    torch.testing.assert_close(first(pixels), body + first.around(F.avg_pool2d(pixels, 2)))


def test_attention_matches_torch_on_pooled_keys():
    torch.manual_seed(0)
    attention, inputs = Attention(16).eval(), torch.randn(2, 16, 4, 6)
    queries = attention.queries(inputs).flatten(2).mT
    keys, values = (F.max_pool2d(layer(inputs), 2).flatten(2).mT for layer in (attention.keys, attention.values))
    attended = F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
    expected = inputs + attention.out(attended.mT.reshape(2, 8, 4, 6))
    torch.testing.assert_close(attention(inputs), expected)


def test_conditional_batch_norm_matches_torch():
    torch.manual_seed(0)
    norm, inputs, condition = ConditionalBatchNorm(4, 3).eval(), torch.randn(5, 4, 2, 2), torch.randn(5, 3)
    norm.norm.running_mean.normal_()
    norm.norm.running_var.uniform_(1, 2)
    expected = torch.stack([
        F.batch_norm(
            inputs[i : i + 1], norm.norm.running_mean, norm.norm.running_var,
            1 + norm.gain(condition)[i], norm.bias(condition)[i],
        )[0]
        for i in range(5)
    ])  # fmt: skip
    torch.testing.assert_close(norm(inputs, condition), expected)


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


def test_actor_critic_starts_orthogonal_and_scales_pixels():
    torch.manual_seed(0)
    model = ActorCritic()
    assert [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 4] == [
        (32, 4, 8, 8),
        (64, 32, 4, 4),
        (32, 64, 3, 3),
    ]
    assert sum(parameter.numel() for parameter in model.parameters()) == 866_439
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
            continue
        rows = parameter.detach().flatten(1)
        gain = {"actor.weight": 0.01, "critic.weight": 1.0}.get(name, math.sqrt(2))
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-5, rtol=0)
    frames = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    logits, values = model(frames)
    hidden = model.body(frames.float() / 255)
    assert logits.shape == (5, 6)
    torch.testing.assert_close(logits, model.actor(hidden))
    torch.testing.assert_close(values, model.critic(hidden)[:, 0])


def correlated_images(number=200, side=8):
    """Make images whose neighbouring pixels and channels are alike."""
    noise = torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(0))
    return noise.cumsum(2).cumsum(3) / 2 + noise.mean(1, keepdim=True)


def test_vit_sizes_and_roles_are_as_designed():
    model = VisionTransformer()
    blocks = 6 * (12 * 256**2 + 2 * 256)
    assert count(model) == blocks + 256 * (48 + 1) + 64 * 256 + 256 + 10 * 257 == 4_753_418
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
    assert round(count(model) / 1e6, 2) == 1.97
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == convolutions + 24 + 2 * (64 + 256 + 256) + 2560
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
