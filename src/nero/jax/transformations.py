r"""Nero as gradient transformations of optax: the step, the learning rate, then the constraints.

:func:`nero` chains three transformations, which also work apart:

1. :func:`scale_by_nero` turns a gradient g into the step :math:`\sigma\, g / \sqrt{\bar g^2 / (1 - \beta^t)}`.
2. ``optax.scale_by_learning_rate`` multiplies it by -η.
3. :func:`keep_balanced` changes the update so that the new weights are balanced.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nero.jax import rule
from nero.jax.options import check_constraints, check_learning_rate, checked, explain_options
from nero.jax.roles import Tree, check_arrays, grouped, map_with_roles, roles_of
from nero.jax.rule import SCALE_AT_ORIGIN, Number, statistics_dtype
from nero.role import Role

FixNorm: TypeAlias = bool | Literal["initial"]
Schedule: TypeAlias = Callable[[Any], Any]  # optax.Schedule, whose long unions would fill the API page


class NeroState(NamedTuple):
    """The state of :func:`scale_by_nero`. Its trees are like the parameters.

    Attributes:
        count: t, the number of steps.
        grad_norm: ḡ, one number per neuron, gain or bias; 1 along the fan-in axes.
        scale: σ of gains and biases. For neurons, one where the neuron started at zero, or else zero, which stands for
            its norm.
        skipped: how many updates each neuron, gain or bias has skipped for a gradient that is not finite.
        momentum_buffer: m; None without momentum.
    """

    count: Array  # type: ignore[assignment]  # the name that optax gives it; a tuple has a method of that name
    grad_norm: Tree
    scale: Tree
    skipped: Tree
    momentum_buffer: Tree | None


class BalanceState(NamedTuple):
    """The state of :func:`keep_balanced`.

    Attributes:
        radius: the norm of each balanced neuron. Where it is negative, the neuron started at zero: its mean is free
            and its norm is at most ``-radius``. Unused for gains and biases.
    """

    radius: Tree


class _Start(NamedTuple):
    grad_norm: Array
    scale: Array
    skipped: Array


@explain_options
def nero(
    learning_rate: Number | Schedule = 0.01,
    *,
    beta: Number = 0.999,
    momentum: Number | None = None,
    nesterov: bool = True,
    longest_step: Number = math.inf,
    fix_mean: bool = True,
    fix_norm: FixNorm = True,
    scale: Number | None = None,
    gain_penalty: Number = 0.0,
    roles: Tree | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Return the neuronal rotator: a step turns every neuron through an angle and keeps it balanced.

    Every neuron, a weight vector :math:`w` with gradient :math:`g`, takes the step

    .. math::
        \bar g^2 &\leftarrow \beta \bar g^2 + (1 - \beta) \|g\|^2 \\
        w &\leftarrow w - \eta \, \|w\| \, \frac{g}{\sqrt{\bar g^2 / (1 - \beta^t)}} \\
        w &\leftarrow w - \operatorname{mean}(w), \qquad w \leftarrow w / \|w\|

    and every gain or bias the same without the last line, relative to its scale :math:`\sigma`. ``init`` cannot change
    the parameters, so balance them first with :func:`nero.jax.balance`. A neuron that is not balanced is projected by
    its first step.

    Args:
        learning_rate: η, the angle in radians through which a neuron turns in a step, or a schedule.
        beta: β, the share of the running average that a step keeps.
        momentum: μ, the share that an average m of gradients keeps in a step. The step goes along m instead of g, and
            ḡ averages the norm of what the step goes along. m takes as much memory as the parameters.
        nesterov: go along μ m + (1 - μ) g, as Nesterov's momentum does.
        longest_step: the longest step, as a multiple of the angle.
        fix_mean: hold every neuron to zero mean.
        fix_norm: hold every neuron to unit norm, or with ``"initial"`` to its norm in ``init``. A neuron that is zero
            there is held to a norm of at most one.
        scale: σ, what a step's size is relative to. By default a neuron's norm, and for gains and biases their mean
            absolute value in ``init``, but at least one for gains, and 0.01 for biases that are zero.
        gain_penalty: λ of the penalty λ/2 (γ - 1)² on every gain γ, added to the loss.
        roles: the role of each parameter, by default as :func:`nero.jax.roles_of` reads them from names and shapes.

    Returns:
        A transformation whose ``update`` needs the parameters. Its updates are float32, or float64 for float64.

    Raises:
        TypeError: if an option is unknown; the message names the fix.
        ValueError: if an option is out of its range.

    Example:
        >>> optimiser = nero(optax.cosine_decay_schedule(0.01, decay_steps=1000))

    Reference:
        Liu, Bernstein, Meister and Yue, 2021, Algorithm 1.
    """
    check_learning_rate(learning_rate)
    return optax.chain(
        scale_by_nero(
            beta=beta,
            momentum=momentum,
            nesterov=nesterov,
            longest_step=longest_step,
            scale=scale,
            gain_penalty=gain_penalty,
            roles=roles,
        ),
        optax.scale_by_learning_rate(learning_rate),
        keep_balanced(fix_mean=fix_mean, fix_norm=fix_norm, roles=roles),
    )


@explain_options
def scale_by_nero(
    *,
    beta: Number = 0.999,
    momentum: Number | None = None,
    nesterov: bool = True,
    longest_step: Number = math.inf,
    scale: Number | None = None,
    gain_penalty: Number = 0.0,
    roles: Tree | None = None,
) -> optax.GradientTransformation:
    """Return the first part of :func:`nero`: the step for a learning rate of one, before the constraints.

    A step is about as long as its neuron, or as σ for a gain or bias. It is zero where the gradient is zero or not
    finite. Multiply it by a learning rate and end the chain with :func:`keep_balanced`. The arguments are those of
    :func:`nero`.
    """
    beta = checked("beta", beta, lambda x: 0 <= x < 1, "in [0, 1), like 0.999")
    longest_step = checked("longest_step", longest_step, lambda x: x >= 1, "at least 1, like 3, or math.inf")
    gain_penalty = checked("gain_penalty", gain_penalty, lambda x: 0 <= x < math.inf, "finite and not negative")
    if scale is not None:
        scale = checked("scale", scale, lambda x: 0 < x < math.inf, "finite and positive, or None")
    if nesterov not in (True, False):
        raise ValueError(f"nesterov must be True or False, got {nesterov!r}")
    if momentum is not None:
        momentum = checked("momentum", momentum, lambda x: 0 <= x < 1, "in [0, 1), like 0.9")
    has_momentum = momentum is not None and not (isinstance(momentum, float) and momentum == 0)

    def init(params: optax.Params) -> NeroState:
        starts = map_with_roles(_start, roles, params)
        buffer = jax.tree.map(jnp.zeros_like, params) if has_momentum else None
        grad_norm, sigma, skipped = (_field(starts, name) for name in _Start._fields)
        return NeroState(jnp.zeros((), jnp.int32), grad_norm, sigma, skipped, buffer)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, NeroState]:
        count = optax.safe_increment(state.count)

        def step(
            role: Role, w: Array, g: Array, grad_norm: Array, sigma: Array, skipped: Array, m: Array | None = None
        ) -> rule.Step:
            found = rule.step(
                grouped(w, role),
                grouped(g, role),
                grad_norm,
                count,
                axes=role.axes,
                beta=beta,
                scale=sigma if scale is None else scale,
                longest=longest_step,
                pull=gain_penalty if role.is_pulled else 0.0,
                m=None if m is None else grouped(m, role),
                momentum=0.0 if momentum is None else momentum,
                nesterov=nesterov,
            )
            buffer = None if m is None or found.m is None else found.m.reshape(m.shape).astype(m.dtype)
            counts = skipped + found.skipped.astype(skipped.dtype)
            return rule.Step(found.step.reshape(w.shape), found.grad_norm, counts, buffer)

        if has_momentum and state.momentum_buffer is None:
            raise ValueError(
                "the state was made without momentum: add zeros, by optax.tree.set(state, "
                "momentum_buffer=jax.tree.map(jnp.zeros_like, params)), or give momentum=None"
            )
        buffers = () if state.momentum_buffer is None else (state.momentum_buffer,)
        steps = map_with_roles(
            step, roles, _needed(params), updates, state.grad_norm, state.scale, state.skipped, *buffers
        )
        moved = _field(steps, "m") if buffers else None
        state = NeroState(count, _field(steps, "grad_norm"), state.scale, _field(steps, "skipped"), moved)
        return _field(steps, "step"), state

    return optax.GradientTransformation(init, update)


@explain_options
def keep_balanced(
    *, fix_mean: bool = True, fix_norm: FixNorm = True, roles: Tree | None = None
) -> optax.GradientTransformation:
    """Return the last part of :func:`nero`, which holds neurons to the constraints under any optimiser.

    It changes an update so that ``optax.apply_updates`` gives balanced neurons. Neurons whose update is zero stay as
    they are. It must come last in a chain, after the learning rate. The arguments are those of :func:`nero`.

    Example:
        >>> optimiser = optax.chain(optax.adam(1e-3), keep_balanced())
    """
    check_constraints(fix_mean, fix_norm)

    def init(params: optax.Params) -> BalanceState:
        return BalanceState(map_with_roles(lambda role, w: _radius(role, w, fix_norm), roles, params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, BalanceState]:
        def constrain(role: Role, w: Array, change: Array, radius: Array) -> Array:
            found = rule.constrain(
                grouped(w, role),
                grouped(change, role),
                axes=role.axes,
                fix_mean=fix_mean,
                fix_norm=bool(fix_norm),
                radius=radius,
            )
            return found.reshape(w.shape)

        return map_with_roles(constrain, roles, _needed(params), updates, state.radius), state

    return optax.GradientTransformation(init, update)


def balance(params: Tree, *, fix_mean: bool = True, fix_norm: FixNorm = True, roles: Tree | None = None) -> Tree:
    """Return the parameters with all neurons balanced: of zero mean and unit norm (Definition 1).

    Do this once, before ``init``. Zero and constant neurons stay as they are, and so do those that are balanced to the
    rounding of their dtype. With ``fix_norm="initial"``, neurons keep their norm. The arguments are those of
    :func:`nero`.

    Example:
        >>> weights = balance({"kernel": jnp.array([[3.0], [1.0], [2.0]])})["kernel"]
        >>> [round(float(weight), 3) for weight in weights[:, 0]]
        [0.707, -0.707, 0.0]
    """
    check_constraints(fix_mean, fix_norm)

    def balanced(role: Role, w: Array) -> Array:
        if role.kind != "neuron":
            return w
        radius = _radius(role, w, fix_norm)
        wide = _wide(w, role)
        found, _ = rule.project(wide, role.axes, fix_mean=fix_mean, fix_norm=bool(fix_norm), radius=radius)
        kept = _is_balanced(role, w, fix_mean, bool(fix_norm), radius)
        return jnp.where(kept, grouped(w, role), found.astype(w.dtype)).reshape(w.shape)

    check_arrays(params)
    # compiled at once: outside of jit, JAX would compile every operation on every shape by itself
    return jax.jit(lambda tree: map_with_roles(balanced, roles, tree))(params)


def is_balanced(params: Tree, *, fix_mean: bool = True, fix_norm: FixNorm = True, roles: Tree | None = None) -> bool:
    """Check that all neurons are balanced, to the rounding of their dtype. The arguments are those of :func:`nero`.

    Raises:
        ValueError: if there are no neurons, or for ``fix_norm="initial"``: params do not tell their first norms.
    """
    check_constraints(fix_mean, fix_norm)
    if fix_norm == "initial":
        raise ValueError(
            "params do not tell the norms they started with: give fix_norm=False, or True for norms of one"
        )
    check_arrays(params)
    roles = roles_of(params) if roles is None else roles
    kinds = map_with_roles(lambda role, w: role.kind if w.size else "empty", roles, params)
    if "neuron" not in jax.tree.leaves(kinds):
        raise ValueError("params have no neurons; nero.jax.roles_of(params) tells what they have")

    def check(role: Role, w: Array) -> Array:
        if role.kind != "neuron" or not w.size:
            return jnp.array(True)
        return jnp.all(_is_balanced(role, w, fix_mean, bool(fix_norm), jnp.ones((), statistics_dtype(w.dtype))))

    checked = jax.jit(
        lambda tree: jax.tree.reduce(jnp.logical_and, map_with_roles(check, roles, tree), jnp.array(True))
    )
    return bool(checked(params))


def _is_balanced(role: Role, w: Array, fix_mean: bool, fix_norm: bool, radius: Array) -> Array:
    wide = _wide(w, role)
    off: Array = rule.distance(wide, role.axes, fix_mean=fix_mean, fix_norm=fix_norm, radius=radius)
    return off <= rule.rounding_error(w.dtype) * (jnp.abs(radius) if fix_norm else rule.norm(wide, role.axes))


def _start(role: Role, w: Array) -> _Start:
    """Return the state in which a parameter enters."""
    wide = _wide(w, role)
    size = rule.norm(wide, role.axes)
    if role.kind == "neuron":
        scale = (size == 0).astype(size.dtype)
    else:
        mean = jnp.mean(size)
        # a gain is a factor: it must be able to open, also from zero or from LayerScale's 1e-6
        scale = jnp.maximum(mean, 1.0) if role.kind == "gain" else jnp.where(mean > 0, mean, SCALE_AT_ORIGIN)
    return _Start(jnp.zeros_like(size), scale, jnp.zeros_like(size, jnp.int32))


def _radius(role: Role, w: Array, fix_norm: FixNorm) -> Array:
    """Return the norm to which each neuron of a parameter is held; -1 for those that start at zero."""
    wide = _wide(w, role)
    if role.kind != "neuron":
        return jnp.zeros((), wide.dtype)
    size = rule.norm(wide, role.axes)
    held = jnp.minimum(size, float(rule.limits(wide.dtype).max) / 2) if fix_norm == "initial" else jnp.ones_like(size)
    return jnp.where(size == 0, -1.0, held)


def _wide(w: Array, role: Role) -> Array:
    return grouped(w, role).astype(statistics_dtype(w.dtype))


def _field(rows: Tree, name: str) -> Tree:
    """Return the tree of one field of a tree of named tuples."""
    return jax.tree.map(lambda row: getattr(row, name), rows, is_leaf=lambda row: isinstance(row, _Start | rule.Step))


def _needed(params: optax.Params | None) -> optax.Params:
    if params is None:
        raise ValueError("Nero steps relative to the weights: call update(grads, state, params)")
    return params
