"""The options of :mod:`nero.jax`: checks, and errors that name the fix, as :mod:`nero.options` has them for torch."""

import inspect
import math
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from reprlib import repr as repr_of  # short, also of a pytree
from typing import Any

import jax
import jax.numpy as jnp

from nero.messages import FOREIGN_OPTIONS, P, T, explain_positional_options

#: What to do instead of options that only torch's Nero, optax or both have under these names.
HINTS: dict[str, str] = {name: FOREIGN_OPTIONS[name] for name in ("weight_decay", "betas", "beta1", "eps")} | {
    "lr": "the learning rate is an option of nero.jax.nero, learning_rate",
    "b1": FOREIGN_OPTIONS["beta1"],
    "b2": "Nero has it as beta: give beta=0.999, or leave it out",
    "mask": "Nero has no weight decay to mask; to train a part of the parameters, use optax.partition, with "
    "optax.set_to_zero() for the others",
    "depth": "divide learning_rate by the depth of the network",
    "maximize": "put optax.scale(-1.0) before it, by optax.chain",
    "on_nonfinite": "neurons whose gradient is not finite are always left out",
    "rounding": "rounding is to nearest; keep the parameters in float32",
    "backend": "XLA compiles the step for every device; leave it out",
    "pretrained": "give fix_norm='initial' and fix_mean=False to nero.jax.nero and nero.jax.balance",
    "overrides": "give roles=nero.jax.roles_of(params, overrides)",
}


def explain_options(make: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that a bad name or place of an option raises an error with the remedy."""
    known = list(inspect.signature(make).parameters)
    where = f"nero.jax.{make.__name__}"
    make = explain_positional_options(where)(make)

    @wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(known)}"
                raise TypeError(f"unknown option {name!r} of {where}: {HINTS.get(name, hint)}")
        return make(*args, **options)

    return made


def check_learning_rate(value: Any) -> None:
    """Raise if a learning rate is invalid. Schedules and arrays, which may be traced, are not read."""
    if isinstance(value, str) and value == "auto":
        raise ValueError(
            "learning_rate='auto' is for PyTorch alone, where Nero counts the depth of the network: give 0.1 divided "
            "by the number of layers of a plain chain, and longest_step=3"
        )
    if isinstance(value, jax.Array) and value.size != 1:
        raise ValueError(f"learning_rate must have one element, got the shape {value.shape}")
    if not callable(value):
        checked("learning_rate", value, lambda x: 0 <= x < math.inf, "finite and not negative, like 0.01")


def checked(name: str, value: Any, accepts: Callable[[float], bool], expected: str) -> Any:
    """Return a hyperparameter; raise if it is out of range. Arrays, which may be traced, are not read."""
    if not isinstance(value, jax.Array):
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not accepts(number):
            kind = "a number, " if isinstance(value, str) else ""
            raise ValueError(f"{name} must be {kind}{expected}, got {repr_of(value)}")
        return number
    if name == "beta" and value.dtype in (jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"beta is {value.dtype}, in which 0.999 is 1: give hyperparam_dtype=jnp.float32 to optax.inject_hyperparams"
        )
    return value


def check_constraints(fix_mean: object, fix_norm: object) -> None:
    """Raise if a constraint is invalid."""
    if not isinstance(fix_mean, bool) or not (isinstance(fix_norm, bool) or fix_norm == "initial"):
        raise ValueError(
            f"fix_mean must be True or False, and fix_norm True, False or 'initial', got {fix_mean!r} and {fix_norm!r}"
        )
