"""Train with Accelerate's FSDP2 plugin, save the state and load it.

    torchrun --nproc-per-node 2 examples/sharding/accelerate_fsdp2.py

Accelerate wants the optimiser before it shards the model: prepare() puts the sharded parameters into the groups.
"""

import argparse
from pathlib import Path

import task
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch import distributed
from torch.distributed.tensor import DTensor

import nero


def main(argv: list[str] | None = None) -> int:
    """Train, and print from the first process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/accelerate"), help="folder of the checkpoint")
    options = parser.parse_args(argv)
    device = task.start()

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin)
    if device.type == "cpu":
        rehearse_on_cpu(accelerator, plugin)
    model = task.Network()
    model, optimiser = accelerator.prepare(model, nero.Nero(model))
    if not all(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise RuntimeError("Accelerate did not shard the model")

    rank, processes = distributed.get_rank(), distributed.get_world_size()
    data = task.batches(device, range(options.steps), rank, processes)
    task.say(str(task.train(model, optimiser, data)))
    task.say(task.memory(model, optimiser.optimizer))
    accelerator.save_state(str(options.out))
    saved = [parameter.full_tensor() for parameter in model.parameters()]
    task.train(model, optimiser, task.batches(device, range(1), rank, processes))
    accelerator.load_state(str(options.out))
    loaded = [parameter.full_tensor() for parameter in model.parameters()]
    is_equal = all(torch.equal(one, other) for one, other in zip(saved, loaded, strict=True))
    task.say(f"the loaded weights are {'equal to' if is_equal else 'different from'} those saved")
    return 0


def rehearse_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make Accelerate use FSDP2 on a CPU. It would ignore the plugin there, and use DistributedDataParallel."""
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


if __name__ == "__main__":
    main()
    distributed.destroy_process_group()
