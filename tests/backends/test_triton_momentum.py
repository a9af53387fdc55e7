"""Momentum and rounding in the Triton kernels: what the tests of all backends do not reach."""
# ruff: noqa: N803

import pytest
import torch
from cases import Case
from test_sweeps import rest_of, sweeps_of
from test_triton import DEVICE, LONG, by_hand, check, columns, network, rows
from torch import Tensor, nn

import nero
from nero.backends.triton.tables import Launch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from nero.backends.triton.rounding_kernels import draw, noise_key, rounded  # noqa: E402


def with_momentum(case: Case, nesterov: bool = True) -> Case:
    options = {**case.options, "momentum": 0.9, "nesterov": nesterov}
    return Case(case.name, case.shape, case.kind, case.axes, case.groups, case.layout, options)


def test_momentum_in_every_tile_agrees_with_oracle():
    """Rows of every tile, aligned and not, a split row, columns, gaps, gains; and rows without momentum beside them."""
    cases = [rows(3, 8), rows(2, 130), rows(1, 2304), rows(1, 5000), rows(1, 9000), rows(1, LONG), columns(300, 40)]
    cases += [columns(60, 8), columns(1_100, 5)]
    cases += [rows(40, 1), Case("gaps", (3, 4), layout="gaps"), Case("strided gains", (3, 4), "gain", layout="gaps")]
    optimiser = check([with_momentum(case, bool(i % 2)) for i, case in enumerate(cases)] + [rows(3, 8)])
    assert len(sweeps_of(optimiser)) == 1


def stepped(weight: Tensor, grads: list[Tensor], backend: str = "triton", **options) -> nero.Nero:
    optimiser = nero.Nero([{"params": [weight], "fan_in_axes": options.pop("axes", None)}], backend=backend, **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimiser.step()
    return optimiser


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((4, 9), None), ((9, 4), (0,)), ((4, 17_000), None), ((1_100, 4), (0,))],
    ids=["rows", "columns", "long rows", "long columns"],
)
def test_unusual_neurons_leave_others_and_their_buffers(shape: tuple[int, int], axes: tuple[int, ...] | None):
    """Of four neurons one is ordinary, one needs float64, one is skipped, and one has no gradient."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for _ in range(2)]
    factors = torch.tensor([1.0, 1e-30, 1.0, 0.0])
    grads = [grad * (factors if axes else factors[:, None]) for grad in grads]
    (grads[1] if axes else grads[1].t())[3, 2] = float("inf")
    start = torch.randn(shape, generator=generator)
    found = []
    for backend in ("eager", "triton"):
        weight = nn.Parameter(start.to(DEVICE))
        optimiser = stepped(weight, [grad.to(DEVICE) for grad in grads], backend, axes=axes, momentum=0.9)
        assert optimiser.skipped == {"parameter 0 of group 0": 1}
        found.append((weight.detach(), optimiser.state[weight]["momentum_buffer"]))
    assert not rest_of(optimiser)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-6)
    buffers = [buffer / factors.clamp_min(1e-30).to(DEVICE).view((1, 4) if axes else (4, 1)) for _, buffer in found]
    torch.testing.assert_close(*buffers, rtol=0, atol=1e-6)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
def test_momentum_with_gradient_of_another_dtype_and_layout():
    weights, buffers = [], []
    grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    for like in (grad, grad.t().contiguous().t()):
        weight = nn.Parameter(torch.linspace(-1, 1, 48, dtype=torch.bfloat16).view(6, 8).to(DEVICE))
        weight.grad_dtype = torch.float32
        optimiser = stepped(weight, [like.to(DEVICE)] * 2, momentum=0.9)
        assert not rest_of(optimiser)
        weights.append(weight.detach())
        buffers.append(optimiser.state[weight]["momentum_buffer"])
    assert torch.equal(*weights)
    assert torch.equal(*buffers)
    assert buffers[0].dtype == torch.bfloat16
    torch.testing.assert_close(buffers[0].cpu().float(), 0.19 * grad, rtol=2**-7, atol=0)


def launches_of(optimiser: nero.Nero) -> list[Launch]:
    return [launch for sweep in sweeps_of(optimiser) for launch, _ in sweep._tables.launches]


def test_changed_momentum_keeps_the_sweep_and_its_kernels():
    weight, grads = nn.Parameter(torch.randn(3, 8, device=DEVICE)), torch.randn(4, 3, 8, device=DEVICE)
    twin = nn.Parameter(weight.detach().clone())
    optimiser, eager = stepped(weight, [grads[0]], momentum=0.9), stepped(twin, [grads[0]], "eager", momentum=0.9)
    before, constants = sweeps_of(optimiser), [launch.constants for launch in launches_of(optimiser)]
    for grad, (momentum, nesterov) in zip(grads[1:], ((0.5, True), (0.95, True), (0.95, False)), strict=True):
        for each, parameter in ((optimiser, weight), (eager, twin)):
            each.param_groups[0].update(momentum=momentum, nesterov=nesterov)
            parameter.grad = grad
            each.step()
        if nesterov:
            assert sweeps_of(optimiser) == before
        torch.testing.assert_close(weight, twin, rtol=0, atol=1e-6)
    assert [launch.constants for launch in launches_of(optimiser)] == constants, "nothing to compile"


def moved(_: nn.Parameter, state: dict[str, Tensor]) -> None:
    state["momentum_buffer"].data = state["momentum_buffer"].data.clone()


def replaced(_: nn.Parameter, state: dict[str, Tensor]) -> None:
    state["momentum_buffer"] = state["momentum_buffer"].clone()


def transposed(weight: nn.Parameter, _: dict[str, Tensor]) -> None:
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize("change", [moved, replaced, transposed])
def test_sweep_follows_a_buffer_that_moves(change):
    start, grads = torch.randn(3, 8, device=DEVICE), torch.randn(2, 3, 8, device=DEVICE)
    found = []
    for changes in (False, True):
        weight = nn.Parameter(start.clone())
        optimiser = stepped(weight, [grads[0]], momentum=0.9)
        if changes:
            change(weight, optimiser.state[weight])
        weight.grad = grads[1].clone()
        optimiser.step()
        assert not rest_of(optimiser)
        found.append((weight.detach(), optimiser.state[weight]["momentum_buffer"]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-6)


def test_noise_of_buffer_is_independent_of_the_weights():
    """Both sizes are rounded up or down at random: those of the weights of a neuron that turns, and of its buffer."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1, 4096, device=DEVICE).bfloat16())
    optimiser = nero.Nero([weight], backend="triton", momentum=0.7, nesterov=False, rounding="stochastic", lr=0.1)
    grad = torch.randn(1, 4096, device=DEVICE).bfloat16()
    exact = nn.Parameter(weight.detach().float())
    stepped(exact, [grad.float()], pretrained=True, lr=0.1)
    weight.grad = grad
    optimiser.step()
    buffer = optimiser.state[weight]["momentum_buffer"].float()
    is_up = [weight.detach().float().abs() > exact.detach().abs(), buffer.abs() > 0.3 * grad.float().abs()]
    correlation = torch.corrcoef(torch.stack(is_up).flatten(1).float())[0, 1]
    assert correlation.abs() < 0.06  # four times the deviation of independent numbers


@triton.jit(do_not_specialize=["owner"])  # the kernels load it: a constant 0 or 1 has no methods
def _draw(out, noise, owner, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr, PAIRED: tl.constexpr):
    i, k = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    bits = draw(noise_key(tl.load(noise), owner), i, k, AXIS, PAIRED).to(tl.int64)
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


@pytest.mark.gpu
def test_cuda_graph_replays_with_momentum():
    model, inputs = network(), torch.ones(8, 64, device="cuda").cumsum(1) / 64
    optimiser = nero.Nero(model, momentum=0.9)

    def train() -> None:
        optimiser.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimiser.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    for _ in range(3):
        graph.replay()
    for found, wanted in zip(model.parameters(), by_hand([0.01] * 6, momentum=0.9), strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-5)
