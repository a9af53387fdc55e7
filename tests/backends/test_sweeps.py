"""Sweeps, by numba and by Triton: the changes of tensors that they must notice, and what they leave to others."""

import gc
import math
import weakref
from typing import NamedTuple

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor, nn

import nero
from nero.backends.available import COMPILED
from nero.backends.sweep import Sweep


class Kind(NamedTuple):
    """A backend that steps by sweeps, and its device."""

    backend: str
    device: str


@pytest.fixture(params=[name for name, backend in COMPILED.items() if backend.works()])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param, "cuda" if request.param == "triton" and not INTERPRETED else "cpu")


def sweeps_of(optimiser: nero.Nero) -> list[Sweep]:
    return optimiser._plan._sweeps


def rest_of(optimiser: nero.Nero) -> list[Tensor]:
    """Return the parameters that no sweep steps."""
    return [member.parameter for group, _ in optimiser._plan._rest for member in group.members]


def layer_and_optimiser(kind: Kind) -> tuple[nn.Linear, nero.Nero]:
    torch.manual_seed(0)
    layer = nn.Linear(24, 16).to(kind.device)
    optimiser = nero.Nero(layer, backend=kind.backend)
    step(layer, optimiser, 0)
    return layer, optimiser


def step(layer: nn.Linear, optimiser: nero.Nero, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
    optimiser.step()


def another_way(kind: Kind, change, seed: int = 1) -> list[Tensor]:
    """Take two steps, with a change between them, and return the parameters."""
    layer, optimiser = layer_and_optimiser(kind)
    change(layer, optimiser)
    step(layer, optimiser, seed)
    return [each.detach().clone() for each in layer.parameters()]


def same_state_elsewhere(_: nn.Linear, optimiser: nero.Nero) -> None:
    for state in optimiser.state.values():
        for key, value in state.items():
            state[key] = value.clone()


def one_average_elsewhere(layer: nn.Linear, optimiser: nero.Nero) -> None:
    state = optimiser.state[layer.weight]
    state["grad_norm"] = state["grad_norm"].clone()


def same_weights_elsewhere(layer: nn.Linear, _: nero.Nero) -> None:
    layer.weight.data = layer.weight.data.clone()


def same_weights_across_memory(layer: nn.Linear, _: nero.Nero) -> None:
    layer.weight.data = layer.weight.data.t().contiguous().t()


def reloaded(_: nn.Linear, optimiser: nero.Nero) -> None:
    optimiser.load_state_dict(optimiser.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        same_state_elsewhere,
        one_average_elsewhere,
        same_weights_elsewhere,
        same_weights_across_memory,
        reloaded,
    ],
)
def test_sweep_follows_tensors_that_move_in_memory(kind: Kind, change):
    for found, wanted in zip(another_way(kind, change), another_way(kind, lambda *_: None), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    layer, optimiser = layer_and_optimiser(kind)
    change(layer, optimiser)
    before = optimiser.state[layer.weight]["grad_norm"].clone()
    step(layer, optimiser, 1)
    assert not torch.equal(optimiser.state[layer.weight]["grad_norm"], before), "the sweep must use the new state"


def test_frozen_layer_with_stale_gradient_is_unchanged(kind: Kind):
    layer, optimiser = layer_and_optimiser(kind)
    layer.weight.requires_grad_(False)
    before = layer.weight.detach().clone()
    step(layer, optimiser, 1)
    assert torch.equal(layer.weight, before)
    assert optimiser.state[layer.weight]["step"] == 1
    assert optimiser.state[layer.bias]["step"] == 2
    layer.weight.requires_grad_(True)
    step(layer, optimiser, 2)
    assert not torch.equal(layer.weight, before)
    assert optimiser.state[layer.weight]["step"] == 2


def test_gradient_in_any_layout_gives_the_same_step(kind: Kind):
    """Gradients as misaligned views of a bucket, transposed in memory, or expanded from one number."""
    results = []
    for layout in ("plain", "bucket", "transposed"):
        layer, optimiser = layer_and_optimiser(kind)
        for seed in (1, 2):
            grad = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed)).to(kind.device)
            if layout == "bucket":
                bucket = torch.zeros(16 * 24 + 1, device=kind.device)
                bucket[1:].view(16, 24).copy_(grad)
                grad = bucket[1:].view(16, 24)
            if layout == "transposed":
                grad = grad.t().contiguous().t()
            layer.weight.grad, layer.bias.grad = grad, torch.ones((), device=kind.device).expand(16)
            optimiser.step()
        results.append(layer.weight.detach().clone())
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


def test_gradients_are_not_kept_alive(kind: Kind):
    layer, optimiser = layer_and_optimiser(kind)
    watched = [weakref.ref(parameter.grad) for parameter in layer.parameters()]
    optimiser.zero_grad(set_to_none=True)
    gc.collect()
    assert [each() for each in watched] == [None, None]


def test_layout_of_three_strides_uses_another_backend(kind: Kind):
    """Neurons that two strides cannot describe are stepped by foreach."""
    whole = torch.zeros(4, 6, 5, 7, device=kind.device)
    weight = nn.Parameter(whole[:, ::2, ::2, ::2])
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape))
    optimiser = nero.Nero([weight], backend=kind.backend)
    weight.grad = torch.randn(weight.shape).to(kind.device)
    optimiser.step()
    assert rest_of(optimiser) == [weight]
    assert nero.is_balanced(nn.ParameterList([weight]))


def test_gradient_norm_overflow_is_skipped(kind: Kind):
    """The norm overflows, though no element does; other neurons move."""
    weight = nn.Parameter(torch.randn(3, 40, device=kind.device))
    optimiser = nero.Nero([weight], backend=kind.backend)
    before = weight.detach().clone()
    weight.grad = torch.randn(3, 40, device=kind.device)
    weight.grad[1] = 3e38
    optimiser.step()
    assert torch.equal(weight[1], before[1])
    assert not torch.equal(weight[0], before[0])
    assert optimiser.skipped == {"parameter 0 of group 0": 1}
    assert math.isclose(float(weight[2].detach().norm()), 1, rel_tol=1e-6)


@pytest.mark.parametrize("key", ["step", "scale", "skipped"])
def test_sweep_follows_replaced_state(kind: Kind, key: str):
    layer, optimiser = layer_and_optimiser(kind)
    old = optimiser.state[layer.bias][key]
    kept = old.clone()
    optimiser.state[layer.bias][key] = old.clone() * 0
    step(layer, optimiser, 1)
    assert torch.equal(old, kept), "the old tensor must stay unchanged"
    assert optimiser.state[layer.bias]["step"] == (1 if key == "step" else 2)


@pytest.mark.parametrize("key", ["step", "scale", "skipped", "grad_norm"])
def test_sweep_follows_state_data_swapped(kind: Kind, key: str):
    layer, optimiser = layer_and_optimiser(kind)
    value = optimiser.state[layer.bias][key]
    old = value.data
    kept, value.data = old.clone(), old.clone()
    step(layer, optimiser, 1)
    assert torch.equal(old, kept), "the old memory must stay unchanged"
    assert {state["step"].item() for state in optimiser.state.values()} == {2.0}


def test_strided_parameter_keeps_its_gaps(kind: Kind):
    weights = []
    for backend in ("eager", kind.backend):
        torch.manual_seed(0)
        whole = torch.zeros(64, 64, device=kind.device)
        weight = nn.Parameter(whole[:, :8])
        with torch.no_grad():
            weight.copy_(torch.randn(64, 8))
        optimiser = nero.Nero([weight], backend=backend)
        for _ in range(2):
            weight.grad = torch.randn(64, 8).to(kind.device)
            optimiser.step()
        assert not whole[:, 8:].any()
        weights.append(weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_parameter_resized_raises(kind: Kind):
    weight = nn.Parameter(torch.randn(8, 5, device=kind.device))
    optimiser = nero.Nero([weight], backend=kind.backend)
    weight.grad = torch.randn(8, 5, device=kind.device)
    optimiser.step()
    weight.grad = None
    weight.data = weight.data[:4]
    weight.grad = torch.randn(4, 5, device=kind.device)
    with pytest.raises(ValueError, match="make a new optimiser after resizing"):
        optimiser.step()


def test_step_bumps_the_version_counter(kind: Kind):
    layer, optimiser = layer_and_optimiser(kind)
    loss = layer(torch.ones(2, 24, device=kind.device, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    optimiser.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_negated_view_as_gradient(kind: Kind):
    weights = []
    for negate in (lambda grad: -grad, torch._neg_view):
        weight = nn.Parameter(torch.ones(3, 8, device=kind.device).cumsum(1))
        optimiser = nero.Nero([weight], backend=kind.backend)
        weight.grad = negate(torch.ones(3, 8, device=kind.device).cumsum(1) ** 2)
        optimiser.step()
        weights.append(weight.detach().clone())
    assert torch.equal(*weights)


def test_steps_in_and_out_of_inference_mode(kind: Kind):
    layer, optimiser = layer_and_optimiser(kind)
    with torch.inference_mode():
        optimiser._reset()
        optimiser.step()
    step(layer, optimiser, 1)
    assert optimiser.state[layer.weight]["step"] == 3


def test_tensors_without_gradient_wait(kind: Kind):
    """Any of the parameters may lack a gradient, or all."""
    layers = [layer_and_optimiser(kind) for _ in range(2)]
    for layer, optimiser in layers:
        step(layer, optimiser, 1)
    (layer, optimiser), (other, _) = layers
    layer.weight.grad = None
    optimiser.step()
    assert torch.equal(layer.weight, other.weight)
    assert not torch.equal(layer.bias, other.bias)
    assert [optimiser.state[each]["step"].item() for each in layer.parameters()] == [2, 3]
    layer.bias.grad = None
    before = layer.bias.detach().clone()
    optimiser.step()
    assert torch.equal(layer.bias, before)


def test_gradient_that_is_sparse_for_a_while(kind: Kind):
    """By name, Triton refuses it; numba leaves it to foreach, and takes it back."""
    layer, optimiser = layer_and_optimiser(kind)
    layer.weight.grad = layer.weight.grad.to_sparse()
    if kind.backend == "triton":
        with pytest.raises(ValueError, match="sparse"):
            optimiser.step()
        return
    optimiser.step()
    assert rest_of(optimiser) == [layer.weight]
    step(layer, optimiser, 1)
    assert not rest_of(optimiser)
    assert {state["step"].item() for state in optimiser.state.values()} == {3.0}


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch wants gradients of the parameter's dtype")
def test_numba_casts_gradients_of_another_dtype():
    results = []
    for backend in ("eager", "numba"):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        optimiser = nero.Nero([weight], backend=backend)
        for dtype in (torch.float64, torch.float32, torch.float32, torch.float64):
            weight.grad_dtype = None  # any
            weight.grad = torch.randn(4, 6, dtype=dtype)
            optimiser.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results)


def test_gradient_of_another_shape_raises(kind: Kind):
    """Compiled code would read beyond its end."""
    weight = nn.Parameter(torch.randn(4, 16, device=kind.device))
    optimiser = nero.Nero([{"params": [weight], "fan_in_axes": (0,)}], backend=kind.backend)
    weight.grad = torch.randn(4, 16, device=kind.device)
    optimiser.step()
    for rows in (64, 2):
        weight.data = torch.randn(rows, 16, device=kind.device)
        with pytest.raises(ValueError, match="its gradient or its state is of another"):
            optimiser.step()


def test_parameter_that_becomes_a_negated_view(kind: Kind):
    if kind.device == "cuda":
        pytest.skip("torch's foreach operations refuse such tensors on a GPU")
    results = []
    for backend in ("eager", kind.backend):
        torch.manual_seed(0)
        numbers = torch.complex(torch.randn(8, 16), torch.randn(8, 16)).to(kind.device)
        weight = nn.Parameter(numbers.imag)
        optimiser = nero.Nero([weight], backend=backend)
        for _ in range(3):
            weight.grad = torch.randn(8, 16).to(kind.device)
            optimiser.step()
            weight.grad, weight.data = None, numbers.conj().imag  # the same address, shape and strides
        results.append(weight.detach().clone())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_momentum_buffer_elsewhere_raises(kind: Kind):
    weight = nn.Parameter(torch.randn(4, 16, device=kind.device))
    optimiser = nero.Nero([weight], momentum=0.9, backend=kind.backend)
    weight.grad = torch.randn(4, 16, device=kind.device)
    optimiser.step()
    optimiser.state[weight]["momentum_buffer"] = torch.zeros(4, 16, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        optimiser.step()


def test_radius_of_one_number_is_left_to_torch(kind: Kind):
    """Compiled code would read beyond it."""
    results = []
    for backend in ("eager", kind.backend):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 16).to(kind.device))
        optimiser = nero.Nero([weight], fix_norm="initial", backend=backend)
        weight.grad = torch.randn(64, 16).to(kind.device)
        optimiser.step()
        optimiser.state[weight]["radius"] = torch.tensor(2.0, device=kind.device)
        optimiser.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_failed_capture_leaves_every_parameter_where_it_was(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    layer, optimiser = layer_and_optimiser(kind)
    if kind.backend == "triton":
        pytest.skip("by name, Triton refuses the sparse gradient that leaves a parameter to foreach")
    layer.weight.grad = layer.weight.grad.to_sparse()
    optimiser.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="before capturing"):
            step(layer, optimiser, 1)
    before = layer.weight.detach().clone()
    step(layer, optimiser, 2)
    assert not torch.equal(layer.weight, before)


def test_buffer_transposed_in_place_is_followed(kind: Kind):
    results = []
    for backend in ("eager", kind.backend):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(16, 16).to(kind.device))
        optimiser = nero.Nero([weight], momentum=0.9, backend=backend)
        for _ in range(2):
            weight.grad = torch.randn(16, 16).to(kind.device)
            optimiser.step()
            buffer = optimiser.state[weight]["momentum_buffer"]
            buffer.data = buffer.data.t()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_buffer_of_a_view_with_gaps_has_none(kind: Kind):
    whole = torch.randn(64, 64, device=kind.device)
    weight = nn.Parameter(whole[:, :8])
    optimiser = nero.Nero([weight], momentum=0.9, backend=kind.backend)
    weight.grad = torch.randn(64, 8, device=kind.device)
    optimiser.step()
    buffer = optimiser.state[weight]["momentum_buffer"]
    assert buffer.untyped_storage().nbytes() == 4 * weight.numel()
