"""Which parameter is what: every layer of torch.nn, what wraps them, and models as people write them."""

import copy
import inspect
import math
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import nero
from nero.groups import param_groups
from nero.roles import Role, role_from_shape, roles_of

GAIN, BIAS = Role("gain", ()), Role("bias", ())


def neuron(*axes, groups=1):
    return Role("neuron", axes, groups)


ROWS = neuron(1)
LINEAR = {"weight": ROWS, "bias": BIAS}
NORM = {"weight": GAIN, "bias": BIAS}


def under(prefix, roles):
    return {f"{prefix}.{name}": role for name, role in roles.items()}


# --- every layer of torch.nn ---------------------------------------------------------------------

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


# (class of torch.nn, how to make it, what its parameters are)
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
    # the fan-in of a convolution is axis 1 whatever the groups; that of a transposed one is its group's part of axis 0
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
    LAYERS += [  # depthwise and 1 x 1: one number a channel
        (f"{kind}{d}d", lambda d=d, kind=kind: getattr(nn, f"{kind}{d}d")(4, 4, 1, groups=4), NORM)
        for kind in ("Conv", "ConvTranspose")
    ]
LAYERS = [layer for layer in LAYERS if hasattr(nn, layer[0])]  # not every torch has every layer

# what torch.nn's lazy layers need before they have a shape
LAZY = {
    "LazyLinear": ((3,), nn.Linear, (2, 4)),
    **{f"LazyConv{d}d": ((3, 2), getattr(nn, f"Conv{d}d"), (1, 4, *[5] * d)) for d in (1, 2, 3)},
    **{f"LazyConvTranspose{d}d": ((3, 2), getattr(nn, f"ConvTranspose{d}d"), (1, 4, *[5] * d)) for d in (1, 2, 3)},
    **{f"LazyBatchNorm{d}d": ((), getattr(nn, f"BatchNorm{d}d"), (2, 4, *[5] * d)) for d in (1, 2, 3)},
    **{f"LazyInstanceNorm{d}d": ((), getattr(nn, f"InstanceNorm{d}d"), (2, 4, *[5] * d)) for d in (1, 2, 3)},
}

# arguments of layers without parameters that do not take a 2 for everything they require
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
def test_a_layer_of_torch_says_what_its_parameters_are(make, expected):
    layer = make()
    roles = roles_of(layer)
    assert roles == expected
    assert list(roles) == [name for name, _ in layer.named_parameters()]
    for name, parameter in layer.named_parameters():  # and the same again from the groups of an optimiser
        assert roles[name].on(parameter.shape) == roles[name]


def exported():
    return sorted(
        name
        for name in dir(nn)
        if inspect.isclass(getattr(nn, name)) and issubclass(getattr(nn, name), nn.Module) and name not in DEPRECATED
    )


@pytest.mark.parametrize("name", exported())
def test_no_layer_of_torch_with_parameters_is_forgotten(name):
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
def test_a_lazy_layer_is_refused_until_it_has_a_shape(name):
    arguments, eager, shape = LAZY[name]
    layer = getattr(nn, name)(*arguments)
    with pytest.raises(ValueError, match=r"'weight' has no shape yet: run a batch"):
        roles_of(layer)
    layer(torch.randn(shape))
    options = {"affine": True} if "InstanceNorm" in name else {}
    assert roles_of(layer) == roles_of(eager(4, *arguments, **options))


# --- the neurons really are the outputs ----------------------------------------------------------


def neurons_under(role, shape):
    """Each neuron as a set of places in the flattened weight."""
    places = role.view(torch.arange(math.prod(shape)).view(shape))
    rows = places.movedim(role.axes, tuple(range(-len(role.axes), 0))).reshape(-1, role.fan_in(shape))
    return {frozenset(row.tolist()) for row in rows}


def weights_behind(layer, weight, channel_axis, *inputs):
    """For each output channel, which places of the weight it depends on."""
    out = layer(*inputs).movedim(channel_axis, 0)
    grads = [torch.autograd.grad(channel.sum(), weight, retain_graph=True)[0] for channel in out]
    return [frozenset(grad.flatten().nonzero()[:, 0].tolist()) for grad in grads]


def hf_conv1d():
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(5, 4)


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
def test_a_neuron_is_what_one_output_channel_depends_on(make, axis, shapes):
    torch.manual_seed(0)
    layer = make()
    role, shape = roles_of(layer)["weight"], layer.weight.shape
    channels = weights_behind(layer, layer.weight, axis, *(torch.rand(each) + 0.5 for each in shapes))
    assert neurons_under(role, shape) == set(channels)
    assert len(set(channels)) == len(channels) == layer.weight.numel() // role.fan_in(shape)


@pytest.mark.parametrize(("groups", "axes", "viewed"), [(1, (0, 2, 3), (6, 4, 3, 2)), (2, (1, 3, 4), (2, 3, 4, 3, 2))])
def test_the_view_of_a_role_shares_memory(groups, axes, viewed):
    role, tensor = neuron(0, 2, 3, groups=groups), torch.zeros(6, 4, 3, 2)
    assert role.axes == axes
    assert role.view(tensor).shape == viewed
    assert role.fan_in(tensor.shape) == 36 // groups
    role.view(tensor).fill_(1)
    assert bool((tensor == 1).all())
    strided = torch.zeros(2, 4, 3, 6).permute(3, 1, 2, 0)  # channels last, say
    assert role.view(strided).data_ptr() == strided.data_ptr()


def test_gains_and_biases_have_no_fan_in():
    for role in (GAIN, BIAS):
        assert role.axes == ()
        assert role.fan_in((4, 3)) == 1
        assert role.view(torch.zeros(4, 3)).shape == (4, 3)


# --- weights that a layer does not hold itself ---------------------------------------------------


def old_weight_norm(layer, name="weight", **options):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer, name, **options)


def pruned(layer, name="weight"):
    return prune.l1_unstructured(layer, name, 0.5)


class Doubled(nn.Module):
    """A parametrization that keeps the shape."""

    def forward(self, raw):
        return 2 * raw

    def right_inverse(self, weight):
        return weight / 2


class LowRank(nn.Module):
    """A parametrization of two tensors, neither shaped as the weight."""

    def forward(self, left, right):
        return left @ right

    def right_inverse(self, weight):
        return weight[:, :1].clone(), weight[:1].clone()


class Adapter(nn.Module):
    """A parametrization with parameters of its own."""

    def __init__(self, rows, columns):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, columns)), nn.Parameter(torch.zeros(rows, 2))

    def forward(self, raw):
        return raw + self.up @ self.down


def parametrized(layer, parametrization, name="weight"):
    parametrize.register_parametrization(layer, name, parametrization)
    return layer


ORIGINAL = "parametrizations.weight.original"
TRANSPOSED = neuron(0, 2, groups=2)
WRAPPED = [
    ("old weight_norm", lambda: old_weight_norm(nn.Linear(4, 3)), {"weight_g": GAIN, "weight_v": ROWS}),
    ("old weight_norm, all", lambda: old_weight_norm(nn.Linear(4, 3), dim=None), {"weight_g": GAIN, "weight_v": ROWS}),
    (
        "old weight_norm, transposed",
        lambda: old_weight_norm(nn.ConvTranspose1d(4, 6, 3, groups=2), dim=1),
        {"weight_g": GAIN, "weight_v": TRANSPOSED},
    ),
    (
        "old weight_norm, recurrent",
        lambda: old_weight_norm(nn.LSTM(4, 3), "weight_hh_l0"),
        {"weight_hh_l0_g": GAIN, "weight_hh_l0_v": ROWS, "weight_ih_l0": ROWS},
    ),
    ("old spectral_norm", lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), {"weight_orig": ROWS}),
    (
        "old spectral_norm, transposed",
        lambda: nn.utils.spectral_norm(nn.ConvTranspose1d(4, 6, 3, groups=2)),
        {"weight_orig": TRANSPOSED},
    ),
    (
        "weight_norm",
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        {f"{ORIGINAL}0": GAIN, f"{ORIGINAL}1": ROWS},
    ),
    (
        "weight_norm, transposed",
        lambda: parametrizations.weight_norm(nn.ConvTranspose1d(4, 6, 3, groups=2), dim=1),
        {f"{ORIGINAL}0": GAIN, f"{ORIGINAL}1": TRANSPOSED},
    ),
    (
        "weight_norm and more",
        lambda: parametrized(parametrizations.weight_norm(nn.Linear(4, 3)), Doubled()),
        {f"{ORIGINAL}0": GAIN, f"{ORIGINAL}1": ROWS},
    ),
    ("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), {ORIGINAL: ROWS}),
    (
        "spectral_norm, transposed",
        lambda: parametrizations.spectral_norm(nn.ConvTranspose1d(4, 6, 3, groups=2)),
        {ORIGINAL: TRANSPOSED},
    ),
    ("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 3)), {ORIGINAL: ROWS}),
    (
        "orthogonal, tall",
        lambda: parametrizations.orthogonal(nn.Linear(3, 4), orthogonal_map="cayley"),
        {ORIGINAL: ROWS},
    ),
    ("pruned", lambda: pruned(nn.Linear(4, 3)), {"weight_orig": ROWS}),
    ("pruned bias", lambda: pruned(nn.Linear(4, 3), "bias"), {"bias_orig": BIAS, "weight": ROWS}),
    ("pruned norm", lambda: pruned(nn.LayerNorm((3, 4))), {"weight_orig": GAIN}),
    ("pruned Conv1D", lambda: pruned(hf_conv1d()), {"weight_orig": neuron(0), "bias": BIAS}),
    ("custom", lambda: parametrized(nn.Linear(4, 3), Doubled()), {ORIGINAL: ROWS}),
    ("custom Conv1D", lambda: parametrized(hf_conv1d(), Doubled()), {ORIGINAL: neuron(0), "bias": BIAS}),
    ("custom norm", lambda: parametrized(nn.LayerNorm((3, 4)), Doubled()), {ORIGINAL: GAIN}),
    ("custom bias", lambda: parametrized(nn.Linear(4, 3), Doubled(), "bias"), {"weight": ROWS}),
    ("low rank", lambda: parametrized(nn.Linear(4, 3), LowRank()), {f"{ORIGINAL}0": GAIN, f"{ORIGINAL}1": ROWS}),
    (
        "adapter",
        lambda: parametrized(nn.Linear(4, 3), Adapter(3, 4)),
        {ORIGINAL: ROWS, "parametrizations.weight.0.down": ROWS, "parametrizations.weight.0.up": ROWS},
    ),
    ("centred_weight_norm", lambda: nero.centred_weight_norm(nn.Linear(4, 3)), {ORIGINAL: ROWS}),
    (
        "centred_weight_norm, transposed",
        lambda: nero.centred_weight_norm(nn.ConvTranspose1d(4, 6, 3, groups=2)),
        {ORIGINAL: TRANSPOSED},
    ),
    ("centred_weight_norm, Conv1D", lambda: nero.centred_weight_norm(hf_conv1d()), {ORIGINAL: neuron(0)}),
]


@pytest.mark.parametrize(("make", "expected"), [each[1:] for each in WRAPPED], ids=[each[0] for each in WRAPPED])
def test_a_weight_behind_something_follows_its_layer(make, expected):
    layer = make()
    roles = roles_of(layer)
    assert {name: roles[name] for name in expected} == expected
    assert not any("Parametrized" in role.why for role in roles.values())
    assert roles_of(nn.Sequential(layer)) == under("0", roles)


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (lambda: parametrized(nn.Linear(4, 3), Doubled()), ORIGINAL, "Linear.weight, parametrized"),
        (lambda: parametrized(nn.Linear(4, 3), LowRank()), f"{ORIGINAL}1", "shape; behind Linear.weight"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), f"{ORIGINAL}0", "weight_norm's length"),
        (lambda: old_weight_norm(nn.Linear(4, 3)), "weight_g", "weight_norm's length"),
        (lambda: old_weight_norm(nn.Linear(4, 3)), "weight_v", "Linear.weight"),
        (lambda: pruned(nn.Linear(4, 3)), "weight_orig", "Linear.weight"),
    ],
)
def test_why_names_the_layer_behind(make, name, why):
    assert roles_of(make())[name].why == why


class DropConnect(nn.Module):
    """A parametrization that draws random numbers."""

    def forward(self, raw):
        return raw * torch.bernoulli(torch.full_like(raw, 0.5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: parametrizations.spectral_norm(nn.Linear(48, 32)),
        lambda: nn.utils.spectral_norm(nn.Linear(48, 32)),
        lambda: parametrized(nn.Linear(4, 3), DropConnect()),
        lambda: nn.BatchNorm1d(4),
    ],
)
def test_reading_the_roles_changes_nothing(make):
    layer = make()
    before, seed = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    roles_of(layer)
    nero.describe(layer)
    assert torch.equal(seed, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


# --- models of Hugging Face ----------------------------------------------------------------------

SMALL = {"vocab_size": 17, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
WIDTHS = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 1}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 3}
STATE_SPACE = {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 4, "state_size": 4, "n_groups": 1}
PICTURE = {"image_size": 8, "patch_size": 4}
IDS, PIXELS = {"input_ids": torch.arange(8)[None] + 1}, {"pixel_values": torch.randn(2, 3, 8, 8)}

# model: options of its config, an input, and roles by pattern, the last that matches counting
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
            "*.grn.weight": GAIN,
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
def test_a_hugging_face_model_is_understood_and_trains(name):
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


def test_gpt2_has_its_tied_head_once():
    model = hugging_face("GPT2LMHeadModel")
    roles = roles_of(model)
    assert "lm_head.weight" not in roles
    assert roles["transformer.wte.weight"].why == "Embedding.weight, tied to lm_head.weight"
    assert roles["transformer.h.0.attn.c_attn.weight"].why == "Conv1D.weight"
    assert roles_of(model, {"lm_head.*": (0,)})["transformer.wte.weight"] == neuron(0)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"])
def test_every_output_has_one_neuron_in_each_stacked_expert(name):
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
    """Stacked experts as people write them."""

    def __init__(self, **parameters):
        super().__init__()
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"w1": (3, 6, 4), "b1": (3, 6)}, {"w1": neuron(2), "b1": BIAS}),
        ({"gate_up_proj": (3, 12, 4), "down_proj": (3, 4, 6)}, {"gate_up_proj": neuron(2), "down_proj": neuron(2)}),
        ({"gate_up_proj": (3, 4, 12), "down_proj": (3, 6, 4)}, {"gate_up_proj": neuron(1), "down_proj": neuron(1)}),
        ({"gate_up_proj": (3, 8, 4), "down_proj": (3, 4, 4)}, {"gate_up_proj": neuron(2), "down_proj": neuron(2)}),
        ({"gate_up_proj": (3, 4, 8), "down_proj": (3, 4, 4)}, {"gate_up_proj": neuron(1), "down_proj": neuron(1)}),
        ({"w": (3, 6, 4, 2), "scale": (3,)}, {"w": neuron(1, 2, 3), "scale": BIAS}),  # then the shape rule
    ],
)
def test_stacked_experts_by_their_shapes(parameters, expected):
    assert roles_of(Experts(**parameters)) == expected


# --- shapes and unknown layers -------------------------------------------------------------------


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
def test_the_shape_rule(shape, role):
    assert role_from_shape(shape) == role
    assert role_from_shape(torch.Size(shape)) == role
    assert "shape" in role_from_shape(shape).why
    model = nn.ParameterList([torch.zeros(shape)])
    assert roles_of(model)["0"] == role
    assert roles_of(model)["0"].why.endswith("; ParameterList is unknown")


class Model(nn.Module):
    """Parameters of a model's own, next to layers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 7, 4))
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.nothing = None
        self.register_parameter("absent", None)
        self.block = nn.ModuleDict({"gate": nn.Linear(4, 4), "norm": nn.RMSNorm(4)})
        self.depthwise = nn.Conv2d(4, 4, 1, groups=4)


def test_a_model_with_parameters_of_its_own():
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


def test_why_says_where_a_role_comes_from():
    roles = roles_of(Model())
    assert roles["token"].why == "shape, a table of vectors; Model is unknown"
    assert roles["temperature"].why == "shape; Model is unknown"
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
def test_what_is_called_a_norm_owns_gains_and_biases(class_name):
    roles = roles_of(norm_named(class_name))
    assert roles == {"weight": GAIN, "gamma": GAIN, "bias": BIAS, "beta": BIAS, "shift": BIAS}


@pytest.mark.parametrize("class_name", ["NormedLinear", "PreNormBlock", "LinearWeightNorm", "SpectralNorm", "Conv1D"])
def test_what_only_sounds_like_a_known_layer_is_unknown(class_name):
    role = roles_of(norm_named(class_name))["weight"]
    assert role == neuron(1, 2, 3)
    assert role.why == f"shape; {class_name} is unknown"


def test_a_subclass_is_what_it_inherits_from():
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
def test_roles_survive_what_frameworks_do_to_a_model(wrap, prefix):
    def make():
        return nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.LayerNorm((3, 4)))

    roles = roles_of(make())
    assert roles_of(wrap(make())) == (under(prefix, roles) if prefix else roles)


def test_fsdp1_is_refused():
    fsdp = type("FullyShardedDataParallel", (nn.Sequential,), {})
    derived = type("Mine", (fsdp,), {})
    for model, name in ((fsdp(nn.Linear(4, 3)), "the model"), (nn.Sequential(derived(nn.Linear(4, 3))), "0")):
        with pytest.raises(ValueError, match=rf"^{name} is wrapped in FSDP1 .*fully_shard"):
            roles_of(model)


@pytest.mark.parametrize("thing", [None, [torch.zeros(3)], iter(()), {"a": 1}, nn.Linear])
def test_what_is_not_a_module_is_refused(thing):
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not"):
        roles_of(thing)


# --- tied weights --------------------------------------------------------------------------------


def tied(first, second):
    second.weight = first.weight
    return nn.ModuleDict({"first": first, "second": second})


def test_tied_weights_that_agree_have_one_role():
    roles = roles_of(tied(nn.Embedding(5, 3), nn.Linear(3, 5)))
    assert roles == {"first.weight": ROWS, "second.bias": BIAS}
    assert roles["first.weight"].why == "Embedding.weight, tied to second.weight"


def test_a_layer_used_twice_counts_once():
    layer = nn.Linear(4, 4)
    assert roles_of(nn.Sequential(layer, nn.ReLU(), layer)) == under("0", LINEAR)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: tied(nn.Conv2d(3, 8, 2), nn.ConvTranspose2d(8, 3, 2)),
            [
                "'first.weight' (neurons along axes (1, 2, 3), from Conv2d.weight)",
                "(0, 2, 3), from ConvTranspose2d.weight",
            ],
        ),
        (
            lambda: tied(nn.LayerNorm((3, 4)), nn.Linear(4, 3)),
            ["'first.weight' (a gain, from LayerNorm.weight)", "'second.weight' (neurons along axes (1,)"],
        ),
        (
            lambda: tied(nn.ConvTranspose1d(4, 2, 3), nn.ConvTranspose1d(4, 4, 3, groups=2)),
            ["'first.weight'", "'second.weight'", "(0, 2) in 2 groups"],
        ),
    ],
)
def test_tied_weights_that_disagree_are_an_error_naming_both(make, words):
    model = make()
    with pytest.raises(ValueError, match="are one tensor with two roles") as caught:
        roles_of(model)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(ValueError, match="two roles"):
        nero.Nero(model)
    for name in ("first.weight", "second.weight", "*.weight"):  # either name resolves it
        role = roles_of(model, {name: (0, 1)})["first.weight"]
        assert role == neuron(0, 1)
        assert role.why == "given"


# --- overrides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ROWS),
        (None, ROWS),
        ({"block.gate.weight": "gain"}, GAIN),
        ({"block.gate.weight": "bias"}, BIAS),
        ({"block.gate.weight": "neuron"}, ROWS),
        ({"block.gate.weight": (0,)}, neuron(0)),
        ({"block.gate.weight": (-2,)}, neuron(0)),
        ({"block.gate.weight": (1, 0)}, neuron(0, 1)),
        ({"block.gate.weight": Role("neuron", (0,), 2)}, neuron(0, groups=2)),
        ({"block.gate.weight": Role("gain")}, GAIN),
        ({"*.gate.weight": "gain"}, GAIN),
        ({"block.*": "bias"}, BIAS),
        ({"block.gat?.[vw]eight": "bias"}, BIAS),
        ({"block.gate.weight": "gain", "*": "bias"}, BIAS),  # the last that matches counts
        ({"*": "bias", "block.gate.weight": (0,)}, neuron(0)),
        ({"*.weight": "gain", "block.norm.*": "bias"}, GAIN),
    ],
)
def test_an_override_counts_by_name_or_pattern_the_last_that_matches(overrides, expected):
    model = Model()
    roles = roles_of(model, overrides)
    assert roles["block.gate.weight"] == expected
    matched = {name for name in roles if any(fnmatchcase(name, pattern) for pattern in overrides or {})}
    assert {name for name, role in roles.items() if role != roles_of(model)[name]} <= matched
    assert roles["block.gate.weight"].why == ("given" if overrides else "Linear.weight")


def test_an_override_keeps_the_reason_it_brings():
    assert roles_of(nn.Linear(4, 3), {"weight": Role("gain", why="because")})["weight"].why == "because"


def test_a_vector_can_be_told_to_be_a_neuron():
    assert roles_of(nn.LayerNorm(4), {"weight": (0,)})["weight"] == neuron(0)


def test_a_name_with_brackets_is_also_a_name():
    model = nn.ParameterDict({"a[0]": torch.randn(3, 4), "a0": torch.randn(3, 4)})
    assert roles_of(model, {"a[0]": "gain"}) == {"a[0]": GAIN, "a0": GAIN}


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (
            {"block.gaet.weight": "gain"},
            ValueError,
            r"\['block\.gaet\.weight'\] match no parameter; .* token, positions",
        ),
        ({"*": "gain", "no*": "gain", "nil": "bias"}, ValueError, r"\['nil', 'no\*'\] match no parameter"),
        ({"block.gate.weight": (2,)}, ValueError, r"'block\.gate\.weight' does not fit: .*\(2,\).*\(4, 4\).* 0 to 1"),
        ({"block.gate.weight": (-3,)}, ValueError, r"does not fit: .*\(-3,\)"),
        ({"block.gate.weight": ()}, ValueError, "does not fit"),
        ({"block.gate.weight": (0.0,)}, ValueError, "does not fit"),
        ({"block.gate.weight": (True,)}, ValueError, "does not fit"),
        ({"block.gate.weight": (1, 1)}, ValueError, r"'block\.gate\.weight' .* twice"),
        ({"block.gate.weight": (1, -1)}, ValueError, r"twice"),
        ({"block.gate.weight": "neurons"}, ValueError, "unknown role 'neurons': use one of neuron, gain, bias"),
        ({"block.gate.weight": Role("gain", (1,))}, ValueError, r"a gain has no fan_in_axes, but \(1,\)"),
        ({"block.gate.weight": Role("neuron", (0,), 3)}, ValueError, "fan_in_groups=3 does not fit"),
        ({"block.gate.weight": Role("neuron", (1,), 2)}, ValueError, "fan_in_groups=2 does not fit"),
        ({"block.gate.weight": Role("neuron", (0,), 0)}, ValueError, "fan_in_groups=0 does not fit"),
        ({"block.gate.weight": Role("neuron", (0,), 2.0)}, ValueError, r"fan_in_groups=2\.0 does not fit"),
        ({"block.gate.weight": Role("neuron", 1)}, ValueError, "fan_in_axes 1 do not fit"),
        ({"temperature": "neuron"}, ValueError, "'temperature' does not fit: .* a scalar is a gain or a bias"),
        ({"temperature": (0,)}, ValueError, "a scalar is a gain or a bias"),
        ({"block.norm.weight": "neuron"}, ValueError, r"'block\.norm\.weight' does not fit: .*\(4,\)"),
        ({"block.gate.weight": [1]}, TypeError, r"'block\.gate\.weight' must be a Role, a kind or a tuple"),
        ({"block.gate.weight": None}, TypeError, "not None"),
        ({"block.gate.weight": 1}, TypeError, "not 1"),
    ],
)
def test_an_override_that_cannot_be_is_a_clear_error(overrides, error, words):
    for read in (roles_of, param_groups, nero.describe):
        with pytest.raises(error, match=words):
            read(Model(), overrides)


def test_fan_in_one_is_a_gain_whoever_says_otherwise():
    role = roles_of(nn.Conv1d(4, 4, 1, groups=4), {"weight": Role("neuron", why="mine")})["weight"]
    assert role == GAIN
    assert role.why == "mine, fan-in 1"


# --- groups --------------------------------------------------------------------------------------


def test_there_is_one_group_a_role_with_names_and_options():
    model = nn.Sequential(
        nn.Linear(4, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 4),
        nn.Unflatten(1, (4, 1)),
        nn.ConvTranspose1d(4, 6, 3, groups=2),
    )
    groups = param_groups(model, {"2.weight": (0,)}, lr=0.5, beta=0.9)
    roles = [Role(group["role"], group["fan_in_axes"], group["fan_in_groups"]) for group in groups]
    assert roles == [ROWS, BIAS, GAIN, neuron(0), neuron(0, 2, groups=2)]
    assert all(group["lr"] == 0.5 and group["beta"] == 0.9 for group in groups)
    named = [pair for group in groups for pair in group["params"]]
    assert sorted(name for name, _ in named) == sorted(name for name, _ in model.named_parameters())
    assert all(parameter is dict(model.named_parameters())[name] for name, parameter in named)
    assert groups[1]["params"][0][0] == "0.bias"

    optimiser = nero.Nero(groups, lr=0.1)
    assert [group["lr"] for group in optimiser.param_groups] == [0.5] * 5
    assert [name for group in optimiser.param_groups for name in group["param_names"]] == [name for name, _ in named]


@pytest.mark.parametrize("make", [lambda: tied(nn.Embedding(5, 3), nn.Linear(3, 5)), Model, lambda: nn.ReLU()])
def test_the_groups_hold_every_parameter_once(make):
    model = make()
    parameters = [parameter for group in param_groups(model) for _, parameter in group["params"]]
    assert len(parameters) == len({id(each) for each in parameters})
    assert {id(each) for each in parameters} == {id(each) for each in model.parameters()}


def test_an_option_can_say_the_role_of_a_whole_group():
    assert {group["role"] for group in param_groups(nn.Linear(4, 3), role="bias", fan_in_axes=())} == {"bias"}


def test_roles_compare_and_group_without_their_reasons():
    assert Role("neuron", (1,), why="a") == Role("neuron", (1,), why="b")
    assert len({Role("neuron", (1,), why="a"), Role("neuron", (1,), why="b")}) == 1
    assert Role("neuron", (0,), 2) != Role("neuron", (0,))
