"""What bad input gets: an error that says which option or parameter, and what to do."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from nero.backends import CHOICES, has, triton
from nero.balance import check_memory
from nero.whole import real


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise if a parameter is none that Nero can train; of a frozen one, only if it could not even be left alone."""
    if is_lazy(parameter):
        raise ValueError(f"{name} has no shape yet: run a batch through the lazy layers before making the optimiser")
    if getattr(parameter, "_is_flat_param", False):
        raise TypeError(
            f"{name} is a flat parameter of FSDP1, which cuts through neurons: shard with "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if parameter.requires_grad:
        check_trained(name, parameter)


def check_trained(name: str, parameter: Tensor) -> None:
    """Raise if a parameter's numbers are none that Nero can train."""
    if parameter.is_complex():
        raise TypeError(f"{name} is complex: hold it as a real parameter of twice the size (torch.view_as_real)")
    if parameter.dtype.itemsize < 2:
        raise TypeError(f"{name} is {parameter.dtype}: train it in bfloat16 or wider")
    if parameter.layout is not torch.strided:
        raise TypeError(f"{name} is laid out as {parameter.layout}: hold it as a dense parameter")
    check_memory(name, parameter)
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return  # where nobody can look at values
    if parameter.is_inference():
        raise ValueError(f"{name} was made under torch.inference_mode(), and cannot be trained: make it outside")
    if not bool(parameter.detach().isfinite().all()):
        raise ValueError(f"{name} holds values that are infinite or not a number: initialise it first")


def check_counts(model: nn.Module) -> None:
    """Raise if nobody can tell when a model runs, for which the count of its depth waits."""
    if isinstance(model, ScriptModule):
        raise ValueError(
            "a scripted model does not say when it runs, so its depth cannot be counted then: count it before, as in "
            "nero.Nero(model, lr=0.1, longest_step=3, depth=nero.depth_of(nero.balance_(model), inputs))"
        )


def check_backend(backend: str, name: str, *tensors: Tensor) -> None:
    """Raise if a backend that was asked for by name cannot step a parameter, or has no library to do it with."""
    instead = "use backend='foreach', or 'auto' for the fastest that serves"
    if backend in ("numba", "triton") and not has(backend):
        how = {"numba": "pip install 'nero-optim[cpu]'", "triton": "pip install triton"}[backend]
        raise ModuleNotFoundError(f"backend={backend!r}, asked for {name}, needs {backend} ({how}); {instead}")
    if backend == "triton":
        for tensor, what in zip(tensors, (name, f"the gradient of {name}"), strict=False):
            reason = triton.why_not(tensor)
            if reason is not None:
                raise ValueError(f"backend='triton' cannot step {name}: {what} is {reason}; {instead}")


def check_lr(lr: object, wait: bool = True) -> None:
    """Raise if a learning rate makes no sense. Without wait, no accelerator is waited for."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr as a tensor must have one element, but it is shaped {tuple(lr.shape)}")
    if isinstance(lr, str) and lr == "auto":
        raise ValueError(
            "lr='auto' is no rate of one group, but for all of them, as in nero.Nero(model, lr='auto'): give the group "
            "lr=0.1, longest_step=3 and a depth, as nero.depth_of counts it; or let optimiser.count_depth(model) count "
            "one, by which the rates of all groups are divided"
        )
    if wait or not isinstance(lr, Tensor) or lr.device.type == "cpu":
        value = lr.item() if isinstance(lr, Tensor) else lr
        what = "finite and not negative, like 0.01" + (" (or 'auto', for all groups)" if isinstance(lr, str) else "")
        _number("lr", value, what, lambda x: 0 <= x < math.inf)


def check_options(options: Mapping[str, Any], wait: bool = True) -> None:
    """Raise if an option of a group makes no sense. Without wait, no accelerator is waited for."""
    check_lr(options["lr"], wait)
    _number("beta", options["beta"], "in [0, 1), like 0.999", lambda x: 0 <= x < 1)
    _number("longest_step", options["longest_step"], "at least 1, like 3, or math.inf", lambda x: x >= 1)
    _number("gain_penalty", options["gain_penalty"], "finite and not negative", lambda x: 0 <= x < math.inf)
    if options["scale"] is not None:
        _number("scale", options["scale"], "finite and positive, or None", lambda x: 0 < x < math.inf)
    if options["depth"] != "auto":
        _number("depth", options["depth"], "finite and positive, or 'auto'", lambda x: 0 < x < math.inf)
    _one_of("fix_mean", options["fix_mean"], [True, False])
    _one_of("fix_norm", options["fix_norm"], [True, False, "initial"])
    _one_of("maximize", options["maximize"], [True, False])
    _one_of("on_nonfinite", options["on_nonfinite"], ["skip", "raise"])
    _one_of("backend", options["backend"], list(CHOICES))
    _one_of("rounding", options["rounding"], ["nearest", "stochastic"])
    _one_of("role", options["role"], [None, "neuron", "gain", "bias"])


def _number(name: str, value: object, what: str, good: Callable[[float], bool]) -> None:
    if isinstance(value, Tensor) or not good(real(value)):  # what is no number is not a number, and good for nothing
        raise ValueError(f"{name} must be {what}, but it is {value!r}")


def _one_of(name: str, value: object, choices: list[object]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f"{name} must be one of {choices}, but it is {value!r}")
