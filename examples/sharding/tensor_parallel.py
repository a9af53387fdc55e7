"""Train with tensor parallelism, alone or with FSDP2 on top (2-D).

    torchrun --nproc-per-node 2 examples/sharding/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/sharding/tensor_parallel.py --shards 2

The second line splits each layer over two processes, and FSDP2 splits each part over two more.
"""

import argparse

import task
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nero


def main(argv: list[str] | None = None) -> int:
    """Train, and print from the first process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--shards", type=int, default=1, help="processes that FSDP2 shards over; default: %(default)s")
    options = parser.parse_args(argv)
    device = task.start()
    processes = distributed.get_world_size()
    if processes % options.shards:
        parser.error(f"--shards must divide the {processes} processes, got {options.shards}")
    shape = (options.shards, processes // options.shards)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))

    model = task.Network().to(device)
    for block in model.blocks:
        # up: each process has some of the neurons; down: each has some of the inputs of every neuron
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if options.shards > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    optimiser = nero.Nero(model)  # after both

    # processes of one tensor-parallel group see the same examples
    part = mesh.get_local_rank("data")
    task.say(f"mesh of {shape[0]} x {shape[1]} (FSDP2 x tensor parallelism)")
    task.say(str(task.train(model, optimiser, task.batches(device, range(options.steps), part, shape[0]))))
    task.say(task.memory(model, optimiser))
    return 0


if __name__ == "__main__":
    main()
    distributed.destroy_process_group()
