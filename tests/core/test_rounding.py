"""Stochastic rounding: unbiased, reproducible, and on every backend."""

import math

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nero
from nero.rounding import HALVES, rounded

by_dtype = pytest.mark.parametrize("dtype", HALVES, ids=str)


@by_dtype
def test_the_mean_is_the_value(dtype: torch.dtype):
    """Over 2**16 draws, to four standard deviations; from the largest numbers to those below the normal."""
    torch.manual_seed(0)
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.tensor([1.0, 1.003, -0.3333, 2.4e4, -7e-3, 3.3 * tiny, 0.0])
    if dtype == torch.float16:
        values = torch.cat([values, torch.tensor([0.3 * tiny, 2.0**-25])])
    draws = rounded(values.expand(1 << 16, -1).contiguous(), dtype, "stochastic").double()
    spread = draws.std(0)
    assert ((draws.mean(0) - values.double()).abs() <= 4 * spread / 2**8).all()
    steps = [len(each.unique()) for each in draws.T]
    assert max(steps) == 2, "up or down, nowhere else"


@by_dtype
def test_what_the_dtype_holds_stays(dtype: torch.dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    held = bits.view(dtype)
    held = held[held.isfinite()]
    assert torch.equal(rounded(held.float(), dtype, "stochastic").view(torch.int16), held.view(torch.int16))


@by_dtype
def test_what_is_not_finite_stays_so(dtype: torch.dtype):
    values = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    found = rounded(values, dtype, "stochastic")
    assert found.isnan().tolist() == [True, True, False, False]
    assert found[2:].tolist() == [math.inf, -math.inf]


@by_dtype
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_is_beyond_the_largest_number_becomes_that(dtype: torch.dtype, rounding: str):
    largest, beyond = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    values = torch.tensor([beyond, -beyond, 1.0001 * largest]).clamp(-beyond, beyond)
    assert rounded(values, dtype, rounding).tolist() == [largest, -largest, largest]


@by_dtype
def test_rounding_to_nearest_takes_few_passes(dtype: torch.dtype):
    """Each reads and writes all weights, and torch.where takes as long as several."""
    passes = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            passes.append(func)
            return func(*args, **(kwargs or {}))

    with Count():
        rounded(torch.ones(3), dtype, "nearest")
    assert passes.pop(0) is torch.ops.aten.ones.default
    assert len(passes) <= 5
    assert torch.ops.aten.where.self not in passes


def test_full_precision_is_rounded_to_nearest():
    values = torch.randn(100, dtype=torch.float64)
    assert torch.equal(rounded(values, torch.float32, "stochastic"), values.float())


def runs(backend: str, dtype: torch.dtype, seed: int, device: str, lr: float = 1e-4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    weight, gain = (nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in ((256, 64), (512,)))
    with torch.no_grad():
        weight[:, ::2] = -1
    optimiser = nero.Nero([weight, gain], lr=lr, rounding="stochastic", backend=backend)
    entered = weight.detach().float()
    for _ in range(4):
        weight.grad = torch.zeros_like(weight)
        weight.grad[:, 0], weight.grad[:, 1] = 1, -1  # turns every neuron in the same plane
        gain.grad = torch.ones_like(gain)
        optimiser.step()
    return weight.detach().float() - entered, gain.detach().float() - 1


@by_dtype
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_small_steps_are_made_now_and_then(backend: str, dtype: torch.dtype, device: str):
    """Steps of a hundredth of what the dtype tells apart: lost by rounding to nearest, kept on average."""
    weight, gain = runs(backend, dtype, 0, device)
    again, _ = runs(backend, dtype, 0, device)
    other, _ = runs(backend, dtype, 1, device)
    assert torch.equal(weight, again), "from the seed"
    assert not torch.equal(weight, other)
    for found, wanted in ((gain, -4e-4), (weight[:, 0], -4e-4 / 2**0.5), (weight[:, 1], 4e-4 / 2**0.5)):
        error = found.std() / len(found) ** 0.5
        assert error > 0
        assert (found.mean() - wanted).abs() < 4 * error
    assert weight[:, 2:].abs().max() <= 2**-6


def test_nearest_loses_them(backend: str):
    if backend == "triton" and not INTERPRETED:
        return
    gain = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimiser = nero.Nero([gain], lr=1e-4, backend=backend)
    for _ in range(4):
        gain.grad = torch.ones_like(gain)
        optimiser.step()
    assert torch.equal(gain, torch.ones_like(gain))


def test_a_bad_choice_is_an_error():
    with pytest.raises(ValueError, match="rounding must be one of"):
        nero.Nero(nn.Linear(2, 2), rounding="up")
