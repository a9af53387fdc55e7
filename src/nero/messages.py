"""Messages to users: warnings that point to their line, and remedies.

This module imports no torch, so that :mod:`nero.jax` has the same texts.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from reprlib import repr as repr_of  # short, also of a whole model
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_OWN = ("nero", "torch")

#: Options of other optimisers, and what to do with Nero instead. With torch, they are dropped where they ask for
#: nothing: 0, False or None.
FOREIGN_OPTIONS: dict[str, str] = {
    "weight_decay": "Nero has no weight decay: leave it out; fixed norms need none, free ones grow until lr is zero",
    "decoupled_weight_decay": "Nero has no weight decay: leave it out",
    "betas": "Nero has betas=(b1, b2) as momentum=b1, beta=b2; leave them out for momentum=0, beta=0.999",
    "beta1": "Nero has it as momentum: give momentum=0.9, or leave it out",
    "dampening": "Nero's momentum is an average, so that a factor on gradients changes nothing: leave it out",
    "eps": "Nero has no epsilon, since it is scale-free: leave it out",
    "amsgrad": "Nero has no maximum of its averages: leave it out",
    "foreach": "leave it out, since backend='auto' takes the fastest; or give backend='foreach'",
    "fused": "leave it out, since backend='auto' takes a fused step where there is one",
    "capturable": "leave it out, since a step of Nero can always be captured in a CUDA graph",
    "differentiable": "a step of Nero cannot be differentiated: leave it out",
}

#: What to do where a library flattens parameters.
SHARD_BY_FSDP2 = "shard with torch.distributed.fsdp.fully_shard (FSDP2) instead"


def warn(message: str) -> None:
    """Warn at the first frame outside of this package and torch, whose schedulers and hooks wrap an optimiser."""
    frame, level = sys._getframe(1), 2  # level 2 is the caller of this function
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def and_more(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, for error messages.

    The package is on no index yet. A package of its name there would be somebody else's, so only a clone will do.

    Example:
        >>> print(how_to_install("cpu"))
        pip install '.[cpu]' in a clone of nero-optim
    """
    return f"pip install '.[{extra}]' in a clone of nero-optim"


def explain_positional_options(where: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator by which an option without its name raises an error with the remedy; the signature stays.

    Optimisers differ in the order of their options: the third argument of SGD is its momentum.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        code = make.__code__
        first, second = code.co_varnames[code.co_argcount :][:2]

        @wraps(make)
        def made(*args: P.args, **options: P.kwargs) -> T:
            if len(args) > code.co_argcount:
                got = repr_of(args[code.co_argcount])
                raise TypeError(
                    f"{where} got {got} without a name: write {first}=..., {second}=... or the name of another option"
                )
            return make(*args, **options)

        return made

    return decorate
