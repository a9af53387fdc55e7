"""Floating point: the range of float32, NaN and infinity, half precision, stochastic rounding (rulings 5 to 7)."""

import copy
import math
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, few
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode

import nero
from nero.groups import MIN_ANGLE_IN_EPS
from nero.rounding import HALVES, rounded


@pytest.mark.no_cover  # many steps run the lines of one
@pytest.mark.parametrize("factor", [1e-25, 1e25])
def test_gradient_scale_does_not_change_the_trajectory(backend: str, factor: float):
    results = []
    for scale in (1.0, factor):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimiser = nero.Nero(model, backend=backend)
        for _ in range(few(backend, 5, 2)):
            optimiser.zero_grad()
            loss = (model(torch.randn(8, 6)) - torch.randn(8, 3)).square().mean()
            (loss * scale).backward()
            optimiser.step()
        results.append([each.detach() for each in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert ((a - b).norm() / a.norm()) < 1e-4


@pytest.mark.parametrize("factor", [1e-20, 1e20, 1e-30, 1e30])
@pytest.mark.parametrize("axes", [(1,), (0,)])
def test_initial_weight_scale_does_not_matter(factor: float, axes: tuple[int, ...]):
    weight = torch.randn(8, 6)
    plain, scaled = nn.Parameter(weight.clone()), nn.Parameter(weight * factor)
    for parameter in (plain, scaled):
        nero.Nero([{"params": [parameter], "role": "neuron", "fan_in_axes": axes}])
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-6)


def test_norm_beyond_float32_keeps_weights_finite(backend: str):
    """The elements are finite, their norm is not; found by hypothesis."""
    weight = nn.Parameter(torch.tensor([[0.0, 2.4062e38, 2.4062e38], [1.0, 2.0, 4.0]]))
    optimiser = nero.Nero([weight], fix_norm="initial", backend=backend)
    for grad in (torch.zeros(2, 3), torch.ones(2, 3).tril(), torch.full((2, 3), 1e30).triu()):
        weight.grad = grad
        optimiser.step()
        assert weight.isfinite().all()
    torch.testing.assert_close(weight[1].norm(), torch.tensor(21.0).sqrt())


def test_gradient_after_huge_one_with_beta_zero_stays_finite(backend: str):
    """With beta = 0, a careless average computes infinity times zero."""
    for shape in ((3,), (3, 4)):
        parameter = nn.Parameter(torch.randn(shape))
        optimiser = nero.Nero([parameter], beta=0.0, backend=backend)
        for size in (1e25, 1.0, 1e-25, 1.0):
            parameter.grad = torch.randn(shape) * size
            optimiser.step()
            assert parameter.isfinite().all()
            assert optimiser.state[parameter]["grad_norm"].isfinite().all()


@pytest.mark.parametrize("factor", [1e25, 1e20, 1.0, 1e-20, 1e-25])
def test_fix_norm_initial_keeps_any_norm(backend: str, factor: float):
    weight = nn.Parameter(torch.randn(4, 8) * factor)
    size = weight.detach().double().norm(dim=1)
    optimiser = nero.Nero([weight], fix_norm="initial", backend=backend)
    for _ in range(3):
        weight.grad = torch.randn(4, 8)
        optimiser.step()
    torch.testing.assert_close(weight.detach().double().norm(dim=1), size, rtol=1e-5, atol=0)


def test_huge_step_of_gains_stays_finite(backend: str):
    layer = nn.LayerNorm(5)
    optimiser = nero.Nero(layer, lr=1e30, scale=1e30, backend=backend)
    layer.weight.grad = torch.randn(5)
    optimiser.step()
    assert layer.weight.isfinite().all()


def test_zero_lr_and_zero_gradients_change_no_bit():
    """torch.distributed.checkpoint does this to create an optimiser's state."""
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    optimiser = nero.Nero(model)
    before = copy.deepcopy(model.state_dict())
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value.view(torch.int32), before[name].view(torch.int32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradient_element_skips_one_gain(backend: str, bad: float):
    norm = nn.LayerNorm(6)
    clean = copy.deepcopy(norm)
    optimisers = [nero.Nero(each, backend=backend) for each in (norm, clean)]
    grad = torch.randn(6)
    for each in (norm, clean):
        each.weight.grad, each.bias.grad = grad.clone(), grad.clone()
    norm.weight.grad[4] = bad
    for optimiser in optimisers:
        optimiser.step()
    assert norm.weight[4] == 1
    others = [0, 1, 2, 3, 5]
    torch.testing.assert_close(norm.weight[others], clean.weight[others], rtol=0, atol=1e-6)
    torch.testing.assert_close(norm.bias, clean.bias, rtol=0, atol=1e-6)
    assert optimisers[0].skipped == {"weight": 1}
    assert optimisers[1].skipped == {}
    norm.weight.grad = grad
    optimisers[0].step()
    assert norm.weight[4] != 1
    assert optimisers[0].skipped == {"weight": 1}


def test_on_nonfinite_raise_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimiser = nero.Nero(model, on_nonfinite="raise")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    model[1].weight.grad[0, 0] = math.nan
    late = nn.ConvTranspose2d(4, 2, 2, groups=2)
    for parameter in late.parameters():
        parameter.requires_grad_(False)
    optimiser.add_param_group({"params": late})
    for parameter in late.requires_grad_(True).parameters():
        parameter.grad = torch.ones_like(parameter)
    entering = late.weight.detach().clone()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimiser.state_dict())
    with pytest.raises(FloatingPointError, match=r"1\.weight.*on_nonfinite='skip'"):
        optimiser.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for key, entry in optimiser.state_dict()["state"].items():
        assert all(torch.equal(entry[name], state["state"][key][name]) for name in entry)
    assert torch.equal(late.weight, entering), "not even balanced"
    model[1].weight.grad[0, 0] = 1.0
    late.weight.grad[0, 0, 0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="weight is not finite"):
        optimiser.step()


def test_nan_weight_does_not_spread(backend: str):
    weight = nn.Parameter(torch.randn(4, 8))
    optimiser = nero.Nero([weight], backend=backend)
    with torch.no_grad():
        weight[1, 2] = math.nan
    weight.grad = torch.randn(4, 8)
    optimiser.step()
    assert weight.isnan().sum() == 1


@pytest.mark.no_cover  # many steps run the lines of one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_accurate_over_many_steps(backend: str, dtype: torch.dtype):
    """The running average stays within 1 %, and the angle per step within 5 %."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 128, generator=generator).to(dtype))
    optimiser = nero.Nero([weight], lr=0.01, backend=backend)
    mean_square, angles = torch.zeros(8, dtype=torch.float64), []
    # a bfloat16 average of half its final value would not grow any more: 600 steps reach that
    for _ in range(few(backend, 600 if dtype == torch.bfloat16 else 60, 20)):
        before = weight.detach().clone()
        weight.grad = (torch.randn(8, 128, generator=generator) * 1e-2).to(dtype)
        mean_square = 0.999 * mean_square + 0.001 * weight.grad.double().square().sum(1)
        optimiser.step()
        cosine = cosine_similarity(before.double(), weight.detach().double(), dim=1)
        angles.append(cosine.clamp(-1, 1).acos().mean())
    found = optimiser.state[weight]["grad_norm"].flatten().double()
    torch.testing.assert_close(found, mean_square.sqrt(), rtol=0.01, atol=0)
    assert torch.stack(angles).mean() == pytest.approx(math.atan(0.01), rel=0.05)
    torch.testing.assert_close(weight.double().norm(dim=1), torch.ones(8).double(), rtol=0.01, atol=0)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_step_beyond_the_largest_half_saturates(backend: str, rounding: str):
    """For gains, and for neurons of free or initial norm, along rows and along columns."""
    largest = torch.finfo(torch.float16).max
    gain, free, across, own = (nn.Parameter(torch.zeros(4, 4, dtype=torch.float16)) for _ in range(4))
    with torch.no_grad():
        gain[0, 0] = free[0, 0] = across[0, 0] = 0.99 * largest
        own[0] = torch.tensor([0.9, -0.9, -0.01, 0.01]) * largest
    optimiser = nero.Nero(
        [
            {"params": [gain], "role": "gain"},
            {"params": [free], "fix_norm": False, "fix_mean": False},
            {"params": [across], "fix_norm": False, "fix_mean": False, "fan_in_axes": (0,)},
            {"params": [own], "fix_norm": "initial"},
        ],
        lr=0.5,
        backend=backend,
        rounding=rounding,
    )
    for _ in range(2):
        for each in (gain, free, across, own):
            each.grad = torch.full_like(each, -1)
        own.grad[:, 2:] = 1
        optimiser.step()
        for each in (gain, free, across, own):
            assert each.isfinite().all()
            assert each[0, 0] == largest


@pytest.mark.parametrize("by_nero", [True, False])
def test_balancing_beyond_the_largest_half_saturates(by_nero: bool):
    """Centring at a constant norm can make elements larger than any element before."""
    layer = nn.Linear(4, 1, bias=False).half()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[6e4, 6e4, 6e4, 5.9e4]]))
    if by_nero:
        nero.Nero(layer, fix_norm="initial")
    else:
        nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer, fix_norm="initial")
    assert layer.weight.isfinite().all()
    assert layer.weight[0, 3] == -torch.finfo(torch.float16).max


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
    with pytest.warns(UserWarning, match="loses most of a step"):
        optimiser = nero.Nero([gain], lr=1e-4, backend=backend)
    for _ in range(4):
        gain.grad = torch.ones_like(gain)
        optimiser.step()
    assert torch.equal(gain, torch.ones_like(gain))


@pytest.mark.parametrize(("dtype", "lr"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4)], ids=str)
def test_steps_that_rounding_loses_warn_once(dtype: torch.dtype, lr: float):
    message = rf"0\.weight and 3 more are {dtype}.* lr( / depth)? = {lr:.2g}: give rounding='stochastic'"
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    for rate, depth in ((lr, 1.0), (torch.tensor(2 * lr), 2.0)):
        with pytest.warns(UserWarning, match=message) as caught:
            optimiser = nero.Nero(model, lr=rate, depth=depth)
        assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="group2.*loses most of a step"):
        optimiser.add_param_group({"params": [nn.Parameter(torch.ones(4, 3, dtype=dtype))], "lr": lr})


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"lr": 1e-4, "rounding": "stochastic"}),
        (torch.bfloat16, {"lr": "auto"}),
        (torch.bfloat16, {"lr": 0.0}),
        (torch.float16, {"lr": 1e-3}),
        (torch.float32, {"lr": 1e-6}),
    ],
    ids=str,
)
def test_steps_that_rounding_keeps_are_quiet(dtype: torch.dtype, options: dict[str, Any]):
    assert nero.Nero(nn.Linear(3, 4).to(dtype), **options)  # warnings are errors here


@by_dtype
@pytest.mark.parametrize("fan_in", [16, 1024])
def test_least_angle_leaves_three_of_four_weights(dtype: torch.dtype, fan_in: int):
    """The threshold of the warning does not depend on the fan-in."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(2**17 // fan_in, fan_in).to(dtype))
    optimiser = nero.Nero([weight], lr=MIN_ANGLE_IN_EPS * torch.finfo(dtype).eps)
    before = weight.detach().clone()
    weight.grad = torch.randn_like(weight)
    optimiser.step()
    assert (weight == before).float().mean().item() == pytest.approx(0.75, abs=0.03)


def test_unknown_rounding_raises():
    with pytest.raises(ValueError, match="rounding must be one of"):
        nero.Nero(nn.Linear(2, 2), rounding="up")
