"""Roles of every layer of torch.nn, by shape, and of unknown layers."""

import copy
import inspect

import pytest
import torch
from role_cases import (
    BIAS,
    GAIN,
    LINEAR,
    NORM,
    ROWS,
    Model,
    hf_conv1d,
    neuron,
    neurons_under,
    under,
    weights_behind,
)
from torch import nn

import nero
from nero.role import Role
from nero.roles import role_from_shape, roles_of

PACKED_ATTENTION = {"in_proj_weight": ROWS, "in_proj_bias": BIAS, **under("out_proj", LINEAR)}
SPLIT_ATTENTION = {
    **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), ROWS),
    "in_proj_bias": BIAS,
    **under("out_proj", LINEAR),
}
ENCODER_LAYER = {
    **under("self_attn", PACKED_ATTENTION),
    **under("linear1", LINEAR),
    **under("linear2", LINEAR),
    **under("norm1", NORM),
    **under("norm2", NORM),
}
DECODER_LAYER = {**ENCODER_LAYER, **under("multihead_attn", PACKED_ATTENTION), **under("norm3", NORM)}


def recurrent(*suffixes):
    weights = {f"weight_{way}{suffix}": ROWS for suffix in suffixes for way in ("ih", "hh")}
    return weights | {f"bias_{way}{suffix}": BIAS for suffix in suffixes for way in ("ih", "hh")}


def transformer(kind, *args, **options):
    layer = getattr(nn, f"Transformer{kind}Layer")(8, 2, 12, batch_first=True)
    return getattr(nn, f"Transformer{kind}")(layer, *args, **options)


# (class of torch.nn, constructor, roles of its parameters)
LAYERS = [
    ("Linear", lambda: nn.Linear(4, 3), LINEAR),
    ("Linear", lambda: nn.Linear(4, 1), LINEAR),
    ("Linear", lambda: nn.Linear(1, 4), NORM),  # fan-in 1 is a gain
    ("Bilinear", lambda: nn.Bilinear(2, 3, 4), {"weight": neuron(1, 2), "bias": BIAS}),
    ("Bilinear", lambda: nn.Bilinear(1, 1, 4), NORM),
    ("Embedding", lambda: nn.Embedding(5, 3, padding_idx=0), {"weight": ROWS}),
    ("Embedding", lambda: nn.Embedding(5, 1), {"weight": GAIN}),
    ("EmbeddingBag", lambda: nn.EmbeddingBag(5, 3), {"weight": ROWS}),
    ("RNN", lambda: nn.RNN(3, 4), recurrent("_l0")),
    ("RNN", lambda: nn.RNN(3, 4, 2, bidirectional=True), recurrent("_l0", "_l0_reverse", "_l1", "_l1_reverse")),
    ("LSTM", lambda: nn.LSTM(3, 4), recurrent("_l0")),
    ("LSTM", lambda: nn.LSTM(3, 4, proj_size=2), {**recurrent("_l0"), "weight_hr_l0": ROWS}),
    ("GRU", lambda: nn.GRU(3, 4, 2), recurrent("_l0", "_l1")),
    ("RNNBase", lambda: nn.RNNBase("GRU", 3, 4), recurrent("_l0")),
    ("RNNCell", lambda: nn.RNNCell(3, 4), recurrent("")),
    ("LSTMCell", lambda: nn.LSTMCell(3, 4), recurrent("")),
    ("GRUCell", lambda: nn.GRUCell(3, 4), recurrent("")),
    ("RNNCellBase", lambda: nn.RNNCellBase(3, 4, True, 2), recurrent("")),
    ("MultiheadAttention", lambda: nn.MultiheadAttention(8, 2), PACKED_ATTENTION),
    ("MultiheadAttention", lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6), SPLIT_ATTENTION),
    (
        "MultiheadAttention",
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
        {**PACKED_ATTENTION, "bias_k": neuron(2), "bias_v": neuron(2)},
    ),
    ("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(8, 2, 12), ENCODER_LAYER),
    ("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(8, 2, 12), DECODER_LAYER),
    (
        "TransformerEncoder",
        lambda: transformer("Encoder", 2, norm=nn.RMSNorm(8)),
        {**under("layers.0", ENCODER_LAYER), **under("layers.1", ENCODER_LAYER), "norm.weight": GAIN},
    ),
    ("TransformerDecoder", lambda: transformer("Decoder", 1), under("layers.0", DECODER_LAYER)),
    (
        "Transformer",
        lambda: nn.Transformer(8, 2, 1, 1, 12, batch_first=True),
        {
            **under("encoder.layers.0", ENCODER_LAYER),
            **under("encoder.norm", NORM),
            **under("decoder.layers.0", DECODER_LAYER),
            **under("decoder.norm", NORM),
        },
    ),
    ("LayerNorm", lambda: nn.LayerNorm(4), NORM),
    ("LayerNorm", lambda: nn.LayerNorm((3, 4, 5)), NORM),
    ("RMSNorm", lambda: nn.RMSNorm((3, 4)), {"weight": GAIN}),
    ("GroupNorm", lambda: nn.GroupNorm(2, 4), NORM),
    ("SyncBatchNorm", lambda: nn.SyncBatchNorm(4), NORM),
    ("PReLU", lambda: nn.PReLU(), {"weight": BIAS}),
    ("PReLU", lambda: nn.PReLU(4), {"weight": BIAS}),
    (
        "AdaptiveLogSoftmaxWithLoss",
        lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 9, [4], head_bias=True),
        {"head.weight": ROWS, "head.bias": BIAS, "tail.0.0.weight": ROWS, "tail.0.1.weight": ROWS},
    ),
    (
        "LinearCrossEntropyLoss",
        lambda: nn.LinearCrossEntropyLoss(4, 3, bias=True),
        under("linear", LINEAR),
    ),
    (
        "ParameterList",
        lambda: nn.ParameterList([torch.randn(2, 3), torch.randn(3), torch.randn(2, 3, 4)]),
        {"0": ROWS, "1": BIAS, "2": neuron(1, 2)},
    ),
    (
        "ParameterDict",
        lambda: nn.ParameterDict({"a": torch.randn(1, 3, 4), "b": torch.tensor(1.0)}),
        {"a": neuron(2), "b": BIAS},
    ),
    ("Sequential", lambda: nn.Sequential(nn.Linear(4, 3)), under("0", LINEAR)),
    ("ModuleList", lambda: nn.ModuleList([nn.Linear(4, 3)]), under("0", LINEAR)),
    ("ModuleDict", lambda: nn.ModuleDict({"a": nn.Linear(4, 3)}), under("a", LINEAR)),
    ("DataParallel", lambda: nn.DataParallel(nn.Linear(4, 3)), under("module", LINEAR)),
]
for d in (1, 2, 3):
    kernel = tuple(range(2, d + 2))
    LAYERS += [
        (f"BatchNorm{d}d", lambda d=d: getattr(nn, f"BatchNorm{d}d")(4), NORM),
        (f"InstanceNorm{d}d", lambda d=d: getattr(nn, f"InstanceNorm{d}d")(4, affine=True), NORM),
    ]
    # a convolution's fan-in is along axis 1 for any groups, a transposed one's is its group's slice of axis 0
    for groups in (1, 2, 4):
        LAYERS += [
            (
                f"Conv{d}d",
                lambda d=d, groups=groups: getattr(nn, f"Conv{d}d")(4, 8, 3, groups=groups),
                {"weight": neuron(1, *kernel), "bias": BIAS},
            ),
            (
                f"ConvTranspose{d}d",
                lambda d=d, groups=groups: getattr(nn, f"ConvTranspose{d}d")(4, 8, 3, groups=groups),
                {"weight": neuron(0, *kernel, groups=groups), "bias": BIAS},
            ),
        ]
    LAYERS += [  # depthwise and 1 x 1: one number per channel
        (f"{kind}{d}d", lambda d=d, kind=kind: getattr(nn, f"{kind}{d}d")(4, 4, 1, groups=4), NORM)
        for kind in ("Conv", "ConvTranspose")
    ]
LAYERS = [layer for layer in LAYERS if hasattr(nn, layer[0])]  # not every torch has every layer

# lazy layers: their arguments, their eager class, and the shape of an input
LAZY = {
    "LazyLinear": ((3,), nn.Linear, (2, 4)),
    **{f"LazyConv{d}d": ((3, 2), getattr(nn, f"Conv{d}d"), (1, 4, *[5] * d)) for d in (1, 2, 3)},
    **{f"LazyConvTranspose{d}d": ((3, 2), getattr(nn, f"ConvTranspose{d}d"), (1, 4, *[5] * d)) for d in (1, 2, 3)},
    **{f"LazyBatchNorm{d}d": ((), getattr(nn, f"BatchNorm{d}d"), (2, 4, *[5] * d)) for d in (1, 2, 3)},
    **{f"LazyInstanceNorm{d}d": ((), getattr(nn, f"InstanceNorm{d}d"), (2, 4, *[5] * d)) for d in (1, 2, 3)},
}

# arguments of layers without parameters that do not accept 2 for each
ARGUMENTS = {
    "Unflatten": (1, (2, 2)),
    "FractionalMaxPool2d": (2, 1),
    "FractionalMaxPool3d": (2, 1),
}
DEPRECATED = ("Container", "NLLLoss2d")  # other names of Module and NLLLoss, which warn


@pytest.mark.parametrize(
    ("make", "expected"),
    [layer[1:] for layer in LAYERS],
    ids=[f"{number}-{layer[0]}" for number, layer in enumerate(LAYERS)],
)
def test_layer_of_torch_has_expected_roles(make, expected):
    layer = make()
    roles = roles_of(layer)
    assert roles == expected
    assert list(roles) == [name for name, _ in layer.named_parameters()]
    for name, parameter in layer.named_parameters():  # an optimiser's groups give the same role
        assert roles[name].on(parameter.shape) == roles[name]


def exported():
    return sorted(
        name
        for name in dir(nn)
        if inspect.isclass(getattr(nn, name)) and issubclass(getattr(nn, name), nn.Module) and name not in DEPRECATED
    )


@pytest.mark.parametrize("name", exported())
def test_every_layer_of_torch_with_parameters_is_listed(name):
    if name in LAZY or name in {layer[0] for layer in LAYERS}:
        return
    kind = getattr(nn, name)
    required = [
        each
        for each in list(inspect.signature(kind.__init__).parameters.values())[1:]
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    layer = kind(*ARGUMENTS.get(name, [2] * len(required)))
    assert not list(layer.parameters()), f"add {name} to LAYERS"
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        assert "Parameter(" not in inspect.getsource(base), f"{name} can have parameters: add it to LAYERS"


@pytest.mark.parametrize("name", LAZY)
def test_lazy_layer_without_shape_raises(name):
    arguments, eager, shape = LAZY[name]
    layer = getattr(nn, name)(*arguments)
    with pytest.raises(ValueError, match=r"'weight' has no shape yet: run a batch"):
        roles_of(layer)
    layer(torch.randn(shape))
    options = {"affine": True} if "InstanceNorm" in name else {}
    assert roles_of(layer) == roles_of(eager(4, *arguments, **options))


CHANNELS = [
    ("linear", lambda: nn.Linear(4, 5), -1, [(3, 4)]),
    ("bilinear", lambda: nn.Bilinear(2, 3, 5), -1, [(4, 2), (4, 3)]),
    ("Conv1D of GPT-2", hf_conv1d, -1, [(3, 4)]),
    *(
        (
            f"{kind}{d}d, {groups} groups",
            lambda kind=kind, d=d, groups=groups: getattr(nn, f"{kind}{d}d")(4, 8, 2, groups=groups),
            1,
            [(2, 4, *[4] * d)],
        )
        for kind in ("Conv", "ConvTranspose")
        for d in (1, 2, 3)
        for groups in (1, 2, 4)
    ),
    ("depthwise ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 4, 2, groups=4), 1, [(2, 4, 4, 4)]),
    ("shrinking ConvTranspose2d", lambda: nn.ConvTranspose2d(6, 2, 2, groups=2), 1, [(2, 6, 4, 4)]),
]


@pytest.mark.parametrize(
    ("make", "axis", "shapes"), [each[1:] for each in CHANNELS], ids=[each[0] for each in CHANNELS]
)
def test_neuron_is_the_weights_of_one_output_channel(make, axis, shapes):
    torch.manual_seed(0)
    layer = make()
    role, shape = roles_of(layer)["weight"], layer.weight.shape
    channels = weights_behind(layer, layer.weight, axis, *(torch.rand(each) + 0.5 for each in shapes))
    assert neurons_under(role, shape) == set(channels)
    assert len(set(channels)) == len(channels) == layer.weight.numel() // role.fan_in(shape)


@pytest.mark.parametrize(("groups", "axes", "viewed"), [(1, (0, 2, 3), (6, 4, 3, 2)), (2, (1, 3, 4), (2, 3, 4, 3, 2))])
def test_role_view_shares_memory(groups, axes, viewed):
    role, tensor = neuron(0, 2, 3, groups=groups), torch.zeros(6, 4, 3, 2)
    assert role.axes == axes
    assert role.view(tensor).shape == viewed
    assert role.fan_in(tensor.shape) == 36 // groups
    role.view(tensor).fill_(1)
    assert bool((tensor == 1).all())
    strided = torch.zeros(2, 4, 3, 6).permute(3, 1, 2, 0)  # such as channels last
    assert role.view(strided).data_ptr() == strided.data_ptr()


def test_gain_and_bias_have_fan_in_one_and_no_axes():
    for role in (GAIN, BIAS):
        assert role.axes == ()
        assert role.fan_in((4, 3)) == 1
        assert role.view(torch.zeros(4, 3)).shape == (4, 3)


@pytest.mark.parametrize(
    ("shape", "role"),
    [
        ((), BIAS),
        ((5,), BIAS),
        ((5, 3), neuron(1)),
        ((1, 3), neuron(1)),
        ((5, 1), GAIN),
        ((5, 2, 3), neuron(1, 2)),
        ((1, 7, 3), neuron(2)),  # a table of positions
        ((1, 1, 3), neuron(2)),  # a token
        ((1, 3, 1), GAIN),
        ((5, 1, 1), GAIN),
        ((5, 1, 1, 1), GAIN),
        ((5, 3, 2, 2), neuron(1, 2, 3)),
        ((1, 3, 2, 2), neuron(1, 2, 3)),  # a convolution with one output
        ((5, 3, 2, 2, 2), neuron(1, 2, 3, 4)),
    ],
)
def test_role_from_shape_follows_the_paper(shape, role):
    assert role_from_shape(shape) == role
    assert role_from_shape(torch.Size(shape)) == role
    assert "shape" in role_from_shape(shape).why
    model = nn.ParameterList([torch.zeros(shape)])
    assert roles_of(model)["0"] == role
    assert roles_of(model)["0"].why.endswith("; ParameterList is unknown")


def test_model_with_own_parameters_has_expected_roles():
    assert roles_of(Model()) == {
        "token": neuron(2),
        "positions": neuron(2),
        "layer_scale": GAIN,
        "temperature": BIAS,
        **under("block.gate", LINEAR),
        "block.norm.weight": GAIN,
        "depthwise.weight": GAIN,
        "depthwise.bias": BIAS,
    }


def test_why_names_the_source_of_a_role():
    roles = roles_of(Model())
    assert roles["token"].why == "Model.token, by name"
    assert roles["temperature"].why == "Model.temperature, by name"
    assert roles["block.gate.weight"].why == "Linear.weight"
    assert roles["depthwise.weight"].why == "Conv2d.weight, fan-in 1"


def norm_named(class_name):
    def init(self):
        nn.Module.__init__(self)
        for name in ("weight", "gamma", "bias", "beta", "shift"):
            self.register_parameter(name, nn.Parameter(torch.ones(1, 4, 1, 3)))

    return type(class_name, (nn.Module,), {"__init__": init})()


@pytest.mark.parametrize(
    "class_name",
    [
        "ActNorm",
        "RMSNorm",
        "LlamaRMSNorm",
        "LayerNorm2d",
        "GlobalResponseNorm",
        "BatchNormalization",
        "RMSNormGated",
        "GRN",
    ],
)
def test_class_named_norm_owns_gains_and_biases(class_name):
    roles = roles_of(norm_named(class_name))
    assert roles == {"weight": GAIN, "gamma": GAIN, "bias": BIAS, "beta": BIAS, "shift": BIAS}


@pytest.mark.parametrize("class_name", ["NormedLinear", "PreNormBlock", "LinearWeightNorm", "SpectralNorm", "Conv1D"])
def test_class_with_similar_name_is_unknown(class_name):
    role = roles_of(norm_named(class_name))["weight"]
    assert role == neuron(1, 2, 3)
    assert role.why == f"shape; {class_name} is unknown"


def test_subclass_has_roles_of_its_base_class():
    class PreNorm(nn.Linear):
        pass

    class Slow(nn.ConvTranspose2d):
        pass

    class ScaledConv2d(nn.Conv2d):
        def __init__(self):
            super().__init__(4, 6, 3)
            self.gain = nn.Parameter(torch.ones(6, 1, 1, 1))

    assert roles_of(PreNorm(4, 3)) == LINEAR
    assert roles_of(Slow(4, 6, 3))["weight"] == neuron(0, 2, 3)
    assert roles_of(ScaledConv2d()) == {"weight": neuron(1, 2, 3), "bias": BIAS, "gain": GAIN}


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda model: torch.compile(model, backend="eager"), "_orig_mod"),
        (nn.DataParallel, "module"),
        (torch.optim.swa_utils.AveragedModel, "module"),
        (lambda model: model.to("meta"), ""),
        (lambda model: model.to(torch.bfloat16), ""),
        (lambda model: model.requires_grad_(False), ""),
        (copy.deepcopy, ""),
    ],
)
def test_roles_of_wrapped_or_moved_model_are_the_same(wrap, prefix):
    def make():
        return nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.LayerNorm((3, 4)))

    roles = roles_of(make())
    assert roles_of(wrap(make())) == (under(prefix, roles) if prefix else roles)


def test_fsdp1_raises():
    fsdp = type("FullyShardedDataParallel", (nn.Sequential,), {})
    derived = type("Mine", (fsdp,), {})
    for model, name in ((fsdp(nn.Linear(4, 3)), "the model"), (nn.Sequential(derived(nn.Linear(4, 3))), "0")):
        with pytest.raises(ValueError, match=rf"^{name} is wrapped in FSDP1 .*fully_shard"):
            roles_of(model)


@pytest.mark.parametrize("thing", [None, [torch.zeros(3)], iter(()), {"a": 1}, nn.Linear])
def test_roles_of_other_object_raises(thing):
    for call in (roles_of, nero.param_groups):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got"):
            call(thing)


def test_role_comparison_and_hash_ignore_why():
    assert Role("neuron", (1,), why="a") == Role("neuron", (1,), why="b")
    assert len({Role("neuron", (1,), why="a"), Role("neuron", (1,), why="b")}) == 1


def owner(class_name, **parameters):
    """Return a layer of an unknown class with parameters of these shapes."""
    layer = type(class_name, (nn.Module,), {})()
    for name, shape in parameters.items():
        layer.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return layer


@pytest.mark.parametrize(
    ("names", "shape", "role"),
    [
        (
            ["gamma", "gamma_1", "gamma2", "layer_scale", "layer_scale_parameter", "ls1", "lambda_1", "lambda1"],
            (8,),
            GAIN,
        ),
        (["layer_scale", "gamma", "scale"], (8, 1, 1), GAIN),
        (["relative_position_bias_table", "attention_biases", "rel_pos_bias", "rpb", "r_w_bias"], (9, 4), BIAS),
        (["A_log", "scale_shift_table", "audio_scale_shift_table", "temperature"], (6, 8), BIAS),
        (["time_mix_key", "time_decay", "time_maa_x", "scale_shift_table", "modulation"], (1, 1, 8), BIAS),
        (["logit_scale", "temperature"], (4, 1, 1), BIAS),
        (["logit_scale", "temperature", "tau", "sinks"], (4,), BIAS),
        (["alpha", "gate", "attn_gate", "resweight", "rezero"], (1,), GAIN),
        (["alpha", "resweight"], (), GAIN),
        (["alpha", "alpha_cross_attn"], (1, 1, 8), GAIN),
        (["rel_pos_h", "rel_pos_w", "position_embeddings", "latents"], (9, 4), neuron(1)),
        (["pos_embed", "position_embeddings", "cls_token"], (1, 9, 4), neuron(2)),
        (["pos_embed", "position_embedding"], (1, 14, 14, 32), neuron(3)),
        (["pos_embed", "pos_embed1", "pixel_pos"], (1, 32, 14, 14), neuron(1)),
        (["pos_embed"], (1, 32, 14, 7), neuron(1)),  # neither square: the longer side is the vector
        (["pos_embed"], (1, 7, 14, 32), neuron(3)),
        (["pos_embed", "position_embeddings"], (14, 14, 32), neuron(2)),
        (["class_embedding", "cls_token", "masked_spec_embed", "image_newline"], (8,), neuron(0)),
        (["text_projection", "time_decay_w1"], (8, 4), neuron(0)),  # used as inputs @ weight
        (["mixing", "weight", "gating", "proj_out"], (8, 4), neuron(1)),  # the shape rule
    ],
)
def test_name_in_unknown_layer_tells_the_role(names, shape, role):
    assert roles_of(owner("Block", **dict.fromkeys(names, shape))) == dict.fromkeys(names, role)


@pytest.mark.parametrize("name", ["relative_attention_bias", "rel_attn_embed", "reference_points", "words"])
def test_table_of_coefficients_is_known_by_its_attribute(name):
    model = nn.ModuleDict({name: nn.Embedding(8, 4)})
    assert roles_of(model) == {f"{name}.weight": ROWS if name == "words" else BIAS}


def test_scales_of_peft_are_no_neurons():
    dora = owner("DoraConv2dLayer", weight=(1, 8, 1, 1))
    model = nn.ModuleDict({"ia3_l": nn.ParameterDict({"default": torch.ones(1, 8)}), "magnitudes": dora})
    assert roles_of(model) == {"ia3_l.default": BIAS, "magnitudes.weight": BIAS}
    factors = nn.ModuleDict({"vera_lambda_b": nn.ParameterDict({"default": torch.zeros(8)})})
    assert roles_of(factors) == {"vera_lambda_b.default": GAIN}


def test_adapter_of_an_embedding_has_a_neuron_per_word():
    shapes = {"lora_embedding_A": (3, 100), "lora_embedding_B": (8, 3)}
    adapters = {name: nn.ParameterDict({"default": torch.zeros(shape)}) for name, shape in shapes.items()}
    assert roles_of(nn.ModuleDict(adapters)) == {
        "lora_embedding_A.default": neuron(0),
        "lora_embedding_B.default": ROWS,
    }


@pytest.mark.parametrize("name", ["gamma", "pos_embed", "logit_scale", "bias", "text_projection"])
def test_name_does_not_override_a_layer_of_torch(name):
    model = nn.ModuleDict({name: nn.Linear(4, 3)})
    assert roles_of(model) == under(name, LINEAR)


class CentredRMSNorm(nn.Module):
    """RMS norm that scales by the offset plus its weight, as Gemma's does with an offset of one."""

    def __init__(self, offset=1.0, weight=0.0, name="weight"):
        super().__init__()
        self.offset, self.name, self.calls = offset, name, 0
        self.register_parameter(name, nn.Parameter(torch.full((4,), weight)))

    def forward(self, x):
        self.calls += 1
        return nn.functional.rms_norm(x, x.shape[-1:]) * (self.offset + self.get_parameter(self.name))


@pytest.mark.parametrize("name", ["weight", "gamma"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norm_that_adds_one_has_gains_with_offset(name, weight, device):
    norm = CentredRMSNorm(1.0, weight, name).to(device)
    assert roles_of(norm) == {name: Role("gain", (), has_offset=True)}
    assert norm.calls == 0  # a copy ran
    assert roles_of(CentredRMSNorm(0.0, weight, name).to(device)) == {name: GAIN}


def test_subclass_of_torch_norm_that_adds_one_has_offset():
    class LayerNorm1P(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias)

    class Plain(nn.LayerNorm):
        pass

    assert roles_of(LayerNorm1P(4)) == {"weight": Role("gain", (), has_offset=True), "bias": BIAS}
    assert roles_of(Plain(4)) == {"weight": GAIN, "bias": BIAS}


def test_gain_penalty_leaves_gains_with_offset_alone():
    model = nn.ModuleDict({"centred": CentredRMSNorm(), "plain": nn.RMSNorm(4)})
    nn.init.constant_(model["plain"].weight, 0.5)
    optimiser = nero.Nero(model, lr=0.1, gain_penalty=1.0)
    assert [group["role"] for group in optimiser.param_groups] == ["gain", "gain"]
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimiser.step()
    assert not model["centred"].weight.any()
    assert bool((model["plain"].weight > 0.5).all())
    with pytest.warns(UserWarning, match="has no effect"):
        nero.Nero(CentredRMSNorm(), gain_penalty=1.0)


def test_offset_can_be_given_and_survives_a_checkpoint():
    model, role = nn.LayerNorm(4), Role("gain", has_offset=True)
    groups = nero.param_groups(model, {"weight": role}, gain_penalty=0.5)
    assert [group["gain_penalty"] for group in groups] == [0.0, 0.5]
    optimiser = nero.Nero(groups)
    optimiser.load_state_dict(optimiser.state_dict())
    assert [group["gain_penalty"] for group in optimiser.param_groups] == [0.0, 0.5]


def test_roles_leave_the_layers_inside_a_norm_alone():
    class OuterNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gain = nn.BatchNorm1d(2, affine=False), nn.Parameter(torch.ones(2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs.transpose(1, 2)).transpose(1, 2) * self.gain

    norm = OuterNorm()
    assert roles_of(norm)["gain"].kind == "gain"
    assert norm.inner.num_batches_tracked == 0
