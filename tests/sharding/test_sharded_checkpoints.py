"""Checkpoints of sharded runs: saved on some processes, resumed on others, equal to a run that was not stopped."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding.layouts import (
    Net,
    assert_weights_close,
    both,
    error_of,
    fsdp,
    full,
    give_gradients,
    gradients,
    made,
    mesh_of,
    placed,
    weights,
)
from sharding.processes import Pools
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_map

import nero

LAYOUTS = {
    "one process": (None, (1,)),
    "fsdp on 2": (fsdp, (2,)),
    "fsdp on 4": (fsdp, (4,)),
    "hsdp": (fsdp, (2, 2)),
    "columns": (placed(1), (2,)),
    "2-D": (both, (2, 2)),
}
#: The run is stopped here, and ends there.
STOP, END = 2, 4


def world_of(layout: str) -> int:
    return math.prod(LAYOUTS[layout][1])


def begun(layout: str, seed: int = 0, **options: Any) -> tuple[nn.Module, nero.Nero]:
    """Return a sharded model with two zero neurons, whose state has a radius, and its optimiser.

    Neurons and biases have momentum, gains have none.
    """
    model = made(Net, torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * seed * torch.randn_like(parameter))
        model.head.weight[0] = model.head.weight[-1] = 0
    shard, mesh = LAYOUTS[layout]
    if shard is not None:
        shard(model, mesh_of(*mesh))
    groups = nero.param_groups(model)
    for group in groups:
        group["momentum"] = 0.0 if group["role"] == "gain" else 0.9
    return model, nero.Nero(groups, **{"lr": 0.02, **options})


def train(model: nn.Module, optimiser: nero.Nero, first: int, last: int) -> None:
    for step in range(first, last):
        whole = gradients(model, step)
        if step == 1:  # on one rank alone
            whole["up.weight"][0, 0] = math.nan
        give_gradients(model, whole)
        optimiser.step()


def assert_resumed(model: nn.Module, optimiser: nero.Nero, first: int = STOP) -> None:
    """Train on, and compare with the run of one process that was never stopped."""
    plain, expected = begun("one process")
    train(plain, expected, 0, END)
    train(model, optimiser, first, END)
    assert_weights_close(model, plain, 1e-12)
    assert optimiser.skipped == expected.skipped == {"up.weight": 1}
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        state, wanted = optimiser.state[parameter], expected.state[reference]
        assert state.keys() == wanted.keys()
        assert all(state[key].shape == value.shape for key, value in wanted.items())
        if "momentum_buffer" in wanted:
            torch.testing.assert_close(
                full(state["momentum_buffer"]), wanted["momentum_buffer"], rtol=1e-10, atol=1e-12
            )
        assert float(state["step"]) == END


RESHARDINGS = [
    ("fsdp on 2", "one process", False),
    ("fsdp on 2", "fsdp on 4", False),
    ("one process", "fsdp on 2", False),
    ("fsdp on 4", "columns", False),
    ("2-D", "fsdp on 2", False),
    ("hsdp", "2-D", False),
    ("fsdp on 2", "one process", True),
    ("fsdp on 2", "fsdp on 4", True),
    ("2-D", "columns", True),
]


@pytest.mark.parametrize(("saved", "resumed", "is_flat"), RESHARDINGS)
def test_distributed_checkpoint_resumes_elsewhere(
    saved: str, resumed: str, is_flat: bool, pools: Pools, tmp_path: Path
):
    pools.run(world_of(saved), save_distributed, saved, tmp_path, is_flat)
    pools.run(world_of(resumed), resume_distributed, resumed, tmp_path, is_flat)


def save_distributed(layout: str, folder: Path, is_flat: bool) -> None:
    model, optimiser = begun(layout)
    train(model, optimiser, 0, STOP)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = {
        "model": get_model_state_dict(model),
        "optimiser": get_optimizer_state_dict(model, optimiser, options=options),
    }
    checkpoint.save(state, checkpoint_id=folder)
    assert_resumed(model, optimiser)  # saving changes nothing


def resume_distributed(layout: str, folder: Path, is_flat: bool) -> None:
    model, optimiser = begun(layout, seed=1, lr=0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = {
        "model": get_model_state_dict(model),
        "optimiser": get_optimizer_state_dict(model, optimiser, options=options),
    }
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimiser, state["optimiser"], options=options)
    assert_resumed(model, optimiser)


@pytest.mark.parametrize(("saved", "resumed"), [("fsdp on 2", "fsdp on 4"), ("2-D", "one process"), ("columns", "2-D")])
def test_full_state_dict_resumes_by_broadcast(saved: str, resumed: str, pools: Pools, tmp_path: Path):
    pools.run(world_of(saved), save_full, saved, tmp_path / "full.pt")
    pools.run(world_of(resumed), resume_full, resumed, tmp_path / "full.pt")


def save_full(layout: str, path: Path) -> None:
    model, optimiser = begun(layout)
    train(model, optimiser, 0, STOP)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = [
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimiser, options=options),
    ]
    if distributed.get_rank() == 0:
        torch.save(state, path)


def resume_full(layout: str, path: Path) -> None:
    model, optimiser = begun(layout, seed=1, lr=0.5)
    state = torch.load(path) if distributed.get_rank() == 0 else [{}, {}]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state[0], options=options)
    set_optimizer_state_dict(model, optimiser, state[1], options=options)
    assert_resumed(model, optimiser)


@pytest.mark.parametrize("layout", ["fsdp on 2", "columns", "2-D"])
def test_checkpoint_of_one_process_loads_into_shards(layout: str, pools: Pools, tmp_path: Path):
    model, optimiser = begun("one process")
    train(model, optimiser, 0, STOP)
    torch.save([model.state_dict(), optimiser.state_dict()], tmp_path / "one.pt")
    pools.run(world_of(layout), load_plain, layout, tmp_path)
    # and back
    model, optimiser = begun("one process", seed=1, lr=0.5)
    model_state, state = torch.load(tmp_path / "back.pt")
    model.load_state_dict(model_state)
    optimiser.load_state_dict(state)
    assert_resumed(model, optimiser)


def load_plain(layout: str, folder: Path) -> None:
    model, optimiser = begun(layout, seed=1, lr=0.5)
    model_state, state = torch.load(folder / "one.pt")
    set_model_state_dict(model, model_state, options=StateDictOptions(full_state_dict=True))
    optimiser.load_state_dict(state)
    # a state_dict of shards, made whole: all processes have it
    whole = tree_map(lambda value: full(value) if isinstance(value, Tensor) else value, optimiser.state_dict())
    if distributed.get_rank() == 0:
        torch.save([weights(model), whole], folder / "back.pt")
    else:
        weights(model)
    other, fresh = begun(layout, seed=2)
    with torch.no_grad():
        for new, old in zip(other.parameters(), model.parameters(), strict=True):
            new.copy_(old)
    fresh.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    assert_resumed(model, optimiser)
    assert_resumed(other, fresh)


def checkpointed(model: nn.Module) -> nn.Module:
    model.up = checkpoint_wrapper(model.up)
    return model


def test_names_of_wrappers_do_not_count(pools: Pools):
    pools.run(2, load_across_wrappers)


def load_across_wrappers() -> None:
    """Load a plain run into a wrapped model, and that into a plain one again."""
    plain, optimiser = begun("one process")
    train(plain, optimiser, 0, STOP)
    wrapped = nn.parallel.DistributedDataParallel(torch.compile(checkpointed(begun("one process")[0])))
    assert "module._orig_mod.up._checkpoint_wrapped_module.weight" in dict(wrapped.named_parameters())
    again, last = begun("one process", seed=1, lr=0.5)
    other = nero.Nero(wrapped, lr=0.5)
    for model in (wrapped, again):
        for parameter, trained in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.data.copy_(trained.data)
    other.load_state_dict(optimiser.state_dict())
    last.load_state_dict(other.state_dict())
    for step in range(STOP, END):
        give_gradients(plain, gradients(plain, step))
        for model, its in ((wrapped, other), (again, last), (plain, optimiser)):
            for parameter, trained in zip(model.parameters(), plain.parameters(), strict=True):
                parameter.grad = trained.grad
            its.step()
    for one, two, three in zip(wrapped.parameters(), again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, three)
        assert torch.equal(two, three)


def test_state_of_another_mesh_is_split_anew(pools: Pools):
    pools.run(4, load_across_meshes)


def load_across_meshes() -> None:
    """Load the state of one mesh into an optimiser on another mesh of the same processes."""
    model, optimiser = begun("fsdp on 4")
    train(model, optimiser, 0, STOP)
    other, last = begun("2-D", seed=1, lr=0.5)
    with torch.no_grad():
        for parameter, trained in zip(other.parameters(), model.parameters(), strict=True):
            parameter.copy_(distribute_tensor(full(trained), parameter.device_mesh, parameter.placements))
    last.load_state_dict(optimiser.state_dict())
    assert_resumed(other, last)


FAULTS = ["other model", "other shape", "other role", "no average", "not a tensor"]


@pytest.mark.parametrize(("layout", "fault"), [("2-D", "other shape"), *(("fsdp on 2", fault) for fault in FAULTS)])
def test_mismatched_checkpoint_is_refused_by_every_rank(layout: str, fault: str, pools: Pools):
    errors = pools.run(world_of(layout), load_mismatched, layout, fault)
    assert {kind for kind, _ in errors} == {"ValueError"}, errors
    assert len(set(errors)) == 1


def load_mismatched(layout: str, fault: str) -> tuple[str, str]:
    model, optimiser = begun(layout)
    train(model, optimiser, 0, STOP)
    plain, expected = begun("one process")
    train(plain, expected, 0, STOP)
    state = expected.state_dict()
    last = state["state"][max(state["state"])]
    if fault == "other model":
        state = nero.Nero(nn.Linear(4, 3)).state_dict()
    elif fault == "other shape":
        last["grad_norm"] = torch.zeros(3, 1)
    elif fault == "other role":
        state["param_groups"][0]["fan_in_axes"] = (0,)
    elif fault == "no average":
        del last["grad_norm"]
    else:
        last["grad_norm"] = "a string"
    error = error_of(optimiser.load_state_dict, state)
    assert_resumed(model, optimiser)  # nothing has changed
    return error
