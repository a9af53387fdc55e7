"""The numba backend: threads, pieces of work, memory, compilation, and its absence."""

import logging
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from cases import Case, Oracle
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nero
from nero.backends import available, plan
from nero.backends.numba import sweep
from nero.backends.numba.tasks import narrow
from nero.rounding import rounded

ROWS: list[tuple[int, ...]] = [(300, 700), (40,), (9, 3, 3, 3), (20_000,), (3, 100_000), *[(5, 7)] * 50]


def trained(
    threads: int, shapes: list[tuple[int, ...]], axes: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    group = {"params": parameters, "fan_in_axes": axes, "rounding": "stochastic"}
    optimiser = nero.Nero([group], backend="numba", momentum=0.9 if dtype == torch.bfloat16 else 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameters[0].grad[0] = 0
            optimiser.step()
    finally:
        torch.set_num_threads(before)
    averages = [optimiser.state[parameter]["grad_norm"] for parameter in parameters]
    return [each.detach() for each in [*parameters, *averages]]


@pytest.mark.parametrize(
    ("shapes", "axes", "dtype"),
    [
        (ROWS, None, torch.float32),
        ([(700, 300), (5000, 4), (3, 7000)], (0,), torch.float32),
        (ROWS, None, torch.bfloat16),
    ],
    ids=["rows", "columns", "bf16"],
)
def test_step_is_bitwise_equal_for_any_thread_count(
    shapes: list[tuple[int, ...]], axes: tuple[int, ...] | None, dtype: torch.dtype
):
    once = trained(1, shapes, axes, dtype)
    for threads in (2, 3, 7):
        assert all(map(torch.equal, once, trained(threads, shapes, axes, dtype)))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_bf16_is_rounded_as_by_torch(rounding: str):
    """All upper halves with some lower ones: ties, subnormal and nonfinite numbers, and those beyond bf16's largest."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] * (1 << 16) + lower).to(torch.int32).flatten()
    values, found = bits.view(torch.float32), torch.empty(bits.numel(), dtype=torch.bfloat16)
    keys = np.arange(2 if rounding == "stochastic" else 0, dtype=np.uint32)
    numba.njit(lambda *args: narrow(*args))(found.data_ptr(), 0, values.numpy(), keys, 1)
    assert torch.equal(found.isnan(), values.isnan())
    if rounding == "nearest":
        assert torch.equal(found.nan_to_num(0.0), rounded(values, torch.bfloat16, "nearest").nan_to_num(0.0))
        return
    up = found.view(torch.int16) != (bits >> 16).to(torch.int16)  # or down, for the largest number alone
    is_exact = (lower == 0).expand(1 << 16, -1).flatten() | ~values.isfinite()
    assert not (up & is_exact & ~values.isnan()).any()
    shares = (lower / (1 << 16)).double()
    is_free = (values.isfinite() & (values.abs() < 3e38)).view(-1, len(lower))[:, 0]
    torch.testing.assert_close(up.view(-1, len(lower))[is_free].double().mean(0), shares, rtol=0, atol=0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bf16_that_is_not_contiguous_is_left_to_foreach(momentum: float, monkeypatch: pytest.MonkeyPatch):
    layers = [nn.Linear(8, 5), nn.LayerNorm(8), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)]
    rows = nn.Sequential(*layers).bfloat16()
    columns = nn.Parameter(torch.randn(8, 5).bfloat16())
    groups = [*nero.param_groups(rows), {"params": [("columns", columns)], "fan_in_axes": (0,)}]
    optimiser = nero.Nero(groups, backend="numba", momentum=momentum)
    for parameter in (columns, *rows.parameters()):
        parameter.grad = torch.randn_like(parameter)
    passed_on = []
    monkeypatch.setattr("nero.backends.foreach.step", lambda jobs, _: passed_on.extend(job.parameter for job in jobs))
    optimiser.step()
    assert len(passed_on) == 1
    assert passed_on[0] is columns


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 70_000), (1,)), ((70_000, 2), (0,)), ((3, 7000), (0,)), ((2, 40, 5, 30), (1, 3))]
)
def test_tensor_cut_into_pieces_agrees_with_oracle(shape: tuple[int, ...], axes: tuple[int, ...]):
    case, generator = Case("cut", shape, "neuron", axes), torch.Generator().manual_seed(4)
    parameter = nn.Parameter(case.start(generator, torch.float32))
    reference, optimiser = Oracle(case, parameter), nero.Nero([case.group(parameter)], backend="numba")
    for _ in range(2):
        parameter.grad = case.tensor(generator, torch.float32)
        reference.step(parameter.grad)
        optimiser.step()
    reference.check(parameter, optimiser.state[parameter], 1e-5)


def test_extreme_columns_do_not_disturb_others():
    results = []
    for backend in ("eager", "numba"):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(20, 9))
        optimiser = nero.Nero([{"params": [weight], "fan_in_axes": (0,)}], backend=backend)
        entered = weight.detach().clone()
        weight.grad = torch.randn(20, 9)
        weight.grad[:, [0, 3, 8]] = torch.tensor([0.0, torch.nan, torch.inf])
        weight.grad[:, 4] *= 1e30
        weight.grad[:, 5] *= 1e-30
        optimiser.step()
        assert torch.equal(weight[:, [0, 3, 8]], entered[:, [0, 3, 8]])
        assert optimiser.state[weight]["skipped"] == 2
        results.append((weight.detach(), optimiser.state[weight]["grad_norm"]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


class LargestNew(TorchDispatchMode):
    """Finds the size of the largest tensor that torch makes, in bytes."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return made


def largest_made(backend: str, axes: tuple[int, ...], momentum: float) -> int:
    """Return the size of the largest thing that torch, numpy or Python makes in a step on weights of 8 MB."""
    weights = [nn.Parameter(torch.randn(1024, 2048)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimiser = nero.Nero([{"params": weights, "fan_in_axes": axes}], backend=backend, momentum=momentum)
    optimiser.step()
    state = [value for weight in weights for value in optimiser.state[weight].values()]
    tracemalloc.start()
    try:
        with LargestNew([*weights, *(weight.grad for weight in weights), *state]) as mode:
            optimiser.step()
        return max(mode.largest, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("axes", [(0,), (1,)], ids=["columns", "rows"])
def test_numba_step_makes_nothing_large(axes: tuple[int, ...], momentum: float):
    assert largest_made("numba", axes, momentum) < 1 << 20
    if momentum:
        assert largest_made("foreach", axes, momentum) >= 1 << 23


def test_compilation_is_announced_once(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("nero"), "warning", said.append)
    loops = SimpleNamespace(do_pieces=numba.njit(lambda *_: None), count=lambda *_: None)  # compiles soon
    monkeypatch.setattr(sweep, "loops", loops)
    weight = nn.Parameter(torch.randn(3, 4))
    weight.grad = torch.randn(3, 4)
    optimiser = nero.Nero([weight], backend="numba")
    for _ in range(2):
        optimiser.step()
    assert said == ["numba compiles Nero's loops for tensors of a new kind: ten seconds or so, then cached"]


def test_cached_loops_follow_all_sources_and_give_the_same_bits(tmp_path: Path):
    package = tmp_path / "nero"
    shutil.copytree(Path(nero.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "backends/__init__.py").write_text("")  # it imports torch, which takes longer than the loops
    code = (
        "import numpy as np\nfrom nero.backends.numba.loops import sum_rows\n"
        "rows, sums = np.random.default_rng(0).random((9, 1152), np.float32), np.empty((5, 9))\n"
        "sum_rows(rows, rows, sums)\nprint(sums.tobytes().hex(), sum(sum_rows.stats.cache_hits.values()))"
    )
    found = []
    for comment in ("", "", "# another source"):
        with (package / "backends/numba/float64.py").open("a") as source:
            source.write(comment)
        command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append(done.stdout.split())
    assert [hits for _, hits in found] == ["0", "1", "0"]
    assert len({bits for bits, _ in found}) == 1


def test_numba_missing_raises_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "nero.backends.numba.loops")  # imported again, by name and from its package
    monkeypatch.delattr("nero.backends.numba.loops")
    available.numba_works.cache_clear()
    message = (
        "backend='numba', chosen for weight, needs numba (pip install '.[cpu]' in a clone of nero-optim); "
        "use backend='foreach'"
    )
    with pytest.raises(ModuleNotFoundError, match=re.escape(message)):
        nero.Nero(nn.Linear(3, 2), backend="numba")
    available.numba_works.cache_clear()


@pytest.mark.parametrize(("least", "is_used"), [(100, True), (10_000, True), (20_000, False)])
def test_auto_uses_numba_from_a_minimum_size(monkeypatch: pytest.MonkeyPatch, least: int, is_used: bool):
    monkeypatch.setattr(plan, "MIN_NUMBA_ELEMENTS", least)
    layer = nn.Linear(20, 20)  # two tensors, which count for 8,192 elements more each
    optimiser = nero.Nero(layer.parameters())
    layer(torch.ones(1, 20)).sum().backward()
    optimiser.step()
    sweeps = optimiser._plan._sweeps
    assert [type(each) for each in sweeps] == ([sweep.NumbaSweep] if is_used else [])


def test_auto_does_without_a_numba_that_does_not_compile():
    code = (
        "import torch, nero\n"
        "layer = torch.nn.Linear(1024, 1024)\n"
        "optimiser = nero.Nero(layer)\n"
        "layer(torch.ones(1, 1024)).sum().backward()\n"
        "optimiser.step()\n"
        "print(nero.is_balanced(layer))"
    )
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True\n"
