"""Steps of sharded parameters against those of one process, and how often the processes talk to each other."""

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sharded as benchmark
import torch
from sharding.layouts import (
    Layers,
    Layout,
    Net,
    Zoo,
    assert_weights_close,
    both,
    error_of,
    fsdp,
    fsdp_by_layer,
    full,
    give_gradients,
    gradients,
    made,
    mesh_of,
    placed,
    sequence_parallel,
    tensor_parallel,
    weights,
)
from sharding.processes import MAX_CASE_S, Pool, Pools
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import nero

STEPS = 5
COUNTED_STEP = 3  # after the first ones, which plan
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A sharded model, its options, and the number of collectives of a step."""

    shard: Layout
    mesh: tuple[int, ...]
    collectives: int
    model: Callable[[], nn.Module] = Zoo
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] | None = None
    edit: Callable[[nn.Module], None] = lambda _: None  # of the weights, before sharding
    gradient: Callable[[dict[str, Tensor], int], object] = lambda *_: None  # changes the gradients of a step
    scale: float = 1.0  # of the gradients
    places: Mapping[str, Sequence[Any]] | None = None  # of the gradients, by pattern, where not the parameter's

    @property
    def world(self) -> int:
        return math.prod(self.mesh)

    def optimiser(self, model: nn.Module) -> nero.Nero:
        groups = model if self.overrides is None else nero.param_groups(model, overrides=self.overrides)
        return nero.Nero(groups, **self.options)


def linear(fan_in: int, rows: int = 5) -> Callable[[], nn.Module]:
    return lambda: Layers(linear=nn.Linear(fan_in, rows))


def transposed(inputs: int, outputs: int, groups: int) -> Callable[[], nn.Module]:
    return lambda: Layers(conv=nn.ConvTranspose1d(inputs, outputs, 3, groups=groups))


def mixed(model: nn.Module, mesh: DeviceMesh) -> None:
    placed(0, only="conv.*")(model, mesh)
    placed(1, only="table.*")(model, mesh)


def two_meshes(model: nn.Module, _: DeviceMesh) -> None:
    """Shard on meshes of the same processes in one and in two dimensions."""
    placed(1, only="linear.*")(model, mesh_of(4))
    placed(0, only="conv.*")(model, mesh_of(4))
    placed(0, 1, only="table.*")(model, mesh_of(2, 2))


LAYOUTS = {
    "fsdp": Case(fsdp, (2,), 0),
    "fsdp, a rank without rows": Case(fsdp, (4,), 0),
    "fsdp by layer": Case(fsdp_by_layer, (4,), 0),
    "hsdp": Case(fsdp, (2, 2), 0),
    "replicated": Case(placed(None), (2,), 0),
    "rows": Case(placed(0), (2,), 0),
    "columns": Case(placed(1), (2,), 1),
    "columns, a rank without any": Case(placed(1), (4,), 1),
    "rows by columns": Case(placed(0, 1), (2, 2), 1),
    "rows by rows": Case(placed(0, 0), (2, 2), 0),
    "copies of columns": Case(placed(None, 1), (2, 2), 1),
    "kernels cut": Case(placed(2), (2,), 1),
    "size one, rows": Case(placed(0, 0), (1, 2), 0),
    "size one, cut by one": Case(placed(0, 1), (2, 1), 0),
    "size one, cut by the other": Case(placed(0, 1), (1, 2), 1),
    "mixed with plain": Case(mixed, (2,), 1),
    "two meshes": Case(two_meshes, (4,), 2),
    "tensor parallel": Case(tensor_parallel, (2,), 1, Net),
    "tensor parallel of 4": Case(tensor_parallel, (4,), 1, Net),
    "fsdp and tensor parallel": Case(both, (2, 2), 1, Net),
    "fsdp and colwise": Case(both, (2, 2), 0, lambda: Layers(up=nn.Linear(5, 10))),
    "fan-in 1": Case(placed(1), (2,), 0, linear(1)),
    "fan-in 2": Case(placed(1), (2,), 1, linear(2)),
    "fan-in 2 on 4": Case(placed(1), (4,), 1, linear(2)),
    "fan-in 3 on 4": Case(placed(1), (4,), 1, linear(3)),
    "fan-in 2, rows": Case(placed(0), (2,), 0, linear(2)),
    "one row": Case(placed(0), (2,), 0, linear(3, 1)),
    "transposed convolution": Case(placed(0), (2,), 1, transposed(6, 3, 1)),
    "transposed convolution, outputs": Case(placed(1), (4,), 0, transposed(4, 3, 1)),
    "groups that divide": Case(placed(0), (2,), 0, transposed(8, 4, 4)),
    "groups, one a rank": Case(placed(0), (4,), 0, transposed(8, 4, 4)),
    "groups cut in two": Case(placed(0), (4,), 1, transposed(8, 4, 2)),
    "groups that do not divide": Case(placed(0), (2,), 1, transposed(6, 3, 3)),
    "groups with a rank left": Case(placed(0), (4,), 0, transposed(6, 6, 3)),
    "groups, outputs": Case(placed(1), (2,), 0, transposed(4, 6, 2)),
    "transposed, cut": Case(placed(0), (2,), 1, linear(5, 7), overrides={"linear.weight": (0,)}),
    "transposed, whole": Case(placed(1), (4,), 0, linear(5, 7), overrides={"linear.weight": (0,)}),
    "stacked experts": Case(placed(0), (2,), 0, lambda: Layers(experts=Experts()), overrides={"*weight": (2,)}),
    "stacked experts, rows": Case(placed(1), (2,), 0, lambda: Layers(experts=Experts()), overrides={"*weight": (2,)}),
    "stacked experts, cut": Case(placed(2), (2,), 1, lambda: Layers(experts=Experts()), overrides={"*weight": (2,)}),
}


class Experts(nn.Module):
    """Three experts of four neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5))


def zero_some(model: nn.Module) -> None:
    """Zero the first and the last neuron of every matrix, and all of one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter[0] = parameter[-1] = 0
        model.get_parameter("conv.weight").zero_()


def spoil(whole: dict[str, Tensor], step: int) -> None:
    """Put a NaN into the first element of each gradient at one step, an infinity into the last at another."""
    for gradient in whole.values():
        if step == 1:
            gradient.view(-1)[0] = math.nan
        if step == 2:
            gradient.view(-1)[-1] = math.inf


def silence(whole: dict[str, Tensor], step: int) -> None:
    """Zero the gradients of some neurons at every step, and all gradients at one."""
    for gradient in whole.values():
        gradient[1] = 0
        if step == 2:
            gradient.zero_()


#: Options that a step of whole neurons only passes on: each is tested with cut neurons, most at once with whole ones.
OPTIONS: dict[str, dict[str, Any]] = {
    "free means": {"fix_mean": False},
    "scale": {"scale": 0.5},
    "gain penalty": {"gain_penalty": 0.3},
    "maximize": {"maximize": True},
    "longest step": {"longest_step": 1.0},
    "depth and beta": {"depth": 3.0, "beta": 0.9},
    "lr in a tensor": {"lr": torch.tensor(0.02)},
    "lr zero": {"lr": 0.0},
    "free norms": {"fix_norm": False},
    "no constraint": {"fix_mean": False, "fix_norm": False},
}
#: Options and inputs to test with whole neurons too, since the state, the gradient or the backend is another.
VARIATIONS = {
    "initial norms": {"options": {"fix_norm": "initial"}},
    "initial norms, pretrained": {"options": {"pretrained": True}},
    "momentum": {"options": {"momentum": 0.9}},
    "momentum, nan gradients": {"options": {"momentum": 0.8, "nesterov": False}, "gradient": spoil},
    "momentum, numba": {"options": {"momentum": 0.9, "backend": "numba"}, "edit": zero_some},
    "zero neurons": {"edit": zero_some},
    "zero neurons, initial norms": {"edit": zero_some, "options": {"fix_norm": "initial"}},
    "zero neurons, free": {"edit": zero_some, "options": {"fix_norm": False}},
    "nan gradients": {"gradient": spoil},
    "zero gradients": {"gradient": silence},
    "eager": {"options": {"backend": "eager"}},
    "foreach": {"options": {"backend": "foreach"}},
    "numba": {"options": {"backend": "numba"}},
    "triton": {"options": {"backend": "triton", "momentum": 0.9}, "model": linear(6)},
    "partial gradients": {"places": {"*": [Partial()]}},
    "replicated gradients": {"places": {"*": [Replicate()]}},
    "gradients sharded otherwise": {"places": {"*weight": [Shard(0)], "table.weight": [Shard(1)]}},
}
#: Gradients that are sharded unlike their parameters are redistributed first, which communicates.
UNCOUNTED = ("partial gradients", "replicated gradients", "gradients sharded otherwise")
CASES = {
    **LAYOUTS,
    **{
        f"{name}, {layout}": replace(LAYOUTS[layout], **change)
        for name, change in VARIATIONS.items()
        for layout in ("rows", "columns")
        if (name, layout) != ("triton", "columns")
    },
    **{f"{name}, columns": replace(LAYOUTS["columns"], options=options) for name, options in OPTIONS.items()},
    "options, rows": replace(LAYOUTS["rows"], options=dict(ChainMap(*list(OPTIONS.values())[:7]))),
    "huge gradients, columns": replace(LAYOUTS["columns"], scale=1e25),
    "tiny gradients, columns": replace(LAYOUTS["columns"], scale=1e-25),
    "transposed convolution, nan": replace(LAYOUTS["groups that do not divide"], gradient=spoil),
    "groups, momentum": replace(
        LAYOUTS["groups that do not divide"], gradient=spoil, options={"momentum": 0.9, "backend": "foreach"}
    ),
    "whole groups, momentum": replace(LAYOUTS["groups that divide"], options={"momentum": 0.9}),
    "a rank without rows, nan": replace(LAYOUTS["fsdp, a rank without rows"], gradient=spoil, edit=zero_some),
}
DOUBLE = [*LAYOUTS, "zero neurons, columns", "initial norms, columns", "free norms, columns", "nan gradients, columns"]
SINGLE = [name for name in CASES if name not in LAYOUTS]
SINGLE += ["columns, a rank without any", "fsdp and tensor parallel", "groups that do not divide"]
RUNS = [(name, "float64") for name in DOUBLE] + [(name, "float32") for name in SINGLE]
#: Half precision rounds at every step, and the last bit of a few elements may differ.
HALF = ["fsdp, a rank without rows", "columns", "zero neurons, columns", "momentum, columns"]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_sharded_steps_equal_those_of_one_process(name: str, dtype: str, pools: Pools):
    pools.run(CASES[name].world, check_steps, name, dtype)


@pytest.mark.parametrize("name", HALF)
def test_half_precision_steps_equal_those_of_one_process(name: str, pools: Pools):
    pools.run(CASES[name].world, check_half_steps, name)


def check_steps(name: str, dtype: str) -> None:
    case = CASES[name]
    plain, sharded, steps = paired(case, DTYPES[dtype])
    tolerance = TOLERANCES[DTYPES[dtype]]
    assert_weights_close(sharded, plain, tolerance)
    *_, counts = steps(STEPS)
    assert_weights_close(sharded, plain, tolerance)
    if not name.startswith(UNCOUNTED):
        assert counts == {case.collectives}, f"{counts} collectives a step, where {case.collectives} is the number"


def check_half_steps(name: str) -> None:
    plain, sharded, steps = paired(CASES[name], torch.bfloat16)
    steps(STEPS)
    expected, elements, different = weights(plain), 0, 0
    for key, weight in weights(sharded).items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight, expected[key], rtol=2**-7, atol=2**-16)
        elements, different = elements + weight.numel(), different + int((weight != expected[key]).sum())
    assert different <= 0.05 * elements


def paired(case: Case, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Callable[[int], tuple[Any, ...]]]:
    """Return a plain and a sharded model, and a function that trains both by the same gradients.

    The function returns both optimisers, after comparing their states, and the numbers of collectives of the steps.
    """
    models = [made(case.model, dtype) for _ in range(2)]
    for model in models:
        case.edit(model)
    plain, sharded = models
    case.shard(sharded, mesh_of(*case.mesh))
    assert any(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    optimisers = [case.optimiser(model) for model in models]

    def train(steps: int) -> tuple[Any, ...]:
        counts = set()
        for step in range(steps):
            whole = gradients(plain, step, case.scale)
            case.gradient(whole, step)
            give_gradients(plain, whole)
            give_gradients(sharded, whole, case.places)
            optimisers[0].step()
            with CommDebugMode() if step == COUNTED_STEP else nullcontext() as mode:
                optimisers[1].step()
            if step == COUNTED_STEP:
                counts.add(mode.get_total_counts())
                plan = optimisers[1]._plan
        assert optimisers[1]._plan is plan, "steps are planned again and again"
        assert_states_match(sharded, optimisers[1], plain, optimisers[0])
        return (*optimisers, counts)

    return plain, sharded, train


def assert_states_match(found: nn.Module, optimiser: nero.Nero, plain: nn.Module, expected: nero.Nero) -> None:
    """Check that the states of sharded parameters are sharded, with the shapes and values of one process."""
    assert optimiser.skipped == expected.skipped
    for (name, parameter), reference in zip(found.named_parameters(), plain.parameters(), strict=True):
        state, wanted = optimiser.state[parameter], expected.state[reference]
        assert state.keys() == wanted.keys(), name
        for key, value in state.items():
            is_sharded = isinstance(parameter, DTensor) and key in ("grad_norm", "radius", "momentum_buffer")
            assert isinstance(value, DTensor) == is_sharded, f"{key} of {name}"
            assert value.shape == wanted[key].shape, f"{key} of {name}"
            if key != "skipped":  # a process counts its own
                relative = 1e-5 if wanted["grad_norm"].dtype == torch.float32 else 1e-11
                if "momentum_buffer" in state and state["momentum_buffer"].dtype == torch.bfloat16:
                    relative = 2**-7  # the average follows the buffer, whose last bit may differ
                # sums of elements may cancel
                absolute = relative * float(wanted[key].abs().max()) if key == "momentum_buffer" else 0
                message = f"{key} of {name}"
                torch.testing.assert_close(full(value), wanted[key], rtol=relative, atol=absolute, msg=message)


@pytest.mark.parametrize("tensors", [1, 5])
def test_tensors_of_a_group_share_one_collective(tensors: int, pools: Pools):
    assert pools.run(2, count_collectives, tensors) == [1, 1]


def count_collectives(tensors: int) -> int:
    model = made(lambda: Layers(**{f"layer{index}": nn.Linear(6, 4 + index) for index in range(tensors)}))
    placed(1)(model, mesh_of(2))
    optimiser = nero.Nero(model)
    for step in range(3):
        give_gradients(model, gradients(model, step))
        with CommDebugMode() as mode:
            optimiser.step()
    return mode.get_total_counts()


def test_counter_of_collectives_sees_all_kinds(pools: Pools):
    assert pools.run(2, count_known_collectives) == [2, 2]


def count_known_collectives() -> int:
    with CommDebugMode() as mode:
        distributed.all_reduce(torch.ones(1))
        DTensor.from_local(torch.ones(1), mesh_of(2), [Partial()]).full_tensor()
    return mode.get_total_counts()


@dataclass(frozen=True)
class Training:
    """A wrapped network, trained on batches that are split over the first dimension of the mesh or not."""

    shard: Layout
    mesh: tuple[int, ...]
    is_split: bool
    options: Mapping[str, Any] = field(default_factory=dict)


TRAININGS = {
    "fsdp": Training(fsdp_by_layer, (4,), True),
    "hsdp": Training(fsdp, (2, 2), True),
    "tensor parallel": Training(tensor_parallel, (2,), False),
    "sequence parallel": Training(sequence_parallel, (2,), False),
    "fsdp and tensor parallel": Training(both, (2, 2), True),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_wrapped_training_equals_that_of_one_process(name: str, pools: Pools):
    pools.run(math.prod(TRAININGS[name].mesh), check_training, name)


def check_training(name: str) -> None:
    training = TRAININGS[name]
    mesh = mesh_of(*training.mesh)
    plain, sharded = made(Net, torch.float64), made(Net, torch.float64)
    training.shard(sharded, mesh)
    optimisers = [nero.Nero(model, **training.options) for model in (plain, sharded)]
    data = mesh if name == "hsdp" or mesh.ndim == 1 else mesh["data"]
    part, parts = (
        (data.get_rank() % data.size(), data.size()) if mesh.ndim == 1 or name == "hsdp" else coordinates(data)
    )
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        tokens = torch.randint(11, (8, 4), generator=generator)
        labels = torch.randint(6, (8, 4), generator=generator)
        own = slice(part * 8 // parts, (part + 1) * 8 // parts) if training.is_split else slice(None)
        for model, optimiser, rows in zip((plain, sharded), optimisers, (slice(None), own), strict=True):
            optimiser.zero_grad()
            logits = model(tokens[rows])
            nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten()).backward()
            optimiser.step()
    assert_weights_close(sharded, plain, 1e-12)
    assert_states_match(sharded, optimisers[1], plain, optimisers[0])


def coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    return mesh.get_local_rank(), mesh.size()


def test_benchmark_measures_every_workload(pools: Pools):
    for rows in pools.run(2, rehearse_benchmark):
        assert {row["backend"] for row in rows} == {"foreach"}
        assert len(rows) == len(benchmark.WORKLOADS)
        for row in rows:
            assert row["collectives"] == ("cut" in row["workload"])
            assert row["collectives_adam"] == 0
            assert row["collectives_muon"] > 3  # per matrix, of which there are three
            assert row["of_plain"] > 0
        assert benchmark.table(rows).row_count == len(rows)


def rehearse_benchmark() -> list[dict[str, Any]]:
    benchmark.numba_works = lambda: False  # it takes seconds to compile
    return list(benchmark.measure_all(rounds=2, is_quick=True))


@pytest.mark.parametrize("fault", ["partial", "no process group"])
def test_unusable_shards_are_refused_by_every_rank(fault: str, pools: Pools):
    errors = pools.run(2, refuse_shard, fault)
    assert {kind for kind, _ in errors} == {"ValueError"}, errors
    assert all("linear.weight" in text for _, text in errors)
    assert len(set(errors)) == 1


def refuse_shard(fault: str) -> tuple[str, str]:
    model = Layers(linear=nn.Linear(4, 3))
    mesh, place = mesh_of(2), Partial()
    if fault == "no process group":
        mesh, place = DeviceMesh("cpu", [0, 1], _init_backend=False), Shard(0)
    shard = DTensor.from_local(torch.randn(3, 4), mesh, [place], run_check=False)
    model.linear.weight = nn.Parameter(shard)
    return error_of(nero.Nero, model)


def test_pool_fails_a_hang_and_an_error_and_goes_on():
    pool = Pool(2)
    try:
        assert pool.run(square, 3) == [9, 9]
        pool.limit_s = 1.0
        with pytest.raises(AssertionError, match="rank 1 did not answer"):
            pool.run(wait_for_nobody)
        pool.limit_s = MAX_CASE_S
        with pytest.raises(AssertionError, match=r"rank 1: (.|\n)*ZeroDivisionError"):
            pool.run(fail_alone)
        assert pool.run(square, 4) == [16, 16]
    finally:
        pool.stop()


def square(number: int) -> int:
    return number * number


def wait_for_nobody() -> None:
    if distributed.get_rank() == 1:
        distributed.barrier()


def fail_alone() -> None:
    if distributed.get_rank() == 1:
        raise ZeroDivisionError
    distributed.barrier()
