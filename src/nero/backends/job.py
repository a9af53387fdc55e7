"""The interface of a backend: groups of parameters, and one job per parameter and step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from nero import rule
from nero.options import FixNorm, Rounding
from nero.role import Role
from nero.rounding import cast
from nero.rule import Number, statistics_dtype
from nero.scalars import as_float

#: The state of a parameter in the dtype of its statistics.
STATISTICS = ("grad_norm", "scale", "radius")
#: The state of a parameter but its momentum buffer, with dtypes; None for that of its statistics.
STATE_DTYPES = {**dict.fromkeys(STATISTICS), "step": torch.float32, "skipped": torch.int64}


class Cut(NamedTuple):
    """The cut of a parameter whose neurons have elements on different processes.

    Args:
        fan_in: the number of elements of a whole neuron.
        reduce: sums a tensor over the processes that hold elements of the same neurons; equal if they are the same.
        owners: the fan-in group of each row, if the rows of fan-in groups are on different processes.
    """

    fan_in: int
    reduce: Callable[[Tensor], Tensor]
    owners: Tensor | None = None


class HasGrad(Protocol):
    """A holder of a gradient."""

    grad: Tensor | None


class Member(NamedTuple):
    """A parameter of a group, or the local part of a sharded one, with its state.

    ``holder`` has the gradient: the parameter itself, or what stands for a part.
    """

    name: str
    parameter: Tensor
    role: Role
    state: dict[str, Tensor]
    holder: HasGrad
    cut: Cut | None = None

    @property
    def grad(self) -> Tensor | None:
        """The gradient to step with; ``None`` if there is none, or if the parameter is frozen."""
        return self.holder.grad if self.parameter.requires_grad else None


class Group(NamedTuple):
    """Parameters with the same options, which may change between steps.

    ``generator`` draws their noise in stochastic rounding, if all are on its device; ``None`` for torch's own.
    """

    options: Mapping[str, Any]
    members: Sequence[Member]
    generator: torch.Generator | None = None


class Neurons(NamedTuple):
    """Neurons to be projected in place: a tensor, its fan-in axes, and the norm that each is held to.

    A tensor of radii has the shape of ``tensor`` with 1 along the axes; see :func:`nero.rule.turn` for negative radii.
    """

    tensor: Tensor
    axes: tuple[int, ...]
    radius: Number = 1.0

    @property
    def fan_in(self) -> int:
        """The number of elements of a neuron."""
        return math.prod(self.tensor.shape[axis] for axis in self.axes)


class Job(NamedTuple):
    """One parameter's step: neurons if it has fan-in axes, else gains or biases.

    A backend steps a job in place. It must

    - compute what :func:`nero.backends.eager.apply_rule` computes, in the dtype of ``grad_norm`` or a wider one;
    - round once, as ``nero.rounding`` does;
    - add one to ``step``, and the number of neurons or elements with a non-finite gradient to ``skipped``;
    - leave the value, ``grad_norm`` and ``buffer`` of those unchanged;
    - leave the value of all that have a zero gradient, and a zero ``buffer`` if any, or ``lr=0``;
    - check the state by :func:`has_expected_state` and ``parameter.is_neg()``, if it works on addresses;
    - never write to the gradient, which may have another dtype and other strides, be sparse or be a negated view;
    - bump the parameter's version counter, if torch does not see the write;
    - leave sparse gradients and tensor subclasses to :mod:`nero.backends.foreach`.

    ``pull`` is the group's ``gain_penalty``, signed, or 0 for a parameter that is not a gain. ``buffer`` is m, with the
    axes of ``parameter``, or ``None`` without momentum.
    """

    parameter: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    axes: tuple[int, ...]
    pull: float
    buffer: Tensor | None = None

    def momentum(self, settings: "Settings") -> rule.Momentum | None:
        """Return the momentum of the step; ``None`` if there is none."""
        return None if self.buffer is None else rule.Momentum(self.buffer, settings.momentum, settings.kept_by_step)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a group that the rule reads; ``angle`` is the learning rate over the depth, negative to ascend."""

    angle: Number
    beta: float
    fix_mean: bool
    fix_norm: FixNorm
    scale: float | None
    rounding: Rounding
    longest: float
    momentum: float = 0.0
    kept_by_step: float = 0.0  # see rule.Momentum
    generator: torch.Generator | None = None  # of the noise in stochastic rounding


class Rates(NamedTuple):
    """The options of a group that schedulers change at every step.

    Attributes:
        lr: the learning rate, which may be a tensor on a device.
        divisor: of the learning rate: the depth, negative to ascend.
        momentum: μ.
        kept_by_step: see :class:`nero.rule.Momentum`.
    """

    lr: Number
    divisor: float
    momentum: float
    kept_by_step: float

    @property
    def angle(self) -> Number:
        """The learning rate over the depth, negative to ascend."""
        lr = self.lr.reshape(()) if isinstance(self.lr, Tensor) else float(self.lr)
        return lr if self.divisor == 1 else lr / self.divisor


def rates_of(options: Mapping[str, Any]) -> Rates:
    """Read the rates of a group from its options."""
    momentum = as_float(options["momentum"])
    return Rates(
        options["lr"],
        -float(options["depth"]) if options["maximize"] else float(options["depth"]),
        momentum,
        momentum**2 if options["nesterov"] else momentum,
    )


def settings_of(options: Mapping[str, Any], generator: torch.Generator | None = None) -> Settings:
    """Read the settings of a group from its options."""
    rates = rates_of(options)
    return Settings(
        angle=rates.angle,
        beta=options["beta"],
        fix_mean=options["fix_mean"],
        fix_norm=options["fix_norm"],
        scale=options["scale"],
        rounding=options["rounding"],
        longest=as_float(options["longest_step"]),
        momentum=rates.momentum,
        kept_by_step=rates.kept_by_step,
        generator=generator,
    )


def jobs_of(group: Group) -> list[Job]:
    """Make a job for every member that has a gradient."""
    jobs = []
    for member in group.members:
        grad = member.grad
        if grad is not None and member.parameter.numel():
            _check_shape(member, grad)
            jobs.append(job_of(member, grad, group.options))
    return jobs


def job_of(member: Member, grad: Tensor, options: Mapping[str, Any]) -> Job:
    """Make the job of a member with this gradient."""
    role, state = member.role, member.state
    dtype = statistics_dtype(member.parameter.dtype)
    if state["grad_norm"].dtype != dtype:  # the parameter was cast since its last step
        with torch.inference_mode(False):  # a tensor made in inference mode is read-only outside it
            state.update({key: state[key].to(dtype) for key in STATISTICS if key in state})
    if role.fan_in_groups > 1 and member.cut is None:
        grad = role.view(grad.to_dense() if grad.is_sparse else grad)
    pull = -options["gain_penalty"] if options["maximize"] else options["gain_penalty"]
    parameter = role.view(member.parameter) if member.cut is None else member.parameter
    buffer = None
    if options["momentum"]:
        buffer = state.get("momentum_buffer")
        # users delete it to start anew; compiled code would read beyond that of a parameter that has grown
        if buffer is None or buffer.shape != member.parameter.shape or buffer.dtype != parameter.dtype:
            buffer = state["momentum_buffer"] = _new_buffer(buffer, member.parameter)
        buffer = role.view(buffer) if member.cut is None else buffer
        grad = grad.to_dense() if grad.is_sparse else grad  # momentum moves all rows
    return Job(parameter, grad, state, role.axes, pull if role.is_pulled else 0.0, buffer)


def _check_shape(member: Member, grad: Tensor) -> None:
    """Raise if a parameter, its gradient and its state do not fit each other."""
    shape, state = member.parameter.shape, member.state["grad_norm"]
    if member.cut is not None or torch.compiler.is_compiling():
        return
    fits = grad.shape == shape and state.dim() == member.role.view(member.parameter).dim()
    if not fits or state.numel() * member.role.fan_in(shape) != shape.numel():
        raise ValueError(
            f"{member.name} has the shape {tuple(shape)}, but its gradient or its state is of another: make a new "
            "optimiser after resizing, such as resize_token_embeddings"
        )


@torch.inference_mode(False)  # a tensor made in inference mode is read-only outside it
def _new_buffer(buffer: Tensor | None, parameter: Tensor) -> Tensor:
    """Cast a momentum buffer, or start it at zero."""
    if buffer is None or buffer.shape != parameter.shape:
        return torch.zeros_like(parameter)
    return cast(buffer, parameter.dtype)


def has_entered(state: object) -> TypeGuard[dict[str, Any]]:
    """Return whether an entry of an optimiser's state is Nero's. Users may add to those of frozen parameters."""
    return isinstance(state, Mapping) and "grad_norm" in state


def has_expected_state(job: Job) -> bool:
    """Return whether the state has the device, dtypes, sizes and memory format that compiled code assumes."""
    here, wide = job.parameter.device, statistics_dtype(job.parameter.dtype)
    size = job.state["grad_norm"].numel()
    for key, value in job.state.items():
        if key in STATE_DTYPES and not (
            value.dtype is (STATE_DTYPES[key] or wide)
            and value.device == here
            and value.is_contiguous()
            and value.numel() == (size if key in ("grad_norm", "radius") else 1)
        ):
            return False
    return True


def flat(tensor: Tensor) -> Tensor:
    """Reshape to a vector."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def shaped(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """View vectors in the shapes of other tensors."""
    return [part if other.dim() == 1 else part.view(other.shape) for part, other in zip(parts, like, strict=True)]
