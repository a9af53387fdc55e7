"""The Triton backend on a GPU: no synchronisation, CUDA graphs, compilation, several devices."""

import pytest
import torch
from test_triton import sweeps_of
from torch import Tensor, nn

import nero
from nero.backends import available


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_step_never_synchronises(rounding: str):
    """Also the first one, and when gradients move."""
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 4)).cuda().to(torch.bfloat16)
    optimiser = nero.Nero(model, rounding=rounding)
    inputs = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        optimiser.zero_grad(set_to_none=True)
        model(inputs).square().sum().backward()
        try:
            torch.cuda.set_sync_debug_mode("error")
            optimiser.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {state["step"].item() for state in optimiser.state.values()} == {3.0}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 10)).cuda()


def by_hand(rates: list[float]) -> list[Tensor]:
    model, inputs = network(), torch.ones(8, 64, device="cuda").cumsum(1) / 64
    optimiser = nero.Nero(model, backend="eager")
    for lr in rates:
        for group in optimiser.param_groups:
            group["lr"] = lr
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.gpu
def test_cuda_graph_replays_with_a_scheduler():
    model, inputs = network(), torch.ones(8, 64, device="cuda").cumsum(1) / 64
    optimiser = nero.Nero(model, lr=torch.tensor(0.01, device="cuda"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)

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
    for _ in range(4):
        graph.replay()
        schedule.step()
    wanted = by_hand([0.01] * 4 + [0.005, 0.0025, 0.00125])
    for found, each in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), each, rtol=1e-4, atol=1e-5)
    assert {state["step"].item() for state in optimiser.state.values()} == {7.0}
    # and steps outside of the graph go on from there, as does the graph
    train()
    graph.replay()
    assert {state["step"].item() for state in optimiser.state.values()} == {9.0}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_before_first_step_raises():
    model = network()
    optimiser = nero.Nero(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="take a step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimiser.step()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler has advice to give
def test_compiled_training_step_agrees_with_eager():
    model, inputs = network(), torch.ones(8, 64, device="cuda").cumsum(1) / 64
    optimiser = nero.Nero(model, lr=torch.tensor(0.01, device="cuda"))

    @torch.compile
    def train() -> None:
        model(inputs).square().mean().backward()
        optimiser.step()

    for lr in (0.01, 0.02, 0.005):
        optimiser.zero_grad()
        for group in optimiser.param_groups:
            group["lr"].fill_(lr)
        train()
    for found, each in zip(model.parameters(), by_hand([0.01, 0.02, 0.005]), strict=True):
        torch.testing.assert_close(found.detach(), each, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_auto_without_working_triton_uses_foreach(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nero.backends.triton.project_kernel.project", None)
    available.triton_works.cache_clear()
    layer = nn.Linear(9, 4).cuda()
    optimiser = nero.Nero(layer)
    layer(torch.ones(2, 9, device="cuda")).sum().backward()
    optimiser.step()
    assert not sweeps_of(optimiser)
    available.triton_works.cache_clear()


@pytest.mark.gpu
def test_parameters_on_two_devices_step_alike():
    parts = [nn.Linear(9, 4), nn.Linear(9, 4).cuda()]
    parts[1].load_state_dict(parts[0].state_dict())
    optimiser = nero.Nero([each for part in parts for each in part.parameters()])
    for part in parts:
        part(torch.ones(2, 9, device=part.weight.device).cumsum(1)).square().sum().backward()
    optimiser.step()
    assert [sweep._device.type for sweep in sweeps_of(optimiser)] == ["cuda"]
    for one, other in zip(*(part.parameters() for part in parts), strict=True):
        torch.testing.assert_close(one.detach(), other.detach().cpu(), rtol=0, atol=1e-6)
