"""Checkpoints: state_dict, deepcopy and pickle, exact resumption, and refused checkpoints of another model."""

import copy
import io
import math
import pickle
from itertools import permutations
from pathlib import Path

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from training import assert_same, assert_same_state, network, train

import nero
from nero.backends import backends_for

HERE = backends_for(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("saved_by", "loaded_by"), list(permutations(HERE, 2)))
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
    """Reading the state of a frozen parameter adds an empty entry, which is saved."""
    model = network()
    model[4].requires_grad_(False)
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    assert sum(not optimiser.state[each] for group in optimiser.param_groups for each in group["params"]) == 2
    loaded = nero.Nero(copy.deepcopy(model))
    loaded.load_state_dict(optimiser.state_dict())
    assert len(loaded.state) == len(optimiser.state) - 2


def test_foreign_state_of_a_frozen_parameter_loads_where_it_trains():
    model = network()
    frozen = model[4].bias.requires_grad_(False)
    optimiser = nero.Nero(model)
    optimiser.state[frozen]["who"] = "me"
    saved = optimiser.state_dict()
    frozen.requires_grad_(True)
    loaded = nero.Nero(model)
    loaded.load_state_dict(saved)
    train(model, loaded, range(2))
    assert loaded.state[frozen]["step"] == 2
    assert loaded.state[frozen]["who"] == "me"


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


LAYERS = {
    "linear": lambda: nn.Linear(12, 5),
    "wide linear": lambda: nn.Linear(600, 2),
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "transposed conv": lambda: nn.ConvTranspose2d(4, 4, 3, groups=2),
    "embedding": lambda: nn.Embedding(8, 6, padding_idx=0),
}
ORDERS = ("load model, build, load optimiser", "build, load model, load optimiser", "build, load optimiser, load model")
RESUMED = [(torch.float32, order, True) for order in ORDERS]
RESUMED += [(torch.bfloat16, ORDERS[0], "initial"), (torch.float64, ORDERS[1], "initial")]


def resumed(make, order: str, saved: tuple[dict, dict], **options: object) -> tuple[nn.Module, nero.Nero]:
    """Load a checkpoint into a new model and optimiser."""
    torch.manual_seed(99)
    model, optimiser = make(), None
    for action in order.split(", "):
        if action == "build":
            optimiser = nero.Nero(model, **options)
        elif action == "load model":
            model.load_state_dict(saved[0])
        else:
            optimiser.load_state_dict(saved[1])
    return model, optimiser


def bits(model: nn.Module, optimiser: nero.Nero) -> list[Tensor]:
    state = [value for parameter in model.parameters() for value in optimiser.state[parameter].values()]
    return [*(parameter.detach() for parameter in model.parameters()), *state]


@pytest.mark.parametrize(("dtype", "order", "fix_norm"), RESUMED)
def test_resumed_run_equals_undisturbed(dtype: torch.dtype, order: str, fix_norm: bool | str, backend: str):
    if backend == "triton" and INTERPRETED and order != ORDERS[0]:
        pytest.skip("interpreted kernels are slow; other backends and a GPU run every case")

    def make() -> nn.Module:
        return nn.Sequential(*(make_layer() for make_layer in LAYERS.values())).to(dtype)

    torch.manual_seed(0)
    model = make()
    optimiser = nero.Nero(model, lr=0.02, fix_norm=fix_norm, backend=backend)
    train(model, optimiser, range(2))
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
    train(model, optimiser, range(2, 4))
    other, resumed_optimiser = resumed(make, order, saved, lr=0.02, fix_norm=fix_norm, backend=backend)
    train(other, resumed_optimiser, range(2, 4))
    for found, wanted in zip(bits(other, resumed_optimiser), bits(model, optimiser), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rebuilt_optimiser_keeps_the_weights(dtype: torch.dtype, backend: str):
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for make in LAYERS.values())).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # no padding row: it would grow from zero
    optimiser = nero.Nero(model, backend=backend)
    for steps in (range(1), range(1, 4)):
        train(model, optimiser, steps)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        nero.Nero(model, backend=backend)
        nero.balance_(model)
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_checkpoint_of_version_0_1_0_loads():
    saved = torch.load(Path(__file__).parents[1] / "data/checkpoint-0.1.0.pt", weights_only=True)

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2))

    model, optimiser = resumed(make, ORDERS[0], (saved["model"], saved["optimiser"]), lr=0.02, fix_norm="initial")
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimiser.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, saved["after"][name], rtol=1e-5, atol=1e-6)


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


def _with_few_names(saved: dict) -> dict:
    saved["param_groups"][1]["param_names"].pop()
    return saved


def _with_bad_option(saved: dict) -> dict:
    saved["param_groups"][1]["beta"] = 7.0
    return saved


def _with_short_average(saved: dict) -> dict:
    saved["state"][3]["grad_norm"] = torch.zeros(1)
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
        (
            lambda: _checkpoint(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))),
            r"grad_norm of 1\.weight has the shape \(5, 1\)",
        ),
        (lambda: _checkpoint(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))), r"'2\.weight'.*'1\.weight'"),
        (lambda: _checkpoint(MODEL(), torch.optim.AdamW), "state of another optimiser, .*'exp_avg'.*start anew"),
        (lambda: _checkpoint(MODEL(), torch.optim.AdamW) | {"state": {}}, "another model, or the groups"),
        (lambda: _without_option(_checkpoint(MODEL())), r"lacks the options \['beta'\]"),
        (lambda: _with_bad_option(_checkpoint(MODEL())), "beta must be"),
        (lambda: _with_few_names(_checkpoint(MODEL())), "2 parameters, but 1 names"),
        (lambda: _without_average(_checkpoint(MODEL())), "grad_norm.*another optimiser"),
        (lambda: _with_short_average(_checkpoint(MODEL())), r"grad_norm of 1\.bias has the shape \(1,\)"),
        (lambda: _with_short_average(_checkpoint(MODEL())) | {"state": {0: None}}, "has None, but .* are needed"),
        (lambda: _with_average(_checkpoint(MODEL()), "large"), r"grad_norm of 1\.bias must be a tensor, got 'large'"),
        (lambda: _with_average(_checkpoint(MODEL()), None), r"grad_norm of 1\.bias must be a tensor, got None"),
        (
            lambda: _with_other_axes(_checkpoint(MODEL())),
            r"0\.weight holds neurons along axes \(0,\) in the checkpoint",
        ),
        (lambda: {"state": {}, "param_groups": [{}]}, "lacks 'params'"),
        (lambda: None, "got a NoneType"),
        (lambda: {"model": 1}, "not an optimiser's state_dict"),
    ],
)
def test_load_of_checkpoint_that_does_not_fit_raises(saved, message: str):
    model = MODEL()
    optimiser = nero.Nero(model)
    before = copy.deepcopy(optimiser.state_dict())
    with pytest.raises(ValueError, match=message):
        optimiser.load_state_dict(saved())
    after = optimiser.state_dict()
    assert after["param_groups"] == before["param_groups"], "nothing half-loaded"
    for key, entry in after["state"].items():
        assert all(torch.equal(entry[name], before["state"][key][name]) for name in entry)


def test_checkpoint_with_keys_of_other_tools_loads():
    model = MODEL()
    saved = _checkpoint(model)
    for group in saved["param_groups"]:
        group.update(weight_decay=0.1, tag="head", initial_lr=0.5)
    optimiser = nero.Nero(model)
    optimiser.load_state_dict(saved)
    assert [group["tag"] for group in optimiser.param_groups] == ["head", "head"]
    model(torch.randn(2, 4)).sum().backward()
    optimiser.step()


@pytest.mark.parametrize("frozen", [(0,), (0, 1)], ids=["one layer", "all"])
@pytest.mark.filterwarnings("ignore:nothing to train", "ignore:.*unfrozen")
def test_own_entries_of_frozen_parameters_load_and_unfreeze(frozen: tuple[int, ...]):
    """Nero has no state of frozen parameters, but users may add to it, here a mask."""
    models = MODEL(), MODEL()
    for layer in frozen:
        models[0][layer].requires_grad_(False), models[1][layer].requires_grad_(False)
    first, second = (nero.Nero(model) for model in models)
    first.state[models[0][0].weight]["mask"] = torch.ones(3, 4)
    first.state["epochs"] = 3
    second.load_state_dict(first.state_dict())
    models[1].requires_grad_()
    for parameter in models[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    second.step()
    state = second.state[models[1][0].weight]
    assert state["step"] == 1
    assert torch.equal(state["mask"], torch.ones(3, 4))
    assert second.state["epochs"] == 3


def test_load_of_adam_state_in_equal_groups_raises():
    """The groups have equal sizes, so that only their options and state differ; before a step, their options alone."""
    optimiser, saved = nero.Nero(MODEL().parameters()), _checkpoint(MODEL(), torch.optim.Adam)
    with pytest.raises(ValueError, match="state of another optimiser"):
        optimiser.load_state_dict(saved)
    with pytest.raises(ValueError, match="lacks the options"):
        optimiser.load_state_dict(saved | {"state": {}})


def test_checkpoint_of_distributed_state_dict_loads():
    """torch.distributed.checkpoint drops the empty tuple of fan-in axes of gains and biases."""
    model = network()
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    options = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimiser, options=options)
    other = network()
    fresh = nero.Nero(other)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state, options=options)
    train(model, optimiser, range(2, 4))
    train(other, fresh, range(2, 4))
    assert_same(model, other)


def test_checkpoint_loads_while_another_device_is_the_default():
    layer = nn.Linear(8, 4)
    optimiser = nero.Nero(layer)
    saved = optimiser.state_dict()
    with torch.device("meta"):
        optimiser.load_state_dict(saved)
    assert all(value.is_cpu for state in optimiser.state.values() for value in state.values())
