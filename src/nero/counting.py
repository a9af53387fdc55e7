"""An optimiser that waits for the depth of its model, which is counted when that first runs."""

import warnings
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nero.checks import check_counts
from nero.state import Part


class Counting(torch.optim.Optimizer):
    """Whose groups have a depth, which may be ``"auto"`` until a run of the model tells it.

    It is what :class:`nero.depth.Once` asks and tells. Who inherits calls :meth:`_leave_uncounted` for each group that
    joins, :meth:`_raise_if_waiting` before each step and :meth:`_warn_of_uncounted` where it can.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._unknown = ""  # why the depth is, if it was tried
        self._uncounted: dict[Tensor, float] = {}  # neurons, by the depth that was counted without them
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._unknown = ""
        self._uncounted = getattr(self, "_uncounted", {})

    def parts(self) -> Iterator[Part]:
        """Every parameter with its name, role and group, in the order of the groups."""
        raise NotImplementedError

    def count_depth(self, model: nn.Module) -> None:
        """Divide the angle by a depth that is counted when the model next runs with gradients.

        That is what ``depth="auto"`` does; groups that were made by hand need to be told of the model.

        Args:
            model: a module, whose run is counted; the groups that have parameters of it are changed.

        Raises:
            TypeError: if it is no module.
            ValueError: if no group has a parameter of it, or if it is scripted.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
        check_counts(model)
        groups = list(self._groups_of(self._shared_with(model)))
        if not groups:
            raise ValueError("no parameter of this model is in the optimiser: give the model that it trains")
        from nero.depth import Once

        for group in groups:
            group["depth"] = "auto"
        Once(model, self)
        self.defaults["depth"] = "auto"  # for what is added later, too
        self._unknown = ""

    def _to_count(self, model: nn.Module) -> set[int]:
        """What of a model to count, by ``id``: all that is in the optimiser now, if a group of it waits for a depth."""
        shared = self._shared_with(model)
        return shared if any(group["depth"] == "auto" for group in self._groups_of(shared)) else set()

    def _take_depth(self, depth: float | str, counted: Container[int]) -> None:
        """Take in what was counted of these parameters, or why it was not: for who counts."""
        if isinstance(depth, str):
            self._unknown = f" ({depth})"
            return
        for group in self._groups_of(counted):
            if group["depth"] == "auto":
                group["depth"] = depth
        for part in self.parts():
            if id(part.parameter) in counted:
                self._uncounted.pop(part.parameter, None)
                if part.role.kind == "neuron" and not part.parameter.requires_grad:
                    self._uncounted[part.parameter] = depth

    def _warn_of_uncounted(self) -> None:
        """Say it once, when any of them first has a gradient."""
        if not any(each.requires_grad and each.grad is not None for each in self._uncounted):
            return
        late = [
            part.name
            for part in self.parts()
            if part.parameter.grad is not None and self._uncounted.get(part.parameter) == part.group["depth"]
        ]
        self._uncounted = {}
        if late:
            more = f" and {len(late) - 1} more" if len(late) > 1 else ""
            warnings.warn(
                f"{late[0]}{more} had no part in the depth that the angle is divided by: call "
                "optimiser.count_depth(model), and the model's next run counts again; or set the depth of the group",
                stacklevel=5,
            )

    def _depth_of_the_others(self) -> dict[str, Any]:
        """The option of a group that joins: what is counted of the model is for all that does, before or after."""
        return {"depth": self.param_groups[0]["depth"]} if self.defaults["depth"] == "auto" else {}

    def _leave_uncounted(self, group: dict[str, Any]) -> None:
        """Note a group that joined after the count, and has the depth of the others."""
        if self.defaults["depth"] == "auto" and group["depth"] != "auto":
            neurons = [part.parameter for part in self.parts() if part.group is group and part.role.kind == "neuron"]
            self._uncounted.update(dict.fromkeys(neurons, group["depth"]))

    def _raise_if_waiting(self) -> None:
        if any(group["depth"] == "auto" for group in self.param_groups):
            raise RuntimeError(
                f"the depth of the model is not known yet{self._unknown}: run it as a whole before the first step, "
                "not compiled; call optimiser.count_depth(model) first, if the optimiser was copied or loaded, or "
                "has parameters of another model; or give the depth, as in nero.Nero(model, lr=0.1, "
                "longest_step=3, depth=nero.depth_of(nero.balance_(model), inputs)), counted before the model is "
                "compiled or sharded, or by hand"
            )

    def _shared_with(self, model: nn.Module) -> set[int]:
        own = {id(parameter) for parameter in model.parameters()}
        return {id(each) for group in self.param_groups for each in group["params"] if id(each) in own}

    def _groups_of(self, shared: Container[int]) -> Iterator[dict[str, Any]]:
        for group in self.param_groups:
            if any(id(each) in shared for each in group["params"]):
                yield group
