"""A watch's numbers are true, cost the step nothing, outlive a restart, and can be written and drawn."""

import copy
import io
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES, Case, Oracle, _split
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nero
from nero.watching import Layer, Reading, Spread, measure

ROOT = Path(__file__).parents[2]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))


def train(model, optimiser, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(16, 6, generator=generator)).square().mean().backward()
        optimiser.step()


def angles(before, after):
    """In float64, neuron by neuron; by the cosine, which does for large ones."""
    cosines = (
        np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)
        for one, other in zip(before, after, strict=True)
    )
    return [math.acos(min(1.0, max(-1.0, cosine))) for cosine in cosines]


def check(spread, values, tolerance=1e-6):
    assert spread == pytest.approx(tuple(np.quantile(values, [0.1, 0.5, 0.9])), rel=1e-9, abs=tolerance)


# -- the numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_are_those_of_plain_arithmetic(case: Case):
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
            check(spread, angles(before, moments[2]))
        else:
            moved = [abs(one - other) / reference.sigma for (one,), (other,) in zip(before, moments[2], strict=True)]
            check(spread, moved)
    kept = 1 - reference.beta**6
    check(layer.grad_norm, [math.sqrt(each / kept) for each in reference.mean_squares], 1e-12)
    if case.role.kind == "neuron":
        assert layer.off_balance == 0
    else:
        assert math.isnan(layer.near_limit)
        assert math.isnan(layer.off_balance)


def test_every_backend_gives_the_same_numbers(backend: str):
    found = []
    for name in ("eager", backend):
        model = network()
        optimiser = nero.Nero(model, backend=name)
        watched = nero.watch(optimiser)
        train(model, optimiser, 5)
        found.append(watched.read())
    for one, other in zip(*(reading.layers for reading in found), strict=True):
        assert one[:5] == other[:5]
        if one.name == "0.bias":  # batch norm takes it out: its gradient is rounding
            continue
        for field in ("turned", "from_start", "grad_norm"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), rel=2e-3, abs=1e-6)
        assert one[8:] == pytest.approx(other[8:], nan_ok=True)


def test_small_angles_are_told_apart():
    """The cosine of a hundredth of a degree is one, in float32."""
    layer = nn.Linear(100, 8)
    optimiser = nero.Nero(layer, lr=1e-5)
    watched = nero.watch(optimiser)
    layer.weight.grad = torch.randn(8, 100)
    layer.weight.grad -= layer.weight * (layer.weight * layer.weight.grad).sum(1, keepdim=True)
    layer.weight.grad -= layer.weight.grad.mean(1, keepdim=True)
    optimiser.step()
    assert watched.read()["weight"].turned == pytest.approx((1e-5,) * 3, rel=0.02)


def test_an_angle_from_the_start_is_no_sum():
    """There and back again."""
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


def test_neurons_that_are_followed_are_evenly_spaced():
    layer = nn.Linear(7, 100, bias=False)
    optimiser = nero.Nero(layer)
    few, all_of_them = nero.watch(optimiser, neurons=30), nero.watch(optimiser, neurons=None)
    with torch.no_grad():
        layer.weight[1::2] *= -1  # every second one is turned round, and every fourth is followed
        layer.weight[2::4] *= -1
    assert few.read()["weight"][2] == 25
    assert few.readings[-1]["weight"].from_start == pytest.approx((0, 0, 0), abs=1e-6)
    assert all_of_them.read()["weight"].from_start == pytest.approx((0, math.pi, math.pi), abs=2e-3)
    assert (few.nbytes, all_of_them.nbytes) == (2 * 4 * 25 * 7, 2 * 4 * 100 * 7)


def test_rows_that_are_measured_in_pieces_are_measured_the_same(monkeypatch: pytest.MonkeyPatch):
    readings = []
    for at_once in (1 << 20, 1):
        monkeypatch.setitem(measure.AT_ONCE, "cpu", at_once)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimiser = nero.Nero(model)
        watched = nero.watch(optimiser)
        train(model, optimiser, 3)
        readings.append(str(watched.read()))
    assert readings[0] == readings[1]


def test_limits_and_silence():
    layer = nn.Linear(10, 8, bias=False)
    with torch.no_grad():
        layer.weight[0] = torch.eye(10)[3]
        layer.weight[1] = -torch.eye(10)[9]
    optimiser = nero.Nero(layer)
    watched = nero.watch(optimiser)
    assert watched.read()["weight"][8:] == pytest.approx((math.nan, 0.25, 0.0), nan_ok=True), "nothing was heard yet"
    layer.weight.grad = torch.randn(8, 10)
    layer.weight.grad[4:] = 0
    optimiser.step()
    with torch.no_grad():
        layer.weight[2] *= 1.001  # off by its norm
        layer.weight[3] += 0.001  # by its mean
        layer.weight[5] = 0
        layer.weight[6] = 0.5
        layer.weight[7] = math.nan
    found = watched.read()["weight"]
    assert found[8:] == (0.5, 0.25, 5 / 8)
    assert found.turned.high < 2, "those that have no direction are left out"


@pytest.mark.parametrize(
    ("options", "share"),
    [({"fix_norm": False}, 0.25), ({"fix_mean": False}, 0.5), ({"fix_norm": False, "fix_mean": False}, 0), ({}, 0.75)],
    ids=str,
)
def test_only_the_constraints_of_the_group_count(options: dict, share: float):
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


def test_options_may_change_between_readings():
    layer = nn.Linear(10, 4, bias=False)
    optimiser = nero.Nero(layer)
    watched = nero.watch(optimiser)
    with torch.no_grad():
        layer.weight *= 2
    assert watched.read()["weight"].off_balance == 1
    for norm, share in ((False, 0), (True, 1), ("initial", 0)):  # the last is first asked for at the next step
        optimiser.param_groups[0].update(fix_norm=norm, beta=0.5)
        assert watched.read()["weight"].off_balance == share
    layer.weight.grad = torch.randn(4, 10)
    optimiser.step()
    assert watched.read()["weight"].off_balance == 0
    with torch.no_grad():
        layer.weight *= 2
    assert watched.read()["weight"].off_balance == 1


def test_a_neuron_at_the_origin_starts_where_it_first_has_a_direction():
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


def test_extreme_neurons_have_angles():
    layer = nn.Linear(6, 4, bias=False)
    optimiser = nero.Nero(layer, fix_norm=False, fix_mean=False)
    watched = nero.watch(optimiser)
    with torch.no_grad():
        layer.weight *= torch.tensor([[1e30], [1e-30], [3.0], [-1.0]])
    assert watched.read()["weight"].turned == pytest.approx((0, 0, 0.7 * math.pi), abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype):
    layer = nn.Linear(50, 6).to(dtype)
    optimiser = nero.Nero(layer, lr=0.05)
    watched = nero.watch(optimiser, neurons=None)
    before = layer.weight.double().tolist()
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    optimiser.step()
    found = watched.read()["weight"]
    check(found.turned, angles(before, layer.weight.double().tolist()), 1e-6)
    assert found.off_balance == 0


def test_skipped_updates_are_the_optimisers():
    model = network()
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
    assert silent == {"0.weight": pytest.approx(1 / 12), "3.bias": 1}, "what had no finite gradient is silent, too"


# -- it keeps out of the way --------------------------------------------------------------------


class NoWaiting(TorchDispatchMode):
    """Fails where a tensor's number is asked for, which is what makes the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func)
        assert "nonzero" not in str(func)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_until_a_number_is_asked_for():
    model = network()
    optimiser = nero.Nero(model, fix_norm="initial")
    watched = nero.watch(optimiser)
    train(model, optimiser, 2)
    with NoWaiting():
        reading = watched.read()
    assert reading.step == 2
    with pytest.raises(AssertionError), NoWaiting():
        int(optimiser.state[model[0].weight]["step"])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_a_gpu():
    model = network().cuda()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    watched.read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reading = watched.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reading["0.weight"].step == 1


def test_a_watch_changes_nothing():
    runs = []
    for is_watched in (False, True):
        model = network()
        optimiser = nero.Nero(model)
        watched = nero.watch(optimiser) if is_watched else None
        state = torch.get_rng_state()
        for seed in range(3):
            train(model, optimiser, 1, seed)
            if watched:
                print(watched.read())
        assert torch.equal(torch.get_rng_state(), state)
        assert not optimiser._optimizer_step_post_hooks
        assert not optimiser._optimizer_step_pre_hooks
        runs.append([*model.parameters(), *(value for each in optimiser.state.values() for value in each.values())])
    assert all(map(torch.equal, *runs))


def test_a_reading_stays_as_it_was_read():
    model = network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    train(model, optimiser, 2)
    early, late = watched.read(), watched.read()
    asked = str(late)
    train(model, optimiser, 5)
    assert str(late) == asked
    assert early.step == 2, "though it was asked for after the others"
    assert early["0.weight"].turned.middle > late["0.weight"].turned.middle == pytest.approx(0, abs=1e-6)


# -- what comes, goes and comes again -----------------------------------------------------------


def test_what_is_added_later_starts_when_it_is_read():
    body, head = nn.Linear(6, 4), nn.Linear(4, 3)
    optimiser = nero.Nero(body)
    watched = nero.watch(optimiser)
    optimiser.add_param_group({"params": head})
    assert [layer.name for layer in watched.read().layers] == ["weight", "bias", "weight (2)", "bias (2)"]
    train(nn.Sequential(body, head), optimiser, 3)
    reading = watched.read()
    assert reading["weight (2)"].from_start == reading["weight (2)"].turned
    assert reading["weight (2)"].turned.low > 0


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["weight (2)", "weight", "weight"], ["weight (2)", "weight", "weight (3)"]),
        (["weight", "weight", "weight (2)"], ["weight", "weight (2)", "weight (2) (2)"]),
    ],
)
def test_a_name_that_looks_numbered_is_one_of_its_own(names: list[str], shown: list[str]):
    layers = [nn.Linear(6, 4 + index, bias=False) for index in range(3)]
    optimiser = nero.Nero([(names[0], layers[0].weight)])
    for name, layer in zip(names[1:], layers[1:], strict=True):
        optimiser.add_param_group({"params": [(name, layer.weight)]})
    reading = nero.watch(optimiser).read()
    assert [(layer.name, layer.followed) for layer in reading.layers] == list(zip(shown, (4, 5, 6), strict=True))


def test_what_is_frozen_is_not_there_until_it_trains():
    model = network()
    model[0].requires_grad_(False)
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    assert "0.weight" not in [layer.name for layer in watched.read().layers]
    model[0].requires_grad_(True)
    train(model, optimiser, 2)
    assert watched.read()["0.weight"].step == 2


def test_parameters_without_entries_and_without_names():
    optimiser = nero.Nero(
        [nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(()))]
    )
    names = [layer.name for layer in nero.watch(optimiser).read().layers]
    assert names == ["parameter 1 of group 0", "parameter 2 of group 0"]
    assert not nero.watch(nero.Nero([nn.Parameter(torch.zeros(0, 3))])).read().layers


def test_a_layer_that_is_another_starts_anew():
    model = network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    model[3] = nn.Linear(12, 9)
    other = nero.Nero(model)
    watched.optimiser = other
    reading = watched.read()
    assert reading["3.weight"].followed == 9
    assert reading["3.weight"].from_start == pytest.approx((0, 0, 0), abs=1e-6)


def test_weights_that_are_loaded_count_as_a_turn_until_a_restart():
    model, other = (
        network(),
        nero.balance_(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))),
    )
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    before = model[0].weight.tolist()
    model.load_state_dict(other.state_dict())
    check(watched.read()["0.weight"].turned, angles(before, model[0].weight.tolist()))
    watched.restart()
    assert len(watched.readings) == 1
    assert watched.read()["0.weight"].from_start == pytest.approx((0, 0, 0), abs=1e-6)


def test_a_run_that_goes_on_reads_as_one_that_never_stopped():
    straight = network()
    optimiser = nero.Nero(straight)
    watched = nero.watch(optimiser, neurons=5)
    train(straight, optimiser, 3, seed=1)
    watched.read()
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (straight, optimiser, watched)], file)
    train(straight, optimiser, 3, seed=2)
    watched.read()

    model = network()
    again = nero.Nero(model)
    resumed = nero.watch(again, neurons=5)
    file.seek(0)
    for each, saved in zip((model, again, resumed), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(saved)
    train(model, again, 3, seed=2)
    resumed.read()
    assert list(map(str, resumed.readings)) == list(map(str, watched.readings))
    assert resumed.nbytes == watched.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", ["watch", "optimiser"])
def test_a_run_that_unfreezes_goes_on_from_its_checkpoint(first: str, dtype: torch.dtype):
    """What had thawed when it was saved is frozen in the run that is made anew, and has no state there yet."""

    def frozen():
        model = network().to(dtype)
        model[0].requires_grad_(False)
        optimiser = nero.Nero(model)
        return model, optimiser, nero.watch(optimiser, neurons=5)

    def on(model, optimiser, watched):
        model[0].requires_grad_(True)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimiser.step()
        watched.read()

    straight, again = frozen(), frozen()
    on(*straight)
    saved = [copy.deepcopy(each.state_dict()) for each in straight]
    order = (0, 1, 2) if first == "optimiser" else (2, 1, 0)
    for place in order:
        again[place].load_state_dict(saved[place])
    on(*straight)
    on(*again)
    assert list(map(str, again[2].readings)) == list(map(str, straight[2].readings))
    assert again[2].readings[-1]["0.weight"].from_start.low > 0
    assert again[2].nbytes == straight[2].nbytes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("last"), "lacks 'start', 'last' or 'readings'"),
        (lambda state: state["start"].update(wait=torch.ones(2, 2)), "'wait', which this optimiser has not"),
        (lambda state: state["last"].update({"0.weight": torch.ones(2, 2)}), r"0\.weight as \(2, 2\) where \(12, 6\)"),
        (
            lambda state: state["start"].update({3: torch.ones(2), "x": torch.ones(2)}),
            "3, which this optimiser has not",
        ),
        (lambda state: state.update(start=None), "'start' is no dict from names to tensors"),
        (lambda state: state.update(last=[torch.ones(2)]), "'last' is no dict from names to tensors"),
        (lambda state: state["last"].update({"0.weight": 3}), "'last' is no dict from names to tensors"),
        (lambda state: state["last"].update({"0.weight": torch.ones(12, 6).cfloat()}), "'last' is no dict from names"),
        *(
            (change, "'readings' are no list of steps and layers")
            for change in (
                lambda state: state.update(readings=None),
                lambda state: state.update(readings=3),
                lambda state: state.update(readings="none"),
                lambda state: state["readings"].append(None),
                lambda state: state["readings"][0].pop("step"),
                lambda state: state["readings"][0].pop("layers"),
                lambda state: state["readings"][0].update(step="x"),
                lambda state: state["readings"][0].update(layers=5),
                lambda state: state["readings"][0]["layers"].append("0.weight..."),
                lambda state: state["readings"][0]["layers"][1].pop(),
                lambda state: state["readings"][0]["layers"][1].append(0.0),
                lambda state: state["readings"][0]["layers"][1].__setitem__(0, 3),
                lambda state: state["readings"][0]["layers"][1].__setitem__(5, 0.5),
                lambda state: state["readings"][0]["layers"][1].__setitem__(6, [0.5, 0.5]),
                lambda state: state["readings"][0]["layers"][1].__setitem__(7, [0.5, 0.5, "x"]),
                lambda state: state["readings"][0]["layers"][1].__setitem__(10, None),
            )
        ),
    ],
)
def test_another_checkpoint_is_refused_whole(change, says: str):
    model = network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    watched.read()
    state = watched.state_dict()
    train(model, optimiser, 2)
    watched.read()
    change(state)
    before = watched.state_dict()
    with pytest.raises(ValueError, match=says):
        watched.load_state_dict(state)
    assert str(watched.state_dict()) == str(before)


@pytest.fixture(scope="module")
def mesh():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("axis", [0, 1])
def test_sharded_parameters_are_watched(mesh, axis: int):
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
        readings.append(str(watched.read()))
    assert readings[0] == readings[1]


# -- for people ---------------------------------------------------------------------------------


class Scalars:
    """A writer that remembers."""

    def __init__(self):
        self.written = {}

    def add_scalar(self, tag, scalar_value, global_step):
        self.written[tag, global_step] = scalar_value


def watched_run(model=None, readings=3):
    model = model or network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    for seed in range(readings):
        train(model, optimiser, 2, seed)
        watched.read()
    return watched


def test_readings_are_written_number_by_number():
    watched = watched_run()
    one, everything = Scalars(), Scalars()
    watched.readings[-1].write(one)
    watched.write(everything)
    layer = watched.readings[-1]["0.weight"]
    assert one.written["turned/0.weight", 6] == layer.turned.middle
    assert one.written["grad_norm/0.weight", 6] == layer.grad_norm.middle
    assert one.written["skipped/1.weight", 6] == 0
    assert ("near_limit/0.weight", 6) in one.written
    assert ("near_limit/1.weight", 6) not in one.written, "a gain has no limit"
    assert one.written.items() <= everything.written.items()
    assert {step for _, step in everything.written} == {2, 4, 6}
    with pytest.raises(TypeError, match=r"add_scalar\(tag, value, step\), but this list has not"):
        watched.write([])


def test_tensorboard_reads_what_is_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watched = watched_run()
    watched.write(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = events.Scalars("from_start/3.weight")
    assert [each.step for each in found] == [2, 4, 6]
    wanted = [reading["3.weight"].from_start.middle for reading in watched.readings]
    assert [each.value for each in found] == pytest.approx(wanted)


def test_a_reading_has_the_step_that_it_is_given_and_prints_as_a_table():
    model = network()
    watched = nero.watch(nero.Nero(model))
    reading = watched.read(step=700)
    assert reading.step == 700
    lines = str(reading).splitlines()
    assert lines[0] == "step 700"
    assert lines[3].split() == ["0.weight", "neuron", "0", "0", "0", "-", "8%", "0%", "0"]
    assert repr(reading) == str(reading)
    with pytest.raises(KeyError, match=r"no layer 'x'; there are 0\.weight, "):
        reading["x"]


def zero_headed():
    model = network()
    nn.init.zeros_(model[3].weight)
    return model


@pytest.mark.parametrize(
    "make",
    [
        network,
        lambda: nn.Linear(6, 1),
        lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(14))),
        zero_headed,
        lambda: nn.BatchNorm1d(6),
    ],
    ids=["network", "one layer", "many layers", "zero head", "no neurons"],
)
def test_a_run_is_drawn(make, tmp_path: Path):
    watched = watched_run(make(), readings=2)
    watched.plot(str(tmp_path / "run.svg"))
    text = (tmp_path / "run.svg").read_text()
    assert text.count("<path") > 100
    assert text.rstrip().endswith("</svg>")


def test_a_picture_is_the_same_whenever_it_is_drawn(tmp_path: Path):
    watched = watched_run(nn.Linear(6, 3), readings=1)
    for name in ("one.png", "other.png"):
        watched.plot(tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()


def test_curves_are_the_readings():
    """What is drawn is what was read, in degrees, and a name stands at the end of each curve."""
    from nero.watching.picture import draw

    watched = watched_run()
    chart = draw(watched.readings).subfigs[0].subfigs[0].axes[0]
    names = {text.get_text(): text.get_color() for text in chart.texts}
    for name in ("0.weight", "3.weight"):
        wanted = [math.degrees(reading[name].from_start.middle) for reading in watched.readings]
        (line,) = [each for each in chart.lines if each.get_color() == names[name.removesuffix(".weight")]]
        assert list(line.get_xdata()) == [2, 4, 6]
        assert list(line.get_ydata()) == pytest.approx(wanted)


def charts_of(watched):
    from matplotlib.axes import Axes

    from nero.watching.picture import draw

    return [axes for part in draw(watched.readings).subfigs for axes in part.findobj(Axes)]


def lines_of(chart):
    """Each line's points, and whether they are dots."""
    for line in chart.lines:
        points = [(x, y) for x, y in zip(*line.get_data(), strict=True) if not math.isnan(y)]
        yield points, line.get_marker() == "o"


def test_what_was_read_once_is_a_dot():
    """A line through one point shows nothing."""
    watched = watched_run(readings=1)
    charts = [axes for axes in charts_of(watched) if axes.lines]
    assert len(charts) == 4
    for chart in charts:
        assert all(is_dot and [x for x, _ in points] == [2] for points, is_dot in lines_of(chart))
        chart.figure.canvas.draw()
        low, high = chart.get_xlim()
        assert [tick for tick in chart.get_xticks() if low <= tick <= high] == [2]
    assert "dot: the median neuron; bar: eight in ten" in [text.get_text() for text in charts[0].texts]
    assert any(bar.get_segments() for bar in charts[0].collections if hasattr(bar, "get_segments"))
    assert not any(is_dot for axes in charts_of(watched_run(readings=2)) for _, is_dot in lines_of(axes))


def test_what_is_first_read_at_the_end_is_a_dot():
    """Beside the curves of the others: a layer that was added, and gradients after a reading before the first step."""
    model, late = network(), nn.Linear(6, 3)
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    watched.read()
    optimiser.add_param_group({"params": late})
    train(model, optimiser, 2)
    watched.read()
    from_start, *_ = (list(lines_of(axes)) for axes in charts_of(watched) if "From start" in axes.get_title(loc="left"))
    (grad_norm,) = (list(lines_of(axes)) for axes in charts_of(watched) if "Grad norm" in axes.get_title(loc="left"))
    assert [(len(points), is_dot) for points, is_dot in from_start] == [(2, False), (2, False), (1, True)]
    assert [(len(points), is_dot) for points, is_dot in grad_norm] == [(1, True), (1, True), (0, False)]


def test_names_stand_above_the_axis():
    model = network()
    watched = nero.watch(nero.Nero(model))
    watched.read()
    chart = charts_of(watched)[0]
    places = {text.get_text(): text.xy[1] for text in chart.texts if hasattr(text, "xy")}
    assert places.keys() == {"0", "3"}
    assert min(places.values()) == 0 < max(places.values())


def words_of_the_table(watched):
    heading = str(watched.readings[-1]).splitlines()[1]
    return re.split("  +", heading)[2:]


def words_of_tensorboard(watched):
    written = Scalars()
    watched.write(written)
    return dict.fromkeys(tag.partition("/")[0].replace("_", " ") for tag, _ in written.written)


def words_of_the_picture(watched):
    charts = charts_of(watched)
    titles = [title for axes in charts for title in axes.get_title(loc="left").split("; ")]
    legends = [text.get_text() for axes in charts if axes.get_legend() for text in axes.get_legend().get_texts()]
    told = [re.sub(r"(: .*| [\d.]+%)$", "", text).lower() for text in (*titles, *legends)]
    return dict.fromkeys(word for word in told if word != "shares of neurons")


def words_of_the_page(_):
    page = (ROOT / "docs/theory.md").read_text().partition("| word |")[2]
    return re.findall(r"^\| ([a-z ]+) \|", page, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [words_of_the_table, words_of_tensorboard, words_of_the_picture, words_of_the_page],
    ids=lambda it: it.__name__,
)
def test_a_number_is_called_by_one_word(words):
    """The name of its attribute, wherever people meet it."""
    wanted = [field.replace("_", " ") for field in Layer._fields if field not in ("name", "role", "followed", "step")]
    assert sorted(words(watched_run())) == sorted(wanted)


def test_a_picture_says_nothing_of_gradients_before_a_step():
    model = network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    watched.read()

    def shown() -> tuple[str, list[float]]:
        charts = [axes for axes in charts_of(watched) if axes.get_legend()]
        (line,) = [each for chart in charts for each in chart.lines if each.get_label().startswith("silent")]
        return line.get_label(), list(line.get_ydata())

    assert shown()[0] == "silent -"
    model[0].requires_grad_(False)  # it makes no step, and so has no part in the share
    train(model, optimiser, 1)
    watched.read()
    assert shown() == ("silent 0.0%", pytest.approx([math.nan, 0.0], nan_ok=True))


def test_turned_past_a_right_angle_and_apart():
    from nero.watching.picture import _apart, draw

    layer = Layer("a", "neuron", 3, 5, 0, Spread(1.0, 2.0, 3.0), Spread(1.0, 2.0, 3.0), Spread(0, 0, 0), 1.0, 0.0, 0.0)
    figure = draw([Reading.of([layer], 5)])
    assert figure.subfigs[0].subfigs[1].axes[0].get_thetamax() == 180
    assert _apart([1.0, 1.0, 5.0], 0.5) == pytest.approx([0.75, 1.25, 5.0])


def test_without_a_package_one_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    watched = watched_run(readings=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"a plot needs matplotlib: pip install 'nero-optim\[watch\]'"):
        watched.plot(tmp_path / "x.png")
    with pytest.raises(ModuleNotFoundError, match=r"a folder needs tensorboard: pip install 'nero-optim\[watch\]'"):
        watched.write(tmp_path)


@pytest.mark.parametrize("step", ["a", "7", 1.5, True, torch.ones(2)])
def test_a_reading_has_a_whole_number(step):
    watched = nero.watch(nero.Nero(network()))
    with pytest.raises(ValueError, match="step must be a whole number, or None"):
        watched.read(step)
    assert not watched.readings
    assert watched.read(np.int64(7)).step == watched.read(torch.tensor(7)).step == 7


def test_bad_input(tmp_path: Path):
    optimiser = nero.Nero(network())
    with pytest.raises(ValueError, match="nothing to draw yet"):
        nero.watch(optimiser).plot("x.png")
    with pytest.raises(ValueError, match="nothing to write yet"):
        nero.watch(optimiser).write(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match=r"watch needs a nero\.Nero, not Adam"):
        nero.watch(torch.optim.Adam(network().parameters()))
    for neurons in (0, -1, 1.5, True, "all"):
        with pytest.raises(ValueError, match="neurons must be a whole number of 1 or more, or None for all"):
            nero.watch(optimiser, neurons=neurons)
    assert nero.watch(optimiser, neurons=np.int64(4)).read()["0.weight"].followed == 4


# -- the examples -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [("watch", ["--epochs", "1"], "of the test digits right"), ("gains", ["--quick", "--seeds", "1"], "every run")],
)
def test_the_examples_run(
    script: str, options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    threads = torch.get_num_threads()
    done = runpy.run_path(str(ROOT / f"examples/{script}.py"))["main"]([*options, "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    assert done == 0
    assert says in capsys.readouterr().out
    assert (tmp_path / f"{script}.png").stat().st_size > 20_000
    found, committed = (
        json.loads((folder / f"{script}.json").read_text()) for folder in (tmp_path, ROOT / "docs/figures")
    )
    assert found.keys() == committed.keys()


def test_watching_is_imported_when_it_is_asked_for():
    code = (
        "import sys, nero\nassert 'nero.watching' not in sys.modules\nassert callable(nero.watch)\n"
        "assert 'nero.watching' in sys.modules\nassert 'matplotlib' not in sys.modules\nnero.wait"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith("AttributeError: module 'nero' has no attribute 'wait'")
