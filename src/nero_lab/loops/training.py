"""A run under way: what records, checkpoints and the display ask of it, whatever its loop does in a step."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nero_lab.data import DataError
from nero_lab.protocol import Precision, SettingError, Settings, Task

#: What is raised where a state lacks something, or has something of another kind, length or shape.
MISFITS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: What is raised meanwhile for reasons of its own.
OTHERS = (SettingError, DataError, torch.OutOfMemoryError, torch.AcceleratorError)


class StateError(ValueError):
    """A state that a run cannot go on from; the text says what of it."""


class Training(ABC):
    """Where a run stands. A loop says what a step is, and what more it has to keep.

    Args:
        task: what to train on what.
        settings: of this run.
        device: to train on.
        steps_an_epoch: how often :meth:`advance` is called for each.

    Attributes:
        curve: by name, a number for each epoch that is over; None where there is none.
        side_by_side: how many runs this process trained at a time, at most.
        resumed: how often the run was broken off.
        mid_step: whether a step that fails may be half made, so that where the run stands is not to be kept.
        files: what is to be kept beside the record, by the end of its name; whoever writes it takes it away.
        tell: told, within a step, of what else it does that takes long, and perhaps what share of that is done; whoever
            shows the run puts it there.
    """

    def __init__(self, task: Task, settings: Settings, device: torch.device, steps_an_epoch: int) -> None:
        self.task, self.settings, self.device, self.steps_an_epoch = task, settings, device, steps_an_epoch
        self.epoch = self.step = 0
        self.curve: dict[str, list[float | None]] = {}
        self.side_by_side, self.resumed, self.mid_step = 1, 0, True
        self.files: dict[str, bytes] = {}
        self.tell: Callable[..., None] = lambda *_: None
        self._spent, self._since = 0.0, time.perf_counter()
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @abstractmethod
    def advance(self) -> None:
        """Make one step, and after the last of an epoch what is due then."""

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """What is trained."""

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.epoch == self.settings.epochs

    @property
    def known(self) -> int:
        """Of how many epochs the numbers have come in."""
        return min(map(len, self.curve.values()))

    @property
    def seconds(self) -> float:
        """How long the run has taken, its earlier parts included."""
        return self._spent + time.perf_counter() - self._since

    @property
    def steps_done(self) -> int:
        """Counted from the first epoch."""
        return self.epoch * self.steps_an_epoch + self.step

    def so_far(self) -> dict[str, float]:
        """Some of the curve's numbers for the epoch under way; waits for the device."""
        return {}

    def pace(self) -> str:
        """How fast it goes, where a loop has a word for that."""
        return ""

    def remark(self) -> str:
        """What there is to say of it, for people, when the first epoch's numbers have come in; mostly nothing."""
        return ""

    def verdict(self) -> dict[str, Any]:
        """What there is to say besides the curves, at the end."""
        return {}

    def state(self) -> dict[str, Any]:
        """All that is needed to go on from here, as tensors and plain Python."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "curve": {name: list(values) for name, values in self.curve.items()},
            "seconds": self.seconds,
            "beside": self.side_by_side,
            "resumed": self.resumed,
        }

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Stand where :meth:`state` was called."""
        if differing := set(state["curve"]) ^ set(self.curve):
            raise ValueError(f"its curve and the run's differ in {', '.join(sorted(differing))}")
        for name, kind in (("epoch", int), ("step", int), ("seconds", float), ("beside", int), ("resumed", int)):
            if type(state[name]) is not kind or not 0 <= state[name] < math.inf:
                raise ValueError(f"{name} is {state[name]!r}")
        epoch, step = state["epoch"], state["step"]
        if epoch > self.settings.epochs or step > self.steps_an_epoch or (step and epoch == self.settings.epochs):
            raise ValueError(f"epoch {epoch}, step {step} of {self.settings.epochs} epochs of {self.steps_an_epoch}")
        if fault := fault_of(state["curve"], epoch):
            raise ValueError(fault)
        self.epoch, self.step, self.curve = state["epoch"], state["step"], state["curve"]
        self._spent, self.side_by_side, self.resumed = state["seconds"], state["beside"], state["resumed"] + 1

    @abstractmethod
    def _build(self) -> None:
        """Make all that is trained, and what it is trained with."""

    def _begin(self, state: dict[str, Any] | None) -> None:
        """Stand at the start, or where the state says.

        Raises:
            StateError: if nothing can go on from it.
        """
        with self._on_stream():
            self._build()
            if state is not None:
                try:
                    self.go_on_from(state)
                except OTHERS:
                    raise
                except MISFITS as error:
                    words = " ".join(str(error).split())
                    what = f"lacks {words}" if isinstance(error, KeyError) else f"has what does not fit ({words})"
                    raise StateError(what) from error
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        """On a GPU, on a stream of the run's own."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def fault_of(curve: dict[str, Any], epochs: int) -> str:
    """What a curve of so many epochs has that it should not; mostly nothing."""
    for name, values in curve.items():
        if not isinstance(values, list) or len(values) != epochs:
            count = f"{len(values)} values" if isinstance(values, list) else "no list"
            return f"{count} of {name} for {epochs} {'epoch' if epochs == 1 else 'epochs'}"
        for value in values:
            if value is not None and (type(value) not in (int, float) or not abs(value) < math.inf):
                return f"{value!r} in {name}"
    return ""


def on_cpu(value: Any) -> Any:
    """A copy of nested dicts and lists with their tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(entry) for entry in value)
    return value


def fill(network: nn.Module, state: dict[str, Any]) -> None:
    """Have a network's parameters and buffers hold what a state has by their names.

    Raises:
        RuntimeError: if it lacks some, has others, or one of another shape.
        ValueError: if it has one of another dtype, which torch would cast.
    """
    network.load_state_dict(state)
    for name, tensor in network.state_dict().items():
        _match(name, state[name], tensor)


def refill(tensor: Tensor, state: dict[str, Any], name: str) -> None:
    """Have a tensor hold what a state has by that name.

    Raises:
        KeyError: if it has none.
        ValueError: if that is no tensor, or one of another shape or dtype; torch would spread it over this one, where
            it can, and cast it.
    """
    _match(name, state[name], tensor)
    tensor.copy_(state[name])


def load(optimiser: torch.optim.Optimizer, state: dict[str, Any], lr: Tensor) -> None:
    """Have a primed optimiser stand where its state was taken, with this learning rate: loading makes a copy of it.

    Raises:
        KeyError: if the state lacks something that the optimiser has; torch does not look, and misses it in a step.
        ValueError: if it has a tensor of another shape or dtype, or none where there is to be one; nor does torch look
            there.
    """
    wanted = _kept(optimiser.state_dict())
    optimiser.load_state_dict(state)
    # as it was saved, since loading may cast; but for what is younger than the checkpoint, and set by loading
    found = _kept(optimiser.state_dict()) | _kept(state)
    if lacking := wanted.keys() - found.keys():
        raise KeyError(min(lacking))
    for name, value in wanted.items():
        _match(name, found[name], value)
    for group in optimiser.param_groups:
        group["lr"] = lr


def _kept(state: dict[str, Any]) -> dict[str, Any]:
    """All that an optimiser keeps, by name."""
    parts = {f"group {number}": group for number, group in enumerate(state["param_groups"])}
    parts |= {f"parameter {number}": each for number, each in state["state"].items()}
    return {f"{name} of {part}": value for part, values in parts.items() for name, value in values.items()}


def _match(name: str, value: Any, wanted: Any) -> None:
    """Raise a ValueError unless both are tensors of one shape and dtype, or neither is a tensor."""
    if (found := _kind(value)) != (needed := _kind(wanted)):
        raise ValueError(f"{name} is {found} where {needed} is needed")


def _kind(value: Any) -> str:
    return f"a {value.dtype} tensor shaped {tuple(value.shape)}" if isinstance(value, Tensor) else "a plain value"


@contextmanager
def products_in(name: Precision) -> Iterator[None]:
    """Products of float32 matrices in float32, or on a GPU's tensor cores in TF32; the fastest kernels of either."""
    matrices = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=name == "tf32"):
            yield
    finally:
        torch.set_float32_matmul_precision(matrices)
