"""The options of a parameter group: every name, default, check and error message, once."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from nero.messages import FOREIGN_OPTIONS, warn
from nero.scalars import IMMUTABLE, as_float, is_scalar_array

Backend: TypeAlias = Literal["auto", "eager", "foreach", "numba", "triton"]
FixNorm: TypeAlias = bool | Literal["initial"]
OnNonfinite: TypeAlias = Literal["skip", "raise"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a group: its default, and what it accepts, as a predicate and in words."""

    default: object
    accepts: Callable[[Any], bool]
    expected: str
    is_number: bool = False

    def error(self, name: str, value: object, more: str = "") -> ValueError:
        """Return the error for a value that the option does not accept."""
        kind = "a number, " if self.is_number and isinstance(value, str) else ""
        return ValueError(f"{name} must be {kind}{self.expected}{more}, got {value!r}")


def _number(default: float | None, accepts: Callable[[float], bool], expected: str, *others: object) -> Option:
    return Option(
        default,
        lambda value: not isinstance(value, Tensor) and (_is_one_of(value, others) or accepts(as_float(value))),
        expected,
        is_number=True,
    )


def _choice(default: object, *choices: object) -> Option:
    return Option(default, lambda value: _is_one_of(value, choices), f"one of {list(choices)}")


def _is_one_of(value: object, choices: tuple[object, ...]) -> bool:
    # identity, so that 1 is not taken for True; strings may be equal without being identical
    return any(value is choice or (isinstance(value, str) and value == choice) for choice in choices)


#: Every option of a group, in the order of the signature of :class:`nero.Nero`. The last three come from
#: :func:`nero.param_groups`; their values are checked against the shapes of parameters by :meth:`nero.Role.on`.
OPTIONS: dict[str, Option] = {
    "lr": _number(0.01, lambda x: 0 <= x < math.inf, "finite and not negative, like 0.01"),
    "beta": _number(0.999, lambda x: 0 <= x < 1, "in [0, 1), like 0.999"),
    "momentum": _number(0.0, lambda x: 0 <= x < 1, "in [0, 1), like 0.9"),
    "nesterov": _choice(True, True, False),
    "longest_step": _number(math.inf, lambda x: x >= 1, "at least 1, like 3, or math.inf"),
    "fix_mean": _choice(True, True, False),
    "fix_norm": _choice(True, True, False, "initial"),
    "scale": _number(None, lambda x: 0 < x < math.inf, "finite and positive, or None", None),
    "gain_penalty": _number(0.0, lambda x: 0 <= x < math.inf, "finite and not negative"),
    "maximize": _choice(False, True, False),
    "on_nonfinite": _choice("skip", *get_args(OnNonfinite)),
    "rounding": _choice("nearest", *get_args(Rounding)),
    "depth": _number(1.0, lambda x: 0 < x < math.inf, "finite and positive, or 'auto'", "auto"),
    "backend": _choice("auto", *get_args(Backend)),
    "role": _choice(None, None, "neuron", "gain", "bias"),
    "fan_in_axes": Option(None, lambda _: True, ""),
    "fan_in_groups": Option(1, lambda _: True, ""),
}
NUMBERS = [name for name, option in OPTIONS.items() if option.is_number]
#: Options that only groups have.
OF_GROUPS = ("role", "fan_in_axes", "fan_in_groups")
#: Options that earlier checkpoints lack; they load with the default.
MISSING_IN_OLD_CHECKPOINTS = ("momentum", "nesterov", "longest_step", "depth")

#: Keys that a group may have besides options: torch's own, and those of schedulers and other tools.
OTHER_KEYS = frozenset(
    {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
    | {"lr_scale", "lr_mult"}
    | {"adaptive"}  # of SAM, whose groups its base optimiser shares
)
#: How similar an unknown option must be to one of Nero's to be a misspelling of it.
MISSPELLING = 0.8


#: Arguments that are no options of groups, and where they go.
ELSEWHERE = {
    "pretrained": "pretrained is for all groups, as in nero.Nero(model, pretrained=True); a group has "
    "fix_norm='initial' and fix_mean=False instead",
    "overrides": "roles are overridden in groups, as in nero.Nero(nero.param_groups(model, overrides={...}))",
}


def make_plain(options: dict[str, Any]) -> None:
    """Replace numbers of other types, such as numpy's, by Python's: ``torch.load`` refuses others by default."""
    for name in NUMBERS:
        value = options.get(name)
        is_number = isinstance(value, Real) or (is_scalar_array(value) and not isinstance(value, Tensor))
        if is_number and type(value) not in IMMUTABLE and not math.isnan(as_float(value)):
            options[name] = as_float(value)


def own_options(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options without those of other optimisers that ask for nothing; raise for unknown ones."""
    known = {*OPTIONS, *OTHER_KEYS, *FOREIGN_OPTIONS} | ({"rho"} if "adaptive" in given else set())  # both: SAM's
    for name, value in given.items():
        if name in FOREIGN_OPTIONS and not _asks_for_nothing(value):
            raise TypeError(f"{name}={value!r} of {where}: {FOREIGN_OPTIONS[name]}")
        if name not in known:
            raise TypeError(f"unknown option {name!r} of {where}; {_hint(str(name), is_nero=where == 'nero.Nero')}")
    return {name: value for name, value in given.items() if name not in FOREIGN_OPTIONS}


def _hint(name: str, is_nero: bool) -> str:
    """Return what to do instead of giving an unknown option, to nero.Nero or to a group."""
    from difflib import get_close_matches  # for this message alone

    close = ["lr"] if name == "learning_rate" else get_close_matches(name, [*OPTIONS, *ELSEWHERE], 1, MISSPELLING)
    if not close:
        own = [*(option for option in OPTIONS if option not in OF_GROUPS), "pretrained"] if is_nero else OPTIONS
        return f"the options are {', '.join(own)}"
    if close[0] in ELSEWHERE and (name == close[0] or not is_nero):
        return ELSEWHERE[close[0]]
    return f"did you mean {close[0]}?"


def _asks_for_nothing(value: object) -> bool:
    return value is None or value is False or as_float(value) == 0


def check_options(options: Mapping[str, Any], *, wait: bool = True) -> None:
    """Raise if an option of a group is invalid. Without ``wait``, an accelerator's values are not read."""
    check_lr(options["lr"], wait=wait)
    for name in OPTIONS:
        if name != "lr":
            check_option(name, options[name])


def check_option(name: str, value: object) -> None:
    """Raise if the value of an option is invalid."""
    if not OPTIONS[name].accepts(value):
        raise OPTIONS[name].error(name, value)


def check_lr(lr: object, *, wait: bool = True) -> None:
    """Raise if a learning rate is invalid. Without ``wait``, an accelerator's value is not read."""
    if isinstance(lr, str) and lr == "auto":
        raise ValueError(
            "lr='auto' is for all groups at once, as in nero.Nero(model, lr='auto'): give this group lr=0.1, "
            "longest_step=3 and depth=nero.depth_of(...), or call optimiser.count_depth(model)"
        )
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr as a tensor must have one element, got the shape {tuple(lr.shape)}")
        if not wait and lr.device.type != "cpu":
            return
        lr = lr.item()
    if not OPTIONS["lr"].accepts(lr):
        raise OPTIONS["lr"].error("lr", lr, ", or 'auto' for all groups" if isinstance(lr, str) else "")


def warn_if_unpenalised(gain_penalty: float, kinds: Iterable[str]) -> None:
    """Warn if there is a penalty on gains, and no gain among the kinds of parameters that it is for."""
    if gain_penalty and "gain" not in kinds:
        warn(
            f"gain_penalty={gain_penalty} has no effect: none of the parameters is known to be a gain around one. "
            "Give the model itself, nero.Nero(model), or groups with role='gain'"
        )
