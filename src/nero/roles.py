"""Roles: which parameters hold neurons, gains or biases, and along which axes a neuron's fan-in runs.

The layer that owns a parameter decides its role, or else the parameter's name (:mod:`nero.known_layers`). For all
others, the paper's shape rule does.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _Orthogonal, _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized, type_before_parametrizations
from torch.nn.utils.weight_norm import WeightNorm

from nero import known_layers
from nero.messages import SHARD_BY_FSDP2
from nero.role import Kind, Override, Role, overridden


def role_from_shape(shape: Iterable[int]) -> Role:
    """Return the role of a parameter by the paper's shape rule.

    Every slice along axis 0 is a neuron. Scalars and vectors are biases. A table of tokens or positions, of shape
    (1, N, D), holds N neurons of D elements.

    Example:
        >>> role_from_shape((64, 3, 7, 7)).fan_in_axes
        (1, 2, 3)
        >>> role_from_shape((1, 197, 768)).fan_in_axes
        (2,)
        >>> role_from_shape((96, 1, 1)).kind
        'gain'
    """
    shape = tuple(shape)
    if len(shape) < 2:
        return Role("bias", (), why="shape")
    if len(shape) == 3 and shape[0] == 1:
        return Role("neuron", (2,), why="shape, a table of vectors").on(shape)
    return Role("neuron", why="shape").on(shape)


def roles_of(model: nn.Module, overrides: Mapping[str, Override] | None = None) -> dict[str, Role]:
    """Return the role of every parameter, by name, in the order of ``model.named_parameters()``.

    Args:
        model: any module. Parameters may be frozen or on the meta device, but must be initialised.
        overrides: roles by name or by pattern (``"blocks.*.gate"``): a kind, a tuple of fan-in axes, or a
            :class:`Role`. The last match counts.

    Raises:
        TypeError: if ``model`` is not a module, an override is of an unknown type, or FSDP1 or DeepSpeed's ZeRO-3
            has flattened a parameter.
        ValueError: if the layers of a tied parameter disagree on its role, an override matches no parameter or does
            not fit its shape, a lazy layer has not run yet, or the model is wrapped in FSDP1.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> {name: role.kind for name, role in roles_of(model).items()}
        {'0.weight': 'neuron', '0.bias': 'bias', '2.weight': 'neuron', '2.bias': 'bias'}
        >>> roles_of(model, {"2.*": "gain"})["2.weight"].kind
        'gain'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}: give the model itself")
    check_unflattened(model.named_parameters())
    claims: dict[int, list[tuple[str, Role]]] = {}
    for name, role, parameter in _claims(model):
        claims.setdefault(id(parameter), []).append((name, role))

    overrides = dict(overrides or {})
    unused = set(overrides)
    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        owners = claims[id(parameter)]
        matches = [
            pattern for pattern in overrides if any(own == pattern or fnmatchcase(own, pattern) for own, _ in owners)
        ]
        unused.difference_update(matches)
        if matches:
            roles[name] = overridden(name, tuple(parameter.shape), overrides[matches[-1]])
        else:
            roles[name] = _agreed(owners)
    if unused:
        known = ", ".join(list(roles)[:4])
        raise ValueError(f"overrides {sorted(unused)} match no parameter; the names are like {known}")
    return roles


def _agreed(owners: Sequence[tuple[str, Role]]) -> Role:
    """Return the role that all owners of a tied parameter agree on."""
    name, role = owners[0]
    for other, rival in owners[1:]:
        if rival != role:
            raise ValueError(
                f"parameters {name!r} ({role}, from {role.why}) and {other!r} ({rival}, from {rival.why}) are one "
                f"tensor with two roles: choose one with nero.Nero(nero.param_groups(model, overrides="
                f"{{{name!r}: {as_override(role)}}})), or {as_override(rival)} for the other"
            )
    if len(owners) == 1:
        return role
    return replace(role, why=f"{role.why}, tied to {', '.join(other for other, _ in owners[1:])}")


def as_override(role: Role) -> str:
    """Return a role as its user would write it in ``overrides``."""
    if role.kind != "neuron":
        return repr(role.kind)
    return (
        f"nero.Role('neuron', {role.fan_in_axes}, {role.fan_in_groups})"
        if role.fan_in_groups > 1
        else repr(role.fan_in_axes)
    )


def check_whole(name: str, parameter: Tensor) -> None:
    """Raise if a parameter is a flat one of FSDP1, or DeepSpeed's ZeRO-3 holds it in one."""
    if getattr(parameter, "_is_flat_param", False):
        raise _flattened(name, "FSDP1")
    if hasattr(parameter, "ds_tensor") and not parameter.numel():  # GatheredParameters makes it whole for a while
        raise _flattened(name, "DeepSpeed's ZeRO-3")


def check_unflattened(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if FSDP1 holds these parameters in flat ones, as with ``use_orig_params=True``.

    All have one axis then. Within ``summon_full_params``, and without sharding, they have their own.
    """
    kept = [(name, parameter) for name, parameter in named if getattr(parameter, "_fsdp_flattened", False)]
    if kept and all(parameter.dim() < 2 for _, parameter in kept):
        raise _flattened(kept[0][0], "FSDP1")


def _flattened(name: str, library: str) -> TypeError:
    return TypeError(f"{name} is in a flat parameter of {library}, which cuts through neurons: {SHARD_BY_FSDP2}")


def _claims(model: nn.Module) -> Iterator[tuple[str, Role, Tensor]]:
    """Yield every (name, role, parameter) of a model; a tied parameter comes once for each owner."""
    parametrized: dict[int, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules():
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            raise ValueError(
                f"{prefix or 'the model'} is wrapped in FSDP1 (FullyShardedDataParallel), which flattens weights "
                f"and cuts through neurons: {SHARD_BY_FSDP2}"
            )
        if is_parametrized(module):
            for tensor_name, originals in cast(nn.ModuleDict, module.parametrizations).items():
                parametrized[id(originals)] = (module, tensor_name)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter {full_name!r} has no shape yet: run a batch through the lazy layers before "
                    "making the optimiser"
                )
            check_whole(full_name, parameter)
            if id(module) in parametrized:
                layer, tensor_name = parametrized[id(module)]
                role = _role_of_original(layer, tensor_name, cast(ParametrizationList, module), name, parameter)
            else:
                role = _role_in_layer(module, prefix.rpartition(".")[2], name, tuple(parameter.shape))
            yield full_name, role, parameter


def _role_of_original(
    layer: nn.Module, tensor_name: str, originals: ParametrizationList, name: str, parameter: Tensor
) -> Role:
    """Return the role of a tensor behind a parametrization: the layer's, if it has the shape that the layer uses."""
    if isinstance(originals[0], _WeightNorm) and name == "original0":
        return Role("gain", (), why="weight_norm's length")
    if any(isinstance(each, _Orthogonal) for each in originals):
        return Role("bias", (), why="orthogonal's coordinates of a rotation")
    if parameter.shape == _shape_made(originals):
        role = _role_in_layer(layer, "", tensor_name, tuple(parameter.shape))
        return replace(role, why=f"{role.why}, parametrized")
    role = role_from_shape(parameter.shape)
    return replace(role, why=f"{role.why}; behind {type_before_parametrizations(layer).__name__}.{tensor_name}")


@torch.no_grad()
def _shape_made(originals: ParametrizationList) -> torch.Size:
    """Return the shape that a parametrization makes, without changing its buffers or torch's random numbers."""
    buffers = {name: buffer.clone() for name, buffer in originals.named_buffers()}
    devices = sorted({parameter.device.index for parameter in originals.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices):
        return cast(torch.Size, torch.func.functional_call(originals, buffers, ()).shape)


def _role_in_layer(module: nn.Module, attribute: str, name: str, shape: tuple[int, ...]) -> Role:
    """Return the role of a parameter that a layer owns; ``attribute`` is the name of the layer in the model."""
    hooks = module._forward_pre_hooks.values()
    if any(isinstance(hook, WeightNorm) and name == f"{hook.name}_g" for hook in hooks):
        return Role("gain", (), why="weight_norm's length")
    if any(isinstance(hook, WeightNorm) and name == f"{hook.name}_v" for hook in hooks):
        name = name.removesuffix("_v")
    elif name.endswith("_orig"):  # the trained tensor under torch's spectral_norm and pruning
        name = name.removesuffix("_orig")

    layer = type_before_parametrizations(module).__name__
    if known_layers.is_coefficient_table(module, attribute):
        return Role("bias", (), why=f"{layer}, by the name {attribute}")
    known = _role_in_torch_layer(module, name, shape)
    if known is not None:
        return replace(known, why=f"{layer}.{name}").on(shape)
    layers = tuple(base.__name__ for base in type(module).__mro__)
    if isinstance(module, nn.ParameterList) or attribute.startswith(("vera_lambda_", "lora_embedding_")):
        name = attribute  # its own names are numbers, or those of PEFT's adapters
    rule, is_by_name = known_layers.rule_of(layers, name, len(shape)) or ("", False)
    if known_layers.is_norm(layers) and rule in ("", "gain"):
        known = _role_in_norm(module, name)
    elif rule:
        known = _role_under(rule, shape)
    else:
        known = _role_in_named_layer(module, layers, name, shape)
    if known is None:
        role = role_from_shape(shape)
        return replace(role, why=f"{role.why}; {layer} is unknown")
    return replace(known, why=f"{layer}.{name}" + ", by name" * is_by_name).on(shape)


_OUTPUT_FIRST = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_SHIFTS = ("bias", "beta", "shift", "offset")


def _role_in_torch_layer(module: nn.Module, name: str, shape: tuple[int, ...]) -> Role | None:
    if isinstance(module, _TRANSPOSED) and name == "weight":
        return Role("neuron", (0, *range(2, len(shape))), module.groups)
    if isinstance(module, _OUTPUT_FIRST + _TRANSPOSED):
        if name in ("bias_k", "bias_v"):  # attention's extra key and value: vectors of shape (1, 1, D)
            return Role("neuron", (2,))
        return Role("neuron") if len(shape) > 1 else Role("bias", ())
    if isinstance(module, _NORMS):
        return _role_in_norm(module, name)
    if isinstance(module, nn.PReLU):  # a slope: pulling it to one would undo the non-linearity
        return Role("bias", ())
    return None


def _role_in_norm(norm: nn.Module, name: str) -> Role:
    if name in _SHIFTS:
        return Role("bias", ())
    is_of_torch = type(norm).forward.__module__.startswith("torch.nn.modules.")
    return Role("gain", (), has_offset=not is_of_torch and known_layers.has_offset(norm))


def _role_under(rule: str, shape: tuple[int, ...]) -> Role:
    if rule in ("gate", "factor"):
        return Role("gain", (), is_weight=True)
    if rule in ("gain", "bias"):
        return Role(cast(Kind, rule), ())
    return Role("neuron", known_layers.fan_in_axes(rule, shape))


def _role_in_named_layer(module: nn.Module, layers: tuple[str, ...], name: str, shape: tuple[int, ...]) -> Role | None:
    """Return the role of a parameter of a layer that is known by the name of its class."""
    if "Conv1D" in layers and "nf" in vars(module):  # GPT-2's linear layer
        return Role("neuron", (0,)) if name == "weight" else Role("bias", ())
    if "DbrxExpertGLU" in layers and name == "w2":  # (experts x in, out)
        return Role("neuron", (0,), cast(int, module.moe_num_experts))
    if any("Experts" in layer for layer in layers):  # one per slice along axis 0
        if len(shape) == 3:
            return Role("neuron", (1,) if _is_transposed(module) else (2,))
        # b1, bias2, b_up, up_b: one row per expert; a router has two axes, too
        if len(shape) == 2 and re.fullmatch(r"b(?:ias)?\d*|b_\w+|\w+_b", name):
            return Role("bias", ())
    return None


def _is_transposed(experts: nn.Module) -> bool:
    """Return whether stacked experts are (E, in, out): by the layer's attribute, or by the shapes of two weights."""
    up, down = (experts._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if hasattr(experts, "is_transposed") or up is None or down is None or not up.dim() == down.dim() == 3:
        return bool(getattr(experts, "is_transposed", False))
    return up.shape[1] == down.shape[2]
