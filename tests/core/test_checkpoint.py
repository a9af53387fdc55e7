"""state_dict, load_state_dict, deepcopy and pickle."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from training import assert_same, assert_same_state, network, train

import nero
from nero.backends import backends_for

HERE = backends_for(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("saved_by", HERE)
@pytest.mark.parametrize("loaded_by", HERE)
def test_checkpoint_of_one_backend_resumes_on_another(dtype: torch.dtype, saved_by: str, loaded_by: str):
    model = network(dtype)
    optimiser = nero.Nero(model, lr=0.02, beta=0.9, backend=saved_by)
    train(model, optimiser, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed = network(dtype)
    fresh = nero.Nero(resumed, backend=loaded_by)
    resumed.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimiser"])
    assert_same_state(optimiser, fresh)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(state["grad_norm"].dtype == wide for state in fresh.state.values())
    assert {group["backend"] for group in fresh.param_groups} == {loaded_by}
    assert {group["lr"] for group in fresh.param_groups} == {0.02}
    train(model, optimiser, range(4, 8))
    train(resumed, fresh, range(4, 8))
    if saved_by == loaded_by:
        assert_same(model, resumed)
        assert_same_state(optimiser, fresh)
    else:
        for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_checkpoint_without_roles_keeps_own_roles():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    told = nero.Nero(model)
    told.load_state_dict(nero.Nero(copy.deepcopy(model).parameters(), beta=0.9).state_dict())
    assert [(group["role"], group["fan_in_axes"], group["beta"]) for group in told.param_groups] == [
        ("neuron", (1,), 0.9)
    ]


def test_edited_optimiser_loads_its_own_checkpoint():
    model = network()
    optimiser = nero.Nero(model)
    for group in optimiser.param_groups:
        group["fix_norm"] = "initial"
    optimiser.load_state_dict(optimiser.state_dict())
    train(model, optimiser, range(2))
    assert nero.is_balanced(model)


def test_checkpoint_with_empty_frozen_state_loads():
    """Asking torch's dict of states for one that is not there puts an empty one into it, which is saved."""
    model = network()
    model[4].requires_grad_(False)
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    assert sum(not optimiser.state[each] for group in optimiser.param_groups for each in group["params"]) == 2
    loaded = nero.Nero(copy.deepcopy(model))
    loaded.load_state_dict(optimiser.state_dict())
    assert len(loaded.state) == len(optimiser.state) - 2


def test_foreign_state_is_loaded_as_saved():
    model = network()
    optimiser = nero.Nero(model)
    optimiser.state["note"] = 3
    optimiser.state[model[0].weight] |= {"drift": torch.tensor([-1.0, -math.inf]), "who": "me"}
    loaded = nero.Nero(model)
    loaded.load_state_dict(optimiser.state_dict())
    assert loaded.state["note"] == 3
    own = loaded.state[model[0].weight]
    assert own["who"] == "me"
    assert own["drift"].tolist() == [-1.0, -math.inf]
    assert own["drift"] is not optimiser.state[model[0].weight]["drift"]
    train(model.double(), loaded, range(2))
    assert own["drift"].dtype == torch.float32


def test_load_state_dict_copies_tensors():
    model = network()
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    other = nero.Nero(network())
    other.load_state_dict(optimiser.state_dict())
    before = copy.deepcopy(other.state_dict())
    train(model, optimiser, range(2, 4))
    for key, state in other.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before["state"][key][name])


def test_load_state_dict_hooks_run():
    model = network()
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    seen = []
    other = nero.Nero(network())
    other.register_load_state_dict_pre_hook(lambda _, saved: seen.append(sorted(saved)))
    other.register_load_state_dict_post_hook(lambda each: seen.append(float(next(iter(each.state.values()))["step"])))
    other.load_state_dict(optimiser.state_dict())
    assert seen == [["param_groups", "state"], 2.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle_continue_alike(duplicate):
    model = network()
    optimiser = nero.Nero(model, fix_norm="initial")
    train(model, optimiser, range(3))
    twin, twin_optimiser = duplicate((model, optimiser))
    train(model, optimiser, range(3, 6))
    train(twin, twin_optimiser, range(3, 6))
    assert_same(model, twin)
    assert_same_state(optimiser, twin_optimiser)


def test_pickled_optimiser_without_longest_step_loads():
    optimiser = nero.Nero(nn.Linear(4, 3))
    for options in (optimiser.defaults, *optimiser.param_groups):
        del options["longest_step"]
    copied = pickle.loads(pickle.dumps(optimiser))
    copied.add_param_group({"params": nn.Linear(3, 2).weight})
    for parameter in (each for group in copied.param_groups for each in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    copied.step()
    assert [group["longest_step"] for group in copied.param_groups] == [math.inf] * 3


def test_checkpoint_without_longest_step_loads(backend: str):
    saved = nero.Nero(nn.Linear(4, 3), backend=backend).state_dict()
    for group in saved["param_groups"]:
        del group["longest_step"]
    optimiser = nero.Nero(nn.Linear(4, 3), longest_step=3, backend=backend)
    optimiser.load_state_dict(saved)
    assert [group["longest_step"] for group in optimiser.param_groups] == [math.inf] * 2
