"""The constraint set: neurons of zero mean and unit norm (Definitions 1 and 2 of the paper).

Tensors are balanced by :func:`project`; models by :func:`balance_`, :func:`is_balanced` and, for
any optimiser, :func:`balance_after_step`. :func:`centred_weight_norm` is the rival, which writes
the same constraints into the network instead.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from nero import rows
from nero.roles import Role, roles_of
from nero.rounding import rounded
from nero.whole import real

Radius: TypeAlias = float | Tensor
FixNorm: TypeAlias = bool | Literal["initial"]

#: What a step, or a radius, is relative to where a parameter comes with nothing: the paper's
#: default for biases that start at zero.
SCALE_AT_ORIGIN = 0.01


class Projected(NamedTuple):
    """A projection, and for which neurons there was one."""

    tensor: Tensor
    possible: Tensor


def norm(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The norm of each neuron, axes kept; right from the smallest number to the largest.

    The square root of a sum of squares leaves float32's range long before the norm does, so the
    entries are divided by the largest of them first.
    """
    if not axes:
        return tensor.abs()
    peak = tensor.detach().abs().amax(axes, keepdim=True)
    unit = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
    return unit * (tensor / unit).square().sum(axes, keepdim=True).sqrt()


def project(
    tensor: Tensor, axes: tuple[int, ...], *, fix_mean: bool = True, fix_norm: bool = True, radius: Radius = 1.0
) -> Projected:
    """Every neuron with its mean taken off and its norm set to the radius.

    A neuron for which that cannot be done (at the origin, constant, or not finite) comes back as
    it was. A neuron of two entries is held to the norm alone: with both constraints, only two
    points would be left.
    """
    peak = tensor.detach().abs().amax(axes, keepdim=True)
    possible = (peak > 0) & peak.isfinite()
    if fix_mean and math.prod([tensor.shape[axis] for axis in axes]) == 2:
        fix_mean = False
    if not (fix_mean or fix_norm):
        return Projected(tensor, possible)
    unit = tensor / torch.where(possible, peak, 1.0)
    square = unit.square().sum(axes, keepdim=True)
    if fix_mean:
        unit = unit - unit.mean(axes, keepdim=True)
        left = unit.square().sum(axes, keepdim=True)
        # what rounding leaves of a constant neuron is no direction
        possible = possible & (left > (16 * torch.finfo(tensor.dtype).eps) ** 2 * square)
        square = left
    if fix_norm:
        unit = unit / torch.where(possible, square, 1.0).sqrt() * radius
    else:
        possible = possible & (peak < torch.finfo(tensor.dtype).max / 2)
        unit = unit * peak
    return Projected(torch.where(possible, unit, tensor), possible)


@torch.no_grad()
def balance_tensor_(
    tensor: Tensor, role: Role, *, fix_mean: bool = True, fix_norm: bool = True, radius: Radius = 1.0
) -> Tensor:
    """Balance, in place, every neuron of one parameter."""
    if role.kind == "neuron" and tensor.numel():
        view = role.view(tensor)
        if not rows.project_(view, role.axes, fix_mean=fix_mean, fix_norm=fix_norm, radius=radius):
            balanced = project(_wide(view), role.axes, fix_mean=fix_mean, fix_norm=fix_norm, radius=radius).tensor
            view.copy_(rounded(balanced, view.dtype, "nearest"))
    return tensor


def balance_(model: nn.Module, *, fix_mean: bool = True, fix_norm: bool = True) -> nn.Module:
    """Project every trainable neuron of the model to zero mean and unit norm, in place.

    Gains, biases and frozen parameters stay as they are; so do neurons at the origin and constant
    ones, for which there is no projection. A model that is built on the meta device is balanced when
    it has its values: after ``to_empty`` and its initialisation, or after loading.

    Raises:
        TypeError: something that is not a module, a complex parameter that is trained.
        ValueError: a constraint that is neither on nor off, a model on the meta device.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> is_balanced(model)
        False
        >>> is_balanced(balance_(model))
        True
    """
    _check_constraints(fix_mean, fix_norm)
    for _, parameter, role in list(_neurons(model)):  # all are looked at before any is changed
        balance_tensor_(parameter, role, fix_mean=fix_mean, fix_norm=fix_norm)
    return model


@torch.no_grad()
def is_balanced(
    model: nn.Module, *, fix_mean: bool = True, fix_norm: bool = True, tolerance: float | None = None
) -> bool:
    r"""Whether all trained neurons are balanced.

    Definition 1: "A neuron is balanced if its weight vector :math:`w \in \mathbb{R}^d` satisfies the following
    constraints:"

    .. math::
        \sum_{i=1}^d w_i = 0, \qquad \sum_{i=1}^d w_i^2 = 1 .

    Definition 2: "A network is balanced if all its constituent neurons are balanced." One at the origin is not, nor is
    a constant one, and :func:`balance_` leaves them so. A neuron of two entries is held to the norm alone, and an
    embedding's padding of zeros is no neuron.

    Args:
        model: any module with neurons.
        fix_mean: ask that every neuron's mean be zero.
        fix_norm: ask that every neuron's norm be one.
        tolerance: how far a neuron may be from the nearest that is balanced, as a distance; by default what
            rounding to the parameter's dtype explains.

    Raises:
        TypeError: something that is not a module, a complex parameter that is trained.
        ValueError: a constraint that is neither on nor off, a tolerance that is no number or negative, a model without
            neurons to train, or on the meta device.
    """
    _check_constraints(fix_mean, fix_norm)
    given = None if tolerance is None else checked_tolerance(tolerance)
    neurons = list(_neurons(model))
    if not neurons:
        raise ValueError(f"{type(model).__name__} has no neurons to train; nero.describe(model) says what it has")
    paddings = paddings_of(model)
    for _, parameter, role in neurons:
        wide = _wide(role.view(parameter))
        rounding = torch.finfo(parameter.dtype).eps + 16 * torch.finfo(wide.dtype).eps
        allowed = rounding if given is None else given
        nearest, possible = project(wide, role.axes, fix_mean=fix_mean, fix_norm=fix_norm)
        # at the origin or constant, all that are balanced are as near
        alike = torch.hypot(norm(wide, role.axes), wide.new_tensor(float(fix_norm)))
        distance = torch.where(possible, norm(nearest - wide, role.axes), alike)
        if parameter in paddings:
            distance[paddings[parameter]] = 0
        if not bool((distance <= allowed).all()):
            return False
    return True


def balance_after_step(
    optimiser: torch.optim.Optimizer,
    model: nn.Module,
    *,
    fix_mean: bool = True,
    fix_norm: FixNorm = True,
    at_once: bool = True,
) -> RemovableHandle:
    """Hold a model's neurons to the constraints under any other optimiser.

    Args:
        optimiser: LAMB, Madam, Adam, SGD, ...: whatever has ``register_step_post_hook``.
        model: whose neurons to balance after each step; those without a gradient stay untouched.
        fix_mean: hold every neuron to zero mean.
        fix_norm: hold every neuron to unit norm, or with ``"initial"`` to the norm it has now.
        at_once: project now as well. The paper's baselines did not.

    Returns:
        a handle whose ``remove()`` ends it.

    Raises:
        TypeError: no optimiser, something that is not a module, a complex parameter that is trained.
        ValueError: a constraint that is none, or a model on the meta device, whose parameters will be replaced.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimiser = torch.optim.Adam(model.parameters())
        >>> handle = balance_after_step(optimiser, model)
        >>> _ = model(torch.randn(2, 8)).square().sum().backward()
        >>> optimiser.step()
        >>> is_balanced(model)
        True
    """
    if fix_norm not in (True, False, "initial"):
        raise ValueError(f"fix_norm must be True, False or 'initial', but it is {fix_norm!r}")
    if isinstance(optimiser, type) or not hasattr(optimiser, "register_step_post_hook"):
        raise TypeError(f"balance_after_step needs a torch.optim.Optimizer, not {optimiser!r}")
    neurons = [
        (parameter, role, initial_radius(parameter, role) if fix_norm == "initial" else 1.0)
        for _, parameter, role in _neurons(model, frozen=True)
    ]

    def project_all(trained: Callable[[Tensor], bool]) -> None:
        for parameter, role, radius in neurons:
            if trained(parameter):
                balance_tensor_(parameter, role, fix_mean=fix_mean, fix_norm=bool(fix_norm), radius=radius)

    if at_once:
        project_all(lambda parameter: parameter.requires_grad)
    return optimiser.register_step_post_hook(
        lambda *_: project_all(lambda parameter: parameter.requires_grad and parameter.grad is not None)
    )


@torch.no_grad()
def initial_radius(parameter: Tensor, role: Role) -> Tensor:
    """The norm each neuron comes with; 0.01 for one that comes with none.

    Finite entries may have a norm that is not: half of the largest number, then, from where a step can go on.
    """
    size = norm(_wide(role.view(parameter)), role.axes)
    return torch.where(size > 0, size.clamp_max(torch.finfo(size.dtype).max / 2), SCALE_AT_ORIGIN)


class CentredWeightNorm(nn.Module):
    """Eq. (cwn) of the paper as a parametrization: ``(w - mean) / ||w - mean||``, neuron by neuron."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.role = role

    def forward(self, raw: Tensor) -> Tensor:
        return project(self.role.view(raw), self.role.axes).tensor.reshape(raw.shape)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight  # the raw weight starts as the weight it replaces


def centred_weight_norm(module: nn.Module, name: str = "weight") -> nn.Module:
    """Write the constraints into the network: the rival of projected descent (Eq. (cwn)).

    The layer then uses the balanced form of a raw weight, which an ordinary optimiser trains.

    Args:
        module: the layer, which is changed in place.
        name: which of its parameters to reparameterise.

    Example:
        >>> layer = centred_weight_norm(nn.Linear(8, 4))
        >>> bool(layer.weight.sum(1).abs().max() < 1e-6)
        True
        >>> [name for name, _ in layer.named_parameters()]
        ['bias', 'parametrizations.weight.original']
    """
    own = dict(module.named_parameters(recurse=False))
    if name not in own:
        raise ValueError(f"{type(module).__name__} has no parameter {name!r} of its own; it has {', '.join(own)}")
    role = roles_of(module)[name]
    if role.kind != "neuron":
        raise ValueError(f"{type(module).__name__}.{name} is a {role.kind} ({role.why}): it has no fan-in to centre")
    parametrize.register_parametrization(module, name, CentredWeightNorm(role))
    return module


def _check_constraints(fix_mean: object, fix_norm: object) -> None:
    """Raise unless each is on or off: with ``"initial"``, which others take, neurons would lose their norms here."""
    if fix_mean not in (True, False) or fix_norm not in (True, False):
        raise ValueError(
            f"fix_mean and fix_norm must be True or False here, but they are {fix_mean!r} and {fix_norm!r}; "
            "fix_norm=False leaves norms as they are"
        )


def checked_tolerance(tolerance: float) -> float:
    """A tolerance as Python's own number; raise unless it is one, and not negative."""
    if not real(tolerance) >= 0:
        raise ValueError(f"tolerance must be a number of 0 or more, like 1e-6, or None, but it is {tolerance!r}")
    return real(tolerance)


def _neurons(model: nn.Module, frozen: bool = False) -> Iterator[tuple[str, nn.Parameter, Role]]:
    roles = roles_of(model)
    parameters = dict(model.named_parameters())
    for name, role in roles.items():
        if parameters[name].is_complex():
            if parameters[name].requires_grad:
                raise TypeError(
                    f"{name!r} is complex: hold it as a real parameter of twice the size (torch.view_as_real)"
                )
            continue
        if role.kind == "neuron" and parameters[name].numel() and (frozen or parameters[name].requires_grad):
            if parameters[name].requires_grad:
                check_memory(repr(name), parameters[name])
            yield name, parameters[name], role


def paddings_of(model: nn.Module) -> dict[Tensor, int]:
    """Which row of an embedding's table is a padding of zeros, and so no neuron."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    # of its own: asking a parametrised one for its weight may change buffers
    found = ((table._parameters.get("weight"), table.padding_idx) for table in tables)
    return {
        weight: padding
        for weight, padding in found
        if weight is not None
        and padding is not None
        and not weight.is_meta
        and not bool(weight.detach()[padding].any())
    }


def check_memory(name: str, parameter: Tensor) -> None:
    """Raise if a parameter has a shape and no values."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: give it memory (module.to_empty) and values first")


def _wide(tensor: Tensor) -> Tensor:
    """At least in float32: sums in half precision are no sums."""
    return tensor.to(statistics_dtype(tensor.dtype))


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter's statistics are kept and its step is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
