"""Shards under stochastic rounding, torch.compile, Accelerate's order, DDP and ZeroRedundancyOptimizer."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding.layouts import (
    Layers,
    Net,
    Zoo,
    assert_weights_close,
    error_of,
    fsdp,
    fsdp_by_layer,
    full,
    give_gradients,
    gradients,
    made,
    mesh_of,
    placed,
)
from sharding.processes import Pools
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

import nero


def local_bits(model: nn.Module) -> list[list[int]]:
    """Return the bits of the local part of every bf16 parameter."""
    found = (parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters())
    return [local.detach().view(torch.int16).flatten().tolist() for local in found]


def twins() -> nn.Module:
    """A layer whose upper half is its lower half, and whose left half is its right half."""
    layer = nn.Linear(16, 8, bias=False)
    with torch.no_grad():
        layer.weight.copy_(layer.weight[:4, :8].repeat(2, 2))
    return Layers(linear=layer)


def round_stochastically(
    model: Callable[[], nn.Module], shard: Any, mesh: tuple[int, ...], are_equal: bool = False, steps: int = 5
) -> list[list[int]]:
    """Train in bf16 from other seeds on every rank, and return the bits of this rank."""
    network = made(model, torch.bfloat16)
    if shard is not None:
        shard(network, mesh_of(*mesh))
    torch.manual_seed(distributed.get_rank())
    optimiser = nero.Nero(network, rounding="stochastic")
    for step in range(steps):
        whole = gradients(network, step)
        if are_equal:
            whole = {name: gradient[:4, :8].repeat(2, 2) for name, gradient in whole.items()}
        give_gradients(network, whole)
        optimiser.step()
    return local_bits(network)


def test_noise_is_equal_on_replicas_of_hsdp(pools: Pools):
    bits = pools.run(4, round_stochastically, Zoo, fsdp, (2, 2))
    assert bits[0] == bits[2]
    assert bits[1] == bits[3]
    assert bits[0] != bits[1]


@pytest.mark.parametrize("layout", ["plain", "replicated"])
def test_noise_is_equal_on_copies(layout: str, pools: Pools):
    """As under DistributedDataParallel, with ranks seeded differently."""
    bits = pools.run(2, round_stochastically, Zoo, None if layout == "plain" else placed_nowhere, (2,))
    assert bits[0] == bits[1]


def placed_nowhere(model: nn.Module, mesh: Any) -> None:
    placed(None)(model, mesh)


def placed_rows(model: nn.Module, mesh: Any) -> None:
    placed(0)(model, mesh)


def placed_columns(model: nn.Module, mesh: Any) -> None:
    placed(1)(model, mesh)


@pytest.mark.parametrize("shard", [placed_rows, placed_columns])
def test_noise_differs_between_shards(shard: Callable[..., None], pools: Pools):
    bits = pools.run(2, round_stochastically, twins, shard, (2,), True)
    assert bits[0] != bits[1], "ranks with equal weights and gradients drew the same noise"
    again = pools.run(2, round_stochastically, twins, shard, (2,), True)
    assert bits == again, "the same run has other bits"


@pytest.mark.parametrize("shard", [None, placed_rows, placed_columns])
def test_noise_of_shards_is_unbiased(shard: Callable[..., None] | None, pools: Pools):
    """Steps far below the spacing of bf16 add up to what float32 does: the noise is new at every step."""
    for moved, wanted in pools.run(2, drift, shard):
        assert moved == pytest.approx(wanted, rel=0.25)


def drift(shard: Callable[..., None] | None) -> tuple[float, float]:
    """Return how far the weights move along a constant gradient, in bf16 and in float32."""
    moved = []
    for dtype in (torch.bfloat16, torch.float32):
        model = made(lambda: Layers(linear=nn.Linear(32, 16, bias=False)), dtype)
        if shard is not None:
            shard(model, mesh_of(2))
        optimiser = nero.Nero(model, lr=2e-4, rounding="stochastic", fix_norm=False, fix_mean=False)
        whole = gradients(model, 0)
        whole = {"linear.weight": whole["linear.weight"].float().sign().to(dtype)}
        before = full(model.linear.weight).float()
        for _ in range(50):
            give_gradients(model, whole)
            optimiser.step()
        change = full(model.linear.weight).float() - before
        moved.append(-float((change * whole["linear.weight"].float()).sum()))
    return moved[0], moved[1]


@pytest.mark.parametrize("shard", [None, placed_rows, placed_columns])
@pytest.mark.parametrize("idle", [None, 1], ids=["", "idle"])
def test_noise_goes_on_after_a_checkpoint(shard: Callable[..., None] | None, idle: int | None, pools: Pools):
    for whole, resumed in pools.run(2, resume_noise, shard, idle):
        assert resumed == whole


def resume_noise(shard: Callable[..., None] | None, idle: int | None) -> tuple[list[list[int]], list[list[int]]]:
    """Return the bits of a run, and of one that is stopped and resumed in other processes' random state.

    The step ``idle`` finds no gradient.
    """
    found = []
    for stop in (None, 3):
        torch.manual_seed(0)
        model = noisy(shard)
        optimiser = nero.Nero(model, rounding="stochastic")
        for step in range(6):
            if step == stop:
                state, before = copy.deepcopy(optimiser.state_dict()), model
                torch.manual_seed(17)
                model = noisy(shard)
                optimiser = nero.Nero(model, rounding="stochastic")
                optimiser.load_state_dict(state)
                with torch.no_grad():
                    for new, old in zip(model.parameters(), before.parameters(), strict=True):
                        new.copy_(old)
            give_gradients(model, gradients(model, step))
            if step == idle:
                optimiser.zero_grad()
            optimiser.step()
        found.append(local_bits(model))
    return found[0], found[1]


def noisy(shard: Callable[..., None] | None) -> nn.Module:
    model = made(Zoo, torch.bfloat16)
    if shard is not None:
        shard(model, mesh_of(2))
    return model


@pytest.mark.parametrize("axis", [0, 1])
def test_compiled_step_of_shards_equals_one_process(axis: int, pools: Pools):
    pools.run(2, step_compiled, axis)


def step_compiled(axis: int) -> None:
    models = [made(lambda: Layers(linear=nn.Linear(7, 5), norm=nn.LayerNorm(6)), torch.float64) for _ in range(2)]
    placed(axis)(models[1], mesh_of(2))
    optimisers = [nero.Nero(model) for model in models]
    steps = optimisers[0].step, torch.compile(optimisers[1].step, backend="eager")
    for number in range(3):
        whole = gradients(models[0], number)
        for model, step in zip(models, steps, strict=True):
            give_gradients(model, whole)
            step()
    assert_weights_close(models[1], models[0], 1e-12)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_parameters_swapped_by_accelerate_train_on(steps_before: int, pools: Pools):
    assert pools.run(2, swap_parameters, steps_before) == [[], []]


def swap_parameters(steps_before: int) -> list[str]:
    """Make the optimiser first, then shard, then replace the parameters in its groups."""
    models = made(Zoo, torch.float64), made(Zoo, torch.float64)
    plain, model = models
    optimisers = [nero.Nero(each) for each in models]
    for step in range(steps_before):
        for each, optimiser in zip(models, optimisers, strict=True):
            give_gradients(each, gradients(plain, step))
            optimiser.step()
            optimiser.zero_grad()
    names = {parameter: name for name, parameter in model.named_parameters()}
    named_groups = [[names[parameter] for parameter in group["params"]] for group in optimisers[1].param_groups]
    fsdp_by_layer(model, mesh_of(2))
    for group, group_names in zip(optimisers[1].param_groups, named_groups, strict=True):
        group["params"] = [model.get_parameter(name) for name in group_names]
    assert optimisers[1].state_dict()["param_groups"], "it can be saved at once"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps_before, steps_before + 4):
            whole = gradients(plain, step)
            for each, optimiser in zip(models, optimisers, strict=True):
                give_gradients(each, whole)
                optimiser.step()
    if not steps_before:  # state that was lost with the parameters starts anew
        assert_weights_close(model, plain, 1e-12)
    assert set(optimisers[1].state) == set(model.parameters()), "state of parameters that are gone"
    state = optimisers[1].state_dict()
    assert len(state["state"]) == len(list(model.parameters()))
    return [str(warning.message) for warning in caught if "nero" in str(warning.message).lower()]


def test_optimiser_made_before_fully_shard_warns(pools: Pools):
    for messages in pools.run(2, shard_after_optimiser):
        assert any("fully_shard" in message for message in messages), messages


def shard_after_optimiser() -> list[str]:
    model = made(Net)
    optimiser = nero.Nero(model)
    fsdp(model, mesh_of(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
            optimiser.step()
            model.zero_grad()
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def test_ordinary_training_of_shards_does_not_warn(pools: Pools):
    assert pools.run(2, train_ordinarily) == [[], []]


def train_ordinarily() -> list[str]:
    """Shard, make the optimiser, and leave some steps without any gradient."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = made(Net)
        fsdp_by_layer(model, mesh_of(2))
        optimiser = nero.Nero(model)
        optimiser.step()
        model(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        optimiser.step()
    return [str(each.message) for each in caught if Path(each.filename) == Path(__file__)]


def test_zero_redundancy_warns_unless_balanced(pools: Pools):
    for warned, silent, off in pools.run(2, shard_optimiser):
        assert any("balance_" in message for message in warned), warned
        assert not silent
        assert off < 1e-6


def shard_optimiser() -> tuple[list[str], list[str], float]:
    """Train with ZeroRedundancyOptimizer; return its warnings on two models, and how far the ranks are apart."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # deprecated functions warn at import

    messages = []
    for is_balanced in (False, True):
        model, plain = made(Net), made(Net)
        if is_balanced:
            nero.balance_(model)
            nero.balance_(plain)
        parallel = nn.parallel.DistributedDataParallel(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimiser = ZeroRedundancyOptimizer(parallel.parameters(), nero.Nero, lr=0.01)
            for step in range(3):
                give_gradients(model, gradients(plain, step))
                optimiser.step()
        messages.append([str(each.message) for each in caught if "nero" in str(each.message).lower()])
    alone = nero.Nero(plain.parameters(), lr=0.01)
    for step in range(3):
        give_gradients(plain, gradients(plain, step))
        alone.step()
    off = max(float((one - two).abs().max()) for one, two in zip(model.parameters(), plain.parameters(), strict=True))
    return messages[0], messages[1], off


@pytest.mark.parametrize("when", ["before", "after", "hook"])
def test_parameters_kept_by_fsdp1_raise(when: str, pools: Pools):
    """With use_orig_params=True, the parameters stay in the model, as parts of a flat one."""
    for kind, message in pools.run(2, wrap_in_fsdp1, when):
        assert kind == "TypeError"
        assert "FSDP1, which cuts through neurons" in message


def wrap_in_fsdp1(when: str) -> tuple[str, str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimiser = nero.Nero(model) if when == "before" else torch.optim.Adam(model.parameters())
    if when == "hook":
        nero.balance_after_step(optimiser, model)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if when == "after":
        return error_of(nero.Nero, wrapped.parameters())
    wrapped(torch.randn(8, 4)).square().mean().backward()
    return error_of(optimiser.step)


@pytest.mark.parametrize("reload", ["never", "at once", "later"])
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "by-hand"])
@pytest.mark.parametrize("options", [{}, {"fix_norm": "initial"}, {"pretrained": True}])
def test_replicas_made_after_the_optimiser_stay_equal(
    options: dict[str, Any], is_wrapped: bool, reload: str, pools: Pools
):
    """Each rank draws other weights; DistributedDataParallel, or a broadcast, then sends those of the first to all."""
    bits = pools.run(2, replicate_late, options, is_wrapped, reload)
    assert bits[0] == bits[1]


def replicate_late(options: dict[str, Any], is_wrapped: bool, reload: str) -> list[float]:
    """Construct Nero, then make the model a replica; return the weights after some steps."""
    torch.manual_seed(distributed.get_rank())
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimiser = nero.Nero(model, **options)
    parallel: nn.Module = model
    if is_wrapped:
        parallel = nn.parallel.DistributedDataParallel(model)
    else:
        for parameter in model.parameters():
            distributed.broadcast(parameter.data, 0)
    start = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
    for step in range(3):
        if (reload, step) in (("at once", 0), ("later", 1)):  # as Accelerate does, and as learning rate finders do
            model.load_state_dict(start[0])
            optimiser.load_state_dict(start[1])
        optimiser.zero_grad()
        parallel(torch.randn(8, 4)).square().mean().backward()
        if not is_wrapped:
            for parameter in model.parameters():
                distributed.all_reduce(parameter.grad)
        optimiser.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_processes_agree_on_the_greatest_depth(pools: Pools):
    """No process counts alone, and if one cannot count, none does until all can."""
    first, second = pools.run(2, count_in_replicas)
    assert "not known yet (this is one of several processes" in first[0][0] == second[0][0]
    assert "not known yet (ValueError: times is zero)" in first[0][1]
    assert "not known yet (another process could not count it)" in second[0][1]
    assert first[1] == second[1] == [5.0, 5.0]
    assert first[2] == pytest.approx(second[2])


class Loop(nn.Module):
    """A layer that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: Tensor, times: int) -> Tensor:
        if not times:
            raise ValueError("times is zero")
        for _ in range(times):
            inputs = self.layer(inputs)
        return inputs


def count_in_replicas() -> tuple[list[str], list[float], list[float]]:
    """Train replicas whose depths differ; return the errors of steps, the depths, and the weights at the end."""
    rank = distributed.get_rank()
    errors, depths, weights = [], [], []
    for wrapped_first in (False, True):
        torch.manual_seed(0)
        model = Loop()
        if wrapped_first:
            parallel = nn.parallel.DistributedDataParallel(model)
            optimiser = nero.Nero(parallel, lr="auto")
        else:
            optimiser = nero.Nero(model, lr="auto")
            model(torch.randn(4, 8), 1 + rank)  # outside of DistributedDataParallel
            errors.append(error_of(optimiser.step)[1])
            parallel = nn.parallel.DistributedDataParallel(model)
            if rank == 0:
                model(torch.randn(4, 8), 2)
            error_of(parallel, torch.randn(4, 8), 2 * rank)  # fails on rank 0
            errors.append(error_of(optimiser.step)[1])
        torch.manual_seed(rank)
        for times in (2 + 3 * rank, 1):
            optimiser.zero_grad()
            parallel(torch.randn(4, 8), times).square().mean().backward()
            optimiser.step()
        depths.append(optimiser.param_groups[0]["depth"])
        weights += model.layer.weight.flatten().tolist()
    return errors, depths, weights


@pytest.mark.parametrize("axis", [0, 1])
def test_changes_to_shards_between_steps_are_seen(axis: int, pools: Pools):
    pools.run(2, change_between_steps, axis)


def change_between_steps(axis: int) -> None:
    """Weights that are loaded, options that change and parameters that move in memory reach the next step."""
    models = made(Zoo, torch.float64), made(Zoo, torch.float64)
    placed(axis)(models[1], mesh_of(2))
    optimisers = [nero.Nero(model) for model in models]
    other = made(Zoo, torch.float64)
    nn.init.normal_(other.linear.weight)
    for step in range(6):
        whole = gradients(models[0], step)
        for model, optimiser in zip(models, optimisers, strict=True):
            give_gradients(model, whole)
            weight = model.linear.weight
            if step == 1:
                optimiser.param_groups[0]["lr"] = 0.1
            if step == 2:
                with torch.no_grad():
                    weight.mul_(2)  # an operation on the DTensor
            if step == 3:
                with torch.no_grad():
                    replaced(weight, other.linear.weight)
            if step == 4:
                optimiser.param_groups[0]["fix_norm"] = False
            optimiser.step()
    assert_weights_close(models[1], models[0], 1e-12)


def replaced(weight: Tensor, new: Tensor) -> None:
    """Copy new values into a parameter, sharded or not."""
    if isinstance(weight, DTensor):
        from torch.distributed.tensor import distribute_tensor

        weight.copy_(distribute_tensor(new.detach(), weight.device_mesh, weight.placements))
    else:
        weight.copy_(new)
