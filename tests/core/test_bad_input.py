"""What bad input gets: either it trains, finite, or an error says which parameter or option, and what to do."""

import copy
import math

import pytest
import torch
from interpreter import few
from torch import Tensor, nn

import nero
from nero.rule import project


def angle(one: Tensor, other: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=1).clamp(-1, 1).acos()


# -- layers that other implementations turn into NaN -------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(1, 6),
        lambda: nn.Conv2d(6, 6, 1, groups=6),
        lambda: nn.ParameterList([nn.Parameter(torch.ones(6, 1, 1))]),
    ],
    ids=["Linear(1, n)", "1x1 depthwise", "(C, 1, 1)"],
)
@pytest.mark.parametrize("from_module", [True, False], ids=["module", "parameters"])
def test_fan_in_one_is_a_gain(backend: str, make, from_module: bool):
    module = make()
    weight = next(module.parameters())
    start = weight.detach().clone()
    optimiser = nero.Nero(module if from_module else module.parameters(), backend=backend)
    assert torch.equal(weight, start), "gains are not projected"
    for _ in range(5):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimiser.step()
    assert weight.isfinite().all()
    assert not torch.equal(weight, start)
    size = float(start.abs().mean())
    assert (weight - start).abs().max() <= 5 * 3 * 0.01 * size, "steps are relative to the size it came with"


def test_neurons_at_the_origin_wait_for_a_gradient(backend: str):
    """A zero-initialised head, LoRA's B: nothing until the first gradient, then against it."""
    head = nn.Linear(7, 4)
    nn.init.zeros_(head.weight)
    optimiser = nero.Nero(head, backend=backend)
    head.weight.grad = torch.zeros(4, 7)
    optimiser.step()
    assert torch.equal(head.weight, torch.zeros(4, 7))
    grad = torch.randn(4, 7)
    grad[2] = 0
    head.weight.grad = grad
    optimiser.step()
    assert torch.equal(head.weight[2], torch.zeros(7))
    moved = [0, 1, 3]
    torch.testing.assert_close(head.weight[moved], project(-grad[moved], (1,)).tensor, rtol=0, atol=1e-5)


def test_neurons_at_the_origin_without_the_norm():
    for fix_norm, size in (("initial", 0.01), (False, 0.01 * 0.01)):
        weight = nn.Parameter(torch.zeros(3, 8))
        optimiser = nero.Nero([weight], fix_norm=fix_norm)
        weight.grad = torch.randn(3, 8)
        weight.grad -= weight.grad.mean(1, keepdim=True)
        optimiser.step()
        torch.testing.assert_close(weight.norm(dim=1), torch.full((3,), size), rtol=1e-5, atol=0)


def test_padding_row_stays_zero_while_the_table_learns(backend: str):
    table = nn.Embedding(5, 8, padding_idx=2)
    optimiser = nero.Nero(table, backend=backend)
    for _ in range(4):
        optimiser.zero_grad()
        before = table.weight.detach().clone()
        (table(torch.arange(5)) * torch.randn(8)).sum().backward()
        optimiser.step()
        assert torch.equal(table.weight[2], torch.zeros(8))
        assert table.weight.isfinite().all()
        assert (angle(table.weight, before)[[0, 1, 3, 4]] > 1e-3).all()


def test_a_padding_row_that_is_not_zero_is_balanced_with_its_table_and_not_trained(backend: str):
    table = nn.Embedding.from_pretrained(3 * torch.randn(5, 8), freeze=False, padding_idx=2)
    optimiser = nero.Nero(table, backend=backend)
    assert nero.is_balanced(table)
    entered = table.weight[2].detach().clone()
    for _ in range(3):
        optimiser.zero_grad()
        (table(torch.arange(5)) * torch.randn(8)).sum().backward()
        optimiser.step()
    assert torch.equal(table.weight[2], entered)


@pytest.mark.parametrize("value", [1.0, 0.1, -3e20, 1e-20])
def test_constant_rows_wait_for_a_gradient(backend: str, value: float):
    weight = nn.Parameter(torch.full((3, 9), value))
    optimiser = nero.Nero([weight], backend=backend)
    assert torch.equal(weight, torch.full((3, 9), value)), "there is nothing to project to"
    weight.grad = torch.randn(3, 9)
    optimiser.step()
    torch.testing.assert_close(weight, project(-weight.grad, (1,)).tensor, rtol=0, atol=1e-3)


def test_a_constant_gradient_at_the_origin_has_no_direction(backend: str):
    weight = nn.Parameter(torch.zeros(3, 9))
    optimiser = nero.Nero([weight], backend=backend)
    for _ in range(3):
        weight.grad = torch.full((3, 9), 0.1)
        optimiser.step()
    assert torch.equal(weight, torch.zeros(3, 9))


# -- bad numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_entry_of_a_gain_stops_that_gain(backend: str, bad: float):
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
    assert torch.equal(norm.weight[others], clean.weight[others])
    assert torch.equal(norm.bias, clean.bias)
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
    assert torch.equal(late.weight, entering), "not even taken in"
    model[1].weight.grad[0, 0] = 1.0
    late.weight.grad[0, 0, 0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="weight is not finite"):
        optimiser.step()


@pytest.mark.parametrize("factor", [1e-25, 1e25])
@pytest.mark.parametrize("through", ["gradient", "loss"])
def test_the_size_of_the_gradient_does_not_matter(backend: str, factor: float, through: str):
    results = []
    for scale in (1.0, factor):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 3))
        optimiser = nero.Nero(model, backend=backend)
        for _ in range(few(backend, 30, 6)):
            optimiser.zero_grad()
            loss = (model(torch.randn(8, 10)) - torch.randn(8, 3)).square().mean()
            (loss * scale if through == "loss" else loss).backward()
            if through == "gradient":
                for parameter in model.parameters():
                    parameter.grad *= scale
            optimiser.step()
        results.append([each.detach() for each in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert ((a - b).norm() / a.norm()) < 1e-4


@pytest.mark.parametrize("factor", [1e-20, 1e20, 1e-30, 1e30])
@pytest.mark.parametrize("axes", [(1,), (0,)])
def test_the_size_of_the_weights_at_the_start_does_not_matter(factor: float, axes: tuple[int, ...]):
    weight = torch.randn(8, 6)
    plain, scaled = nn.Parameter(weight.clone()), nn.Parameter(weight * factor)
    for parameter in (plain, scaled):
        nero.Nero([{"params": [parameter], "role": "neuron", "fan_in_axes": axes}])
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-6)


def test_a_norm_beyond_the_largest_number(backend: str):
    """Of entries that are not: Hypothesis found it."""
    weight = nn.Parameter(torch.tensor([[0.0, 2.4062e38, 2.4062e38], [1.0, 2.0, 4.0]]))
    optimiser = nero.Nero([weight], fix_norm="initial", backend=backend)
    for grad in (torch.zeros(2, 3), torch.ones(2, 3).tril(), torch.full((2, 3), 1e30).triu()):
        weight.grad = grad
        optimiser.step()
        assert weight.isfinite().all()
    torch.testing.assert_close(weight[1].norm(), torch.tensor(21.0).sqrt())


@pytest.mark.no_cover  # two thousand steps go by the lines of one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_for_two_thousand_steps(backend: str, dtype: torch.dtype):
    """The average stays right to 1 % and the angle turned per step to 5 %."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 256, generator=generator).to(dtype))
    optimiser = nero.Nero([weight], lr=0.01, backend=backend)
    mean_square, angles = torch.zeros(16, dtype=torch.float64), []
    for _ in range(few(backend, 2000, 30)):
        before = weight.detach().clone()
        weight.grad = (torch.randn(16, 256, generator=generator) * 1e-2).to(dtype)
        mean_square = 0.999 * mean_square + 0.001 * weight.grad.double().square().sum(1)
        optimiser.step()
        angles.append(angle(before, weight.detach()).mean())
    found = optimiser.state[weight]["grad_norm"].flatten().double()
    torch.testing.assert_close(found, mean_square.sqrt(), rtol=0.01, atol=0)
    assert torch.stack(angles).mean() == pytest.approx(math.atan(0.01), rel=0.05)
    torch.testing.assert_close(weight.double().norm(dim=1), torch.ones(16).double(), rtol=0.01, atol=0)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_no_step_goes_beyond_the_largest_half(backend: str, rounding: str):
    """Of gains, and of neurons whose norm is free or their own, whole in memory and across it."""
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
def test_nothing_is_balanced_beyond_the_largest_half(by_nero: bool):
    """Without their mean, at the same norm, entries may be larger than any were."""
    layer = nn.Linear(4, 1, bias=False).half()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[6e4, 6e4, 6e4, 5.9e4]]))
    if by_nero:
        nero.Nero(layer, fix_norm="initial")
    else:
        nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer, fix_norm="initial")
    assert layer.weight.isfinite().all()
    assert layer.weight[0, 3] == -torch.finfo(torch.float16).max


def test_a_gradient_after_a_huge_one_without_memory(backend: str):
    """With beta = 0, infinity times zero lies in wait."""
    for shape in ((3,), (3, 4)):
        parameter = nn.Parameter(torch.randn(shape))
        optimiser = nero.Nero([parameter], beta=0.0, backend=backend)
        for size in (1e25, 1.0, 1e-25, 1.0):
            parameter.grad = torch.randn(shape) * size
            optimiser.step()
            assert parameter.isfinite().all()
            assert optimiser.state[parameter]["grad_norm"].isfinite().all()


@pytest.mark.parametrize("factor", [1e25, 1e20, 1.0, 1e-20, 1e-25])
def test_any_initial_norm_is_kept(backend: str, factor: float):
    weight = nn.Parameter(torch.randn(4, 8) * factor)
    size = weight.detach().double().norm(dim=1)
    optimiser = nero.Nero([weight], fix_norm="initial", backend=backend)
    for _ in range(3):
        weight.grad = torch.randn(4, 8)
        optimiser.step()
    torch.testing.assert_close(weight.detach().double().norm(dim=1), size, rtol=1e-5, atol=0)


def test_one_neuron_over_the_whole_tensor(backend: str):
    weight = nn.Parameter(torch.randn(5, 6))
    optimiser = nero.Nero([{"params": [weight], "fan_in_axes": (0, 1)}], backend=backend)
    for _ in range(3):
        weight.grad = torch.randn(5, 6)
        optimiser.step()
    assert optimiser.state[weight]["grad_norm"].shape == (1, 1)
    assert float(weight.detach().norm()) == pytest.approx(1, abs=1e-5)


def test_a_nan_weight_stays_where_it_is(backend: str):
    weight = nn.Parameter(torch.randn(4, 8))
    optimiser = nero.Nero([weight], backend=backend)
    with torch.no_grad():
        weight[1, 2] = math.nan
    weight.grad = torch.randn(4, 8)
    optimiser.step()
    assert weight.isnan().sum() == 1


def test_huge_steps_of_gains_stay_finite(backend: str):
    layer = nn.LayerNorm(5)
    optimiser = nero.Nero(layer, lr=1e30, scale=1e30, backend=backend)
    layer.weight.grad = torch.randn(5)
    optimiser.step()
    assert layer.weight.isfinite().all()


def test_zero_lr_and_zero_gradients_change_no_bit():
    """What torch's distributed checkpoints do to make an optimiser's state."""
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


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be finite and not negative"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": math.inf}, "lr must be"),
        ({"lr": "fast"}, "lr must be"),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr as a tensor must have one element"),
        ({"lr": torch.tensor(-1.0)}, "lr must be"),
        ({"beta": 1.0}, r"beta must be in \[0, 1\)"),
        ({"beta": -0.1}, "beta must be"),
        ({"beta": math.nan}, "beta must be"),
        ({"beta": (0.9, 0.99)}, "beta must be"),
        ({"scale": 10**400}, "scale must be finite and positive"),
        ({"longest_step": 0.5}, "longest_step must be at least 1, like 3, or math.inf, but it is 0.5"),
        ({"longest_step": math.nan}, "longest_step must be"),
        ({"longest_step": "3"}, "longest_step must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"scale": math.inf}, "scale must be"),
        ({"gain_penalty": -1.0}, "gain_penalty must be"),
        ({"fix_mean": "yes"}, "fix_mean must be one of"),
        ({"fix_norm": "final"}, "fix_norm must be one of"),
        ({"maximize": 2}, "maximize must be one of"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
@pytest.mark.parametrize("where", ["constructor", "group", "added"])
def test_bad_options(options: dict, message: str, where: str):
    layer, optimiser = nn.Linear(3, 2), nero.Nero(nn.Linear(3, 2))
    calls = {
        "constructor": lambda: nero.Nero(layer, **options),
        "group": lambda: nero.Nero([{"params": layer.parameters(), **options}]),
        "added": lambda: optimiser.add_param_group({"params": layer.parameters(), **options}),
    }
    with pytest.raises(ValueError, match=message):
        calls[where]()
    assert len(optimiser.param_groups) == 2, "nothing half-added"


def test_auto_as_the_rate_of_one_group_says_what_to_do_instead():
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"lr=0\.1, longest_step=3.*count_depth"):
        nero.Nero(nero.param_groups(layer, lr="auto"))
    optimiser = nero.Nero(nero.param_groups(layer, lr=0.1))
    optimiser.count_depth(layer)
    layer(torch.randn(4, 3)).square().mean().backward()
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {1.0}
    optimiser.param_groups[0]["lr"] = "auto"
    with pytest.raises(ValueError, match="no rate of one group"):
        optimiser.step()


def test_an_error_leaves_the_model_as_it_was():
    """What comes before the bad parameter is not balanced either."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.ParameterList([torch.ones(2, dtype=torch.complex64)]))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match="complex"):
        nero.Nero(model)
    optimiser = nero.Nero(extra := nn.Linear(3, 2))
    with pytest.raises(TypeError, match="complex"):
        optimiser.add_param_group({"params": model})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(optimiser.param_groups) == 2
    optimiser.add_param_group({"params": model[:2]})
    assert nero.is_balanced(model[0])
    assert nero.is_balanced(extra)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "weight"}, "role must be one of"),
        ({"role": "neuron", "fan_in_axes": (2,)}, r"parameter 0 of group 0.*fan_in_axes \(2,\) do not fit"),
        ({"role": "neuron", "fan_in_axes": ()}, "do not fit"),
        ({"role": "neuron", "fan_in_axes": (1, -1)}, "twice"),
        ({"role": "bias", "fan_in_axes": (1,)}, "a bias has no fan_in_axes"),
        ({"role": "neuron", "fan_in_axes": (0,), "fan_in_groups": 3}, "fan_in_groups=3 does not fit"),
        ({"fan_in_axes": (5,)}, "do not fit"),
    ],
)
def test_bad_roles(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        nero.Nero([{"params": [nn.Parameter(torch.randn(4, 3))], **options}])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", math.nan),
        ("lr", torch.tensor(-0.1)),
        ("lr", "fast"),
        ("beta", 1.5),
        ("longest_step", 0),
        ("backend", "x"),
        ("scale", -1.0),
        ("fix_norm", "intial"),
        ("on_nonfinite", "rais"),
    ],
)
def test_an_option_spoilt_later_stops_the_step_before_it_begins(option: str, value: object):
    layer = nn.Linear(3, 2)
    optimiser = nero.Nero(layer)
    optimiser.param_groups[1][option] = value
    layer(torch.randn(1, 3)).sum().backward()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=f"{option} must be"):
        optimiser.step()
    assert torch.equal(layer.weight, before["weight"])
    assert optimiser.state[layer.weight]["step"] == 0


@pytest.mark.parametrize("group", [{}, {"params": [("name",)]}, {"params": nn.Linear(2, 2).to(torch.float8_e4m3fn)}])
def test_a_group_that_fails_leaves_no_trace(group: dict):
    optimiser, late = nero.Nero(nn.Linear(3, 2)), nn.Linear(3, 2)
    with pytest.raises((ValueError, TypeError, IndexError)):
        optimiser.add_param_group(group)
    assert len(optimiser.param_groups) == 2
    optimiser.add_param_group({"params": late})
    assert nero.is_balanced(late)


@pytest.mark.parametrize(
    ("parameter", "kind", "message"),
    [
        (lambda: torch.randn(3, 2, dtype=torch.complex64), TypeError, "odd is complex.*view_as_real"),
        (lambda: torch.randn(3, 2, device="meta"), ValueError, "odd is on the meta device.*to_empty"),
        (lambda: torch.eye(3, 2).to_sparse(), TypeError, "odd is laid out as torch.sparse_coo.*dense"),
        (lambda: torch.tensor([[1.0, math.nan]]), ValueError, "odd holds values.*initialise"),
    ],
    ids=["complex", "meta", "sparse", "NaN"],
)
def test_bad_parameters(parameter, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        nero.Nero([("good", nn.Parameter(torch.randn(3, 2))), ("odd", nn.Parameter(parameter()))])


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (lambda: torch.randn(3, 2, dtype=torch.complex64), "odd is complex.*view_as_real"),
        (lambda: torch.randn(3, 2).to(torch.float8_e4m3fn), "odd is torch.float8_e4m3fn.*bfloat16 or wider"),
        (lambda: torch.randn(3, 2, device="meta"), "odd is on the meta device.*to_empty"),
        (lambda: torch.full((3, 2), math.nan), "odd holds values that are infinite or not a number"),
    ],
    ids=["complex", "float8", "meta", "NaN"],
)
def test_what_cannot_be_trained_may_be_frozen(odd, message: str, backend: str):
    """As a base of quantised weights is under LoRA; it is refused where it is trained after all."""
    model = nn.Linear(2, 3)
    model.register_parameter("odd", nn.Parameter(odd(), requires_grad=False))
    optimiser = nero.Nero(model, backend=backend)
    assert nero.is_balanced(nero.balance_(model))
    for fix_norm in (True, "initial"):
        nero.balance_after_step(torch.optim.SGD([model.weight]), model, fix_norm=fix_norm)
    before = model.weight.detach().clone()
    model.weight.grad = torch.randn(3, 2)
    optimiser.step()
    assert not torch.equal(model.weight, before)
    optimiser.load_state_dict(optimiser.state_dict())
    model.odd.requires_grad_()
    model.odd.grad = torch.zeros_like(model.odd)
    with pytest.raises((TypeError, ValueError), match=message if backend != "triton" else "odd (is|holds)"):
        optimiser.step()
    assert model.odd not in optimiser.state


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(3, 4).to(torch.float8_e4m3fn), r"is torch.float8_e4m3fn: train it in"),
        (torch.full((3, 4), math.nan), "holds values that are infinite or not a number"),
    ],
    ids=["float8", "NaN"],
)
def test_what_cannot_be_trained_after_all_is_told_before_anything_has_changed(
    values: Tensor, message: str, on_nonfinite: str
):
    first, late = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4), requires_grad=False)
    odd = nn.Parameter(values.clone(), requires_grad=False)
    optimiser = nero.Nero([{"params": [first, late]}, {"params": [odd]}], on_nonfinite=on_nonfinite)
    before = [first.detach().clone(), late.detach().clone()]
    late.requires_grad_(), odd.requires_grad_()
    first.grad, late.grad, odd.grad = torch.randn(3, 4), torch.randn(3, 4), torch.zeros_like(odd)
    with pytest.raises((TypeError, ValueError), match=f"parameter 0 of group 1 {message}"):
        optimiser.step()
    assert torch.equal(first, before[0])
    assert torch.equal(late, before[1]), "not even taken in"


def test_flat_parameters_of_fsdp1():
    flat = nn.Parameter(torch.randn(10))
    flat._is_flat_param = True
    with pytest.raises(TypeError, match=r"FSDP1.*fully_shard"):
        nero.Nero([("module._flat_param", flat)])


@torch.inference_mode()
def _made_for_inference() -> nn.Module:
    return nn.Linear(3, 2)


def test_parameters_made_for_inference():
    with pytest.raises(ValueError, match=r"weight was made under torch.inference_mode\(\).*outside"):
        nero.Nero(_made_for_inference())
    model = nn.Sequential(_made_for_inference(), nn.Linear(2, 3))
    with torch.inference_mode():
        model[0].requires_grad_(False)
    nero.Nero(model)


def test_uninitialised_parameters():
    lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"'weight' has no shape yet.*run a batch"):
        nero.Nero(lazy)
    with pytest.raises(ValueError, match="has no shape yet"):
        nero.Nero(lazy.parameters())


@pytest.mark.parametrize("params", [[], iter([]), nn.ReLU()], ids=["list", "iterator", "module"])
def test_nothing_to_train(params):
    with pytest.raises(ValueError, match="empty"):
        nero.Nero(params)


@pytest.mark.parametrize(
    "params", [torch.randn(3), [{"params": {torch.randn(3)}}], [3.0], None], ids=["tensor", "set", "float", "None"]
)
def test_not_parameters(params):
    with pytest.raises(TypeError):
        nero.Nero(params)


# -- checkpoints of something else -------------------------------------------------------------


def _checkpoint(model: nn.Module, kind: type[torch.optim.Optimizer] = nero.Nero) -> dict:
    params = model if kind is nero.Nero else model.parameters()
    optimiser = kind(params, lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    return optimiser.state_dict()


def _with_other_axes(saved: dict) -> dict:
    saved["param_groups"][0]["fan_in_axes"] = (0,)
    return saved


def _without_option(saved: dict) -> dict:
    saved["param_groups"][1].pop("beta")
    return saved


def _with_bad_option(saved: dict) -> dict:
    saved["param_groups"][1]["beta"] = 7.0
    return saved


def _with_short_average(saved: dict) -> dict:
    saved["state"][3]["grad_norm"] = torch.zeros(1)
    return saved


def _with_nan_average(saved: dict) -> dict:
    saved["state"][3]["grad_norm"][0] = math.nan
    return saved


def _with_average(saved: dict, average: object) -> dict:
    saved["state"][3]["grad_norm"] = average
    return saved


def _without_average(saved: dict) -> dict:
    saved["state"][3].pop("grad_norm")
    return saved


MODEL = lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))  # noqa: E731


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda: _checkpoint(nn.Linear(4, 3)), "another model"),
        (lambda: _checkpoint(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))), r"grad_norm of 1\.weight is shaped"),
        (lambda: _checkpoint(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))), r"'2\.weight'.*'1\.weight'"),
        (lambda: _checkpoint(MODEL(), torch.optim.Adam), "another model, or the groups"),
        (lambda: _without_option(_checkpoint(MODEL())), r"lacks the options \['beta'\]"),
        (lambda: _with_bad_option(_checkpoint(MODEL())), "beta must be"),
        (lambda: _without_average(_checkpoint(MODEL())), "grad_norm.*another optimiser"),
        (lambda: _with_short_average(_checkpoint(MODEL())), r"grad_norm of 1\.bias is shaped \(1,\)"),
        (lambda: _with_short_average(_checkpoint(MODEL())) | {"state": {0: None}}, "has None where"),
        (lambda: _with_nan_average(_checkpoint(MODEL())), "must be finite"),
        (lambda: _with_average(_checkpoint(MODEL()), torch.full((2,), 1e300, dtype=torch.float64)), "must be finite"),
        (
            lambda: _with_average(_checkpoint(MODEL()), "large"),
            r"grad_norm of 1\.bias must be a tensor, but .* 'large'",
        ),
        (lambda: _with_average(_checkpoint(MODEL()), None), r"grad_norm of 1\.bias must be a tensor, but it is None"),
        (
            lambda: _with_other_axes(_checkpoint(MODEL())),
            r"0\.weight as a neuron of fan-in axes \(0,\), this",
        ),
        (lambda: {"state": {}, "param_groups": [{}]}, "lacks 'params'"),
        (lambda: None, "but a NoneType"),
        (lambda: {"model": 1}, "not an optimiser's state_dict"),
    ],
)
def test_a_checkpoint_that_does_not_fit(saved, message: str):
    model = MODEL()
    optimiser = nero.Nero(model)
    before = copy.deepcopy(optimiser.state_dict())
    with pytest.raises(ValueError, match=message):
        optimiser.load_state_dict(saved())
    after = optimiser.state_dict()
    assert after["param_groups"] == before["param_groups"], "nothing half-loaded"
    for key, entry in after["state"].items():
        assert all(torch.equal(entry[name], before["state"][key][name]) for name in entry)


def test_adams_state_in_neros_groups():
    """The same group sizes, so that only the state can tell."""
    model = MODEL()
    optimiser = nero.Nero(model.parameters())
    with pytest.raises(ValueError, match="lacks the options"):
        optimiser.load_state_dict(_checkpoint(MODEL(), torch.optim.Adam))
