"""Which parameter holds neurons, gains or biases, and along which axes a neuron's fan-in runs.

A role is read from the layer that owns the parameter; a layer nobody knows falls back to the
shape rule of the paper. Nothing here looks at a gradient.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized, type_before_parametrizations
from torch.nn.utils.weight_norm import WeightNorm

Kind: TypeAlias = Literal["neuron", "gain", "bias"]
KINDS: tuple[Kind, ...] = ("neuron", "gain", "bias")


@dataclass(frozen=True, slots=True)
class Role:
    """What a parameter is to the network.

    Args:
        kind: ``"neuron"``, ``"gain"`` or ``"bias"``.
        fan_in_axes: the axes a neuron's entries run along; empty for gains and biases, and
            ``None`` for "every axis but the first".
        fan_in_groups: how many blocks axis 0 is cut into before the fan-in is taken, for
            grouped transposed convolutions, whose weight keeps its groups along its fan-in.
        why: where the role comes from, for people; it does not count in comparisons.
    """

    kind: Kind
    fan_in_axes: tuple[int, ...] | None = None
    fan_in_groups: int = 1
    why: str = field(default="given", compare=False)

    def on(self, shape: Iterable[int]) -> "Role":
        """The role on a parameter of that shape: axes filled in and checked, fan-in 1 a gain.

        Raises:
            ValueError: if the kind is unknown or the axes do not fit the shape.
        """
        shape = tuple(shape)
        if self.kind not in KINDS:
            raise ValueError(f"unknown role {self.kind!r}: use one of {', '.join(KINDS)}")
        if self.kind != "neuron":
            if self.fan_in_axes:
                raise ValueError(f"a {self.kind} has no fan_in_axes, but {self.fan_in_axes} were given")
            return replace(self, fan_in_axes=(), fan_in_groups=1)
        axes = tuple(range(1, len(shape))) if self.fan_in_axes is None else self.fan_in_axes
        if not isinstance(axes, tuple | list) or not axes or not all(_is_axis(axis, len(shape)) for axis in axes):
            known = f"a tuple of axes from 0 to {len(shape) - 1}" if shape else "a scalar is a gain or a bias"
            raise ValueError(f"fan_in_axes {axes} do not fit the shape {shape}: {known}")
        axes = tuple(sorted(axis % len(shape) for axis in axes))
        if len(set(axes)) != len(axes):
            raise ValueError(f"fan_in_axes {self.fan_in_axes} name an axis of {shape} twice")
        groups = self.fan_in_groups
        if not isinstance(groups, int) or groups < 1 or shape[0] % groups or (groups > 1 and 0 not in axes):
            raise ValueError(
                f"fan_in_groups={groups} does not fit: axis 0 of {shape} must be a fan-in axis and divide into it"
            )
        role = replace(self, fan_in_axes=axes)
        if role.fan_in(shape) == 1:
            return Role("gain", (), why=f"{self.why}, fan-in 1")
        return role

    def fan_in(self, shape: Iterable[int]) -> int:
        """How many entries a neuron of a parameter of that shape has; 1 for gains and biases."""
        shape = tuple(shape)
        return math.prod(shape[axis] for axis in self.fan_in_axes or ()) // self.fan_in_groups

    def view(self, tensor: Tensor) -> Tensor:
        """The tensor with its groups, if any, on an axis of their own; shares its memory."""
        groups = self.fan_in_groups
        return tensor if groups == 1 else tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])

    def __str__(self) -> str:
        if self.kind != "neuron":
            return "gains" if self.kind == "gain" else "biases"
        groups = f" in {self.fan_in_groups} groups" if self.fan_in_groups > 1 else ""
        return f"neurons along axes {self.fan_in_axes}{groups}"

    @property
    def axes(self) -> tuple[int, ...]:
        """The fan-in axes of :meth:`view`."""
        axes = self.fan_in_axes or ()
        return axes if self.fan_in_groups == 1 else tuple(axis + 1 for axis in axes)


Override: TypeAlias = Role | Kind | tuple[int, ...]


def role_from_shape(shape: Iterable[int]) -> Role:
    """The paper's rule, for a parameter of which only the shape is known.

    A slice along axis 0 is a neuron; what has fewer than two axes is a bias. A table of tokens or
    positions, shaped (1, N, D), is N vectors of D.

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
    """The role of every parameter, by name, in the order of ``model.named_parameters()``.

    Args:
        model: any module; parameters may be frozen or on the meta device, but not uninitialised.
        overrides: your own word, by name or by pattern (``"blocks.*.gate"``): a kind, a tuple of
            fan-in axes, or a :class:`Role`. The last entry that matches counts.

    Raises:
        TypeError: something that is not a module, an override of no known form.
        ValueError: a tied parameter on whose role its layers disagree, an override that matches
            nothing or does not fit, a lazy layer that has not run yet, a model wrapped in FSDP1.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> {name: role.kind for name, role in roles_of(model).items()}
        {'0.weight': 'neuron', '0.bias': 'bias', '2.weight': 'neuron', '2.bias': 'bias'}
        >>> roles_of(model, {"2.*": "gain"})["2.weight"].kind
        'gain'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
    claims: dict[int, list[tuple[str, Role]]] = {}
    for name, role, parameter in _claims(model):
        claims.setdefault(id(parameter), []).append((name, role))

    overrides = dict(overrides or {})
    unused = set(overrides)
    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        claimed = claims[id(parameter)]
        role = claimed[0][1]
        names = [other for other, _ in claimed]
        matching = [
            pattern for pattern in overrides if any(each == pattern or fnmatchcase(each, pattern) for each in names)
        ]
        if matching:
            unused.difference_update(matching)
            role = _overridden(name, tuple(parameter.shape), overrides[matching[-1]])
        else:
            for other, rival in claimed[1:]:
                if rival != role:
                    raise ValueError(
                        f"parameters {claimed[0][0]!r} ({role}, from {role.why}) and {other!r} "
                        f"({rival}, from {rival.why}) are one tensor with two roles: "
                        f"say which with roles_of(model, overrides={{{name!r}: ...}})"
                    )
            if len(claimed) > 1:
                role = replace(role, why=f"{role.why}, tied to {', '.join(names[1:])}")
        roles[name] = role
    if unused:
        known = ", ".join(list(roles)[:4])
        raise ValueError(f"overrides {sorted(unused)} match no parameter; the names are like {known}")
    return roles


def _overridden(name: str, shape: tuple[int, ...], override: Override) -> Role:
    if isinstance(override, Role):
        role = override
    elif isinstance(override, str):
        role = Role(override)
    elif isinstance(override, tuple):
        role = Role("neuron", override)
    else:
        raise TypeError(f"the override of {name!r} must be a Role, a kind or a tuple of axes, not {override!r}")
    try:
        return role.on(shape)
    except ValueError as error:
        raise ValueError(f"the override of {name!r} does not fit: {error}") from error


def _is_axis(axis: object, count: int) -> bool:
    return isinstance(axis, int) and not isinstance(axis, bool) and -count <= axis < count


def _claims(model: nn.Module) -> Iterable[tuple[str, Role, Tensor]]:
    """Every (name, role, parameter) in the model; a tied parameter comes once for each owner."""
    behind: dict[int, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules():
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            raise ValueError(
                f"{prefix or 'the model'} is wrapped in FSDP1 (FullyShardedDataParallel), which flattens weights "
                "and cuts through neurons: shard with torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        if is_parametrized(module):
            for tensor_name, listed in cast(nn.ModuleDict, module.parametrizations).items():
                behind[id(listed)] = (module, tensor_name)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter {full_name!r} has no shape yet: run a batch through the lazy layers before "
                    "making the optimiser"
                )
            if id(module) in behind:
                role = _role_of_original(*behind[id(module)], cast(ParametrizationList, module), name, parameter)
            else:
                role = _role_in_layer(module, name, tuple(parameter.shape))
            yield full_name, role, parameter


def _role_of_original(
    layer: nn.Module, tensor_name: str, behind: ParametrizationList, name: str, parameter: Tensor
) -> Role:
    """A tensor behind a parametrization follows the layer, if it has the shape of what the layer uses."""
    if isinstance(behind[0], _WeightNorm) and name == "original0":
        return Role("gain", (), why="weight_norm's length")
    if parameter.shape == _shape_made(behind):
        role = _role_in_layer(layer, tensor_name, tuple(parameter.shape))
        return replace(role, why=f"{role.why}, parametrized")
    role = role_from_shape(parameter.shape)
    return replace(role, why=f"{role.why}; behind {type_before_parametrizations(layer).__name__}.{tensor_name}")


@torch.no_grad()
def _shape_made(behind: ParametrizationList) -> torch.Size:
    """The shape of what a parametrization makes; leaves its buffers and the random numbers as they were."""
    buffers = {name: buffer.clone() for name, buffer in behind.named_buffers()}
    with torch.random.fork_rng(sorted({each.device.index for each in behind.parameters() if each.is_cuda})):
        return cast(torch.Size, torch.func.functional_call(behind, buffers, ()).shape)


def _role_in_layer(module: nn.Module, name: str, shape: tuple[int, ...]) -> Role:
    """The role of a layer's own parameter."""
    hooks = module._forward_pre_hooks.values()
    if any(isinstance(hook, WeightNorm) and name == f"{hook.name}_g" for hook in hooks):
        return Role("gain", (), why="weight_norm's length")
    if any(isinstance(hook, WeightNorm) and name == f"{hook.name}_v" for hook in hooks):
        name = name.removesuffix("_v")
    elif name.endswith("_orig"):  # where torch's spectral_norm and pruning keep the trained tensor
        name = name.removesuffix("_orig")

    layer = type_before_parametrizations(module).__name__
    known = _known_role(module, name, shape)
    if known is None:
        role = role_from_shape(shape)
        return replace(role, why=f"{role.why}; {layer} is unknown")
    return replace(known, why=f"{layer}.{name}").on(shape)


_WEIGHT_FIRST = (
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
# what norms a weight is no norm layer: it holds neurons
_NORM_NAME = re.compile(r"(?:(?<!Weight)(?<!Spectral)(?<!Linear)(?<!Conv)Norm(?:alization)?(?:Gated)?(?:\dd)?|GRN)$")
_SHIFTS = ("bias", "beta", "shift", "offset")


def _known_role(module: nn.Module, name: str, shape: tuple[int, ...]) -> Role | None:
    class_names = [base.__name__ for base in type(module).__mro__]
    if isinstance(module, _TRANSPOSED) and name == "weight":
        return Role("neuron", (0, *range(2, len(shape))), module.groups)
    if isinstance(module, _WEIGHT_FIRST + _TRANSPOSED):
        if name in ("bias_k", "bias_v"):  # attention's extra key and value: vectors shaped (1, 1, D)
            return Role("neuron", (2,))
        if len(shape) > 1:
            return Role("neuron")
        return Role("bias", ())
    if isinstance(module, _NORMS) or any(_NORM_NAME.search(each) for each in class_names):
        return Role("bias" if name in _SHIFTS else "gain", ())
    if isinstance(module, nn.PReLU):  # a slope: pulling it to one would undo the non-linearity
        return Role("bias", ())
    if "Conv1D" in class_names and "nf" in vars(module):  # GPT-2's linear layer
        return Role("neuron", (0,)) if name == "weight" else Role("bias", ())
    if any("Experts" in each for each in class_names) and len(shape) > 1:
        # one expert a slice along axis 0: the role of the slice, one axis on
        if len(shape) == 2:
            return Role("bias", ())
        if len(shape) == 3:
            return Role("neuron", (1,) if _are_transposed(module) else (2,))
    return None


def _are_transposed(experts: nn.Module) -> bool:
    """Whether stacked experts are (E, in, out); where the layer does not say, two of its shapes do."""
    up, down = (experts._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if hasattr(experts, "is_transposed") or up is None or down is None or not up.dim() == down.dim() == 3:
        return bool(getattr(experts, "is_transposed", False))
    return up.shape[1] == down.shape[2]
