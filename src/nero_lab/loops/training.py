"""The base of all training loops: a run in progress, as records, checkpoints and the display see it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nero_lab import distributed
from nero_lab.data import DataError
from nero_lab.protocol import Precision, SettingError, Settings, Task

#: Errors that a state with missing or mismatched content raises.
MISMATCH_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: Subclasses of these that have other causes.
UNRELATED_ERRORS = (SettingError, DataError, torch.OutOfMemoryError, torch.AcceleratorError)
#: Variants of compiled code (shapes of batches, training or evaluation, runs) before torch would run it uncompiled.
RECOMPILE_LIMIT = 64


class StateError(ValueError):
    """A state that a run cannot resume from. The message names the fault."""


class Training(ABC):
    """Run in progress. Each loop defines a step and adds to the state.

    Args:
        task: the experiment.
        settings: the settings of this run.
        device: device to train on.
        steps_per_epoch: calls of :meth:`advance` per epoch.

    Attributes:
        curve: values of each metric, one per finished epoch; None where there is none.
        side_by_side: most runs that shared the device at a time.
        resumed: number of times the run was interrupted and resumed.
        is_mid_step: whether an exception may leave a step half made, so that the state must not be saved.
        files: files to write beside the record, by suffix; the writer removes them.
        on_activity: called within a step with a long activity other than the step, and optionally its progress in
            [0, 1]; set by the display.
    """

    def __init__(self, task: Task, settings: Settings, device: torch.device, steps_per_epoch: int) -> None:
        self.task, self.settings, self.device, self.steps_per_epoch = task, settings, device, steps_per_epoch
        self.epoch = self.step = 0
        self.curve: dict[str, list[float | None]] = {}
        self.side_by_side, self.resumed, self.is_mid_step = 1, 0, True
        self.files: dict[str, bytes] = {}
        self.on_activity: Callable[..., None] = lambda *_: None
        self._seconds_before, self._started = 0.0, time.perf_counter()
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @abstractmethod
    def advance(self) -> None:
        """Make one step; after the last of an epoch, evaluate."""

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The trained network."""

    @property
    def is_finished(self) -> bool:
        """True when all epochs are done."""
        return self.epoch == self.settings.epochs

    @property
    def epochs_known(self) -> int:
        """Number of epochs whose metrics have arrived from the device."""
        return min(map(len, self.curve.values()))

    @property
    def seconds(self) -> float:
        """Duration of the run, including the time before it was resumed."""
        return self._seconds_before + time.perf_counter() - self._started

    @property
    def steps_done(self) -> int:
        """Steps since the start of the first epoch."""
        return self.epoch * self.steps_per_epoch + self.step

    def running_metrics(self) -> dict[str, float]:
        """Return metrics of the current epoch so far; waits for the device."""
        return {}

    def speed(self) -> str:
        """Describe the speed in the loop's own unit; empty if it has none."""
        return ""

    def throughput_note(self) -> str:
        """Return a line to print after the first epoch; mostly empty."""
        return ""

    def final_results(self) -> dict[str, Any]:
        """Return results besides the curves, at the end."""
        return {}

    def sizes(self) -> dict[str, int]:
        """Return numbers of the record that tell the memory of a run, such as the bytes of the optimiser's state."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return all that :meth:`restore` needs, as tensors and plain Python objects."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "curve": {name: list(values) for name, values in self.curve.items()},
            "seconds": self.seconds,
            "beside": self.side_by_side,
            "resumed": self.resumed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`state`."""
        if differing := set(state["curve"]) ^ set(self.curve):
            raise ValueError(f"its curve and the run's differ in {', '.join(sorted(differing))}")
        self.epoch, self.step, self.curve = state["epoch"], state["step"], state["curve"]
        self._seconds_before, self.side_by_side = state["seconds"], state["beside"]
        self.resumed = state["resumed"] + 1

    def _seed_of(self, number: int) -> int:
        """Return the seed of an epoch or a round, which no other run has up to a million of them."""
        return self.settings.seed * 1_000_003 + number

    @abstractmethod
    def _build(self) -> None:
        """Build the network, its optimiser and their buffers."""

    def _start(self, state: dict[str, Any] | None) -> None:
        """Build everything, and restore a state if there is one.

        Raises:
            StateError: if the state does not fit the run.
        """
        with self._on_stream():
            self._build()
            if state is not None:
                try:
                    self.restore(state)
                except UNRELATED_ERRORS:
                    raise
                except MISMATCH_ERRORS as error:
                    words = " ".join(str(error).split())
                    fault = f"lacks {words}" if isinstance(error, KeyError) else f"does not fit ({words})"
                    raise StateError(fault) from error
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Enter the run's own CUDA stream, if on a GPU."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


@dataclass
class Snapshot:
    """A run that trains in another process, as the display sees it. Has the names of :class:`Training`."""

    task: Task
    settings: Settings
    device: torch.device
    steps_per_epoch: int
    steps_done: int
    curve: dict[str, list[float | None]]
    seconds: float
    metrics: dict[str, float]
    speed_text: str
    note: str
    on_activity: Callable[..., None] | None = None

    @classmethod
    def of(cls, run: "Training | Snapshot") -> "Snapshot":
        """Copy what there is to see of a run. Waits for no GPU."""
        kept = (run.task, run.settings, run.device, run.steps_per_epoch, run.steps_done, run.curve, run.seconds)
        return cls(*kept, run.running_metrics() if run.device.type == "cpu" else {}, run.speed(), run.throughput_note())

    @property
    def epoch(self) -> int:
        return self.steps_done // self.steps_per_epoch

    @property
    def step(self) -> int:
        return self.steps_done % self.steps_per_epoch

    @property
    def epochs_known(self) -> int:
        return min(map(len, self.curve.values()))

    def running_metrics(self) -> dict[str, float]:
        return self.metrics

    def speed(self) -> str:
        return self.speed_text

    def throughput_note(self) -> str:
        return self.note


def copy_to_cpu(value: Any) -> Any:
    """Copy nested dicts and lists, with their tensors whole and on the CPU."""
    if isinstance(value, Tensor):
        return distributed.whole(value.detach()).cpu().clone()
    if isinstance(value, dict):
        return {key: copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_to_cpu(item) for item in value)
    return value


def state_tensors(*optimisers: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of the optimisers' states, which a step changes in place."""
    values = [value for each in optimisers for state in each.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def count_bytes(value: Any) -> int:
    """Sum the bytes of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(count_bytes, items))


def load_network(network: nn.Module, state: dict[str, Any]) -> None:
    """Load parameters and buffers.

    Raises:
        RuntimeError: if names or shapes differ.
        ValueError: if a dtype differs, which torch would cast.
    """
    network.load_state_dict(distributed.shard_like(state, network.state_dict()))
    for name, tensor in network.state_dict().items():
        _require_same_kind(name, state[name], tensor)


def load_tensor(tensor: Tensor, state: dict[str, Any], name: str) -> None:
    """Copy ``state[name]`` into a tensor.

    Raises:
        KeyError: if the state lacks the name.
        ValueError: if the shape or dtype differs, where torch would broadcast or cast.
    """
    _require_same_kind(name, state[name], tensor)
    tensor.copy_(state[name])


def load_optimiser(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimiser that was primed, and reattach the run's learning-rate tensors.

    Raises:
        KeyError: if the state lacks something. torch does not check, and would fail in a later step.
        ValueError: if a shape or dtype differs, which torch does not check either.
    """
    now, rates = optimiser.state_dict(), [group["lr"] for group in optimiser.param_groups]
    wanted = _flatten(now)
    sharded = {"state": distributed.shard_like(state["state"], now["state"]), "param_groups": state["param_groups"]}
    optimiser.load_state_dict(sharded)
    # saved values first, since loading may cast; loading itself sets options that are newer than the checkpoint
    loaded = _flatten(optimiser.state_dict()) | _flatten(state)
    if lacking := wanted.keys() - loaded.keys():
        raise KeyError(min(lacking))
    for name, value in wanted.items():
        _require_same_kind(name, loaded[name], value)
    for group, before, lr in zip(optimiser.param_groups, now["param_groups"], rates, strict=True):
        group["lr"] = lr  # loading copied the tensor
        if "fused" in before:
            group["fused"] = before["fused"]  # says how to compute, and depends on the number of processes


def _flatten(state: dict[str, Any]) -> dict[str, Any]:
    """Flatten an optimiser's state_dict into values by name."""
    parts = {f"group {number}": group for number, group in enumerate(state["param_groups"])}
    parts |= {f"parameter {number}": values for number, values in state["state"].items()}
    return {f"{name} of {part}": value for part, values in parts.items() for name, value in values.items()}


def _require_same_kind(name: str, value: Any, wanted: Any) -> None:
    """Raise a ValueError unless both are tensors of one shape and dtype, or neither is a tensor."""
    if (found := _kind(value)) != (needed := _kind(wanted)):
        raise ValueError(f"{name} is {found} where {needed} is needed")


def _kind(value: Any) -> str:
    return f"a {value.dtype} tensor shaped {tuple(value.shape)}" if isinstance(value, Tensor) else "a plain value"


def compile_in_place(module: nn.Module) -> None:
    """Compile a module for the shapes that it meets."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    module.compile(dynamic=False)


def eager_if(is_rare: bool) -> AbstractContextManager[Any]:
    """Run compiled modules uncompiled on a rare shape, which would take longer to compile than it saves."""
    return torch.compiler.set_stance("force_eager") if is_rare else nullcontext()


@contextmanager
def matmul_precision(name: Precision) -> Iterator[None]:
    """Compute matrix products and convolutions in float32, or in TF32 on a GPU; benchmark cuDNN's kernels.

    With bf16, products outside of :func:`autocast` are in TF32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if name == "float32" else "high")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=name != "float32"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(name: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Enter bfloat16 arithmetic for forward passes and losses, if that is the precision."""
    if name != "bf16":
        return nullcontext()
    # a cached copy of a weight could outlive the CUDA graph that made it
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
