"""Momentum in the Triton kernels: what the tests of all backends do not reach, and the changes that a sweep follows."""

import pytest
import torch
from cases import Case
from test_triton import DEVICE, LONG, by_hand, check, columns, network, rest_of, rows, sweeps_of
from torch import Tensor, nn

import nero
from nero.backends.triton.tables import Launch


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
