"""Nero for JAX, as gradient transformations of optax. Imports no torch.

Example:
    >>> import jax, jax.numpy as jnp, nero.jax, optax
    >>> params = nero.jax.balance({"kernel": jax.random.normal(jax.random.key(0), (8, 4)), "bias": jnp.zeros(4)})
    >>> optimiser = nero.jax.nero(learning_rate=0.01)
    >>> state = optimiser.init(params)
    >>> grads = jax.grad(lambda params: jnp.sum(jnp.tanh(params["kernel"] + params["bias"])))(params)
    >>> updates, state = jax.jit(optimiser.update)(grads, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> nero.jax.is_balanced(params)
    True
"""

from nero.jax.roles import roles_of
from nero.jax.transformations import (
    BalanceState,
    NeroState,
    balance,
    is_balanced,
    keep_balanced,
    nero,
    scale_by_nero,
)
from nero.role import Role

__all__ = [
    "BalanceState",
    "NeroState",
    "Role",
    "balance",
    "is_balanced",
    "keep_balanced",
    "nero",
    "roles_of",
    "scale_by_nero",
]
