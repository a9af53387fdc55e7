"""What an optimiser keeps of its parameters, and a checkpoint of it: all that goes by our names must be ours."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nero.balance import statistics_dtype
from nero.checks import check_options
from nero.roles import Role, role_from_shape


class Part(NamedTuple):
    """A parameter of an optimiser, what it is there, and the group whose options it has."""

    name: str
    parameter: Tensor
    role: Role
    group: dict[str, Any]


def name_of(groups: Sequence[dict[str, Any]], group: dict[str, Any], index: int) -> str:
    """What a parameter of a group is called."""
    names = group.get("param_names")
    if names is not None:
        return str(names[index])
    number = next(i for i, each in enumerate(groups) if each is group)
    return f"parameter {index} of group {number}"


def role_in(group: Mapping[str, Any], parameter: Tensor) -> Role:
    """What a parameter is by its group's options, or else by its shape."""
    kind, axes = group["role"], group["fan_in_axes"]
    if kind is None and axes is None:
        return role_from_shape(parameter.shape)
    return Role(kind or "neuron", axes, group["fan_in_groups"]).on(parameter.shape)


def state_shape(parameter: Tensor, role: Role) -> list[int]:
    """Of what is kept of a parameter: one number a neuron, or one an entry."""
    if role.kind != "neuron":
        return list(parameter.shape)
    groups = role.fan_in_groups
    shape = list(parameter.shape) if groups == 1 else [groups, parameter.shape[0] // groups, *parameter.shape[1:]]
    return [1 if axis in role.axes else size for axis, size in enumerate(shape)]


@torch.inference_mode(False)  # whose tensors nobody could change outside of it
def checked_state(
    incoming: Mapping[str, Any], groups: list[dict[str, Any]], options: set[str]
) -> dict[Tensor, dict[str, Any]]:
    """The state of a checkpoint by parameter, cast and placed.

    Args:
        incoming: what an optimiser's ``state_dict`` gave.
        groups: of the optimiser that it is loaded into.
        options: that each group must have.

    Raises:
        ValueError: if it is of another model or optimiser.
    """
    saved_groups, saved_state = incoming.get("param_groups"), incoming.get("state")
    if not isinstance(saved_state, Mapping) or not isinstance(saved_groups, list):
        raise ValueError("not an optimiser's state_dict: it lacks 'state' or 'param_groups'")
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in saved_groups):
        raise ValueError("not an optimiser's state_dict: a group of it lacks 'params'")
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"the checkpoint has groups of {[len(group['params']) for group in saved_groups]} parameters, this "
            f"optimiser of {[len(group['params']) for group in groups]}: it is of another model, or "
            "the groups were made in another way"
        )
    checked = {}
    for number, (saved, own) in enumerate(zip(saved_groups, groups, strict=True)):
        # torch adds the first when it unpickles, and the others came later than the rest
        missing = options - set(saved) - {"differentiable", "depth", "longest_step"}
        if missing:
            raise ValueError(
                f"group {number} of the checkpoint lacks the options {sorted(missing)}: it is another optimiser's, or "
                "of another version of nero.Nero; if so, add them to its param_groups"
            )
        check_options({"depth": 1.0, "longest_step": math.inf, **saved})
        for index, (key, parameter) in enumerate(zip(saved["params"], own["params"], strict=True)):
            name = name_of(groups, own, index)
            saved_name = saved.get("param_names", own.get("param_names", [name] * (index + 1)))[index]
            if "param_names" in own and saved_name != name:
                raise ValueError(f"the checkpoint has {saved_name!r} where this optimiser has {name!r}")
            role, saved_role = role_in(own, parameter), role_in(saved, parameter)
            if saved_role != role:
                raise ValueError(
                    f"the checkpoint has {name} as {told(saved_role)}, this optimiser as {told(role)}: make it as "
                    "the one was made that wrote it"
                )
            # an empty one is what is left where somebody asked for the state of a frozen parameter
            if key in saved_state and saved_state[key] != {}:
                checked[parameter] = _checked_entry(name, parameter, role, saved_state[key])
    return checked


def told(role: Role) -> str:
    """A role in words."""
    groups = f" in {role.fan_in_groups} groups" if role.fan_in_groups > 1 else ""
    return f"a {role.kind}" + (f" of fan-in axes {role.fan_in_axes}{groups}" if role.fan_in_axes else "")


def _checked_entry(name: str, parameter: Tensor, role: Role, entry: object) -> dict[str, Any]:
    """One parameter's saved state, on its device and in the statistics' dtype; notes of others' as they are."""
    by_neuron = tuple(state_shape(parameter, role))
    wanted = {"step": (), "grad_norm": by_neuron, "skipped": ()}
    if role.kind != "neuron":
        wanted["scale"] = ()
    if not isinstance(entry, Mapping) or not set(wanted) <= set(entry):
        found = sorted(entry) if isinstance(entry, Mapping) else repr(entry)
        raise ValueError(
            f"the checkpoint's state of {name} has {found} where {sorted(wanted)} are needed: it is of "
            "another optimiser or model"
        )
    wanted["radius"] = by_neuron  # if it is there: it is made when first asked for
    dtypes = {"step": torch.float32, "skipped": torch.int64}
    state: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in wanted:  # somebody's note: it is none of ours
            state[key] = value.to(parameter.device, copy=True) if isinstance(value, Tensor) else deepcopy(value)
            continue
        try:
            tensor = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"the checkpoint's {key} of {name} must be a tensor, but it is {value!r}") from error
        if tuple(tensor.shape) != wanted[key]:
            raise ValueError(
                f"the checkpoint's {key} of {name} is shaped {tuple(tensor.shape)} where {wanted[key]} is needed: it "
                "is of another model"
            )
        dtype = dtypes.get(key, statistics_dtype(parameter.dtype))
        # as it came, and as it will be: what is finite in float64 may not be in float32
        if tensor.is_complex() or not bool(((tensor >= 0) & tensor.isfinite() & tensor.to(dtype).isfinite()).all()):
            raise ValueError(f"the checkpoint's {key} of {name} must be finite in {dtype} and not negative")
        state[key] = tensor.to(device=parameter.device, dtype=dtype, copy=True)
    return state
