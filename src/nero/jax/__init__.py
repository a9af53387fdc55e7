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

from nero.messages import how_to_install
from nero.role import Role

try:
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
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"nero.jax needs {error.name}: {how_to_install('jax')}", name=error.name) from error

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
