"""Momentum: every backend against the oracle on every case, and what users do with the option."""

import copy
import functools
import math
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
import torch
from cases import CASES, ROUNDING, TOLERANCE, Case, Oracle
from interpreter import few
from torch import Tensor, nn
from training import assert_same, assert_same_state, fill_grads, network, train

import nero

MOMENTUM = 0.8
STEPS = 5
MAX_ELEMENTS = 2000

by_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def cases(dtype: torch.dtype) -> list[Case]:
    """Return all cases with momentum: every second with Nesterov's, the others with it in the other dtype.

    Long neurons, for which the oracle takes seconds, are in float32 alone.
    """
    return [
        replace(case, options={**case.options, "momentum": MOMENTUM, "nesterov": bool((i + dtype.itemsize // 4) % 2)})
        for i, case in enumerate(CASES)
        if dtype == torch.float32 or math.prod(case.shape) <= MAX_ELEMENTS
    ]


def drawn(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, list[Tensor | None]]:
    """Return a tensor and its gradients; there is none at the third step."""
    generator = torch.Generator().manual_seed(4)
    start = case.start(generator, dtype, device)
    grads: list[Tensor | None] = [case.tensor(generator, dtype, device) for _ in range(STEPS)]
    grads[2] = None
    return start, grads


@functools.cache
def references(dtype: torch.dtype, steps: int) -> list[Oracle]:
    """Return the oracle of every case after some steps. Cached, since it is slow and the same for all backends."""
    found = []
    for case in cases(dtype):
        start, grads = drawn(case, dtype)
        found.append(Oracle(case, start))
        for grad in grads[:steps]:
            if grad is not None:
                found[-1].step(grad)
    return found


@by_device
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_momentum_agrees_with_oracle(backend: str, dtype: torch.dtype, device: str):
    """All cases are groups of one optimiser."""
    steps = few(backend, STEPS, 2)
    pairs = [drawn(case, dtype, device) for case in cases(dtype)]
    parameters = [nn.Parameter(start) for start, _ in pairs]
    groups = [case.group(parameter) for case, parameter in zip(cases(dtype), parameters, strict=True)]
    optimiser = nero.Nero(groups, backend=backend)
    for step in range(steps):
        for parameter, (_, grads) in zip(parameters, pairs, strict=True):
            parameter.grad = grads[step]
        optimiser.step()
    for parameter, reference in zip(parameters, references(dtype, steps), strict=True):
        reference.check(parameter, optimiser.state[parameter], TOLERANCE[dtype])


@by_device
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_half_buffer_is_rounded_once_per_step(backend: str, dtype: torch.dtype, device: str):
    """The direction of a step is not rounded, and the buffer is rounded to nearest."""
    for case in cases(dtype)[:: 1 if few(backend, 1, 0) else 5]:
        start, (grad, *_) = drawn(case, dtype, device)
        parameter = nn.Parameter(start)
        optimiser, reference = nero.Nero([case.group(parameter)], backend=backend), Oracle(case, start)
        reference.read(parameter)
        parameter.grad = grad
        reference.step(grad)
        optimiser.step()
        buffer = optimiser.state[parameter]["momentum_buffer"]
        assert buffer.dtype == dtype
        if not case.options.get("gain_penalty"):
            assert torch.equal(buffer.cpu(), ((1 - MOMENTUM) * grad.cpu().float()).to(dtype)), case.name
        reference.memories = [type(memory)(0.0, False) for memory in reference.memories]
        state = {key: value for key, value in optimiser.state[parameter].items() if key != "momentum_buffer"}
        found = state["grad_norm"].cpu().double().flatten().tolist()
        assert found == pytest.approx([each**0.5 for each in reference.mean_squares], rel=1e-5)
        reference.mean_squares = [each**2 for each in found]
        reference.check(parameter, state, ROUNDING[dtype])


def buffers(optimiser: nero.Nero) -> list[Tensor | None]:
    """Return a copy of the buffer of every parameter."""
    found = [optimiser.state.get(part.parameter, {}).get("momentum_buffer") for part in optimiser.parts()]
    return [None if buffer is None else buffer.clone() for buffer in found]


def stepped(layer: nn.Module, grads: list[Tensor | None], **options: Any) -> nero.Nero:
    """Step the weight of a layer with given gradients."""
    optimiser = nero.Nero(layer, **options)
    for grad in grads:
        layer.weight.grad = grad
        optimiser.step()
    return optimiser


def test_buffer_exists_only_with_momentum():
    model = network()
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    assert buffers(optimiser) == [None] * 8
    optimiser.param_groups[0]["momentum"] = 0.9
    train(model, optimiser, range(2, 4))
    has_buffer = [buffer is not None for buffer in buffers(optimiser)]
    assert has_buffer == [part.group is optimiser.param_groups[0] for part in optimiser.parts()]
    optimiser.param_groups[0]["momentum"] = 0.0
    train(model, optimiser, range(4, 5))
    assert buffers(optimiser) == [None] * 8


def test_momentum_switched_off_leaves_the_plain_step(backend: str):
    """Bit for bit, that of an optimiser which never had momentum, on the same weights and averages."""
    model = network()
    optimiser = nero.Nero(model, momentum=0.9, nesterov=False, backend=backend)
    train(model, optimiser, range(2))
    saved = copy.deepcopy(optimiser.state_dict())
    for state, group in zip_longest(saved["state"].values(), saved["param_groups"]):
        del state["momentum_buffer"]
        if group is not None:
            group["momentum"] = 0.0
    plain_model = copy.deepcopy(model)
    plain = nero.Nero(plain_model, backend=backend)
    plain.load_state_dict(saved)
    for group in optimiser.param_groups:
        group["momentum"] = 0.0
    train(model, optimiser, range(2, 4))
    train(plain_model, plain, range(2, 4))
    assert_same(model, plain_model)
    assert_same_state(optimiser, plain)


def test_deleted_buffer_starts_at_zero(backend: str):
    layer, grad = nn.Linear(6, 4, bias=False), torch.randn(4, 6)
    optimiser = stepped(layer, [grad, grad], momentum=0.5, backend=backend)
    del optimiser.state[layer.weight]["momentum_buffer"]
    optimiser.step()
    torch.testing.assert_close(buffers(optimiser)[0], 0.5 * grad)


def test_buffer_of_parameter_that_grows_starts_at_zero(backend: str):
    """The neurons are columns, so that the strides of the buffer and the number of neurons stay the same."""
    weight = nn.Parameter(torch.randn(4, 3))
    optimiser = nero.Nero([{"params": [weight], "fan_in_axes": (0,)}], momentum=0.9, backend=backend, pretrained=False)
    for rows in (4, 8):
        weight.grad, weight.data = None, torch.randn(rows, 3)
        weight.grad = torch.randn(rows, 3)
        optimiser.step()
        buffer = optimiser.state[weight]["momentum_buffer"]
        assert torch.allclose(buffer, 0.1 * weight.grad)


def test_buffer_of_unfrozen_and_added_parameters_starts_at_zero():
    model = network()
    model[0].requires_grad_(False)
    optimiser = nero.Nero(model[:4], momentum=0.9, pretrained=False)
    optimiser.add_param_group({"params": model[4], "momentum": 0.5})
    added = [part.parameter for part in optimiser.parts() if part.group["momentum"] == 0.5]
    assert len(added) == 2
    assert all(not optimiser.state[each]["momentum_buffer"].any() for each in added)
    model[0].requires_grad_(True)
    train(model, optimiser, range(1))
    for part in optimiser.parts():
        kept = part.group["momentum"]
        torch.testing.assert_close(optimiser.state[part.parameter]["momentum_buffer"], (1 - kept) * part.parameter.grad)


def test_buffer_has_the_memory_format_of_its_parameter(backend: str):
    layer = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    optimiser = stepped(layer, [torch.randn(4, 3, 3, 3)] * 2, momentum=0.9, backend=backend)
    buffer = optimiser.state[layer.weight]["momentum_buffer"]
    assert buffer.stride() == layer.weight.stride()
    fresh = nero.Nero(layer, momentum=0.9)
    fresh.load_state_dict(optimiser.state_dict())
    assert fresh.state[layer.weight]["momentum_buffer"].stride() == layer.weight.stride()


@pytest.mark.parametrize("nesterov", [True, False])
def test_nonfinite_gradient_leaves_the_neuron_and_its_buffer(backend: str, nesterov: bool):
    torch.manual_seed(0)
    layer, grads = nn.Linear(6, 4), torch.randn(3, 4, 6)
    optimiser = nero.Nero(layer, momentum=0.9, nesterov=nesterov, backend=backend)
    for step, grad in enumerate(grads):
        layer.weight.grad, layer.bias.grad = grad.clone(), grad[:, 0].clone()
        if step == 1:
            layer.weight.grad[2, 3] = math.inf
            layer.weight.grad[1] = math.nan
            layer.bias.grad[1:3] = torch.tensor([math.nan, -math.inf])
        before = [each.detach().clone() for each in (layer.weight, layer.bias, *buffers(optimiser))]
        optimiser.step()
        after = (layer.weight, layer.bias, *buffers(optimiser))
        for old, new in zip(before, after, strict=True):
            same = [torch.equal(a, b) for a, b in zip(old, new, strict=True)]
            assert same == [False, step == 1, step == 1, False]
    assert optimiser.skipped == {"weight": 2, "bias": 2}


def test_zero_gradient_goes_on_along_the_buffer(backend: str):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=False)
    grad = torch.randn(4, 6)
    grad[0] = 0
    optimiser = stepped(layer, [grad], momentum=0.5, backend=backend)
    before, (kept,) = layer.weight.detach().clone(), buffers(optimiser)
    layer.weight.grad = torch.zeros(4, 6)
    optimiser.step()
    assert torch.equal(layer.weight[0], before[0]), "no gradient and no momentum: nothing moves"
    assert all(not torch.equal(layer.weight[i], before[i]) for i in (1, 2, 3))
    torch.testing.assert_close(buffers(optimiser)[0], 0.5 * kept)
    before, (kept,) = layer.weight.detach().clone(), buffers(optimiser)
    layer.weight.grad = None
    optimiser.step()
    assert torch.equal(layer.weight, before)
    assert torch.equal(buffers(optimiser)[0], kept)


def test_rest_of_a_buffer_that_no_longer_decays_moves_nothing(backend: str):
    """Some thousand steps without a gradient leave the buffer, and the average after it, at a few subnormal numbers."""
    shapes = {"neuron": (3, 8), "gain": (5,)}
    parameters = [nn.Parameter(torch.randn(shape)) for shape in (*shapes.values(), (8, 3))]
    groups = [{"params": [each], "role": role} for each, role in zip(parameters, shapes, strict=False)]
    optimiser = nero.Nero([*groups, {"params": parameters[-1:], "fan_in_axes": (0,)}], momentum=0.95, backend=backend)
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        optimiser.state[parameter]["momentum_buffer"].fill_(1e-44)
        optimiser.state[parameter]["grad_norm"].fill_(1e-44)
    optimiser.step()
    assert all(map(torch.equal, parameters, before))


def test_fp16_buffer_decays_to_the_documented_rest(backend: str):
    """In units of the least subnormal number, nine tenths of four are rounded to four again."""
    weight = nn.Parameter(torch.randn(2, 8).half())
    optimiser = nero.Nero([weight], momentum=0.9, backend=backend)
    weight.grad = torch.zeros_like(weight)
    optimiser.state[weight]["momentum_buffer"].fill_(8 * 2**-24)
    for _ in range(8):
        optimiser.step()
    assert torch.equal(optimiser.state[weight]["momentum_buffer"], torch.full_like(weight, 4 * 2**-24))


@pytest.mark.parametrize(("momentum", "share"), [(0.95, 0.95), (0.99, 0.78)])
def test_bf16_buffer_stays_short_of_equal_gradients_as_documented(momentum: float, share: float):
    weight = nn.Parameter(torch.randn(3, 1600).bfloat16())
    optimiser = nero.Nero([weight], momentum=momentum, beta=0.95)
    weight.grad = torch.randn_like(weight)
    for _ in range(600):
        optimiser.step()
    buffer = optimiser.state[weight]["momentum_buffer"]
    assert buffer.norm().item() / weight.grad.norm().item() == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("beta", "peak"), [(0.95, 1.39), (0.999, 1.47)])
def test_first_steps_along_equal_gradients_are_as_long_as_documented(beta: float, peak: float):
    weight = nn.Parameter(torch.zeros(1, 16))
    optimiser = nero.Nero([weight], momentum=0.95, beta=beta, fix_mean=False, fix_norm=False, scale=1.0)
    weight.grad = torch.randn(1, 16)
    lengths = []
    for _ in range(40):
        before = weight.detach().clone()
        optimiser.step()
        lengths.append((weight - before).norm().item() / 0.01)
    assert lengths[0] == pytest.approx(1, rel=1e-4)
    assert max(lengths) == pytest.approx(peak, abs=0.005)


def test_zero_rate_advances_the_buffer_alone(backend: str):
    layer, grad = nn.Linear(6, 4), torch.randn(4, 6)
    optimiser = nero.Nero(layer, lr=0.0, momentum=0.5, backend=backend)
    before = layer.weight.detach().clone()
    layer.weight.grad = grad
    optimiser.step()
    assert torch.equal(layer.weight, before)
    torch.testing.assert_close(optimiser.state[layer.weight]["momentum_buffer"], 0.5 * grad)


def test_maximize_with_momentum_mirrors_minimize(backend: str):
    layers = [nn.Linear(6, 4, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    grads = list(torch.randn(3, 4, 6))
    stepped(layers[0], grads, momentum=0.9, backend=backend)
    stepped(layers[1], [-grad for grad in grads], momentum=0.9, backend=backend, maximize=True)
    torch.testing.assert_close(layers[0].weight, layers[1].weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-25, 1e25])
def test_momentum_is_scale_free(backend: str, factor: float):
    layers = [nn.Linear(6, 4, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    grads = list(torch.randn(3, 4, 6))
    stepped(layers[0], grads, momentum=0.9, backend=backend)
    stepped(layers[1], [factor * grad for grad in grads], momentum=0.9, backend=backend)
    torch.testing.assert_close(layers[0].weight, layers[1].weight, rtol=0, atol=1e-5)


def test_sparse_gradient_with_momentum_equals_dense():
    tables = [nn.Embedding(8, 5, padding_idx=3, sparse=sparse) for sparse in (False, True)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimiser = nero.Nero(table, momentum=0.9)
        for tokens in ([1, 2, 2, 3], [2, 5], [1, 3]):
            optimiser.zero_grad()
            (table(torch.tensor(tokens)) * torch.arange(5)).square().sum().backward()
            optimiser.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_run_with_momentum_resumes_exactly(backend: str, dtype: torch.dtype):
    model, resumed = network(dtype), network(dtype)
    optimiser = nero.Nero(model, momentum=0.9, nesterov=False, backend=backend)
    train(model, optimiser, range(3))
    fresh = nero.Nero(resumed, momentum=0.3, backend=backend)
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    assert {(group["momentum"], group["nesterov"]) for group in fresh.param_groups} == {(0.9, False)}
    twin, twin_optimiser = copy.deepcopy((model, optimiser))
    for each, its in ((model, optimiser), (resumed, fresh), (twin, twin_optimiser)):
        train(each, its, range(3, 5))
    for each, its in ((resumed, fresh), (twin, twin_optimiser)):
        assert_same(model, each)
        assert_same_state(optimiser, its)


@pytest.mark.parametrize("is_old", [True, False], ids=["no options", "no momentum"])
def test_checkpoint_without_buffers_starts_them_at_zero(is_old: bool):
    model = network()
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    saved = copy.deepcopy(optimiser.state_dict())
    for group in saved["param_groups"] if is_old else []:
        del group["momentum"], group["nesterov"]
    fresh = nero.Nero(model, momentum=0.9)
    train(model, fresh, range(1))
    with pytest.warns(UserWarning, match="momentum .* zero"):
        fresh.load_state_dict(saved)
    assert {group["momentum"] for group in fresh.param_groups} == {0.9}
    assert not any(buffer.any() for buffer in buffers(fresh))
    plain = nero.Nero(model)
    plain.load_state_dict(saved)
    assert_same_state(plain, optimiser)


def test_checkpoint_with_buffers_sets_momentum():
    model = network()
    optimiser = nero.Nero(model, momentum=0.9)
    train(model, optimiser, range(2))
    fresh = nero.Nero(model)
    fresh.load_state_dict(optimiser.state_dict())
    assert {group["momentum"] for group in fresh.param_groups} == {0.9}
    assert_same_state(fresh, optimiser)


def test_buffer_of_another_shape_raises():
    layer = nn.Linear(6, 4)
    saved = nero.Nero(layer, momentum=0.9).state_dict()
    saved["state"][0]["momentum_buffer"] = torch.zeros(4, 5)
    with pytest.raises(ValueError, match="momentum_buffer of weight"):
        nero.Nero(layer, momentum=0.9).load_state_dict(saved)


def test_checkpoint_with_none_as_buffer_starts_it_at_zero():
    """As the state is of someone who sets the buffer to None to start anew."""
    layer = nn.Linear(6, 4)
    optimiser = stepped(layer, [torch.randn(4, 6)], momentum=0.9)
    optimiser.state[layer.weight]["momentum_buffer"] = None
    with pytest.warns(UserWarning, match="momentum .* zero"):
        optimiser.load_state_dict(optimiser.state_dict())
    assert not optimiser.state[layer.weight]["momentum_buffer"].any()


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16], ids=str)
def test_buffer_cast_to_a_smaller_range_stays_finite(before: torch.dtype):
    """An infinite buffer would make its neuron sit out all steps that follow."""
    layer = nn.Linear(6, 4).to(before)
    optimiser = stepped(layer, [1e7 * torch.randn(4, 6).to(before)], momentum=0.9)
    saved = copy.deepcopy(optimiser.state_dict())
    layer.half()
    for resumed in (optimiser, nero.Nero(layer, momentum=0.9)):
        if resumed is not optimiser:
            resumed.load_state_dict(saved)
        layer.weight.grad = torch.randn(4, 6).half()
        resumed.step()
        assert resumed.state[layer.weight]["momentum_buffer"].isfinite().all()
        assert not resumed.skipped


def test_parameter_cast_later_casts_its_buffer():
    layer = nn.Linear(6, 4)
    optimiser = nero.Nero(layer, momentum=0.9)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        layer.to(dtype)
        layer.weight.grad = torch.randn(4, 6, dtype=dtype)
        optimiser.step()
        assert optimiser.state[layer.weight]["momentum_buffer"].dtype == dtype


@by_device
def test_cast_parameter_without_gradient_keeps_its_state(backend: str, device: str):
    """A step rounds the buffers of the parameters that it steps, and no others."""
    layers = nn.ModuleList([nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)]).to(device)
    optimiser = nero.Nero(layers, momentum=0.9, backend=backend)

    def step(count: int) -> dict[str, Tensor]:
        optimiser.zero_grad()
        for layer in layers[:count]:
            layer.weight.grad = torch.randn_like(layer.weight)
        optimiser.step()
        return {key: value.clone() for key, value in optimiser.state[layers[1].weight].items()}

    before = step(2)
    layers.half()
    after = step(1)
    assert all(value.dtype == before[key].dtype and torch.equal(value, before[key]) for key, value in after.items())
    assert step(2)["momentum_buffer"].dtype == torch.float16


def test_nesterov_given_without_momentum_raises():
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="needs momentum"):
        nero.Nero(layer, nesterov=True)
    assert nero.Nero(layer, nesterov=False).defaults["nesterov"] is False
    assert nero.Nero([{"params": layer.parameters(), "momentum": 0.9}], nesterov=True).param_groups
    assert nero.Nero(nero.Nero(layer).param_groups).param_groups, "groups of an optimiser hold every option"


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_scheduler_cycles_momentum_within_one_plan(name: str, backend: str):
    model = network()
    optimiser = nero.Nero(model, momentum=0.9, backend=backend)
    lengths = {"total_steps": 6} if name == "OneCycleLR" else {"step_size_up": 2}
    rates = {"max_lr": 0.1} | ({} if name == "OneCycleLR" else {"base_lr": 0.01})
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimiser, **rates, **lengths)
    seen, plans = set(), set()
    for seed in range(4):
        wanted = [state["momentum_buffer"].clone() for state in optimiser.state.values()]
        train(model, optimiser, range(seed, seed + 1))
        kept = optimiser.param_groups[0]["momentum"]
        for before, (parameter, state) in zip(wanted, optimiser.state.items(), strict=True):
            torch.testing.assert_close(state["momentum_buffer"], kept * before + (1 - kept) * parameter.grad)
        scheduler.step()
        seen.add(kept)
        plans.add(id(optimiser._plan))
    assert len(seen) >= 3
    assert len(plans) == 1


def test_scheduler_that_switches_on_momentum_warns():
    model = network()
    optimiser = nero.Nero(model)
    torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=6)
    with pytest.warns(UserWarning, match="cycle_momentum=False"):
        train(model, optimiser, range(1))
    train(model, optimiser, range(1, 2))


def test_buffer_is_rounded_stochastically(backend: str):
    torch.manual_seed(0)
    layer = nn.Linear(4096, 2, bias=False).bfloat16()
    grad = torch.full((2, 4096), 1.0).bfloat16()
    grad[:, ::2] = -1.0
    optimiser = stepped(layer, [grad], momentum=0.7, backend=backend, rounding="stochastic")
    sizes = optimiser.state[layer.weight]["momentum_buffer"].abs().float()
    assert len(sizes.unique()) == 2
    assert sizes.mean().item() == pytest.approx(0.3, rel=3e-4)


@pytest.mark.gpu
def test_captured_step_with_momentum_agrees_with_eager():
    models = [network().cuda(), network().cuda()]
    optimisers = [nero.Nero(models[0], momentum=0.9), nero.Nero(models[1], momentum=0.9, backend="eager")]
    for seed in range(2):
        for model, optimiser in zip(models, optimisers, strict=True):
            fill_cuda_grads(model, seed)
            optimiser.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimisers[0].step()
    for seed in range(2, 5):
        for model in models:
            fill_cuda_grads(model, seed)
        graph.replay()
        optimisers[1].step()
    for parameter, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(parameter, plain, rtol=0, atol=1e-5)
        found, wanted = optimisers[0].state[parameter], optimisers[1].state[plain]
        torch.testing.assert_close(found["momentum_buffer"], wanted["momentum_buffer"], rtol=0, atol=1e-5)


def fill_cuda_grads(model: nn.Module, seed: int) -> None:
    """Fill the gradients in place: a graph reads them at their addresses."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator).cuda()
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.copy_(grad)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:Guards may run slower on Python 3.13.0")
def test_compiled_step_with_momentum_agrees_with_plain():
    torch._dynamo.reset()
    models = [network(), network()]
    optimisers = [nero.Nero(model, momentum=0.9) for model in models]
    step = torch.compile(optimisers[0].step, backend="eager")
    for seed in range(3):
        for model in models:
            fill_grads(model, seed)
        step()
        optimisers[1].step()
    for parameter, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(parameter, plain, rtol=0, atol=1e-6)
