"""Roles of models of the transformers library, and of stacked experts."""

from fnmatch import fnmatchcase

import pytest
import torch
from role_cases import BIAS, GAIN, OFFSET_GAIN, ROWS, neuron, neurons_under, weights_behind
from torch import nn

import nero
from nero.roles import roles_of

SMALL = {"vocab_size": 17, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
WIDTHS = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 1}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 3}
STATE_SPACE = {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 4, "state_size": 4, "n_groups": 1}
PICTURE = {"image_size": 8, "patch_size": 4}
IDS, PIXELS = {"input_ids": torch.arange(8)[None] + 1}, {"pixel_values": torch.randn(2, 3, 8, 8)}

# model: options of its config, an input, and roles by pattern; the last match counts
HUGGING_FACE = {
    "GPT2LMHeadModel": (
        {**SMALL, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2},
        IDS,
        {"*.c_*.weight": neuron(0), "*.w?e.weight": ROWS, "*.ln_*.weight": GAIN, "*.bias": BIAS},
    ),
    "LlamaForCausalLM": ({**SMALL, **WIDTHS, **HEADS}, IDS, {"*": ROWS, "*norm.weight": GAIN}),
    "MixtralForCausalLM": (
        {**SMALL, **WIDTHS, **HEADS, **EXPERTS},
        IDS,
        {"*": ROWS, "*norm.weight": GAIN, "*.experts.*": neuron(2)},
    ),
    "GptOssForCausalLM": (
        {**SMALL, **WIDTHS, **HEADS, **EXPERTS, "head_dim": 4},
        IDS,
        {"*": ROWS, "*bias": BIAS, "*sinks": BIAS, "*norm.weight": GAIN, "*.experts.*_proj": neuron(1)},
    ),
    "Llama4ForCausalLM": (
        {**SMALL, **WIDTHS, **HEADS, **EXPERTS, "head_dim": 4, "intermediate_size_mlp": 12, "attention_chunk_size": 8},
        IDS,
        {"*": ROWS, "*norm.weight": GAIN, "*.experts.*": neuron(1)},
    ),
    "Mamba2ForCausalLM": (
        {**SMALL, **STATE_SPACE},
        IDS,
        {"*": BIAS, "*weight": ROWS, "*.conv1d.weight": neuron(1, 2), "*.norm.weight": GAIN, "*.norm_f.weight": GAIN},
    ),
    "ViTForImageClassification": (
        {**WIDTHS, **PICTURE},
        PIXELS,
        {
            "*.weight": ROWS,
            "*.bias": BIAS,
            "*norm*.weight": GAIN,
            "*.projection.weight": neuron(1, 2, 3),
            "*.cls_token": neuron(2),
            "*.position_embeddings": neuron(2),
        },
    ),
    "ConvNextV2ForImageClassification": (
        {**PICTURE, "hidden_sizes": [4, 4], "depths": [1, 1], "num_stages": 2},
        PIXELS,
        {
            "*.weight": ROWS,
            "*.bias": BIAS,
            "*norm.weight": GAIN,
            "*.grn.weight": OFFSET_GAIN,
            "*.downsampling_layer.0.weight": GAIN,
            "*.downsampling_layer.1.weight": neuron(1, 2, 3),
            "*.patch_embeddings.weight": neuron(1, 2, 3),
            "*.dwconv.weight": neuron(1, 2, 3),
        },
    ),
}


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    return kind(kind.config_class(**HUGGING_FACE[name][0]))


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transformers_model_has_expected_roles_and_trains(name):
    model = hugging_face(name)
    _, inputs, patterns = HUGGING_FACE[name]
    roles = roles_of(model)
    for parameter, role in roles.items():
        expected = [each for pattern, each in patterns.items() if fnmatchcase(parameter, pattern)]
        assert role == expected[-1], parameter

    optimiser = nero.Nero(model)
    before = {key: value.clone() for key, value in model.named_parameters()}
    model(**inputs).logits.square().sum().backward()
    optimiser.step()
    for key, value in model.named_parameters():
        assert bool(value.isfinite().all()), key
    assert nero.is_balanced(model)
    moved = [key for key, value in model.named_parameters() if not torch.equal(value, before[key])]
    assert len(moved) > len(before) / 2
    assert not optimiser.skipped


def test_gpt2_tied_head_has_one_role():
    model = hugging_face("GPT2LMHeadModel")
    roles = roles_of(model)
    assert "lm_head.weight" not in roles
    assert roles["transformer.wte.weight"].why == "Embedding.weight, tied to lm_head.weight"
    assert roles["transformer.h.0.attn.c_attn.weight"].why == "Conv1D.weight"
    assert roles_of(model, {"lm_head.*": (0,)})["transformer.wte.weight"] == neuron(0)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"])
def test_stacked_expert_has_one_neuron_per_output(name):
    model = hugging_face(name)
    prefix, experts = next(each for each in model.named_modules() if each[0].endswith("experts"))
    block = model.get_submodule(prefix.removesuffix(".experts"))
    role, weight = roles_of(model)[f"{prefix}.down_proj"], experts.down_proj
    channels = weights_behind(lambda x: block(x)[0].reshape(-1, 8), weight, -1, torch.randn(1, 16, 8))
    neurons = neurons_under(role, weight.shape)
    assert len(neurons) == 3 * 8
    for channel in channels:
        within = [each for each in neurons if each <= channel]
        assert len(within) == 3
        assert frozenset().union(*within) == channel


class Experts(nn.Module):
    """Stacked experts with parameters of any shape."""

    def __init__(self, **parameters):
        super().__init__()
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"w1": (3, 6, 4), "b1": (3, 6)}, {"w1": neuron(2), "b1": BIAS}),
        ({"w1": (3, 6, 4), "router": (3, 4)}, {"w1": neuron(2), "router": ROWS}),
        ({"a": (3, 6, 2), "b": (3, 2, 6), "b_up": (3, 6)}, {"a": neuron(2), "b": neuron(2), "b_up": BIAS}),
        ({"gate_up_proj": (3, 12, 4), "down_proj": (3, 4, 6)}, {"gate_up_proj": neuron(2), "down_proj": neuron(2)}),
        ({"gate_up_proj": (3, 4, 12), "down_proj": (3, 6, 4)}, {"gate_up_proj": neuron(1), "down_proj": neuron(1)}),
        ({"gate_up_proj": (3, 8, 4), "down_proj": (3, 4, 4)}, {"gate_up_proj": neuron(2), "down_proj": neuron(2)}),
        ({"gate_up_proj": (3, 4, 8), "down_proj": (3, 4, 4)}, {"gate_up_proj": neuron(1), "down_proj": neuron(1)}),
        ({"w": (3, 6, 4, 2), "mix": (3,)}, {"w": neuron(1, 2, 3), "mix": BIAS}),  # four axes: the shape rule
    ],
)
def test_stacked_experts_have_roles_by_shape(parameters, expected):
    assert roles_of(Experts(**parameters)) == expected


def dbrx_experts():
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU

    glu = DbrxExpertGLU(DbrxFFNConfig(hidden_size=3, ffn_hidden_size=4, moe_num_experts=2))
    torch.nn.init.normal_(glu.w2)

    def second_expert_alone(x):
        return glu(x, *(each.detach()[4:] for each in (torch.ones(8, 3), torch.ones(8, 3))), glu.w2[4:])

    return glu, "w2", second_expert_alone, torch.rand(5, 3) + 0.5


def grouped_linear():
    from transformers.models.convbert.modeling_convbert import GroupedLinearLayer

    layer = GroupedLinearLayer(6, 4, 2)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return layer, "weight", layer, torch.rand(2, 5, 6) + 0.5


def gated_recurrence():
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaConfig, RecurrentGemmaRglru

    layer = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=6, num_attention_heads=2))
    for each in layer.parameters():
        torch.nn.init.normal_(each)
    return layer, "input_gate_weight", lambda x: layer(x, torch.arange(1)[None]), torch.rand(1, 1, 6) + 0.5


@pytest.mark.parametrize("make", [dbrx_experts, grouped_linear, gated_recurrence])
def test_neuron_of_transformers_layer_is_one_output(make):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    layer, name, run, inputs = make()
    weight = layer.get_parameter(name)
    neurons = neurons_under(roles_of(layer)[name], weight.shape)
    channels = weights_behind(run, weight, -1, inputs)
    assert set(channels) <= neurons
    assert len(set(channels)) == len(channels)
