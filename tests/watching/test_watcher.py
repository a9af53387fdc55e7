"""A watch over a run: it costs nothing between readings, and survives a restart."""

import copy
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    angles_between,
    check_spread,
    train_on_noise,
    watched_network,
    watched_run,
)

import nero


class NoSynchronisation(TorchDispatchMode):
    """A mode that fails where the host would wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func)
        assert "nonzero" not in str(func)
        return func(*args, **(kwargs or {}))


def test_read_does_not_synchronise():
    model = watched_network()
    optimiser = nero.Nero(model, fix_norm="initial")
    watched = nero.watch(optimiser)
    train_on_noise(model, optimiser, 2)
    with NoSynchronisation():
        reading = watched.read()
    assert reading.step == 2
    with pytest.raises(AssertionError), NoSynchronisation():
        int(optimiser.state[model[0].weight]["step"])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_read_does_not_synchronise_with_gpu():
    model = watched_network().cuda()
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


def test_watched_run_equals_unwatched_run():
    runs = []
    for is_watched in (False, True):
        model = watched_network()
        optimiser = nero.Nero(model)
        watched = nero.watch(optimiser) if is_watched else None
        state = torch.get_rng_state()
        for seed in range(3):
            train_on_noise(model, optimiser, 1, seed)
            if watched:
                print(watched.read())
        assert torch.equal(torch.get_rng_state(), state)
        assert not optimiser._optimizer_step_post_hooks
        assert not optimiser._optimizer_step_pre_hooks
        runs.append([*model.parameters(), *(value for each in optimiser.state.values() for value in each.values())])
    assert all(map(torch.equal, *runs))


def test_reading_accessed_late_has_its_own_numbers():
    model = watched_network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    train_on_noise(model, optimiser, 2)
    early, late = watched.read(), watched.read()
    asked = str(late)
    train_on_noise(model, optimiser, 5)
    assert str(late) == asked
    assert early.step == 2, "accessed after later steps"
    assert early["0.weight"].turned.middle > late["0.weight"].turned.middle == pytest.approx(0, abs=1e-6)


def test_added_group_starts_at_its_first_reading():
    body, head = nn.Linear(6, 4), nn.Linear(4, 3)
    optimiser = nero.Nero(body)
    watched = nero.watch(optimiser)
    optimiser.add_param_group({"params": head})
    assert [layer.name for layer in watched.read().layers] == ["weight", "bias", "weight (2)", "bias (2)"]
    train_on_noise(nn.Sequential(body, head), optimiser, 3)
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
def test_equal_names_are_numbered_apart(names: list[str], shown: list[str]):
    layers = [nn.Linear(6, 4 + index, bias=False) for index in range(3)]
    optimiser = nero.Nero([(names[0], layers[0].weight)])
    for name, layer in zip(names[1:], layers[1:], strict=True):
        optimiser.add_param_group({"params": [(name, layer.weight)]})
    reading = nero.watch(optimiser).read()
    assert [(layer.name, layer.followed) for layer in reading.layers] == list(zip(shown, (4, 5, 6), strict=True))


def test_frozen_parameter_is_read_once_it_trains():
    model = watched_network()
    model[0].requires_grad_(False)
    optimiser = nero.Nero(model, pretrained=False)
    watched = nero.watch(optimiser)
    assert "0.weight" not in [layer.name for layer in watched.read().layers]
    model[0].requires_grad_(True)
    train_on_noise(model, optimiser, 2)
    assert watched.read()["0.weight"].step == 2


@pytest.mark.filterwarnings("ignore:nothing to train")
def test_empty_parameter_is_left_out():
    optimiser = nero.Nero(
        [nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(()))]
    )
    names = [layer.name for layer in nero.watch(optimiser).read().layers]
    assert names == ["parameter 1 of group 0", "parameter 2 of group 0"]
    assert not nero.watch(nero.Nero([nn.Parameter(torch.zeros(0, 3))])).read().layers


def test_layer_of_another_shape_starts_anew():
    model = watched_network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    model[3] = nn.Linear(12, 9)
    other = nero.Nero(model)
    watched.optimiser = other
    reading = watched.read()
    assert reading["3.weight"].followed == 9
    assert reading["3.weight"].from_start == pytest.approx((0, 0, 0), abs=1e-6)


def test_loaded_weights_count_as_turn_until_restart():
    model, other = (
        watched_network(),
        nero.balance_(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))),
    )
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    before = model[0].weight.tolist()
    model.load_state_dict(other.state_dict())
    check_spread(watched.read()["0.weight"].turned, angles_between(before, model[0].weight.tolist()))
    watched.restart()
    assert len(watched.readings) == 1
    assert watched.read()["0.weight"].from_start == pytest.approx((0, 0, 0), abs=1e-6)


def test_resumed_run_reads_like_uninterrupted_run():
    straight = watched_network()
    optimiser = nero.Nero(straight)
    watched = nero.watch(optimiser, neurons=5)
    train_on_noise(straight, optimiser, 3, seed=1)
    watched.read()
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (straight, optimiser, watched)], file)
    train_on_noise(straight, optimiser, 3, seed=2)
    watched.read()

    model = watched_network()
    again = nero.Nero(model)
    resumed = nero.watch(again, neurons=5)
    file.seek(0)
    for each, saved in zip((model, again, resumed), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(saved)
    train_on_noise(model, again, 3, seed=2)
    resumed.read()
    assert list(map(str, resumed.readings)) == list(map(str, watched.readings))
    assert resumed.nbytes == watched.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", ["watch", "optimiser"])
def test_resumed_run_reads_layers_unfrozen_before_saving(first: str, dtype: torch.dtype):
    """The layer is frozen again in the new run, and has no state yet."""

    def make_frozen():
        model = watched_network().to(dtype)
        model[0].requires_grad_(False)
        optimiser = nero.Nero(model, pretrained=False)
        return model, optimiser, nero.watch(optimiser, neurons=5)

    def unfreeze_and_step(model, optimiser, watched):
        model[0].requires_grad_(True)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimiser.step()
        watched.read()

    straight, again = make_frozen(), make_frozen()
    unfreeze_and_step(*straight)
    saved = [copy.deepcopy(each.state_dict()) for each in straight]
    order = (0, 1, 2) if first == "optimiser" else (2, 1, 0)
    for place in order:
        again[place].load_state_dict(saved[place])
    unfreeze_and_step(*straight)
    unfreeze_and_step(*again)
    assert list(map(str, again[2].readings)) == list(map(str, straight[2].readings))
    assert again[2].readings[-1]["0.weight"].from_start.low > 0
    assert again[2].nbytes == straight[2].nbytes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda state: state["start"].update(wait=torch.ones(2, 2)),
            r"another model.*'wait' is \(2, 2\) there and mis",
        ),
        (
            lambda state: state["last"].update({"0.weight": torch.ones(2, 2)}),
            r"another model.*'0\.weight' is \(2, 2\) there and \(12, 6\) here",
        ),
    ],
    ids=["unknown parameter", "another shape"],
)
def test_state_dict_of_another_model_raises(change, says: str):
    model = watched_network()
    optimiser = nero.Nero(model)
    watched = nero.watch(optimiser)
    watched.read()
    state = watched.state_dict()
    train_on_noise(model, optimiser, 2)
    watched.read()
    change(state)
    before = watched.state_dict()
    with pytest.raises(ValueError, match=says):
        watched.load_state_dict(state)
    assert str(watched.state_dict()) == str(before)
    for other in (model.state_dict(), optimiser.state_dict(), {}):
        with pytest.raises(ValueError, match=r"not the state_dict\(\) of a watch: it has no 'start'"):
            watched.load_state_dict(other)


@pytest.mark.parametrize("step", ["a", "7", 1.5, True, torch.ones(2)])
def test_read_with_step_that_is_not_an_integer_raises(step):
    watched = nero.watch(nero.Nero(watched_network()))
    with pytest.raises(ValueError, match="step must be an integer, or None"):
        watched.read(step)
    assert not watched.readings
    assert watched.read(np.int64(7)).step == watched.read(torch.tensor(7)).step == 7


def test_missing_package_raises_with_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    watched = watched_run(readings=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"a plot needs matplotlib: pip install '\.\[watch\]'"):
        watched.plot(tmp_path / "x.png")
    with pytest.raises(ModuleNotFoundError, match=r"a folder needs tensorboard: pip install '\.\[watch\]'"):
        watched.write(tmp_path)


def test_watch_with_bad_arguments_raises(tmp_path: Path):
    optimiser = nero.Nero(watched_network())
    with pytest.raises(ValueError, match="no readings to draw"):
        nero.watch(optimiser).plot("x.png")
    with pytest.raises(ValueError, match="no readings to write"):
        nero.watch(optimiser).write(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match=r"watch needs a nero\.Nero, got Adam"):
        nero.watch(torch.optim.Adam(watched_network().parameters()))
    for neurons in (0, -1, 1.5, True, "all"):
        with pytest.raises(ValueError, match="neurons must be an integer of at least 1, or None for all"):
            nero.watch(optimiser, neurons=neurons)
    assert nero.watch(optimiser, neurons=np.int64(4)).read()["0.weight"].followed == 4


def test_watching_is_imported_on_first_use():
    code = (
        "import sys, nero\nassert 'nero.watching' not in sys.modules\nassert callable(nero.watch)\n"
        "assert 'nero.watching' in sys.modules\nassert 'matplotlib' not in sys.modules\nnero.wait"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith("AttributeError: module 'nero' has no attribute 'wait'")
