"""The roles of parameters in a pytree, by the names and shapes that flax and haiku give them.

Kernels of flax and weights of haiku have their output features last, so that a neuron's fan-in runs along all other
axes. A pytree holds no layers: where name and shape leave two answers, :func:`roles_of` asks for an override.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import GetAttrKey, KeyPath, keystr, tree_flatten_with_path

from nero.role import Override, Role, overridden

#: A pytree of parameters, or of anything shaped like them.
Tree: TypeAlias = Any

_BIAS = re.compile(r"b|(.*_)?(bias|offset|beta|shift|slope)")
_GAIN = re.compile(r"(layer_)?scale|gain|gamma")
_GATE = re.compile(r"(?!log_)(.*_)?(alphas?|gates?)|resweight|rezero")
_VECTORS = re.compile(r"(.*_)?(emb|embed|embeddings?|tokens?|cls)")
_RELATIVE_BIAS = re.compile(r"rel(ative)?_?(pos\w*|attention)_bias|rel_embedding")
_KERNEL = re.compile(r"kernel|w|lora_[ab]")
#: The widest square window of a convolution whose name does not tell that it is one.
MAX_WINDOW = 16
#: Fan-in axes of flax's attention: query, key and value are (in, heads, features), out is (heads, features, out).
_ATTENTION = {"query": (0,), "key": (0,), "value": (0,), "out": (0, 1)}


def roles_of(params: Tree, overrides: Mapping[str, Override] | None = None) -> Tree:
    """Return the role of every parameter, as a pytree of :class:`nero.Role`.

    Args:
        params: parameters of flax (linen or nnx) or haiku, or any pytree with such names. Shapes are enough, as
            ``jax.eval_shape`` gives them.
        overrides: roles by regular expressions that are searched for in the path of a parameter, such as
            ``"params/Dense_0/kernel"``: a kind, a tuple of fan-in axes, or a :class:`nero.Role`. The last match counts.

    Raises:
        TypeError: if a parameter is not of real floating point, or an override is of an unknown type.
        ValueError: if names and shapes do not tell a role, or if an override is not a regular expression, matches no
            parameter or does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"Dense_0": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}}
        >>> str(roles_of(params)["Dense_0"]["kernel"])
        'neurons along axes (0,)'
        >>> roles_of(params, {"Dense_0/bias": "gain"})["Dense_0"]["bias"].kind
        'gain'
    """
    overrides = dict(overrides or {})
    leaves, structure = tree_flatten_with_path(params)
    check_arrays(params)
    shapes = {name_of(path): jnp.shape(leaf) for path, leaf in leaves}
    known = _known_roles(shapes)
    unused, unknown, roles = set(overrides), [], []
    for path, _ in leaves:
        name = name_of(path)
        shape = shapes[name]
        matches = [pattern for pattern in overrides if _is_found(pattern, name)]
        unused.difference_update(matches)
        role = overridden(name, shape, overrides[matches[-1]]) if matches else known[name]
        if role is None:
            unknown.append(f"{name} {shape}")
        roles.append(role)
    if unused:
        names = ", ".join(list(shapes)[:4])
        raise ValueError(f"overrides {sorted(unused)} match no parameter; the names are like {names}")
    if unknown and len(shapes.get("", ())) == 1:
        raise ValueError(
            f"params are one array of shape{unknown[0]}, which has no name to tell its role: leave out optax.flatten, "
            "which joins neurons, gains and biases; or give its role, as in roles=nero.jax.Role('bias')"
        )
    if unknown:
        first = unknown[0].partition(" (")[0]
        raise ValueError(
            f"names and shapes do not tell the fan-in axes of {'; '.join(unknown)}: pass "
            f"roles=nero.jax.roles_of(params, {{'{first}$': axes}}) to nero.jax.nero, balance and is_balanced, with an "
            "entry for each: 'gain', 'bias', or its fan-in axes, like (1,) for (layers, in, out)"
        )
    return jax.tree.unflatten(structure, roles)


def _is_found(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"overrides are regular expressions, and {pattern!r} is not one: {error}") from error


def _known_roles(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Role | None]:
    """Return roles by the names and shapes of all parameters; None where they do not tell it."""
    roles = {name: _role(name, shape, shapes) for name, shape in shapes.items()}
    unknown = [name for name, role in roles.items() if role is None]
    # 12 layers of 12 heads that a scan has stacked look like a window, but come with other kernels of unknown axes
    if all(_is_window(name, shapes[name]) for name in unknown):
        roles |= {name: Role("neuron", (0, 1, 2), why="square window").on(shapes[name]) for name in unknown}
    return roles


def _is_window(name: str, shape: tuple[int, ...]) -> bool:
    is_kernel = _KERNEL.fullmatch(name.rpartition("/")[2]) is not None
    return is_kernel and len(shape) == 4 and shape[0] == shape[1] <= MAX_WINDOW


def _role(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> Role | None:
    """Return the role of a parameter by its name and shape, among others; None if they do not tell it."""
    *modules, own = name.split("/")
    module, axes = modules[-1] if modules else "", range(len(shape))
    if _BIAS.fullmatch(own) or _RELATIVE_BIAS.search(name):
        return Role("bias", (), why=own)
    if _GAIN.fullmatch(own):
        return Role("gain", (), why=own)
    if _GATE.fullmatch(own) and len(shape) < 2:
        return Role("gain", (), why=own, is_weight=True)
    if _VECTORS.fullmatch(own) and shape:
        return Role("neuron", (-1,), why=own).on(shape)
    if len(shape) < 2 and (name or not shape):
        return Role("bias", (), why="shape")
    if not _KERNEL.fullmatch(own):
        return None
    if "transpose" in module and own == "w":  # haiku's transposed convolutions are (..., out, in)
        return Role("neuron", tuple(axis for axis in axes if axis != len(shape) - 2), why=own).on(shape)
    if module in _ATTENTION and len(shape) == 3:
        query, out = (shapes.get("/".join([*modules[:-1], sibling, own]), ()) for sibling in ("query", "out"))
        if len(query) == len(out) == 3 and query[1:] == out[:2]:  # not so if a scan has stacked dense layers
            return Role("neuron", _ATTENTION[module], why=f"attention's {module}").on(shape)
    # other kernels of three or four axes may be of layers that a scan has stacked, or have several axes of outputs
    if len(shape) == 2 or (len(shape) in (3, 4) and "conv" in module.lower()):
        return Role("neuron", tuple(axes[:-1]), why=own).on(shape)
    return None


def name_of(path: KeyPath[Any]) -> str:
    """Return the path of a parameter as a string: ``"params/Dense_0/kernel"``."""
    if len(path) > 1 and path[-1] == GetAttrKey("value"):
        path = path[:-1]  # a variable of nnx
    return keystr(path, simple=True, separator="/")


def map_with_roles(function: Callable[..., Any], roles: Tree | None, params: Tree, *others: Tree) -> Tree:
    """Map a function of a parameter's role, the parameter, and the leaves of other trees of the same structure.

    Roles are found by name: ``optax.masked`` leaves parameters out, and ``nnx.Optimizer`` unwraps their variables.
    None stands for those of :func:`roles_of`.
    """
    paths = tree_flatten_with_path(roles_of(params) if roles is None else roles)[0]
    known = {name_of(path): role for path, role in paths}

    def apply(path: KeyPath[Any], leaf: Any, *rest: Any) -> Any:
        name = name_of(path)
        role = known.get(name)
        _check_dtype(name, leaf)
        if not isinstance(role, Role):
            raise ValueError(
                f"roles have {role!r} for the parameter {name!r}: make them by nero.jax.roles_of(params, overrides)"
            )
        if any(value is None for value in rest):
            raise ValueError(f"parameter {name!r} has no gradient: give zeros, or leave it out by optax.partition")
        return function(overridden(name, jnp.shape(leaf), role), *map(jnp.asarray, (leaf, *rest)))

    return jax.tree.map_with_path(apply, params, *others)


def check_arrays(params: Tree) -> None:
    """Raise if a leaf is not an array that Nero can train."""
    for path, leaf in tree_flatten_with_path(params)[0]:
        _check_dtype(name_of(path), leaf)


def _check_dtype(name: str, leaf: Array) -> None:
    try:
        dtype = jnp.result_type(leaf)
    except TypeError as error:
        is_torch = any(base.__module__.partition(".")[0] == "torch" for base in type(leaf).__mro__)
        remedy = "for PyTorch, use nero.Nero and nero.balance_" if is_torch else "give a pytree of arrays"
        where = f"parameter {name!r}" if name else "params"
        raise TypeError(f"{where} must be an array of JAX, got {type(leaf).__name__}: {remedy}") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"parameter {name!r} is {dtype}, which Nero cannot train: leave it out by optax.partition")


def grouped(array: Array, role: Role) -> Array:
    """Return an array with its fan-in groups, if any, on an axis of their own."""
    groups = role.fan_in_groups
    return array if groups == 1 else array.reshape(groups, array.shape[0] // groups, *array.shape[1:])
