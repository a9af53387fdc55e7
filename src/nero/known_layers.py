"""Parameters whose role their shape does not tell: by layer, by name, and by what the layer computes.

A rule is ``"gain"``, ``"gate"``, ``"factor"``, ``"bias"``, ``"vectors"``, ``"positions"``, or the layout of neurons:
one letter per axis, ``i`` for the axes of the fan-in and ``o`` for all others. A factor may be meant to start at zero;
a gate is a factor of at most one axis. ``"bias"`` stands for all else that moves element by element and must not be
pulled to one: biases, coefficients, temperatures, tables of attention biases.
"""

import re
from functools import lru_cache

import torch
from torch import Tensor, nn

#: Rules by "Layer.parameter"; the first match with the right number of axes counts.
BY_LAYER: tuple[tuple[str, str], ...] = (
    (r"XLNetRelativeAttention\.[qkvr]|FunnelRelMultiheadAttention\.r_kernel", "ioo"),  # (width, heads, head width)
    (r"XLNetRelativeAttention\.o", "oii"),
    (r"\w*(?:Rglru|RGLRU)\.\w+_gate_weight", "oio"),  # RecurrentGemma: (heads, in, out)
    (r"ZambaMambaMixer\.(?:x|dt)_proj_weight", "ooi"),
    (r"GroupedLinearLayer\.weight|CsmCodebooksHead\.weight", "oio"),
    (r"\w*FlexibleLinear\.weight", "ooi"),
    (r"\w*EfficientAdditiveAttention\.w_g", "io"),
    (r"MultiQueryAttentionV2\.(?:key|value)_proj", "io"),
    (r"MultiQueryAttentionV2\.query_proj", "ooi"),
    (r"MultiQueryAttentionV2\.out_proj", "oii"),
    (r"(?:VisionTransformer|\w*RelativeLogits)\.proj", "io"),  # open_clip's, used as inputs @ proj
    (r"\w*(?:Router|Gate|Linear|Embedding)\.weight|DbrxExpertGLU\.[wv]1", "oi"),
    (r"Sam\w*PositionalEmbedding\.positional_embedding", "bias"),  # random frequencies
    (r"Phi4MultimodalAudioGluPointWiseConv\.b\d", "bias"),
    (r"\w*(?:Mamba|Mixer|SSM|SSD)\w*\.D", "bias"),
    (r"\w*Hyper(?:Connection|Head)\.(?:hc_)?fn|\w*Indexer\.\w+_gate", "oi"),  # DeepSeek V4, GLM 5
    (r"\w*Hyper(?:Connection|Head)\.\w+|\w*Indexer\.\w+_ape|\w*(?:Rglru|RGLRU)\.recurrent_param", "bias"),
    (r"\w*(?:Snake\w*|StarReLU)\.\w+|PriorTransformer\.clip_(?:mean|std)", "bias"),
    (r"Affine\.alpha|\w*LayerScale\w*\.\w+", "gain"),
    (r"Dora\w*Layer\.weight", "bias"),  # PEFT's DoRA: the norms of neurons
)

#: Parts of the names of PEFT's parameters that start at zero or as copies, and are trained where they are neither.
ADAPTERS = ("lora_B", "lora_embedding_A", "modules_to_save", "trainable_tokens_delta")

#: Rules by the parameter's name in a layer that is not known; the first match with the right number of axes counts.
BY_NAME: tuple[tuple[str, str], ...] = (
    (r"(?:\w+_)?bias(?:es)?(?:_\w+)?|rpb|beta|shift|offset|translate", "bias"),
    (r"lora_embedding_A", "io"),  # PEFT's (rank, words): a neuron is a word
    (r"lora_embedding_B", "oi"),
    (r"A_logs?|time_(?:mix|first|faaaa|maa|decay)\w*(?<!_w[12])", "bias"),  # Mamba, RWKV
    (r"time_(?:maa|decay)_w[12]", "io"),
    (r"time_maa_w2", "oio"),
    (r"\w*scale_shift\w*|modulation|modulate_table", "bias"),  # PixArt, Wan
    (r"(?:\w+_)?(?:logit_scale(?:_\w+)?|per_dim_scale|temp|temperature|tau|const|sinks?)|log_\w+", "bias"),
    (r"(?:\w+_)?(?:alphas?|gates?)|resweight|rezero|vera_lambda_[bd]", "gate"),
    (r"(?:\w+_)?alphas?(?:_\w+)?", "factor"),
    (r"lambdas|lambda_[qk]\d|\w*freq(?:s|uencies)?", "bias"),
    (r"(?:\w+_)?gamma(?:_?\w+)?\d?|gamma\d|\w*layer_?scale\w*|ls\d*|lambda_?\d", "gain"),  # LayerScale
    (r"(?:\w+_)?gain|(?:\w+_)?scale\d?|(?:vision|text)_param|(?:input|post_attention)_residual", "gain"),
    (r"\w+_projection(?:_weight)?", "io"),  # CLIP and Gemma 3, used as inputs @ projection
    (r"(?:\w+_)?pos(?:ition(?:s|al)?)?\d*(?:_\w+)?|(?:height|width)_rel", "positions"),
    (r"(?:\w+_)?(?:tokens?|emb|embeds?|embeddings?)\d*(?:_\w+)?", "vectors"),
    (r"(?:\w+_)?(?:latents?|quer(?:y|ies)|probe|prompt|codevectors)(?:_\dd)?", "vectors"),
    (
        r"class_pos|image_(?:newline|begin|end|sep)|view_separator|no_object_pointer|(?:global|sub)_img_feature_extensor",
        "vectors",
    ),
)

#: Tables whose elements act one by one, by the name that their layer has in the model.
COEFFICIENT_TABLES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Embedding, r"(?:\w+_)?relative_attention_bias|rel_attn_embed|bias_values"),  # T5, WavLM: (buckets, heads)
    (nn.Embedding, r"(?:\w+_)?ref(?:erence_)?points?(?:_embed\w*)?"),  # boxes of detection queries: (queries, 4)
    (nn.Linear, r"rel_pos(?:_[xy])?_bias"),  # LayoutLMv3, of one-hot buckets
    (nn.ParameterDict, "ia3_l"),  # PEFT's IA3: (1, width), by adapter
)

# WeightNorm, SpectralNorm and the like normalise weights: they hold neurons
_NORM_NAME = re.compile(
    r"(?:(?<!Weight)(?<!Spectral)(?<!Linear)(?<!Conv)Norm(?:alization)?(?:Gated|Act|Tlu)?(?:\dd)?(?:[SB]\d\w?)?(?:Fp32)?"
    r"|RMS_norm|GRN|InplaceAbn)$"
)


@lru_cache(maxsize=4096)
def rule_of(layers: tuple[str, ...], parameter: str, axes: int) -> tuple[str, bool] | None:
    """Return the rule for a parameter of a layer that torch does not define, and whether it is by its name alone.

    Args:
        layers: the names of the layer's class and of its base classes.
        parameter: its name in the layer.
        axes: its number of axes.
    """
    for pattern, rule in BY_LAYER:
        if _fits(rule, axes) and any(re.fullmatch(pattern, f"{layer}.{parameter}") for layer in layers):
            return rule, False
    for pattern, rule in BY_NAME:
        if _fits(rule, axes) and re.fullmatch(pattern, parameter):
            return rule, True
    return None


def fan_in_axes(rule: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of the fan-in under a layout, or under ``"vectors"`` or ``"positions"``.

    A table of vectors has them along its last axis. A table of positions of shape (1, C, H, W) has them along axis 1.

    Example:
        >>> fan_in_axes("positions", (1, 64, 64, 768)), fan_in_axes("positions", (1, 96, 7, 7))
        ((3,), (1,))
    """
    if is_layout(rule):
        return tuple(axis for axis, letter in enumerate(rule) if letter == "i")
    if rule == "positions" and len(shape) == 4 and shape[0] == 1 and _is_channels_first(shape):
        return (1,)
    return (len(shape) - 1,)


def is_layout(rule: str) -> bool:
    """Return whether a rule is a layout of neurons."""
    return set(rule) <= {"i", "o"}


def is_coefficient_table(module: nn.Module, attribute: str) -> bool:
    """Return whether a layer of torch is a table of coefficients, by the name that it has in the model."""
    return any(isinstance(module, kind) and re.fullmatch(names, attribute) for kind, names in COEFFICIENT_TABLES)


def is_norm(layers: tuple[str, ...]) -> bool:
    """Return whether a class is a normalisation layer, by its name and those of its base classes."""
    return any(_NORM_NAME.search(layer) for layer in layers)


def has_offset(norm: nn.Module) -> bool:
    """Return whether a normalisation layer scales by 1 + w, as Gemma's do: it is not zero where its parameters are.

    A copy of the layer with parameters of zero runs on a small input. A layer that cannot run so counts as one without,
    and so does one with layers of its own, which the run could change.
    """
    if any(True for _ in norm.children()):
        return False
    probe = object.__new__(type(norm))  # copy.copy would call __init__ of FSDP2's classes
    own = {key: each for key, each in norm._parameters.items() if each is not None}
    zeros = {key: nn.Parameter(torch.zeros(each.shape, device="cpu"), requires_grad=False) for key, each in own.items()}
    buffers = {
        key: each if each is None else torch.zeros(each.shape, device="cpu") for key, each in norm._buffers.items()
    }
    vars(probe).update(vars(norm))
    vars(probe).update(_parameters={**norm._parameters, **zeros}, _buffers=buffers, training=False)
    width = next((each.shape[-1] for each in own.values() if each.dim()), 1)
    inputs = torch.arange(2.0 * width, device="cpu").reshape(1, 2, width)
    try:
        with torch.no_grad(), torch.random.fork_rng(()):
            outputs = type(norm).forward(probe, inputs)
        return isinstance(outputs, Tensor) and bool(outputs.any())
    except Exception:  # it needs other inputs, or a GPU
        return False


def _fits(rule: str, axes: int) -> bool:
    if rule == "positions":
        return axes > 1
    if rule == "gate":
        return axes < 2
    if rule == "vectors":
        return axes > 0
    return not is_layout(rule) or len(rule) == axes


def _is_channels_first(shape: tuple[int, ...]) -> bool:
    """Return whether a table of positions is (1, C, H, W), not (1, H, W, C): by its square, or by its longer side."""
    if (shape[1] == shape[2]) != (shape[2] == shape[3]):
        return shape[2] == shape[3]
    return shape[1] > shape[3]
