"""Shards whose dtype or gradients change between steps, and processes that do not all have the same."""

import math
from pathlib import Path

import pytest
import torch
from sharding.layouts import (
    Layers,
    Zoo,
    assert_weights_close,
    error_of,
    full,
    give_gradients,
    gradients,
    made,
    mesh_of,
    placed,
)
from sharding.processes import Pools
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

import nero


@pytest.mark.parametrize("axis", [0, 1])
def test_cast_shards_keep_their_state(axis: int, pools: Pools):
    pools.run(2, cast_between_steps, axis)


def cast_between_steps(axis: int) -> None:
    """The state goes on in the new dtype, also where it is saved and where options change after it."""
    models = made(Zoo), made(Zoo)
    placed(axis)(models[1], mesh_of(2))
    optimisers = [nero.Nero(model, lr=0.1, beta=0.5, momentum=0.5) for model in models]
    for step in range(6):
        if step == 2:
            for model in models:
                model.double()
        whole = gradients(models[0], step)
        for model, optimiser in zip(models, optimisers, strict=True):
            if step == 4:
                optimiser.param_groups[0]["beta"] = 0.6
            give_gradients(model, whole)
            optimiser.step()
    assert_weights_close(models[1], models[0], 1e-6)
    plain, sharded = (optimiser.state_dict()["state"] for optimiser in optimisers)
    for key, state in plain.items():
        assert sharded[key]["grad_norm"].dtype == torch.float64
        torch.testing.assert_close(full(sharded[key]["grad_norm"]), state["grad_norm"], rtol=1e-5, atol=0)
        assert sharded[key]["momentum_buffer"].dtype == torch.float64
        torch.testing.assert_close(full(sharded[key]["momentum_buffer"]), state["momentum_buffer"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"pretrained": True}])
def test_step_of_whole_neurons_waits_for_no_other_process(options: dict[str, bool], pools: Pools):
    pools.run(2, step_alone, options)


def step_alone(options: dict[str, bool]) -> None:
    """One process steps while the other waits for it: a collective would never end."""
    model = made(Zoo)
    placed(0)(model, mesh_of(2))
    optimiser = nero.Nero(model, **options)
    give_gradients(model, gradients(model, 0))
    if distributed.get_rank() == 0:
        optimiser.step()
    distributed.barrier()


def test_processes_may_have_gradients_of_their_own(pools: Pools):
    errors = pools.run(2, step_with_expert)
    assert [kind for kind, _ in errors] == ["FloatingPointError"] * 2, errors
    assert "expert.weight" in errors[0][1]
    assert "another process" in errors[1][1]


def step_with_expert() -> tuple[str, str]:
    """Experts are plain tensors beside shards: one without tokens has no gradient. A NaN still stops all processes."""
    model = made(lambda: Layers(linear=nn.Linear(6, 5), expert=nn.Linear(5, 4)))
    placed(0, only="linear*")(model, mesh_of(2))
    for parameter in (model.linear.bias, model.expert.bias):
        parameter.requires_grad_(False)
    optimiser = nero.Nero(model, on_nonfinite="raise", pretrained=False)
    for parameter in (model.linear.bias, model.expert.bias):
        parameter.requires_grad_(True)
    for step in range(2):
        give_gradients(model, gradients(model, step))
        if distributed.get_rank() == 1:
            model.expert.weight.grad = model.expert.bias.grad = None
        if step == 0:
            optimiser.step()
    if distributed.get_rank() == 0:
        model.expert.weight.grad[0, 0] = math.nan
    return error_of(optimiser.step)


def test_frozen_shards_count_no_steps(pools: Pools):
    assert pools.run(2, steps_of_frozen_shard) == [2.0, 2.0]


def steps_of_frozen_shard() -> float:
    """The parameter has one row, so the second process holds none of it."""
    model = made(lambda: Layers(linear=nn.Linear(4, 1)))
    placed(0)(model, mesh_of(2))
    optimiser = nero.Nero(model)
    for step in range(4):
        give_gradients(model, gradients(model, step))
        model.linear.weight.requires_grad_(step < 2)
        optimiser.step()
    return float(optimiser.state[model.linear.weight]["step"])


def test_parameter_of_other_processes_is_refused(pools: Pools):
    errors = pools.run(2, train_foreign_parameter)
    assert all(
        kind == "ValueError" and "linear.weight is sharded over other processes" in text for kind, text in errors
    )


def train_foreign_parameter() -> tuple[str, str]:
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(2)]
    model = made(lambda: Layers(linear=nn.Linear(4, 2)))
    foreign = distribute_tensor(model.linear.weight.detach(), meshes[1 - distributed.get_rank()])
    model.linear.weight = nn.Parameter(foreign)
    return error_of(nero.Nero, model)


def test_plain_gradient_of_a_shard_is_refused(pools: Pools):
    errors = pools.run(2, step_with_plain_gradient)
    assert all(kind == "TypeError" and "give a DTensor" in text for kind, text in errors), errors


def step_with_plain_gradient() -> tuple[str, str]:
    model = made(lambda: Layers(linear=nn.Linear(4, 2)))
    placed(1)(model, mesh_of(2))
    optimiser = nero.Nero(model)
    model.linear.weight.grad = torch.ones(2, 4)
    return error_of(optimiser.step)


@pytest.mark.parametrize("axis", [0, 1])
def test_grown_neurons_load_into_a_model_without_zeros(axis: int, pools: Pools, tmp_path: Path):
    pools.run(2, load_grown_neurons, axis, str(tmp_path))


def load_grown_neurons(axis: int, folder: str) -> None:
    """torch.distributed.checkpoint reads no radius, since the new optimiser has none."""
    model = headed(is_zero=True, axis=axis)
    optimiser = nero.Nero(model)
    for step in range(3):
        give_gradients(model, gradients(model, step))
        optimiser.step()
    checkpoint.save(dict(enumerate(get_state_dict(model, optimiser))), checkpoint_id=folder)
    other = headed(is_zero=False, axis=axis)
    resumed = nero.Nero(other)
    state = dict(enumerate(get_state_dict(other, resumed)))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=state[0], optim_state_dict=state[1])
    for step in range(3, 6):
        for net, its in ((model, optimiser), (other, resumed)):
            give_gradients(net, gradients(model, step))
            its.step()
    assert bool(full(model.head.weight).norm(dim=1).lt(0.9).all())
    assert_weights_close(other, model, 1e-12)


def headed(*, is_zero: bool, axis: int) -> nn.Module:
    """Make a sharded network whose head starts at zero or not."""
    torch.manual_seed(0)
    model = Layers(body=nn.Linear(6, 8), head=nn.Linear(8, 4)).double()
    if is_zero:
        nn.init.zeros_(model.head.weight)
    placed(axis)(model, mesh_of(2))
    return model
