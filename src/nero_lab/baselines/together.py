"""Several optimisers as one, each with parameters of its own."""

from collections.abc import Sequence
from typing import Any

import torch


class Together(torch.optim.Optimizer):
    """Optimisers that step one after another, with one list of groups, one state and one checkpoint.

    The hooks of this object run once a step, before the first and after the last of its parts.

    Args:
        parts: optimisers of disjoint parameters, before their first step. They share their groups and their state with
            this one.

    Raises:
        ValueError: if two parts have a parameter in common.

    Example:
        >>> weight, bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        >>> optimiser = Together([torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([bias], lr=0.01)])
        >>> [group["lr"] for group in optimiser.param_groups]
        [0.1, 0.01]
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Step every part."""
        for part in self.parts:
            part.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the groups of the parts; raise for any other, which no part would step."""
        if len(self.param_groups) == sum(len(part.param_groups) for part in self.parts):
            raise ValueError("a group belongs to one of the parts: add it to that before they are put together")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()  # a copy, or a loaded state, has other groups

    def _share(self) -> None:
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:stop], self.state
            start = stop
