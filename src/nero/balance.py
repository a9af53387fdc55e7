"""Balanced neurons: zero mean and unit norm (Definitions 1 and 2 of the paper).

:func:`balance_` projects a model, and :func:`is_balanced` checks it. :func:`centred_weight_norm` is the paper's
alternative, a reparameterisation.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nero import backends
from nero.parameters import check_memory, check_real
from nero.radius import wide_neurons
from nero.role import Role
from nero.roles import roles_of
from nero.rule import Number, distance, norm, project, rounding_error, statistics_dtype
from nero.scalars import checked_tolerance
from nero.sharding import agreed, local_of, local_row, sharding_of, spec_of


class Balancer:
    """The projection of many parameters, in a few launches or operations for all.

    A neuron that is balanced to the rounding of its dtype keeps its bits, so that a loaded model resumes exactly.

    Args:
        neurons: parameters that hold neurons, their roles, and the norms that neurons are held to.
        fix_mean: project to zero mean.
        fix_norm: project to those norms.
    """

    def __init__(self, neurons: Iterable[tuple[Tensor, Role, Number]], *, fix_mean: bool, fix_norm: bool) -> None:
        self._held = [_Held(parameter, role, radius) for parameter, role, radius in neurons]
        self._projector = backends.projector(fix_mean=fix_mean, fix_norm=fix_norm)
        # a projector keeps tables for one list of tensors
        self._projector_of_gathered = backends.projector(fix_mean=fix_mean, fix_norm=fix_norm)

    @torch.no_grad()
    def __call__(self, is_wanted: Callable[[Tensor], bool] = lambda _: True) -> None:
        """Balance the parameters that are wanted, in place."""
        whole: list[_Held] = []
        cut: list[_Held] = []
        for held in self._held:
            held.follow()
            (cut if held.sharding.is_cut else whole).append(held)
        wanted = [is_wanted(held.parameter) for held in whole]
        self._projector([held.neurons() for held in whole], wanted)
        for held, is_changed in zip(whole, wanted, strict=True):
            if is_changed:
                held.sharding.write(held.parameter, held.parameter)  # raises the version counter of shards
        for held in cut:
            if is_wanted(held.parameter):
                gathered = held.neurons()  # one at a time: all of them may not fit in memory
                self._projector_of_gathered([gathered])
                held.sharding.write(held.parameter, gathered.tensor)


class _Held:
    """A parameter whose neurons are held to a norm."""

    def __init__(self, parameter: Tensor, role: Role, radius: Number) -> None:
        self.parameter, self._role = parameter, role
        self._radius = local_of(radius) if isinstance(radius, Tensor) else radius
        self.sharding, self.spec = sharding_of(parameter, role), spec_of(parameter)

    def follow(self) -> None:
        """Read the sharding anew if the parameter has another. It is kept, since reading it is slow."""
        spec = spec_of(self.parameter)
        if spec is not self.spec:
            self.sharding, self.spec = sharding_of(self.parameter, self._role), spec

    def neurons(self) -> backends.Neurons:
        """Return the neurons that have elements on this process."""
        tensor = self.sharding.neurons(self.parameter)
        if isinstance(self._radius, Tensor):
            self._radius = self._radius.to(tensor.device)  # the model may have moved
        return backends.Neurons(tensor, self._role.axes, self._radius)


def balance_tensor_(
    tensor: Tensor, role: Role, *, fix_mean: bool = True, fix_norm: bool = True, radius: Number = 1.0
) -> Tensor:
    """Balance, in place, every neuron of one parameter."""
    if role.kind == "neuron" and tensor.numel() and (fix_mean or fix_norm):
        Balancer([(tensor, role, radius)], fix_mean=fix_mean, fix_norm=fix_norm)()
    return tensor


def balance_(model: nn.Module, *, fix_mean: bool = True, fix_norm: bool = True) -> nn.Module:
    """Project every trainable neuron of a model to zero mean and unit norm, in place.

    Gains, biases and frozen parameters stay as they are. So do zero and constant neurons, which have no projection,
    and neurons that are balanced already. A model on the meta device is balanced once it has values: after
    ``to_empty`` and its initialisation, or after loading.

    Args:
        model: any module.
        fix_mean: project to zero mean.
        fix_norm: project to unit norm.

    Returns:
        The model.

    Raises:
        TypeError: if ``model`` is not a module, or a trainable parameter is complex.
        ValueError: if a constraint is not a bool, or the model is on the meta device.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> is_balanced(model)
        False
        >>> is_balanced(balance_(model))
        True
    """
    _check_constraints(fix_mean, fix_norm)
    neurons = [(parameter, role, 1.0) for _, parameter, role in neurons_of(model)]
    Balancer(neurons, fix_mean=fix_mean, fix_norm=fix_norm)()
    return model


@torch.no_grad()
def is_balanced(
    model: nn.Module, *, fix_mean: bool = True, fix_norm: bool = True, tolerance: float | None = None
) -> bool:
    r"""Check that all trainable neurons of a model are balanced.

    Definition 1: "A neuron is balanced if its weight vector :math:`w \in \mathbb{R}^d` satisfies the following
    constraints:"

    .. math::
        \sum_{i=1}^d w_i = 0, \qquad \sum_{i=1}^d w_i^2 = 1 .

    Definition 2: "A network is balanced if all its constituent neurons are balanced." Zero and constant neurons are
    not balanced, and :func:`balance_` leaves them so. A neuron of two elements needs unit norm only, and an
    embedding's padding row of zeros is not a neuron.

    Args:
        model: any module with neurons.
        fix_mean: check for zero mean.
        fix_norm: check for unit norm.
        tolerance: the largest distance of a neuron to the nearest balanced one; by default the rounding error of the
            parameter's dtype, relative to the neuron's norm if that is free.

    All processes that share a sharded model must call this, and get the same answer.

    Raises:
        TypeError: if ``model`` is not a module, or a trainable parameter is complex.
        ValueError: if a constraint is not a bool, the tolerance is not a number of at least 0, or the model has no
            trainable neurons or is on the meta device.
    """
    _check_constraints(fix_mean, fix_norm)
    given = None if tolerance is None else checked_tolerance(tolerance)
    neurons = list(neurons_of(model))
    if not neurons:
        raise ValueError(f"{type(model).__name__} has no trainable neurons; nero.describe(model) lists what it has")
    paddings = paddings_of(model)
    has_off = torch.zeros((), dtype=torch.int32, device="cpu")
    for _, parameter, role in neurons:
        wide, axes = wide_neurons(parameter, role), role.axes
        off = distance(wide, axes, fix_mean=fix_mean, fix_norm=fix_norm)
        if parameter in paddings:
            off[paddings[parameter]] = 0
        allowed: Number = rounding_error(parameter.dtype) if given is None else given
        if given is None and not fix_norm:
            allowed = allowed * norm(wide, axes)
        has_off |= (~(off <= allowed)).any().cpu()
    return not bool(agreed(has_off, (parameter for _, parameter, _ in neurons)))


class CentredWeightNorm(nn.Module):
    """Equation (cwn) of the paper as a parametrization: ``(w - mean) / ||w - mean||`` for each neuron."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.role = role

    def forward(self, raw: Tensor) -> Tensor:
        wide = self.role.view(raw).to(statistics_dtype(raw.dtype))  # sums in half precision lose too much
        return project(wide, self.role.axes).tensor.to(raw.dtype).reshape(raw.shape)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight  # the raw weight starts as the weight it replaces


def centred_weight_norm(module: nn.Module, name: str = "weight") -> nn.Module:
    """Reparameterise a layer by Equation (cwn), the paper's alternative to projection.

    The layer then uses the balanced form of a raw weight, which an ordinary optimiser trains.

    Args:
        module: the layer, changed in place.
        name: the parameter to reparameterise.

    Raises:
        ValueError: if the layer has no such parameter, or it holds no neurons.

    Example:
        >>> layer = centred_weight_norm(nn.Linear(8, 4))
        >>> bool(layer.weight.sum(1).abs().max() < 1e-6)
        True
        >>> [name for name, _ in layer.named_parameters()]
        ['bias', 'parametrizations.weight.original']
    """
    own = dict(module.named_parameters(recurse=False))
    if name not in own:
        names = ", ".join(own) or "none"
        raise ValueError(f"{type(module).__name__} has no parameter {name!r} of its own; it has {names}")
    role = roles_of(module)[name]
    if role.kind != "neuron":
        raise ValueError(f"{type(module).__name__}.{name} is a {role.kind} ({role.why}): it has no fan-in to centre")
    parametrize.register_parametrization(module, name, CentredWeightNorm(role))
    return module


def paddings_of(model: nn.Module) -> dict[Tensor, int]:
    """Map each embedding weight whose padding row is zero to the index of that row, if it is on this process."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    # read _parameters: the attribute of a parametrized table may update buffers
    found: dict[Tensor, int] = {}
    for table in tables:
        weight, padding = table._parameters.get("weight"), table.padding_idx
        if weight is None or padding is None or weight.is_meta:
            continue
        row = local_row(weight, padding)
        if row is not None and not bool(local_of(weight)[row].detach().any()):
            found[weight] = row
    return found


def neurons_of(model: nn.Module, frozen: bool = False) -> Iterator[tuple[str, nn.Parameter, Role]]:
    """Yield the parameters that hold neurons, with names and roles; raise for those that cannot be balanced."""
    roles = roles_of(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            check_real(repr(name), parameter)
        if roles[name].kind != "neuron" or not parameter.numel() or parameter.is_complex():
            continue
        if parameter.requires_grad:
            check_memory(repr(name), parameter)
        if frozen or parameter.requires_grad:
            yield name, parameter, roles[name]


def _check_constraints(fix_mean: object, fix_norm: object) -> None:
    if not isinstance(fix_mean, bool) or not isinstance(fix_norm, bool):
        raise ValueError(
            f"fix_mean and fix_norm must be True or False here, got {fix_mean!r} and {fix_norm!r}; "
            "fix_norm=False leaves norms as they are"
        )
