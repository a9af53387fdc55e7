"""The state of parameters: how it starts and follows options, and the groups that a step hands to the backends.

It holds the step, the running average, the radius of neurons, the scale of gains and biases, and the momentum buffer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nero.backends import Group, Member, has_entered, member_of
from nero.balance import balance_tensor_
from nero.groups import Part, name_of
from nero.messages import warn
from nero.options import FixNorm
from nero.parameters import can_read
from nero.process import is_one_of_several
from nero.radius import MIN_CHANGE, initial_radius, measure_roughly, own_radius, wide_neurons
from nero.role import Role
from nero.rounding import Noise, noise_of
from nero.rule import SCALE_AT_ORIGIN, Number, distance, rounding_error, statistics_dtype
from nero.sharding import is_sharded, local_of, sharding_of


@torch.inference_mode(False)  # tensors created in inference mode are read-only outside it
@torch.no_grad()
def initial_state(
    parameter: Tensor, role: Role, options: Mapping[str, Any], grown: Tensor | None = None
) -> dict[str, Tensor]:
    """Balance a parameter that enters the optimiser, and return its state. ``grown`` masks neurons that stay short."""
    dtype = statistics_dtype(parameter.dtype)
    sharding = sharding_of(parameter, role)
    average = torch.zeros(sharding.state_shape(parameter), dtype=dtype, device=parameter.device)
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "grad_norm": sharding.as_state(average),
        "skipped": torch.zeros((), dtype=torch.int64, device=parameter.device),
    }
    if role.kind == "neuron":
        radius: Number = 1.0
        if parameter.numel() and (radii := initial_radius(parameter, role, options["fix_norm"], grown)) is not None:
            radius = state["radius"] = sharding.as_state(radii)
        fix_norm = bool(options["fix_norm"])
        balance_tensor_(parameter, role, fix_mean=options["fix_mean"], fix_norm=fix_norm, radius=radius)
    else:
        state["scale"] = initial_scale(parameter, role)
    match_momentum(parameter, role, state, options["momentum"])
    return state


def initial_scale(parameter: Tensor, role: Role) -> Tensor:
    """Return the scale of a tensor of gains or biases, from their values."""
    size = sharding_of(parameter, role).mean(parameter.to(statistics_dtype(parameter.dtype)).abs())
    # a gain is a factor: it must be able to open, also from zero or from LayerScale's 1e-6
    return size.clamp_min(1.0) if role.kind == "gain" else torch.where(size > 0, size, SCALE_AT_ORIGIN)


@torch.inference_mode(False)  # as above
@torch.no_grad()
def match_momentum(parameter: Tensor, role: Role, state: dict[str, Any], momentum: float) -> bool:
    """Add a momentum buffer of zeros if there is momentum and no buffer; drop the buffer if there is no momentum.

    Returns:
        Whether a buffer was added.
    """
    if not momentum:
        state.pop("momentum_buffer", None)
        return False
    if state.get("momentum_buffer") is not None:
        return False
    state["momentum_buffer"] = sharding_of(parameter, role).as_parameter(torch.zeros_like(local_of(parameter)))
    return True


def match_radius(parameter: Tensor, role: Role, state: dict[str, Tensor], fix_norm: FixNorm) -> None:
    """Match the radius in a neuron's state with an option that may have changed."""
    if not parameter.numel():
        return
    if "radius" not in state:
        if fix_norm == "initial":
            state["radius"] = sharding_of(parameter, role).as_state(own_radius(parameter, role))
        return
    known = local_of(state["radius"])  # changed in place, since captured graphs hold the address
    if fix_norm is True:
        known.sign_()  # 1: norm one; -1: started at zero, norm at most one
    # infinite where the norm was free when the neuron entered. Each process decides for its own neurons, without the
    # others: a step may be one of this process alone
    elif fix_norm == "initial" and can_read(parameter) and bool(known.isinf().any()):
        known.copy_(torch.where(known.isinf(), own_radius(parameter, role), known))


@torch.inference_mode(False)  # as above
@torch.no_grad()
def read_again(parts: Iterable[Part], state: Mapping[Tensor, dict[str, Any]]) -> list[Part]:
    """Read scales and norms again: weights may be loaded or sent after the optimiser is made.

    Parameters that have made a step keep theirs. So do sharded gains and biases, since all processes would have to
    join, and neurons that still are as the optimiser has balanced them.

    Returns:
        Parameters that the next step moves, if not sharded, with neurons that are far from balanced.
    """
    changed: list[Part] = []
    for part in parts:
        _, parameter, role, group = part
        own = state.get(parameter)
        if not has_entered(own) or not can_read(parameter) or not parameter.numel() or float(own["step"]) > 0:
            continue
        if role.kind == "neuron" and group["fix_norm"] == "initial":
            if "radius" in own:
                _read_norms_again(part, local_of(own["radius"]))
        elif not is_sharded(parameter) and role.kind != "neuron":
            own["scale"].copy_(initial_scale(parameter, role))  # in place: captured graphs hold the address
        elif not is_sharded(parameter):
            size, shift, _ = measure_roughly(parameter, role)
            radius = _read_zeros_again(own, size, 1.0 if group["fix_norm"] else torch.inf)
            is_off = ((size - 1).abs() > MIN_CHANGE) & group["fix_norm"]
            is_off |= (shift > MIN_CHANGE * size) & group["fix_mean"]
            is_off &= radius > 0
            if not (parameter.requires_grad and parameter.grad is not None and bool(is_off.any())):
                continue
            if not (group["fix_mean"] and _are_clipped(size[is_off], shift[is_off])):
                changed.append(part)
    return changed


def _are_clipped(size: Tensor, shift: Tensor) -> bool:
    """Return whether neurons are balanced but for one norm below one: ``max_norm`` of an embedding clips at each use.

    Balancing does not change what such a layer computes.
    """
    least = size.amin() * (1 + MIN_CHANGE)
    return bool((size <= least.clamp_max(1)).all() & (shift <= MIN_CHANGE * size).all())


def _read_norms_again(part: Part, known: Tensor) -> None:
    """Set the radius of neurons to the norms that they have now, if these are not those of the balanced neurons."""
    _, parameter, role, group = part
    radius = own_radius(parameter, role)
    if known.shape != radius.shape:  # resized: the step says so
        return
    if group["fix_mean"] and not is_one_of_several():  # replicas must all read the values that they now have
        off = distance(wide_neurons(parameter, role), role.axes, radius=known)
        radius = torch.where(off <= rounding_error(parameter.dtype) * known.abs(), known, radius)
    known.copy_(radius)


def _read_zeros_again(state: dict[str, Any], size: Tensor, usual: float) -> Tensor:
    """Set the radius of neurons that are zero, or no longer, and return the radius of all neurons."""
    known = state.get("radius", torch.full_like(size, usual))
    if known.shape != size.shape:  # as above
        return torch.full_like(size, -1.0)
    # a neuron that was zero, and is longer than neurons grow, was loaded
    radius = torch.where((known < 0) & (size > 1 + MIN_CHANGE), usual, known).masked_fill(size == 0, -1.0)
    if "radius" in state:
        known.copy_(radius)
    elif bool((radius < 0).any()):
        state["radius"] = radius
    return radius


def groups_of(
    param_groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    role_in: Callable[[dict[str, Any], Tensor], Role],
) -> list[Group]:
    """Return the parameters that have state, as backends see them.

    Args:
        param_groups: the optimiser's groups.
        state: the optimiser's state.
        role_in: returns the role of a parameter of a group.
    """
    groups: list[Group] = []
    generators: dict[Noise, torch.Generator] = {}
    is_switched_on = False
    for group in param_groups:
        members: dict[Noise | None, list[Member]] = {}
        for index, parameter in enumerate(group["params"]):
            own, role = state.get(parameter), role_in(group, parameter)
            if not has_entered(own):
                continue
            if role.kind == "neuron":
                match_radius(parameter, role, own, group["fix_norm"])
            if match_momentum(parameter, role, own, group["momentum"]) and "max_momentum" in group:
                is_switched_on = True
            noise = noise_of(parameter, role) if group["rounding"] == "stochastic" else None
            members.setdefault(noise, []).append(member_of(name_of(param_groups, group, index), parameter, role, own))
        for noise, alike in (members or {None: []}).items():
            generator = noise and generators.setdefault(noise, noise.generator())
            groups.append(Group(group, alike, generator))
    if is_switched_on and not torch.compiler.is_compiling():
        warn(
            "a scheduler has switched on momentum, which nero.Nero was made without: give the scheduler "
            "cycle_momentum=False, or give nero.Nero a momentum"
        )
    return groups


class Sight:
    """A note of whether users have seen the state. Wrappers that copy the optimiser's attributes share it."""

    is_seen = False


class UnseenState(torch.optim.Optimizer):
    """An optimiser that notices when others read :attr:`state`.

    Backends keep addresses of the state's tensors. To compare these at each step takes almost as long as all other
    checks together, if tensors are small and many. But nobody can replace a tensor without a look at the state, or at
    its :meth:`state_dict`. So the comparison is left out until someone has had one.

    Attributes:
        state: the state of every parameter.
    """

    _state: defaultdict[Tensor, dict[str, Any]]
    _sight: Sight

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        self._sight.is_seen = True
        return self._state

    @state.setter
    def state(self, state: defaultdict[Tensor, dict[str, Any]]) -> None:
        if not hasattr(self, "_sight"):  # the constructor of torch sets the state
            self._sight = Sight()
        else:
            self._sight.is_seen = True
        self._state = state

    def _has_entered(self, parameter: Tensor) -> bool:
        return has_entered(self._state.get(parameter))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sight = getattr(self, "_sight", None) or Sight()
        if "state" in state:
            self.state = state["state"]
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
