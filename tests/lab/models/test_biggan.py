"""The GAN's networks, against BigGAN's definition."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import nero
from nero_lab.models.biggan import Attention, ConditionalBatchNorm, Down, GANPair, Up
from nero_lab.models.spectral import SpectralNorm


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
