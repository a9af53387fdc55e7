"""The examples of sharded training, and the recipes of torchtitan and Trainer on shards, in gloo processes."""

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import memory
import pytest
import torch
from sharding.layouts import Layers, assert_weights_close, give_gradients, gradients, mesh_of, placed, weights
from sharding.processes import Pool, Pools
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import nero

EXAMPLES = Path(__file__).parents[2] / "examples/sharding"


def run_example(script: str, *options: str) -> str:
    """Run an example in this process, and return what it prints."""
    sys.path.insert(0, str(EXAMPLES))
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        assert runpy.run_path(str(EXAMPLES / script))["main"](["--steps", "10", *options]) == 0
    sys.path.remove(str(EXAMPLES))
    return printed.getvalue()


def assert_learnt(printed: str, collectives: int) -> None:
    """Check the line of losses: the loss falls by a fifth or more."""
    first, last, counted = re.search(r"loss ([\d.]+) -> ([\d.]+);.* (\d+)\n", printed).groups()
    assert float(last) < 0.8 * float(first)
    assert int(counted) == collectives


def state_and_weights(printed: str) -> tuple[int, int]:
    weights, state = re.search(r"rank 0: weights ([\d,]+) bytes, state ([\d,]+) bytes", printed).groups()
    return int(state.replace(",", "")), int(weights.replace(",", ""))


def test_fsdp2_example_learns_and_resumes_as_hsdp(pools: Pools, tmp_path: Path):
    printed, other = pools.run(2, run_example, "fsdp2.py", "--checkpoint", str(tmp_path))
    assert other == ""
    assert_learnt(printed, collectives=0)
    state, weights = state_and_weights(printed)
    assert state < 0.05 * weights
    resumed, *_ = pools.run(4, run_example, "fsdp2.py", "--checkpoint", str(tmp_path), "--replicas", "2")
    assert "steps 10 to 20 on a mesh of 2 x 2" in resumed
    assert_learnt(resumed, collectives=0)
    loss_before, loss_after = (float(re.search(r"loss ([\d.]+)", text)[1]) for text in (printed, resumed))
    assert loss_after < 0.7 * loss_before
    assert state_and_weights(resumed) == (state, weights)


@pytest.mark.parametrize(("processes", "options"), [(2, ()), (4, ("--shards", "2"))])
def test_tensor_parallel_example_learns(processes: int, options: tuple[str, ...], pools: Pools):
    printed, *_ = pools.run(processes, run_example, "tensor_parallel.py", *options)
    assert_learnt(printed, collectives=1)


@pytest.fixture(scope="module")
def accelerate_pool() -> Iterator[Pool]:
    """Two processes of their own, since Accelerate keeps its state there."""
    pool = Pool(2)
    pool.limit_s = 240.0  # transformers takes long to import
    yield pool
    pool.stop()


def test_accelerate_example_learns_and_loads(accelerate_pool: Pool, tmp_path: Path):
    printed, _ = accelerate_pool.run(run_with_accelerate, run_example, "accelerate_fsdp2.py", "--out", str(tmp_path))
    assert_learnt(printed, collectives=0)
    assert "equal to those saved" in printed


def test_trainer_recipe_on_shards_equals_replicas_and_resumes(accelerate_pool: Pool, tmp_path: Path):
    for replicas, shards, resumed in accelerate_pool.run(run_with_accelerate, train_by_trainer, tmp_path):
        torch.testing.assert_close(resumed, shards, rtol=0, atol=0)
        for run in (shards, replicas):
            run["transformer.h.0.attn.c_attn.bias"][16:32] = 0  # of keys: their gradient is nothing but rounding
        torch.testing.assert_close(shards, replicas, rtol=0, atol=1e-5)


def run_with_accelerate(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function as a process of torchrun would, without the state of Accelerate from an earlier run."""
    from accelerate.state import AcceleratorState

    rank = str(distributed.get_rank())
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        found = function(*arguments)
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


def train_by_trainer(folder: Path) -> list[dict[str, Tensor]]:
    """Train by the recipe in replicas, in shards, and in shards from a checkpoint; return the weights of each run."""
    from test_docs import blocks_of
    from test_recipes import sections

    names: dict[str, Any] = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(EXAMPLES))
        torch.manual_seed(0)
        for text in (sections()[""], sections()["transformers.Trainer"]):
            for block in blocks_of(text):
                exec(block.code.partition("\nmake_trainer(")[0], names)  # the definitions alone
        found = [train_gpt2(names)]
        names["Trainer"] = trainer_with_fsdp2()
        sharded = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
        found += [train_gpt2(names, **sharded), train_gpt2(names, "out/checkpoint-3", **sharded)]
    return found


def train_gpt2(names: dict[str, Any], checkpoint: str | None = None, **arguments: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    config = names["config"]
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # each process would drop others
    trainer = names["make_trainer"](names["GPT2LMHeadModel"](config), use_cpu=True, **arguments)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert all(isinstance(weight, DTensor) == bool(arguments) for weight in trainer.model.parameters())
    groups = trainer.optimizer.param_groups
    assert ("neuron", (0,)) in [(group["role"], group["fan_in_axes"]) for group in groups]  # a transposed layer
    return weights(trainer.model)


def trainer_with_fsdp2() -> type:
    """Return a Trainer that uses FSDP2 on a CPU, where Accelerate would use DistributedDataParallel."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate_fsdp2 import rehearse_on_cpu
    from transformers import Trainer

    class ShardingTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            rehearse_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
            self.is_fsdp_enabled = True

    return ShardingTrainer


def test_torchtitan_recipe_resumes_on_shards(pools: Pools, tmp_path: Path):
    pools.run(2, resume_container, tmp_path)


def resume_container(folder: Path) -> None:
    """Train the parts of a sharded model in the container of the recipe, save it by name, and resume."""
    from test_docs import blocks_of
    from test_recipes import OptimizersContainer, install, sections

    names = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        install(patch, "torchtitan.components.optimizer", OptimizersContainer=OptimizersContainer)
        install(patch, "torchtitan.components.checkpointer.utils", canonical_fqn=lambda name: name)
        for text in (sections()[""], sections()["torchtitan"]):
            for block in blocks_of(text):
                if block.language == "python":
                    exec(block.code, names)

    def make(seed: int) -> tuple[nn.Module, OptimizersContainer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
        parts = [Layers(first=model[:3]), Layers(second=model[3:])]
        for part in parts:
            fully_shard(part, mesh=mesh_of(2))
        return model, names["NeroContainer"](names["NeroContainer"].Config(lr=0.02), model_parts=parts)

    def train(model: nn.Module, container: OptimizersContainer, first: int) -> None:
        for step in range(first, first + 3):
            give_gradients(model, gradients(model, step))
            with CommDebugMode() as counted:
                container.step()
            assert counted.get_total_counts() == 0

    (model, container), (resumed, loaded) = make(0), make(1)
    train(model, container, 0)
    assert isinstance(container.state_dict()["state.first.0.weight.grad_norm"], DTensor)
    saved = {"model": model.state_dict(), "optimizer": container.state_dict()}
    checkpoint.save(saved, checkpoint_id=folder)
    states = {"model": resumed.state_dict(), "optimizer": loaded.state_dict()}
    checkpoint.load(states, checkpoint_id=folder)
    resumed.load_state_dict(states["model"])
    loaded.load_state_dict(states["optimizer"])
    train(model, container, 3)
    train(resumed, loaded, 3)
    assert_weights_close(resumed, model, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_a_rank_is_what_optimisers_hold(dtype: torch.dtype, pools: Pools):
    found, _ = pools.run(2, measured_memory, dtype)
    model = memory.llama(vocabulary=10, width=4, layers=2, hidden=7)
    assert found == {name: memory.held(model, name, dtype, 2) for name in memory.OPTIMISERS}


def measured_memory(dtype: torch.dtype) -> dict[str, memory.Held]:
    """Shard a small Llama by rows, take a step with each optimiser, and count the bytes on this rank."""
    found = {}
    for name in memory.OPTIMISERS:
        model = memory.llama(vocabulary=10, width=4, layers=2, hidden=7).to_empty(device="cpu").to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0, 0.1)
        placed(0)(model, mesh_of(2))
        give_gradients(model, gradients(model, 0))
        matrices = [
            parameter
            for part, parameter in model.named_parameters()
            if name == "Muon" and parameter.dim() == 2 and part.startswith("blocks")
        ]
        others = [parameter for parameter in model.parameters() if all(parameter is not each for each in matrices)]
        optimisers = [nero.Nero(model)] if name == "Nero" else [torch.optim.Adam(others)]
        optimisers += [torch.optim.Muon(matrices)] if matrices else []
        state = []
        for optimiser in optimisers:
            optimiser.step()
            state += [value for own in optimiser.state.values() for value in own.values()]
        found[name] = memory.Held(local_bytes(list(model.parameters())), local_bytes(state))
    return found


def local_bytes(tensors: list[Tensor]) -> int:
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)
