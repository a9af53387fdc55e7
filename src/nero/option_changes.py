"""Options that users and schedulers set on groups between steps."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor

from nero import backends
from nero.groups import check_roles, freeze_axes, name_of
from nero.options import OPTIONS, check_lr, check_option, check_options
from nero.roles import Role
from nero.scalars import IMMUTABLE, are_same

#: Options that schedulers change at every step.
SCHEDULED = ("lr", "momentum")

_options = itemgetter(*OPTIONS)
_others = itemgetter(*(name for name in OPTIONS if name not in SCHEDULED))


class OptionChanges:
    """The options of all groups at the last step."""

    def __init__(self) -> None:
        self._options: list[Any] = []
        self._others: list[Any] = []
        self._is_fixed = False  # whether no learning rate can change in place

    def check(self, groups: Sequence[dict[str, Any]], roles: Mapping[Tensor, Role]) -> bool:
        """Validate options that have changed; return whether the step must be planned anew."""
        options = list(chain.from_iterable(map(_options, groups)))
        if self._is_fixed and are_same(options, self._options):
            return False
        for group in groups:
            check_lr(group["lr"], wait=False)
            check_option("momentum", group["momentum"])
            freeze_axes(group)
        # momentum adds or drops buffers, but its value may change at each step
        others = [*chain.from_iterable(map(_others, groups)), *(bool(group["momentum"]) for group in groups)]
        has_changed = False
        if not are_same(others, self._others):
            for group in groups:
                check_options(group, wait=False)
                check_roles(groups, group, roles)
                if group["params"]:
                    backends.check_backend(group["backend"], name_of(groups, group, 0))
            has_changed = others != self._others
            self._others = others
        self._options = options
        self._is_fixed = IMMUTABLE.issuperset(type(group["lr"]) for group in groups)
        return has_changed
