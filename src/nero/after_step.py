"""Balance under any other optimiser: a hook projects the neurons of a model after each step."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nero.balance import Balancer, neurons_of
from nero.groups import Part
from nero.messages import and_more, warn
from nero.options import FixNorm, check_option
from nero.pretrained import warn_if_balanced
from nero.radius import initial_radius
from nero.regrowth import grown_neurons
from nero.roles import check_unflattened
from nero.sharding import is_sharded

#: The id() of all parameters of the optimiser or the models, at the calls of :func:`balance_after_step`.
_KNOWN: "WeakKeyDictionary[torch.optim.Optimizer, set[int]]" = WeakKeyDictionary()


def balance_after_step(
    optimiser: torch.optim.Optimizer,
    model: nn.Module,
    *,
    fix_mean: bool = True,
    fix_norm: FixNorm = True,
    at_once: bool = True,
) -> RemovableHandle:
    """Hold a model's neurons to the constraints under any other optimiser.

    Of the model, the neurons that this optimiser trains are balanced after each of its steps. If several optimisers
    train one model, call this for each: ``balance_after_step(muon, model)`` and ``balance_after_step(adamw, model)``.

    Args:
        optimiser: any optimiser with ``register_step_post_hook``: Adam, SGD, Muon, ...
        model: the model, or a part of it: neurons elsewhere stay free. Parameters without a gradient stay untouched.
        fix_mean: hold every neuron to zero mean.
        fix_norm: hold every neuron to unit norm, or with ``"initial"`` to its norm at this call. A neuron that is zero
            at this call is held to a norm of at most one, and its mean is free. So is one that has grown from zero
            earlier: it is shorter than one, the optimiser has state of it, and another layer of the model is balanced.
            A warning names those.
        at_once: project now as well. The paper's baselines did not.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        TypeError: if ``optimiser`` is not an optimiser, ``model`` is not a module, or a trainable parameter is complex.
        ValueError: if a constraint is unknown, the model is on the meta device, or the optimiser trains none of its
            parameters. A later step raises it if a framework has since sharded the parameters in the optimiser.

    Example:
        >>> import nero
        >>> model = nn.Linear(8, 4)
        >>> optimiser = torch.optim.Adam(model.parameters())
        >>> handle = balance_after_step(optimiser, model)
        >>> _ = model(torch.randn(2, 8)).square().sum().backward()
        >>> optimiser.step()
        >>> nero.is_balanced(model)
        True
    """
    check_option("fix_mean", fix_mean)
    check_option("fix_norm", fix_norm)
    optimiser = unwrapped(optimiser)
    if isinstance(optimiser, type) or not hasattr(optimiser, "register_step_post_hook"):
        kind = type(optimiser).__name__
        raise TypeError(f"balance_after_step needs a torch.optim.Optimizer first, then the model; got {kind} first")
    options = {"fix_mean": fix_mean, "fix_norm": fix_norm}
    parts = [Part(name, parameter, role, options) for name, parameter, role in neurons_of(model, frozen=True)]
    trained = _params_of(optimiser)
    whole = [parameter for parameter in _held(optimiser) if not is_sharded(parameter)]
    if trained.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"{type(optimiser).__name__} trains no parameter of this {type(model).__name__}: make the optimiser "
            "after the model is copied, cast or sharded"
        )
    # others may have balanced other layers; what this optimiser has no state of is new to it
    short = {each: mask for each, mask in grown_neurons(parts).items() if each in optimiser.state}
    if kept := [part.name for part in parts if part.parameter in short]:
        warn(
            f"neurons of {and_more(kept)} are shorter than one, and other layers are balanced, so they are kept "
            "as neurons that have grown from zero in an earlier run: if they have not, first call nero.balance_ on "
            "their layer"
        )
    entering = (part for part in parts if id(part.parameter) in trained and part.parameter.requires_grad)
    warn_if_balanced(
        (part for part in entering if part.parameter not in short),
        remedy="keep the weights with fix_norm='initial', fix_mean=False, or balance them without this warning by "
        "nero.balance_(model) before",
    )
    radii = [initial_radius(part.parameter, part.role, fix_norm, short.get(part.parameter)) for part in parts]
    neurons = [
        (part.parameter, part.role, 1.0 if radius is None else radius)
        for part, radius in zip(parts, radii, strict=True)
    ]
    known = _KNOWN.setdefault(optimiser, set())
    known |= trained | set(map(id, model.parameters()))
    balancer = Balancer(neurons, fix_mean=fix_mean, fix_norm=bool(fix_norm))

    def balance(has_moved: Callable[[Tensor], bool]) -> None:
        own = _params_of(optimiser)  # read at every step: add_param_group may have added some
        new = own - known
        if (
            new
            and any(id(each) in new and is_sharded(each) for each in _held(optimiser))
            and any(id(each) not in own for each in whole)
        ):
            raise ValueError(
                f"the parameters of {type(optimiser).__name__} were sharded after balance_after_step, which does not "
                "balance the new ones: call it after the model is sharded, as by accelerator.prepare"
            )
        try:
            balancer(lambda parameter: id(parameter) in own and parameter.requires_grad and has_moved(parameter))
        except IndexError:  # an axis is gone
            check_unflattened((part.name, part.parameter) for part in parts)
            raise

    if at_once:
        balance(lambda _: True)
    return optimiser.register_step_post_hook(lambda *_: balance(lambda parameter: parameter.grad is not None))


def unwrapped(optimiser: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser inside of wrappers, such as Accelerate's and Lightning's, and SAM's ``base_optimizer``."""
    for name in ("optimizer", "base_optimizer"):
        if isinstance(inner := getattr(optimiser, name, None), torch.optim.Optimizer):
            return unwrapped(inner)
    return optimiser


def _held(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _params_of(optimiser: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for parameter in _held(optimiser)}
