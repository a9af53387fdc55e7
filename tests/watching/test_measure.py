"""The numbers of a reading against plain arithmetic."""

import copy
import math

import pytest
import torch
from cases import CASES, Case, Oracle, _split
from torch import nn
from training import (
    angles_between,
    assert_readings_close,
    check_spread,
    train_on_noise,
    watched_network,
)

import nero
from nero.watching import measure


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_match_plain_arithmetic(case: Case):
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(case.tensor(generator, torch.float64))
    reference = Oracle(case, parameter)
    optimiser = nero.Nero([case.group(parameter)], backend="eager")
    watched = nero.watch(optimiser, neurons=None)
    moments = [_split(case.role, parameter)]
    for _ in range(2):
        for _ in range(3):
            parameter.grad = case.tensor(generator, torch.float64)
            reference.step(parameter.grad)
            optimiser.step()
        moments.append(_split(case.role, parameter))
        reading = watched.read()

    (layer,) = reading.layers
    assert (layer.role, layer.step, layer.skipped, layer.silent) == (case.role.kind, 6, 0, 0)
    assert layer.followed == len(moments[0])
    for spread, before in ((layer.turned, moments[1]), (layer.from_start, moments[0])):
        if case.role.kind == "neuron":
            check_spread(spread, angles_between(before, moments[2]))
        else:
            moved = [abs(one - other) / reference.sigma for (one,), (other,) in zip(before, moments[2], strict=True)]
            check_spread(spread, moved)
    kept = 1 - reference.beta**6
    check_spread(layer.grad_norm, [math.sqrt(each / kept) for each in reference.mean_squares], 1e-12)
    if case.role.kind == "neuron":
        assert layer.off_balance == 0
    else:
        assert math.isnan(layer.near_limit)
        assert math.isnan(layer.off_balance)


def test_every_backend_gives_the_same_numbers(backend: str):
    found = []
    for name in ("eager", backend):
        model = watched_network()
        optimiser = nero.Nero(model, backend=name)
        watched = nero.watch(optimiser)
        train_on_noise(model, optimiser, 5)
        found.append(watched.read())
    for one, other in zip(*(reading.layers for reading in found), strict=True):
        assert one[:5] == other[:5]
        if one.name == "0.bias":  # batch norm removes it, so its gradient is rounding noise
            continue
        for field in ("turned", "from_start", "grad_norm"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), rel=2e-3, abs=1e-6)
        assert one[8:] == pytest.approx(other[8:], nan_ok=True)


def test_small_angles_are_resolved():
    """The cosine of 0.01 degrees rounds to one in float32."""
    layer = nn.Linear(100, 8)
    optimiser = nero.Nero(layer, lr=1e-5)
    watched = nero.watch(optimiser)
    layer.weight.grad = torch.randn(8, 100)
    layer.weight.grad -= layer.weight * (layer.weight * layer.weight.grad).sum(1, keepdim=True)
    layer.weight.grad -= layer.weight.grad.mean(1, keepdim=True)
    optimiser.step()
    assert watched.read()["weight"].turned == pytest.approx((1e-5,) * 3, rel=0.02)


def test_angle_from_start_is_zero_after_return():
    layer = nn.Linear(9, 4)
    optimiser = nero.Nero(layer, lr=0.1)
    watched = nero.watch(optimiser)
    start = copy.deepcopy(layer.state_dict())
    layer.weight.grad = torch.randn(4, 9)
    optimiser.step()
    gone = watched.read()["weight"]
    layer.load_state_dict(start)
    back = watched.read()["weight"]
    assert back.turned == pytest.approx(gone.turned)
    assert back.turned.low > 0.01
    assert back.from_start == pytest.approx((0, 0, 0), abs=1e-6)


def test_followed_neurons_are_evenly_spaced():
    layer = nn.Linear(7, 100, bias=False)
    optimiser = nero.Nero(layer)
    few, all_of_them = nero.watch(optimiser, neurons=30), nero.watch(optimiser, neurons=None)
    with torch.no_grad():
        layer.weight[1::2] *= -1  # neurons 0, 4, 8, ... are followed, and stay
        layer.weight[2::4] *= -1
    assert few.read()["weight"][2] == 25
    assert few.readings[-1]["weight"].from_start == pytest.approx((0, 0, 0), abs=1e-6)
    assert all_of_them.read()["weight"].from_start == pytest.approx((0, math.pi, math.pi), abs=2e-3)
    assert (few.nbytes, all_of_them.nbytes) == (2 * 4 * 25 * 7, 2 * 4 * 100 * 7)


def test_numbers_do_not_depend_on_batching(monkeypatch: pytest.MonkeyPatch):
    readings = []
    for max_elements in (1 << 20, 1):
        monkeypatch.setitem(measure.MAX_ELEMENTS, "cpu", max_elements)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimiser = nero.Nero(model)
        watched = nero.watch(optimiser)
        train_on_noise(model, optimiser, 3)
        readings.append(watched.read())
    assert_readings_close(*readings)


def test_shares_of_silent_limited_and_unbalanced_neurons():
    layer = nn.Linear(10, 8, bias=False)
    with torch.no_grad():
        layer.weight[0] = torch.eye(10)[3]
        layer.weight[1] = -torch.eye(10)[9]
    optimiser = nero.Nero(layer)
    watched = nero.watch(optimiser)
    assert watched.read()["weight"][8:] == pytest.approx((math.nan, 0.25, 0.0), nan_ok=True), "no step yet"
    layer.weight.grad = torch.randn(8, 10)
    layer.weight.grad[4:] = 0
    optimiser.step()
    with torch.no_grad():
        layer.weight[2] *= 1.001  # breaks the norm
        layer.weight[3] += 0.001  # breaks the mean
        layer.weight[5] = 0
        layer.weight[6] = 0.5
        layer.weight[7] = math.nan
    found = watched.read()["weight"]
    assert found[8:] == (0.5, 0.25, 5 / 8)
    assert found.turned.high < 2, "neurons without a direction are left out"


@pytest.mark.parametrize(
    ("options", "share"),
    [({"fix_norm": False}, 0.25), ({"fix_mean": False}, 0.5), ({"fix_norm": False, "fix_mean": False}, 0), ({}, 0.75)],
    ids=str,
)
def test_off_balance_counts_the_constraints_of_the_group(options: dict, share: float):
    layer = nn.Linear(10, 4, bias=False)
    optimiser = nero.Nero(layer, **options)
    watched = nero.watch(optimiser)
    with torch.no_grad():
        nero.balance_(layer)
        if options:
            assert watched.read()["weight"].off_balance == 0
        layer.weight[0] *= 2
        layer.weight[1] *= 3
        layer.weight[2] += 0.1
        layer.weight[2] /= layer.weight[2].norm()
    assert watched.read()["weight"].off_balance == share


def test_off_balance_follows_changed_options():
    layer = nn.Linear(10, 4, bias=False)
    optimiser = nero.Nero(layer)
    watched = nero.watch(optimiser)
    with torch.no_grad():
        layer.weight *= 2
    assert watched.read()["weight"].off_balance == 1
    for norm, share in ((False, 0), (True, 1), ("initial", 0)):  # "initial" holds from the next step on
        optimiser.param_groups[0].update(fix_norm=norm, beta=0.5)
        assert watched.read()["weight"].off_balance == share
    layer.weight.grad = torch.randn(4, 10)
    optimiser.step()
    assert watched.read()["weight"].off_balance == 0
    with torch.no_grad():
        layer.weight *= 2
    assert watched.read()["weight"].off_balance == 1


def test_neuron_at_origin_starts_at_its_first_direction():
    layer = nn.Linear(6, 3, bias=False)
    nn.init.zeros_(layer.weight)
    optimiser = nero.Nero(layer)
    watched = nero.watch(optimiser)
    assert all(map(math.isnan, watched.read()["weight"].turned))
    assert watched.readings[0]["weight"].off_balance == 1
    for _ in range(2):
        layer.weight.grad = torch.randn(3, 6)
        optimiser.step()
        watched.read()
    first, second = (reading["weight"] for reading in watched.readings[1:])
    assert all(map(math.isnan, first.turned))
    assert first.from_start == (0, 0, 0)
    assert str(watched.readings[1]).splitlines()[3].split()[:4] == ["weight", "neuron", "-", "0"]
    assert second.turned == second.from_start
    assert second.turned.low > 0


def test_angles_of_extreme_norms_are_finite():
    layer = nn.Linear(6, 4, bias=False)
    optimiser = nero.Nero(layer, fix_norm=False, fix_mean=False)
    watched = nero.watch(optimiser)
    with torch.no_grad():
        layer.weight *= torch.tensor([[1e30], [1e-30], [3.0], [-1.0]])
    assert watched.read()["weight"].turned == pytest.approx((0, 0, 0.7 * math.pi), abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_angles_in_other_dtypes_match_float64(dtype: torch.dtype):
    layer = nn.Linear(50, 6).to(dtype)
    optimiser = nero.Nero(layer, lr=0.05)
    watched = nero.watch(optimiser, neurons=None)
    before = layer.weight.double().tolist()
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    optimiser.step()
    found = watched.read()["weight"]
    check_spread(found.turned, angles_between(before, layer.weight.double().tolist()), 1e-6)
    assert found.off_balance == 0


def test_skipped_updates_match_the_optimiser():
    model = watched_network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[0].weight.grad[2, 3] = math.nan
    model[3].bias.grad[:] = math.inf
    optimiser.step()
    found = {layer.name: layer.skipped for layer in watched.read().layers if layer.skipped}
    assert found == optimiser.skipped == {"0.weight": 1, "3.bias": 5}
    silent = {layer.name: layer.silent for layer in watched.readings[0].layers if layer.silent}
    assert silent == {"0.weight": pytest.approx(1 / 12), "3.bias": 1}, "neurons without a finite gradient are silent"


@pytest.fixture(scope="module")
def mesh():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("axis", [0, 1])
def test_sharded_parameters_read_like_whole_ones(mesh, axis: int):
    from torch.distributed.tensor import Shard, distribute_tensor

    readings = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(6, 4)
        gradients = {"weight": torch.randn(4, 6), "bias": torch.randn(4)}
        for name, gradient in gradients.items():
            if is_sharded:
                places = [Shard(min(axis, gradient.dim() - 1))]
                parameter = nn.Parameter(distribute_tensor(layer.get_parameter(name).detach(), mesh, places))
                setattr(layer, name, parameter)
                gradients[name] = distribute_tensor(gradient, mesh, places)
        optimiser = nero.Nero(layer, backend="eager")
        watched = nero.watch(optimiser)
        for name, gradient in gradients.items():
            layer.get_parameter(name).grad = gradient
        optimiser.step()
        readings.append(watched.read())
    assert_readings_close(*readings)
