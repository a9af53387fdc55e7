"""Train with FSDP2, or with HSDP, and save a distributed checkpoint that any number of processes can resume.

    torchrun --nproc-per-node 2 examples/sharding/fsdp2.py --checkpoint out/fsdp2
    torchrun --nproc-per-node 4 examples/sharding/fsdp2.py --checkpoint out/fsdp2 --replicas 2

The second line resumes the checkpoint of the first, on two replicas of two shards.
"""

import argparse
from pathlib import Path
from typing import Any

import task
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nero


def main(argv: list[str] | None = None) -> int:
    """Train, and print from the first process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model, each sharded (HSDP); default: 1")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and to resume from")
    options = parser.parse_args(argv)
    device = task.start()
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    if processes % options.replicas:
        parser.error(f"--replicas must divide the {processes} processes, got {options.replicas}")
    shape: tuple[int, ...] = (processes,)
    names: tuple[str, ...] = ("shard",)
    if options.replicas > 1:
        shape, names = (options.replicas, processes // options.replicas), ("replica", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)

    model = task.Network().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = nero.Nero(model)  # after fully_shard

    done = load(options.checkpoint, model, optimiser) if options.checkpoint else 0
    steps = range(done, done + options.steps)
    task.say(f"steps {steps.start} to {steps.stop} on a mesh of {' x '.join(map(str, shape))}")
    task.say(str(task.train(model, optimiser, task.batches(device, steps, rank, processes))))
    task.say(task.memory(model, optimiser))
    if options.checkpoint:
        save(options.checkpoint, model, optimiser, steps.stop)
    return 0


def save(folder: Path, model: nn.Module, optimiser: nero.Nero, done: int) -> None:
    """Save a checkpoint; every process writes its shards."""
    model_state, optimiser_state = get_state_dict(model, optimiser)
    state = {"model": model_state, "optimiser": optimiser_state, "done": done}
    checkpoint.save(state, checkpoint_id=folder / f"step-{done:06}")  # type: ignore[attr-defined]


def load(folder: Path, model: nn.Module, optimiser: nero.Nero) -> int:
    """Load the latest checkpoint, if there is one; return the number of steps done."""
    saved = sorted(folder.glob("step-*/.metadata"))
    if not saved:
        return 0
    model_state, optimiser_state = get_state_dict(model, optimiser)
    state: dict[str, Any] = {"model": model_state, "optimiser": optimiser_state, "done": 0}
    checkpoint.load(state, checkpoint_id=saved[-1].parent)  # type: ignore[attr-defined]
    set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    return int(state["done"])


if __name__ == "__main__":
    main()
    distributed.destroy_process_group()
