"""Answers about sharded models: the same on every rank, those of one process, and never a hang."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from sharding.layouts import (
    Layers,
    Net,
    Zoo,
    assert_weights_close,
    both,
    error_of,
    fsdp,
    fsdp_by_layer,
    give_gradients,
    gradients,
    made,
    mesh_of,
    placed,
    sequence_parallel,
    tensor_parallel,
    weights,
)
from sharding.processes import Pools
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training import assert_readings_close

import nero

#: How models are sharded here: neurons whole and neurons cut.
SHARDINGS = {
    "rows": (placed(0), (2,)),
    "columns": (placed(1), (2,)),
    "fsdp": (fsdp, (4,)),
    "rows by columns": (placed(0, 1), (2, 2)),
}


def world_of(sharding: str) -> int:
    return math.prod(SHARDINGS[sharding][1])


def sharded(sharding: str, edit: Any = None, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Return a plain model, and the same model sharded."""
    shard, mesh = SHARDINGS[sharding]
    models = made(Zoo, dtype), made(Zoo, dtype)
    for model in models:
        if edit is not None:
            edit(model)
    shard(models[1], mesh_of(*mesh))
    return models


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spoil_weight(model: nn.Module) -> None:
    """Put a NaN where one rank alone holds it."""
    with torch.no_grad():
        model.get_parameter("linear.weight")[0, 0] = math.nan


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_nan_weight_on_one_rank_is_refused_by_all(sharding: str, pools: Pools):
    errors = pools.run(world_of(sharding), construct_with_nan, sharding)
    assert {kind for kind, _ in errors} == {"ValueError"}, errors
    assert all("linear.weight" in text for _, text in errors)
    assert len(set(errors)) == 1


def construct_with_nan(sharding: str) -> tuple[str, str]:
    _, model = sharded(sharding, spoil_weight)
    before = [local(parameter).clone() for parameter in model.parameters()]
    error = error_of(nero.Nero, model)
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(local(parameter), old, rtol=0, atol=0, equal_nan=True)
    return error


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_nan_gradient_on_one_rank_raises_on_all(sharding: str, pools: Pools):
    errors = pools.run(world_of(sharding), step_with_nan, sharding)
    assert {kind for kind, _ in errors} == {"FloatingPointError"}, errors
    assert all("linear.weight" in text for _, text in errors)
    assert len(set(errors)) == 1


def step_with_nan(sharding: str) -> tuple[str, str]:
    plain, model = sharded(sharding)
    optimisers = [nero.Nero(each, on_nonfinite="raise") for each in (plain, model)]
    for step in range(2):
        whole = gradients(plain, step)
        for each, optimiser in zip((plain, model), optimisers, strict=True):
            give_gradients(each, whole)
            optimiser.step()
    before = snapshot(model, optimisers[1])
    whole = gradients(plain, 2)
    whole["linear.weight"][0, 0] = math.nan
    give_gradients(model, whole)
    error = error_of(optimisers[1].step)
    for new, old in zip(snapshot(model, optimisers[1]), before, strict=True):
        assert torch.equal(new, old)
    assert optimisers[1].skipped == {}
    # training goes on
    for each, optimiser in zip((plain, model), optimisers, strict=True):
        give_gradients(each, gradients(plain, 3))
        optimiser.step()
    assert_weights_close(model, plain, 1e-6)
    return error


def snapshot(model: nn.Module, optimiser: nero.Nero) -> list[Tensor]:
    """Return copies of the local parameters and of their state."""
    tensors = [*model.parameters()]
    tensors += [value for state in optimiser.state.values() for value in state.values()]
    return [local(tensor).detach().clone() for tensor in tensors]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_balance_of_shards_is_that_of_one_process(sharding: str, pools: Pools):
    pools.run(world_of(sharding), check_balance, sharding)


def check_balance(sharding: str) -> None:
    plain, model = sharded(sharding, dtype=torch.float64)
    assert nero.is_balanced(model) is False
    nero.balance_(model)
    nero.balance_(plain)
    assert_weights_close(model, plain, 1e-14)
    assert nero.is_balanced(model) is True
    bits = weights(model)
    nero.balance_(model)
    assert all(torch.equal(weight, bits[name]) for name, weight in weights(model).items())
    # one neuron that one rank alone can see, first or last
    for row in (0, -1):
        _, model = sharded(sharding, partial(lengthen, row=row), dtype=torch.float64)
        assert nero.is_balanced(model) is False
    # padding rows of zeros are not neurons, on the rank that has them and on the others
    _, model = sharded(sharding, pad, dtype=torch.float64)
    assert nero.is_balanced(model) is True


def lengthen(model: nn.Module, row: int) -> None:
    nero.balance_(model)
    with torch.no_grad():
        model.get_parameter("linear.weight")[row] *= 2


def pad(model: nn.Module) -> None:
    nero.balance_(model)
    table = model.get_submodule("table")
    table.padding_idx = 7
    with torch.no_grad():
        table.weight[7] = 0


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_constraints_under_adam_equal_those_of_one_process(sharding: str, pools: Pools):
    pools.run(world_of(sharding), check_constraints, sharding)


def check_constraints(sharding: str) -> None:
    models = sharded(sharding, dtype=torch.float64)
    adams = [torch.optim.Adam(model.parameters(), lr=0.01, foreach=False) for model in models]
    for model, adam in zip(models, adams, strict=True):
        nero.balance_after_step(adam, model, fix_norm="initial")
    for step in range(3):
        whole = gradients(models[0], step)
        for model, adam in zip(models, adams, strict=True):
            give_gradients(model, whole)
            adam.step()
    assert_weights_close(models[1], models[0], 1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_balanced_muon_of_fsdp2_equals_that_of_one_process(pools: Pools):
    pools.run(2, check_balanced_muon)


def check_balanced_muon() -> None:
    models = [made(Net), made(Net)]
    fsdp_by_layer(models[1], mesh_of(2))
    optimisers = []
    for model in models:
        hidden = [model.up.weight, model.down.weight]
        rest = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in hidden)]
        pair = [torch.optim.Muon(hidden, lr=0.02, weight_decay=0), torch.optim.AdamW(rest, lr=0.01)]
        for optimiser in pair:
            nero.balance_after_step(optimiser, model)
        optimisers.append(pair)
    for step in range(2):
        whole = gradients(models[0], step)
        for model, pair in zip(models, optimisers, strict=True):
            give_gradients(model, whole)
            for optimiser in pair:
                optimiser.step()
    assert nero.is_balanced(models[1])
    found, expected = (weights(model) for model in reversed(models))
    for name, weight in found.items():  # Muon orthogonalises in bfloat16, with sums in another order
        tolerance = 2e-3 if name in ("up.weight", "down.weight") else 1e-5
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=tolerance)


def zero_first(model: nn.Module) -> None:
    """Zero a neuron of each matrix, and make one constant, each on one rank."""
    with torch.no_grad():
        for name in ("linear.weight", "table.weight"):
            model.get_parameter(name)[0] = 0
        model.get_parameter("conv.weight")[-1] = 1


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_description_of_shards_is_that_of_one_process(sharding: str, pools: Pools):
    found = pools.run(world_of(sharding), describe_both, sharding)
    for plain, described in found:
        assert described == plain


def describe_both(sharding: str) -> tuple[str, str]:
    plain, model = sharded(sharding, zero_first)
    return str(nero.describe(plain)), str(nero.describe(model))


@pytest.mark.parametrize("neurons", [None, 2])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_readings_are_equal_on_every_rank(sharding: str, neurons: int | None, pools: Pools):
    readings = pools.run(world_of(sharding), read_shards, sharding, neurons)
    for reading in readings[1:]:
        assert_readings_close(reading[1], readings[0][1])
    if neurons is None:  # counts and shares are exact; quantiles are the means of those of the ranks
        for mine, alone in zip(readings[0][1].layers, readings[0][0].layers, strict=True):
            assert mine[:5] == alone[:5]
            assert mine[8:] == pytest.approx(alone[8:], nan_ok=True)


def read_shards(sharding: str, neurons: int | None) -> list[Any]:
    """Return the last readings of a plain and of a sharded model."""
    models = sharded(sharding)
    optimisers = [nero.Nero(model) for model in models]
    watches = [nero.watch(optimiser, neurons) for optimiser in optimisers]
    for step in range(4):
        whole = gradients(models[0], step)
        if step == 2:
            whole["linear.weight"][0, 0] = math.nan
        for model, optimiser, watched in zip(models, optimisers, watches, strict=True):
            give_gradients(model, whole)
            optimiser.step()
            if step % 2:
                watched.read()
    assert optimisers[1].skipped == optimisers[0].skipped == {"linear.weight": 1}
    found = [watched.readings[-1] for watched in watches]
    return [type(reading).of(reading.layers, reading.step) for reading in found]


DEPTHS = {
    "fsdp": (fsdp, (2,)),
    "fsdp by layer": (fsdp_by_layer, (4,)),
    "hsdp": (fsdp, (2, 2)),
    "tensor parallel": (tensor_parallel, (2,)),
    "sequence parallel": (sequence_parallel, (2,)),
    "fsdp and tensor parallel": (both, (2, 2)),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_auto_depth_of_shards_is_that_of_one_process(name: str, pools: Pools):
    found = pools.run(math.prod(DEPTHS[name][1]), count_depths, name)
    assert len({depth for _, depth in found}) == 1
    plain, depth = found[0]
    # under sequence parallelism a rank measures its own tokens
    assert depth == pytest.approx(plain, rel=0.05 if name == "sequence parallel" else 1e-6)
    assert depth > 1


def count_depths(name: str) -> tuple[float, float]:
    """Count without process groups first: one of several processes may not count a plain model."""
    shard, mesh = DEPTHS[name]
    plain, model = made(Net, torch.float64), made(Net, torch.float64)
    shard(model, mesh_of(*mesh))
    tokens = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(1))
    nero.balance_(plain)
    expected = nero.depth_of(plain, tokens)
    optimiser = nero.Nero(model, lr="auto")
    for _ in range(2):
        optimiser.zero_grad()
        model(tokens).square().mean().backward()
        optimiser.step()
    (depth,) = {group["depth"] for group in optimiser.param_groups}
    assert weights_are_finite(model)
    return expected, depth


def weights_are_finite(model: nn.Module) -> bool:
    return all(bool(weight.isfinite().all()) for weight in weights(model).values())


def test_auto_depth_is_the_greatest_of_all_ranks(pools: Pools):
    depths = pools.run(2, count_unequal_depths)
    assert depths[0] == depths[1] == pytest.approx(5.0)


class Loop(nn.Module):
    """A layer that is used several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: Tensor, times: int) -> Tensor:
        for _ in range(times):
            inputs = self.layer(inputs)
        return inputs


def count_unequal_depths() -> float:
    model = made(Loop)
    mesh = mesh_of(2)
    fsdp(model, mesh)
    optimiser = nero.Nero(model, lr="auto")
    model(torch.randn(4, 8), 2 + 3 * mesh.get_local_rank()).square().mean().backward()
    optimiser.step()
    return optimiser.param_groups[0]["depth"]


class OffsetRMSNorm(nn.Module):
    """A norm that scales by 1 + w, as in transformers, and is not built without a width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.rms_norm(inputs, inputs.shape[-1:]) * (1 + self.weight)


def test_norm_of_its_own_shard_keeps_role(pools: Pools):
    assert pools.run(2, norm_is_recognised) == [True, True]


def norm_is_recognised() -> bool:
    """Shard each layer by itself, as Accelerate does with the last norm; return whether the roles are the same."""
    model = made(lambda: Layers(up=nn.Linear(4, 8), last=OffsetRMSNorm(8)))
    expected = nero.roles_of(model)
    fsdp_by_layer(model, mesh_of(2))
    return expected["last.weight"].has_offset and nero.roles_of(model) == expected


def test_frozen_and_unfrozen_shards_step_like_one_process(pools: Pools):
    pools.run(4, check_unfreezing)


def check_unfreezing() -> None:
    """A parameter frozen at first enters at its first gradient; one rank of four holds no row of it."""
    models = made(Zoo, torch.float64), made(Zoo, torch.float64)
    placed(0)(models[1], mesh_of(4))
    optimisers = []
    for model in models:
        model.get_parameter("conv.weight").requires_grad_(False)
        optimisers.append(nero.Nero(model, pretrained=False))
    for step in range(6):
        whole = gradients(models[0], step)
        for model, optimiser in zip(models, optimisers, strict=True):
            if step == 3:
                model.get_parameter("conv.weight").requires_grad_(True)
            give_gradients(model, whole)
            if step < 3:
                model.get_parameter("conv.weight").grad = None
            if step == 4:
                model.get_parameter("table.weight").grad = None
            optimiser.step()
    assert_weights_close(models[1], models[0], 1e-12)


def test_shards_without_gradient_keep_their_bits(pools: Pools):
    pools.run(2, check_untouched)


def check_untouched() -> None:
    """No gradient and a zero gradient leave every bit, whole or cut."""
    for axis in (0, 1):
        model = made(lambda: Layers(one=nn.Linear(6, 5), two=nn.Linear(6, 5)))
        placed(axis)(model, mesh_of(2))
        optimiser = nero.Nero(model)
        before = weights(model)
        give_gradients(model, {name: torch.zeros_like(weight) for name, weight in before.items()})
        for parameter in model.get_submodule("two").parameters():
            parameter.grad = None
        optimiser.step()
        assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())
