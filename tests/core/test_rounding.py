"""Stochastic rounding: unbiased, reproducible, and on every backend."""

import math

import pytest
import torch
from interpreter import INTERPRETED, few
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nero
from nero.rounding import HALVES, rounded

by_dtype = pytest.mark.parametrize("dtype", HALVES, ids=str)


@by_dtype
def test_stochastic_rounding_keeps_the_mean(dtype: torch.dtype):
    """Over 2**16 draws, within four standard errors; from large to subnormal values."""
    torch.manual_seed(0)
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.tensor([1.0, 1.003, -0.3333, 2.4e4, -7e-3, 3.3 * tiny, 0.0])
    if dtype == torch.float16:
        values = torch.cat([values, torch.tensor([0.3 * tiny, 2.0**-25])])
    draws = rounded(values.expand(1 << 16, -1).contiguous(), dtype, "stochastic").double()
    spread = draws.std(0)
    assert ((draws.mean(0) - values.double()).abs() <= 4 * spread / 2**8).all()
    steps = [len(each.unique()) for each in draws.T]
    assert max(steps) == 2, "up or down, to the nearest two"


@by_dtype
def test_value_of_the_dtype_keeps_its_bits(dtype: torch.dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    held = bits.view(dtype)
    held = held[held.isfinite()]
    assert torch.equal(rounded(held.float(), dtype, "stochastic").view(torch.int16), held.view(torch.int16))


@by_dtype
def test_nonfinite_value_stays_nonfinite(dtype: torch.dtype):
    values = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    found = rounded(values, dtype, "stochastic")
    assert found.isnan().tolist() == [True, True, False, False]
    assert found[2:].tolist() == [math.inf, -math.inf]


@by_dtype
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_value_beyond_the_largest_number_saturates(dtype: torch.dtype, rounding: str):
    largest, beyond = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    values = torch.tensor([beyond, -beyond, 1.0001 * largest]).clamp(-beyond, beyond)
    assert rounded(values, dtype, rounding).tolist() == [largest, -largest, largest]


@by_dtype
def test_rounding_to_nearest_takes_few_passes(dtype: torch.dtype):
    """Every pass reads and writes all weights; torch.where takes as long as several."""
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


def test_full_precision_rounds_to_nearest():
    values = torch.randn(100, dtype=torch.float64)
    assert torch.equal(rounded(values, torch.float32, "stochastic"), values.float())


def moves(backend: str, dtype: torch.dtype, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Return how far weights and gains move in four small steps."""
    torch.manual_seed(seed)
    shapes = ((few(backend, 256, 12), 64), (512,))
    weight, gain = (nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in shapes)
    with torch.no_grad():
        weight[:, ::2] = -1
    optimiser = nero.Nero([weight, gain], lr=1e-4, rounding="stochastic", backend=backend)
    entered = weight.detach().float()
    for _ in range(4):
        weight.grad = torch.zeros_like(weight)
        weight.grad[:, 0], weight.grad[:, 1] = 1, -1  # turns every neuron in the same plane
        gain.grad = torch.ones_like(gain)
        optimiser.step()
    return weight.detach().float() - entered, gain.detach().float() - 1


@by_dtype
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_small_steps_with_stochastic_rounding_keep_the_mean(backend: str, dtype: torch.dtype, device: str):
    """Steps of a hundredth of the dtype's spacing."""
    weight, gain = moves(backend, dtype, 0, device)
    again, _ = moves(backend, dtype, 0, device)
    other, _ = moves(backend, dtype, 1, device)
    assert torch.equal(weight, again), "determined by the seed"
    assert not torch.equal(weight, other)
    for found, wanted in ((gain, -4e-4), (weight[:, 0], -4e-4 / 2**0.5), (weight[:, 1], 4e-4 / 2**0.5)):
        error = found.std() / len(found) ** 0.5
        assert error > 0
        assert (found.mean() - wanted).abs() < 4 * error
    assert weight[:, 2:].abs().max() <= 2**-6


def test_small_steps_with_rounding_to_nearest_are_lost(backend: str):
    if backend == "triton" and not INTERPRETED:
        return
    gain = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimiser = nero.Nero([gain], lr=1e-4, backend=backend)
    for _ in range(4):
        gain.grad = torch.ones_like(gain)
        optimiser.step()
    assert torch.equal(gain, torch.ones_like(gain))


def test_unknown_rounding_raises():
    with pytest.raises(ValueError, match="rounding must be one of"):
        nero.Nero(nn.Linear(2, 2), rounding="up")
