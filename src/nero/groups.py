"""Parameter groups by role, and the names and roles of their members."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from nero.roles import Override, Role, role_from_shape, roles_of


class Part(NamedTuple):
    """A parameter of an optimiser: its name, its role, and the group whose options apply to it."""

    name: str
    parameter: Tensor
    role: Role
    group: dict[str, Any]


def param_groups(
    model: nn.Module, overrides: Mapping[str, Override] | None = None, **options: object
) -> list[dict[str, Any]]:
    """Make named parameter groups for :class:`nero.Nero`, one per role in the model.

    Args:
        model: any module; see :func:`nero.roles_of`.
        overrides: roles by name or pattern; see :func:`nero.roles_of`.
        options: options for all of these groups, such as ``lr``.

    Example:
        >>> groups = param_groups(nn.Linear(8, 4), lr=0.02)
        >>> [(group["role"], group["fan_in_axes"], group["lr"]) for group in groups]
        [('neuron', (1,), 0.02), ('bias', (), 0.02)]
    """
    groups: dict[Role, dict[str, Any]] = {}
    parameters = dict(model.named_parameters())
    for name, role in roles_of(model, overrides).items():
        group = groups.setdefault(
            role,
            {
                "params": [],
                "role": role.kind,
                "fan_in_axes": role.fan_in_axes,
                "fan_in_groups": role.fan_in_groups,
                **options,
                **({"gain_penalty": 0.0} if role.has_offset else {}),
            },
        )
        group["params"].append((name, parameters[name]))
    return list(groups.values())


def role_in(group: Mapping[str, Any], parameter: Tensor) -> Role:
    """Return a parameter's role by its group's options, or else by its shape."""
    kind, axes = group["role"], group["fan_in_axes"]
    if kind is None and axes is None:
        return role_from_shape(parameter.shape)
    return Role(kind or "neuron", axes, group["fan_in_groups"]).on(parameter.shape)


def name_of(groups: Sequence[dict[str, Any]], group: dict[str, Any], index: int) -> str:
    """Return the name of a parameter of a group."""
    names = group.get("param_names")
    if names is not None:
        return str(names[index])
    number = next(i for i, other in enumerate(groups) if other is group)
    return f"parameter {index} of group {number}"


def parts_of(groups: Sequence[dict[str, Any]], roles: Mapping[Tensor, Role]) -> Iterator[Part]:
    """Yield every parameter of the groups; equal names, as of modules added one by one, are numbered."""
    seen: set[str] = set()
    for group in groups:
        for index, parameter in enumerate(group["params"]):
            own = name = name_of(groups, group, index)
            count = 1
            while name in seen:
                count += 1
                name = f"{own} ({count})"
            seen.add(name)
            yield Part(name, parameter, roles.get(parameter) or role_in(group, parameter), group)


def matched(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Name the parameters of a new group if the others have names, and not if they have none, as torch demands."""
    if isinstance(group, dict) and "params" not in group:
        raise ValueError(f"a parameter group needs 'params', but this one has only {sorted(group)}")
    if not isinstance(group, dict) or isinstance(group["params"], set) or not groups:
        return group  # torch raises for the first two
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if "param_names" not in groups[0]:
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    elif "param_names" not in group and not any(isinstance(entry, tuple) for entry in params):
        params = [(f"group{len(groups)}.{index}", entry) for index, entry in enumerate(params)]
    return {**group, "params": params}


def check_roles(groups: Sequence[dict[str, Any]], group: dict[str, Any], roles: Mapping[Tensor, Role]) -> None:
    """Raise if a group's role differs from when its parameters were added, since their state depends on it."""
    for index, parameter in enumerate(group["params"]):
        known = roles.get(parameter)
        if known is not None and role_in(group, parameter) != known:
            raise ValueError(
                f"{name_of(groups, group, index)} was added as {known}, and its group now says "
                f"{role_in(group, parameter)}: make another optimiser to change a role"
            )
