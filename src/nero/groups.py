"""Parameter groups: made by role, completed, and checked when they are added and when their options change."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nero import backends
from nero.messages import and_more, warn
from nero.options import OPTIONS, check_lr, check_option, check_options, make_plain, own_options
from nero.parameters import check_parameter
from nero.role import Override, Role
from nero.roles import check_unflattened, role_from_shape, roles_of
from nero.rounding import HALVES
from nero.scalars import IMMUTABLE, are_same, as_float
from nero.sharding import local_of

#: The least angle of a step in half precision. Rounding of smaller steps to nearest leaves three of four weights, and
#: most gains of one, as they were.
MIN_ANGLE_IN_EPS = 0.15
#: Options that schedulers change at every step.
SCHEDULED = ("lr", "momentum")

_options = itemgetter(*OPTIONS)
_others = itemgetter(*(name for name in OPTIONS if name not in SCHEDULED))


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
        options: options for all of these groups, such as ``lr``. Each group gets its own copy of a tensor ``lr``.

    Raises:
        TypeError: if ``model`` is not a module, or an option is unknown.

    Example:
        >>> groups = param_groups(nn.Linear(8, 4), lr=0.02)
        >>> [(group["role"], group["fan_in_axes"], group["lr"]) for group in groups]
        [('neuron', (1,), 0.02), ('bias', (), 0.02)]
    """
    options = own_options(options, "a parameter group")
    groups: dict[tuple[Role, bool], dict[str, Any]] = {}
    roles = roles_of(model, overrides)
    parameters = dict(model.named_parameters())
    for name, role in roles.items():
        group = groups.setdefault(
            (role, role.is_pulled),
            {
                "params": [],
                "role": role.kind,
                "fan_in_axes": role.fan_in_axes,
                "fan_in_groups": role.fan_in_groups,
                **options,
                **({"lr": own_rate(options["lr"])} if "lr" in options else {}),
                **({"gain_penalty": 0.0} if role.kind == "gain" and not role.is_pulled else {}),
            },
        )
        group["params"].append((name, parameters[name]))
    return list(groups.values())


def own_rate(lr: Any) -> Any:
    """Copy a learning rate that is a tensor: schedulers change the tensor of each group in turn."""
    return lr.detach().clone() if isinstance(lr, Tensor) else lr


def check_params(params: object) -> None:
    """Raise if an optimiser was given a class, a method, a tensor or a single group instead of parameters."""
    if isinstance(params, dict):
        fix = "put it into a list, as in [group]" if "params" in params else "give the model itself"
        raise TypeError(f"expected a module, parameters or a list of groups, got a dict: {fix}")
    if isinstance(params, Tensor):
        raise TypeError(
            "expected a module, parameters or a list of groups, got a tensor: put it into a list, as in [tensor]"
        )
    if isinstance(params, str) or not (isinstance(params, (nn.Module, Iterable)) or callable(params)):
        raise TypeError(f"expected a module, parameters or a list of groups, got {params!r}")
    if callable(params) and not isinstance(params, nn.Module):
        raise TypeError(f"expected a module or parameters, got {params!r}: call it first, as in model.parameters()")


def role_in(group: Mapping[str, Any], parameter: Tensor) -> Role:
    """Return a parameter's role by its group's options, or else by its shape."""
    kind, axes = group["role"], group["fan_in_axes"]
    if kind is None and axes is None:
        if group["fan_in_groups"] != 1:
            raise ValueError(f"fan_in_groups={group['fan_in_groups']!r} needs fan_in_axes: give both, or neither")
        return role_from_shape(parameter.shape)
    return Role(kind or "neuron", axes, group["fan_in_groups"]).on(parameter.shape)


def name_of(groups: Sequence[dict[str, Any]], group: dict[str, Any], index: int) -> str:
    """Return the name of a parameter of a group."""
    names = group.get("param_names")
    if names is not None and index < len(names):  # users may append to the parameters alone
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


def completed(group: Any, groups: Sequence[dict[str, Any]], lr: float | Tensor) -> dict[str, Any]:
    """Give a new group its own learning rate, and names if the other groups have names; raise for unknown options.

    Torch demands that either all groups name their parameters, or none does.
    """
    if not isinstance(group, dict):
        raise TypeError(f"a parameter group must be a dict, like {{'params': [...]}}, got {group!r}")
    if "params" not in group:
        raise ValueError(f"a parameter group needs 'params', but this one has only {sorted(group)}")
    own = {"lr": own_rate(lr), **own_options(group, "a parameter group")}
    make_plain(own)
    freeze_axes(own)
    if isinstance(own["params"], list | tuple) and any(isinstance(entry, nn.Module) for entry in own["params"]):
        raise TypeError("expected parameters, got a list of modules: give one module, as in nn.ModuleList([...])")
    if any(own["lr"] is other["lr"] for other in groups):  # schedulers would change a shared tensor several times
        own["lr"] = own_rate(own["lr"])
    if isinstance(own["params"], set) or not groups:
        return own  # torch raises for a set
    params = [own["params"]] if isinstance(own["params"], Tensor) else list(own["params"])
    if "param_names" not in groups[0]:
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    elif not params:
        own["param_names"] = []  # torch finds no names in an empty group
    elif "param_names" not in own and not any(isinstance(entry, tuple) for entry in params):
        params = [(f"group{len(groups)}.{index}", entry) for index, entry in enumerate(params)]
    return {**own, "params": params}


def freeze_axes(group: dict[str, Any]) -> None:
    """Replace fan-in axes in a list by a tuple: a list could change in place without notice."""
    if isinstance(group.get("fan_in_axes"), list):
        group["fan_in_axes"] = tuple(group["fan_in_axes"])


def checked_role(groups: Sequence[dict[str, Any]], group: dict[str, Any], index: int) -> Role:
    """Return the role of a parameter of a new group; raise if Nero cannot train the parameter."""
    name, parameter = name_of(groups, group, index), group["params"][index]
    check_parameter(name, parameter)
    backends.check_backend(group["backend"], name, *([local_of(parameter)] if parameter.requires_grad else []))
    try:
        return role_in(group, parameter)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_roles(groups: Sequence[dict[str, Any]], group: dict[str, Any], roles: Mapping[Tensor, Role]) -> None:
    """Raise if a group's role differs from when its parameters were added, since their state depends on it."""
    for index, parameter in enumerate(group["params"]):
        known = roles.get(parameter)
        if known is None:
            continue
        name = name_of(groups, group, index)
        try:
            role = role_in(group, parameter)
        except ValueError as error:
            check_unflattened([(name, parameter)])
            raise ValueError(
                f"{name} was added as {known}: make another optimiser to change a role ({error})"
            ) from error
        if role != known:
            check_unflattened([(name, parameter)])
            raise ValueError(
                f"{name} was added as {known}, and its group now says {role}: make another optimiser to change a role"
            )


class OptionChanges:
    """The options of all groups at the last step."""

    def __init__(self) -> None:
        self._options: list[Any] = []
        self._others: list[Any] = []
        self._is_fixed = False  # whether no learning rate can change in place

    def check(self, groups: Sequence[dict[str, Any]], roles: Mapping[Tensor, Role]) -> bool:
        """Validate options that have changed; return whether the step must be planned anew."""
        options = list(chain.from_iterable(map(_options, groups)))
        if self._is_fixed and are_same(options, self._options):
            return False
        for group in groups:
            make_plain(group)
            check_lr(group["lr"], wait=False)
            check_option("momentum", group["momentum"])
            freeze_axes(group)
        # momentum adds or drops buffers, but its value may change at each step
        others = [*chain.from_iterable(map(_others, groups)), *(bool(group["momentum"]) for group in groups)]
        has_changed = False
        if not are_same(others, self._others):
            for group in groups:
                check_options(group, wait=False)
                check_roles(groups, group, roles)
                if group["params"]:
                    backends.check_backend(group["backend"], name_of(groups, group, 0))
            has_changed = others != self._others
            self._others = others
        self._options = options
        self._is_fixed = IMMUTABLE.issuperset(type(group["lr"]) for group in groups)
        return has_changed


def warn_if_lost(parts: Iterable[Part]) -> None:
    """Warn if steps are so small that rounding to half precision loses most of them."""
    lost = [part for part in parts if part.parameter.dtype in HALVES and _is_lost(part)]
    if lost:
        _, parameter, _, group = lost[0]
        what, angle = "lr" if group["depth"] == 1 else "lr / depth", as_float(group["lr"]) / group["depth"]
        warn(
            f"the values of {and_more([part.name for part in lost])} are {parameter.dtype}, and rounding to it loses "
            f"most of a step of {what} = {angle:.2g}: give rounding='stochastic', or train float32 parameters, with "
            "torch.autocast for speed"
        )


def _is_lost(part: Part) -> bool:
    group = part.group
    if group["rounding"] != "nearest" or group["scale"] is not None or group["depth"] == "auto":
        return False
    # a step changes a weight by about this angle of the weight, whatever the fan-in
    return bool(0 < as_float(group["lr"]) / group["depth"] < MIN_ANGLE_IN_EPS * torch.finfo(part.parameter.dtype).eps)
