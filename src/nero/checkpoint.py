"""Validate and load a ``state_dict``: errors for a checkpoint of another model or optimiser."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from nero.backends import has_entered
from nero.groups import Part, name_of, own_rate, role_in
from nero.messages import and_more, warn
from nero.options import MISSING_IN_OLD_CHECKPOINTS, OPTIONS, check_options
from nero.role import Role
from nero.rounding import cast
from nero.rule import statistics_dtype
from nero.sharding import local_of, sharding_of
from nero.state import match_momentum

#: Parts of names that come from torch.compile, activation checkpointing and DistributedDataParallel.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "module")


def take_apart(
    incoming: Mapping[str, Any], groups: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
    """Split a checkpoint into what torch loads, and Nero's state, which torch would cast to the parameters' dtypes.

    Args:
        incoming: the result of an optimiser's ``state_dict``.
        groups: the groups of the optimiser that loads it.

    Returns:
        The checkpoint without Nero's state and with the groups to load, and this state by parameter.

    Raises:
        ValueError: if the checkpoint is of another model or optimiser.
    """
    own = _state_to_load(incoming, groups)
    ours = {key for saved in incoming["param_groups"] for key in saved["params"]}
    others = {key: value for key, value in incoming["state"].items() if key not in ours}
    return {**incoming, "state": others, "param_groups": _groups_to_load(incoming["param_groups"], groups)}, own


def start_missing_momentum(parts: Sequence[Part], loaded: Mapping[Tensor, dict[str, Any]]) -> None:
    """Start the momentum of loaded parameters at zero, with a warning, if the checkpoint has none."""
    added = [
        name
        for name, parameter, role, group in parts
        if has_entered(loaded.get(parameter)) and match_momentum(parameter, role, loaded[parameter], group["momentum"])
    ]
    if added:
        warn(f"the checkpoint has no momentum of {and_more(added)}: it starts at zero")


@torch.inference_mode(False)  # tensors created in inference mode are read-only outside it
def _state_to_load(incoming: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Return a checkpoint's state by parameter, on its device and in the right dtypes."""
    saved_groups, saved_state = _checked_groups(incoming, groups)
    loaded = {}
    for number, (saved, own) in enumerate(zip(saved_groups, groups, strict=True)):
        # torch.distributed.checkpoint drops the empty tuple of gains and biases
        saved = {"fan_in_axes": own["fan_in_axes"], **saved}
        if missing := set(OPTIONS) - set(saved) - set(MISSING_IN_OLD_CHECKPOINTS):
            raise ValueError(
                f"group {number} of the checkpoint lacks the options {sorted(missing)}: it is of another optimiser, or "
                "of another version of nero.Nero; if so, add them to its param_groups"
            )
        check_options({**{name: OPTIONS[name].default for name in MISSING_IN_OLD_CHECKPOINTS}, **saved})
        for index, (key, parameter) in enumerate(zip(saved["params"], own["params"], strict=True)):
            name = name_of(groups, own, index)
            saved_name = saved["param_names"][index] if "param_names" in saved and "param_names" in own else name
            if _without_wrappers(saved_name) != _without_wrappers(name):
                raise ValueError(f"the checkpoint has {saved_name!r} where this optimiser has {name!r}")
            role, saved_role = role_in(own, parameter), role_in(saved, parameter)
            if saved_role != role:
                raise ValueError(
                    f"{name} holds {saved_role} in the checkpoint, and {role} in this optimiser: build it with the "
                    "same roles"
                )
            if saved_state.get(key, {}) != {}:  # empty if someone read the state of a frozen parameter
                loaded[parameter] = _loaded_entry(name, parameter, role, saved_state[key])
    return loaded


def _groups_to_load(saved_groups: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge saved groups with the optimiser's own: its backend, roles and names stay, and a depth already counted.

    So does the optimiser's momentum where the checkpoint has none.
    """
    own_keys = ("backend", "role", "fan_in_axes", "fan_in_groups", "param_names")
    merged = []
    for saved, own in zip(saved_groups, groups, strict=True):
        depth = saved.get("depth", 1.0)
        if depth == "auto" and own["depth"] != 1:
            depth = own["depth"]
        lr = own_rate(saved["lr"])  # an older checkpoint has one tensor for all groups
        kept = (*own_keys, "momentum", "nesterov") if own["momentum"] and not saved.get("momentum") else own_keys
        merged.append({**saved, **{key: own[key] for key in kept if key in own}, "depth": depth, "lr": lr})
    return merged


def _without_wrappers(name: str) -> str:
    """Return a parameter's name as in the plain model, so that a run may resume compiled, or no longer so."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _checked_groups(
    incoming: Mapping[str, Any], groups: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    saved_groups, saved_state = incoming.get("param_groups"), incoming.get("state")
    if not isinstance(saved_state, Mapping) or not isinstance(saved_groups, list):
        raise ValueError("not an optimiser's state_dict: it lacks 'state' or 'param_groups'")
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in saved_groups):
        raise ValueError("not an optimiser's state_dict: one of its groups lacks 'params'")
    entries = [entry for entry in saved_state.values() if isinstance(entry, Mapping) and entry]
    is_own = any(map(has_entered, entries)) or any("fix_norm" in group for group in saved_groups)
    if entries and not is_own:
        raise ValueError(
            f"the checkpoint is the state of another optimiser, which holds {sorted(map(str, entries[0]))}: load the "
            "model's weights alone, and let Nero start anew"
        )
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in (saved_groups, groups))
    if sizes != own_sizes:
        raise ValueError(
            f"the checkpoint has groups of {sizes} parameters, this optimiser of {own_sizes}: it is of another model, "
            "or the groups were made in another way"
        )
    for number, group in enumerate(saved_groups):
        if "param_names" in group and len(group["param_names"]) != len(group["params"]):
            raise ValueError(
                f"group {number} of the checkpoint has {len(group['params'])} parameters, but "
                f"{len(group['param_names'])} names in 'param_names': give each a name, or remove 'param_names'"
            )
    return saved_groups, saved_state


def _loaded_entry(name: str, parameter: Tensor, role: Role, entry: object) -> dict[str, Any]:
    """Return one parameter's state; keys that are not Nero's are copied as they are."""
    shape = role.state_shape(parameter.shape)
    wanted = {"step": (), "grad_norm": shape, "skipped": (), **({} if role.kind == "neuron" else {"scale": ()})}
    # what users have added to the state of a frozen parameter is none of Nero's
    if not isinstance(entry, Mapping) or (not set(wanted) <= set(entry) and set(wanted) & set(entry)):
        found = sorted(entry) if isinstance(entry, Mapping) else repr(entry)
        raise ValueError(
            f"the checkpoint's state of {name} has {found}, but {sorted(wanted)} are needed: it is of another "
            "optimiser or model"
        )
    wanted["radius"] = shape  # optional: see nero.radius.initial_radius
    wanted["momentum_buffer"] = tuple(parameter.shape)  # optional, too
    sharding = sharding_of(parameter, role)
    dtypes = {"step": torch.float32, "skipped": torch.int64}
    state: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "momentum_buffer" and value is None:  # users set it to None to start anew
            continue
        if key not in wanted:
            state[key] = value.to(parameter.device, copy=True) if isinstance(value, Tensor) else deepcopy(value)
            continue
        tensor = _checked_tensor(f"the checkpoint's {key} of {name}", value, wanted[key])
        if key == "momentum_buffer":
            buffer = torch.empty_like(local_of(parameter))
            buffer.copy_(cast(sharding.load_parameter(tensor), buffer.dtype))
            state[key] = sharding.as_parameter(buffer)
            continue
        dtype = dtypes.get(key, statistics_dtype(parameter.dtype))
        is_per_neuron = key in ("grad_norm", "radius")
        local = sharding.load_state(tensor) if is_per_neuron else local_of(tensor)
        local = local.to(device=parameter.device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        state[key] = sharding.as_state(local) if is_per_neuron else local
    if not sharding.is_first and has_entered(state):  # the count is of all processes, which add theirs up
        state["skipped"].zero_()
    return state


def _checked_tensor(what: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """Convert a loaded value to a tensor; raise if it is none, or has another shape."""
    try:
        tensor = (value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} must be a tensor, got {value!r}") from error
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{what} has the shape {tuple(tensor.shape)}, but {shape} is needed: it is of another model")
    return tensor
