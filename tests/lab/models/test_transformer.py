"""The language model and the translator, against torch's own layers and the paper's sizes."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from interpreter import INTERPRETED
from lab.helpers import make_data
from torch import nn

import nero
from nero_lab.data import pairs
from nero_lab.models import attention
from nero_lab.models.dropout import Dropout
from nero_lab.models.transformer import Translator, language_model


def test_text_networks_layers_match_the_authors():
    model = language_model()
    for block in model[1:3]:
        attention = block.attention[0]
        assert attention.heads == 2
        assert attention.into.weight.shape == (600, 200)
        assert 0.95 < attention.into.weight.abs().max() / math.sqrt(6 / 800) <= 1  # Glorot's bound
        assert not attention.into.bias.any()
        assert not attention.out.bias.any()
        assert block.feed_forward[0].weight.shape == (200, 200)
    translator = Translator()
    layers = [*translator.encoder, *translator.decoder]
    assert [len(layer.attentions) for layer in layers] == [1] * 6 + [2] * 6
    assert translator.heads == 8
    assert {heads.scale for layer in layers for heads in layer.attentions} == {64**0.5}  # elements per head
    assert {layer.feed_forward[0].weight.shape for layer in layers} == {(2048, 512)}
    dropouts = [module.keep for module in translator.modules() if isinstance(module, Dropout)]
    assert dropouts == [0.9] * (1 + 12 + 18)
    for weight in (translator.embedding.words.weight, layers[0].attentions[0].queries.weight):
        assert 0.95 < weight.abs().max() / math.sqrt(6 / sum(weight.shape)) <= 1


@pytest.mark.parametrize("make", [language_model, Translator])
def test_text_model_every_dropout_is_active(make):
    torch.manual_seed(0)
    inputs = torch.randint(1, 20, (3, 9) if make is language_model else (3, 2, 9))
    model = make(20, width=16, hidden=16, layers=1).train()
    dropouts = [module for module in model.modules() if isinstance(module, Dropout)]
    keeps = [module.keep for module in dropouts]
    for chosen in dropouts:
        for module in dropouts:
            module.keep = 1.0
        still = model(inputs)
        assert torch.equal(model(inputs), still)
        chosen.keep = 0.5
        assert not torch.equal(model(inputs), still)
    assert len(keeps) == (5 if make is language_model else 1 + 2 + 3)


def test_language_model_matches_torch_layers():
    torch.manual_seed(0)
    ours = language_model(50, width=12, heads=3, hidden=8, layers=2, max_length=9, dropout=0.2).eval()
    embedding, *blocks, decoder = ours
    words = torch.randint(50, (4, 7))
    places = torch.arange(7)[:, None] / 10000 ** (torch.arange(0, 12, 2) / 12)
    waves = torch.zeros(7, 12)
    waves[:, 0::2], waves[:, 1::2] = places.sin(), places.cos()
    theirs = embedding.words.weight[words] * math.sqrt(12) + waves
    for block in blocks:
        layer = nn.TransformerEncoderLayer(12, 3, 8, dropout=0.0, batch_first=True)
        layer.norm1 = layer.norm2 = nn.Identity()
        attention, (first, _, _, second, _) = block.attention[0], block.feed_forward
        torchs = layer.self_attn
        pairs = (
            (torchs.in_proj_weight, attention.into.weight), (torchs.in_proj_bias, attention.into.bias),
            (torchs.out_proj.weight, attention.out.weight), (torchs.out_proj.bias, attention.out.bias),
            (layer.linear1.weight, first.weight), (layer.linear1.bias, first.bias),
            (layer.linear2.weight, second.weight), (layer.linear2.bias, second.bias),
        )  # fmt: skip
        with torch.no_grad():
            for copy, value in pairs:
                copy.copy_(value)
        theirs = layer(theirs, src_mask=nn.Transformer.generate_square_subsequent_mask(7))
    torch.testing.assert_close(ours(words), decoder(theirs))


def test_language_model_tensors_match_the_paper():
    model = language_model()
    assert len(list(model.parameters())) == 19
    for weight in (model[0].words.weight, model[-1].weight):
        assert weight.shape == (33278, 200)
        assert 0.0999 < weight.abs().max() <= 0.1
    assert {role.kind for role in nero.roles_of(model).values()} == {"neuron", "bias"}
    assert not model[-1].bias.any()
    dropouts = [module.keep for module in model.modules() if isinstance(module, Dropout)]
    assert dropouts == [0.8] * 9


@pytest.mark.parametrize("scaled", [False, True])
def test_translator_matches_torch_layers(scaled):
    torch.manual_seed(0)
    ours = Translator(30, width=12, heads=3, hidden=8, layers=2, max_length=9, dropout=0.1, scaled=scaled).eval()
    words = torch.randint(1, 30, (4, 2, 7))
    words[0, 0, 5:] = words[2, 0, 3:] = 0  # shorter sentences
    places = torch.arange(7)[:, None] / 10000 ** (torch.arange(0, 12, 2) / 12)
    waves = torch.stack([places.sin(), places.cos()], -1).flatten(1)
    table = ours.embedding.words.weight

    def normed(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()

    def fill(layer, of):
        for theirs, heads in zip(
            [layer.self_attn, getattr(layer, "multihead_attn", None)], of.attentions, strict=False
        ):
            theirs.in_proj_weight.copy_(torch.cat([heads.queries.weight, heads.keys.weight, heads.values.weight]))
            theirs.out_proj.weight.copy_(heads.out.weight)
            theirs.in_proj_bias.zero_()
            theirs.out_proj.bias.zero_()
        for linear, which in ((layer.linear1, 0), (layer.linear2, 2)):
            linear.load_state_dict(of.feed_forward[which].state_dict())
        return layer.eval()

    with torch.no_grad():
        source, target = (normed(table[words[:, side]] * (math.sqrt(12) if scaled else 1) + waves) for side in (0, 1))
        blanks, later = words[:, 0] == 0, nn.Transformer.generate_square_subsequent_mask(7)
        form = {"d_model": 12, "nhead": 3, "dim_feedforward": 8, "layer_norm_eps": 1e-6, "batch_first": True}
        for block in ours.encoder:
            source = fill(nn.TransformerEncoderLayer(**form), block)(source, src_key_padding_mask=blanks)
        for block in ours.decoder:
            layer = fill(nn.TransformerDecoderLayer(**form), block)
            target = layer(target, source, tgt_mask=later, memory_key_padding_mask=blanks)
        torch.testing.assert_close(ours(words), target @ table.T, rtol=1e-4, atol=1e-5)


def test_translator_packed_words_match_padded_rows(monkeypatch):
    """Compare outputs and all gradients. Blanks get no gradient."""
    monkeypatch.setattr(pairs, "POSITIONS_MULTIPLE", 4)
    data = make_data("multi30k", examples=12, tests=3)
    ours = Translator(len(data.vocabulary), width=12, heads=3, hidden=8, layers=2, dropout=0.0).double()
    for words, places, labels in data.train.batches(5):
        assert places.shape[1] < words[:, 0].numel()  # the packed batch leaves out some blanks, not all
        assert (words.unbind(1)[1].flatten()[places[1]] == 0).any()
        found = []
        for logits, wanted in (
            (ours(words, places), labels),
            (ours(words).flatten(0, 1), torch.full((words[:, 0].numel(),), -100).index_copy(0, places[1], labels)),
        ):
            ours.zero_grad()
            F.cross_entropy(logits, wanted, reduction="sum").backward()
            found.append((logits[wanted >= 0], [each.grad.clone() for each in ours.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.fixture
def kernels(monkeypatch):
    """Return the device on which Triton's kernels run: a GPU, or the CPU by Triton's interpreter."""
    pytest.importorskip("triton")
    if INTERPRETED:
        monkeypatch.setattr(attention, "kernels_work", lambda _: True)
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def launched(monkeypatch):
    """Return the calls of the attention's kernels."""
    calls, apply = [], attention._Attend.apply
    monkeypatch.setattr(attention._Attend, "apply", lambda *given: calls.append(given) or apply(*given))
    return calls


@pytest.mark.no_cover
@pytest.mark.parametrize("positions_multiple", [1, 4])
def test_attention_kernel_matches_padded_rows(kernels, launched, monkeypatch, positions_multiple):
    """Compare outputs and all gradients, with sentences of many lengths and heads of an odd width."""
    monkeypatch.setattr(pairs, "POSITIONS_MULTIPLE", positions_multiple)
    data = make_data("multi30k", examples=7, tests=3).to(kernels)
    torch.manual_seed(0)
    model = Translator(len(data.vocabulary), width=18, heads=3, hidden=8, layers=1, dropout=0.0).to(kernels)
    for words, places, labels in data.train.batches(4):
        found = []
        for most in (64, 0):
            monkeypatch.setattr(attention, "MAX_KERNEL_LENGTH", most)
            model.zero_grad()
            logits = model(words, places)
            F.cross_entropy(logits, labels, reduction="sum").backward()
            found.append((logits[labels >= 0], [each.grad.clone() for each in model.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert len(launched) == len(data.train.batches(4)) * 3  # of 1 + 2 attentions


@pytest.mark.no_cover
def test_attention_kernel_leaves_what_it_cannot_do(kernels, launched, monkeypatch):
    words = torch.randint(1, 20, (2, 2, 5), device=kernels)
    places = torch.arange(10, device=kernels).repeat(2, 1)
    model = Translator(20, width=16, heads=2, hidden=8, layers=1).to(kernels).eval()
    depth = nero.depth_of(model, words, places)  # traces operations, which kernels hide
    model.double()(words, places)
    monkeypatch.setattr(attention, "MAX_KERNEL_WIDTH", 7)
    model.float()(words, places)
    assert not launched
    monkeypatch.setattr(attention, "MAX_KERNEL_WIDTH", 8)
    weights = list(model.parameters())
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model(words, places).square().sum(), weights, create_graph=True)
    assert len(launched) == 3
    assert depth == nero.depth_of(model, words, places)


@pytest.mark.no_cover
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_kernel_dropout_follows_its_mask(kernels, is_causal):
    """Read the mask off values that are unit vectors, and compare with softmax, mask and product."""
    torch.manual_seed(0)
    heads, length = 2, 16
    lengths = torch.tensor([16, 5], dtype=torch.int32, device=kernels)
    starts = lengths.cumsum(0, dtype=torch.int32) - lengths
    own = torch.randn(21, heads * length, device=kernels)
    other = torch.randn(21, 2 * heads * length, device=kernels)
    constants = {"WIDTH": length, "LENGTH": 16, "BLOCK": 16, "IS_CAUSAL": is_causal, "IS_DROPPED": True}
    constants |= {"PRECISION": "ieee", "enable_fp_fusion": True}

    def attend(own, other, seed=3):
        bounds = starts, lengths, starts, lengths
        return attention._Attend.apply(
            own, other, torch.tensor(seed, device=kernels), bounds, heads, 4.0, 0.5, constants
        )

    units = torch.eye(length, device=kernels).repeat(2, heads)[:21]
    uniform = torch.cat([torch.zeros_like(units), units], 1)
    assert torch.equal(attend(own, uniform), attend(own, uniform))
    assert not torch.equal(attend(own, uniform), attend(own, uniform, seed=4))
    expected, kept = torch.zeros_like(own), []
    own.requires_grad_()
    other.requires_grad_()
    for start, count in zip(starts.tolist(), lengths.tolist(), strict=True):
        for head in range(heads):
            rows, columns = slice(start, start + count), slice(head * length, (head + 1) * length)
            queries, keys, values = own[rows, columns], *(part[rows, columns] for part in other.chunk(2, 1))
            seen = torch.ones(count, count, dtype=torch.bool, device=kernels).tril() if is_causal else None
            mask = attend(torch.zeros_like(own), uniform)[rows, columns][:, :count] > 0
            kept.append(mask[seen].float().mean() if is_causal else mask.float().mean())
            scores = queries @ keys.T / 4
            weights = (scores if seen is None else scores.masked_fill(~seen, -math.inf)).softmax(1)
            expected[rows, columns] = weights * mask * 2 @ values
    torch.testing.assert_close(attend(own, other), expected, rtol=1e-4, atol=1e-5)
    ours = torch.autograd.grad(attend(own, other).square().sum(), (own, other))
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), (own, other)), rtol=1e-4, atol=1e-4)
    assert 0.3 < sum(kept) / len(kept) < 0.7


def test_translator_tensors_match_the_paper():
    with torch.device("meta"):
        model = Translator()
    assert len(list(model.parameters())) == 121
    assert model.embedding.words.weight.shape == (9529, 512)
    assert {role.kind for role in nero.roles_of(model).values()} == {"neuron", "bias"}


def test_translate_is_greedy_decoding():
    torch.manual_seed(1)
    model = Translator(12, width=16, heads=2, hidden=16, layers=1, dropout=0.1).eval()
    sources = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0], [2, 4, 4, 3]])
    found = model.translate(sources, begin=2, end=3, max_length=6).tolist()
    for source, sentence in zip(sources, found, strict=True):
        written = [2]
        while len(written) < 7 and written[-1] != 3:
            pair = torch.zeros(2, max(len(source), len(written)), dtype=torch.long)
            pair[0, : len(source)] = source
            pair[1, : len(written)] = torch.tensor(written)
            written.append(int(model(pair[None])[0, len(written) - 1].argmax()))
        assert sentence[: len(written) - 1] == written[1:]
