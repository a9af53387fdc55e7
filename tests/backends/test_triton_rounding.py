"""Rounding in the Triton kernels: to nearest as torch does it, and the noise of stochastic rounding."""
# ruff: noqa: N803

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
DEVICE = "cpu" if INTERPRETED else "cuda"

from nero.backends.triton.rounding_kernels import draw, noise_key, rounded  # noqa: E402


@triton.jit
def _draw(out, noise, owner, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr, PAIRED: tl.constexpr):
    i, k = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    bits = draw(noise_key(noise, owner), i, k, AXIS, PAIRED).to(tl.int64)
    at = tl.expand_dims(tl.arange(0, ROWS) * WIDTH, AXIS) + tl.expand_dims(k, 1 - AXIS)
    tl.store(out + at, bits)


@triton.jit
def _round(x, out, bits, dtype: tl.constexpr, SIZE: tl.constexpr, STOCHASTIC: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, rounded(tl.load(x + at), dtype, tl.load(bits + at), STOCHASTIC))


def drawn(seed: int, owner: int = 0, first: int = 0, axis: int = 1, paired: bool = False, rows: int = 256) -> Tensor:
    """Draw numbers of 32 bits for 1024 elements of each of some neurons."""
    out = torch.zeros(rows, 1024, dtype=torch.int64, device=DEVICE)
    noise = torch.tensor([seed], dtype=torch.int64, device=DEVICE)
    _draw[(1,)](out, noise, owner, first, rows, 1024, axis, paired)
    return out.cpu()


def halves(bits: Tensor) -> list[Tensor]:
    """Return the lower and the upper 16 bits, as uniform numbers of zero mean and unit variance."""
    return [((half + 0.5) / 2**16 - 0.5) * 12**0.5 for half in (bits & 0xFFFF, bits >> 16)]


def correlation(one: Tensor, other: Tensor) -> float:
    """Return a correlation in standard errors."""
    return abs(float((one * other).mean())) * one.numel() ** 0.5


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_noise_is_uniform_and_independent(axis: int, paired: bool):
    """Within five standard errors: of neighbours and other places, steps, tensors, and of weight and buffer."""
    seed = 4611686018427387903 // 3
    one, *others = (drawn(seed + i, owner, axis=axis, paired=paired) for i, owner in ((0, 0), (0, 1), (1, 0), (1, 1)))
    lower, upper = halves(one)
    for half in (lower,) if paired else (lower, upper):
        assert correlation(half, torch.ones_like(half)) < 5
        assert abs(float(half.square().mean()) - 1) < 5 * (0.8 / half.numel()) ** 0.5
        counts = torch.bincount(((half / 12**0.5 + 0.5) * 256).long().flatten(), minlength=256)
        expected = half.numel() / 256
        assert float(((counts - expected) ** 2 / expected).sum()) < 255 + 5 * 510**0.5
        for lag in (1, 2, 3, 4, 8, 16, 32, 64, 256, 512):
            assert correlation(half[:, lag:], half[:, :-lag]) < 5
        for lag in (1, 2, 3, 4, 8, 64):
            assert correlation(half[lag:], half[:-lag]) < 5
    if not paired:
        assert correlation(lower, upper) < 5
        assert correlation(lower[:, 1:], upper[:, :-1]) < 5
    for other in others:
        assert all(correlation(lower, half) < 5 for half in halves(other)[: 1 if paired else 2])


def test_noise_depends_on_place_alone():
    """Programs of any size draw the same numbers for the same elements."""
    whole = drawn(7, rows=64)
    assert torch.equal(whole[32:], drawn(7, first=32, rows=32))
    assert torch.equal(whole, drawn(7, rows=64))


def by_kernel(x: Tensor, dtype: torch.dtype, bits: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    given = torch.zeros_like(x, dtype=torch.int32) if bits is None else bits.to(torch.int32)
    name = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    _round[(1,)](x.to(DEVICE), out, given.to(DEVICE), name, x.numel(), bits is not None)
    return out.cpu()


by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@by_dtype
def test_rounding_to_nearest_is_that_of_torch(dtype: torch.dtype):
    """All sizes, ties, the largest numbers, infinity and NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * 2.0 ** torch.randint(-24, 15, (4096,), generator=generator)
    numbers = torch.randint(1, 0x7800, (1024,), generator=generator).to(torch.int16)
    x[:1024] = (numbers.view(dtype).double() + (numbers + 1).view(dtype).double()).float() / 2
    x[:6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e38])
    largest = torch.finfo(dtype).max
    wanted = torch.where(x.isfinite(), x.clamp(-largest, largest), x).to(dtype)
    found = by_kernel(x, dtype)
    same = found.view(torch.int16) == wanted.view(torch.int16)
    assert (same | (found.isnan() & wanted.isnan())).all()


@by_dtype
def test_stochastic_rounding_has_the_right_mean(dtype: torch.dtype):
    """For every value of the random bits once, the mean is exact; a number of the dtype keeps its bits."""
    count = 1 << (16 if dtype == torch.bfloat16 else 13)
    for value in (1.003, -0.3333, -7e-3, 2e-7, 2.0**-14 * 1.3):
        x = torch.full((count,), value)
        found = by_kernel(x, dtype, torch.arange(count)).double()
        assert float(found.mean()) == pytest.approx(float(x[0]), rel=1e-6, abs=2.0**-24 / count)
        assert len(found.unique()) == 2
    held = torch.randn(4096).to(dtype)
    assert torch.equal(by_kernel(held.float(), dtype, torch.randint(1 << 16, (4096,))), held)
