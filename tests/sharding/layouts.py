"""Models, ways to shard them, and gradients, for the tests of sharding."""

import functools
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Layout = Callable[[nn.Module, DeviceMesh], object]


class Zoo(nn.Module):
    """Layers of many kinds, with rows that divide no mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.conv = nn.Conv2d(4, 3, 2)
        self.table = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)


class Net(nn.Module):
    """A small network of tokens, whose layers can be parallelised as in torch's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = self.table(tokens)
        return self.head(inputs + self.down(self.up(self.norm(inputs)).relu()))


class Layers(nn.Module):
    """Any layers, by name."""

    def __init__(self, **named: nn.Module) -> None:
        super().__init__()
        for name, layer in named.items():
            self.add_module(name, layer)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.children():
            inputs = layer(inputs)
        return inputs


def made(model: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a model, the same in every process."""
    torch.manual_seed(0)
    built = model()
    for name, parameter in built.named_parameters():
        if "norm" in name:  # gains and biases of no special value
            nn.init.normal_(parameter, 1.0, 0.1)
    return built.to(dtype)


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Return the mesh of a shape: (data,), or (data, tensor)."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[: len(shape)])


def placed(*axes: int | None, only: str = "*") -> Layout:
    """Shard along one axis per mesh dimension; parameters without that axis are replicated."""

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(model.named_parameters()):
            if fnmatchcase(name, only):
                places = [Replicate() if axis is None or axis >= parameter.dim() else Shard(axis) for axis in axes]
                owner, _, leaf = name.rpartition(".")
                whole = nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, places))
                setattr(model.get_submodule(owner), leaf, whole)

    return shard


def fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def fsdp_by_layer(model: nn.Module, mesh: DeviceMesh) -> None:
    for child in model.children():
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "table": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def both(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard by tensor parallelism, then by FSDP2, as torchtitan does."""
    tensor_parallel(model, mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])


def gradients(model: nn.Module, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Return the whole gradient of every parameter at a step, in its dtype."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        for name, parameter in model.named_parameters()
    }


def scattered(whole: Tensor, mesh: DeviceMesh, places: Sequence[Placement]) -> DTensor:
    """Shard a tensor that every process has, without communication. The summands of a partial one are unequal."""
    if any(place.is_partial() for place in places):
        assert all(isinstance(place, Partial) for place in places)
        offset = mesh.get_rank() - (mesh.size() - 1) / 2  # the offsets sum to zero
        return DTensor.from_local(whole / mesh.size() + offset, mesh, places, run_check=False)
    if any(isinstance(place, _StridedShard) for place in places):
        total = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return total.redistribute(placements=places)
    sizes, starts = compute_local_shape_and_global_offset(whole.shape, mesh, places)  # the usual case, and faster
    local = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))].contiguous()
    return DTensor.from_local(local, mesh, places, run_check=False, shape=whole.shape, stride=whole.stride())


def give_gradients(
    model: nn.Module, whole: Mapping[str, Tensor], places: Mapping[str, Sequence[Placement]] | None = None
) -> None:
    """Set the gradients of a model, sharded like its parameters, or as ``places`` says for patterns of names."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            parameter.grad = whole[name].clone()
            continue
        own = [given for pattern, given in (places or {}).items() if fnmatchcase(name, pattern)]
        parameter.grad = scattered(whole[name], parameter.device_mesh, own[-1] if own else parameter.placements)


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all whole parameters. Collective."""
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def assert_weights_close(found: nn.Module, expected: nn.Module, tolerance: float) -> None:
    expected_weights = weights(expected)
    for name, weight in weights(found).items():
        off = float((weight.double() - expected_weights[name].double()).abs().max())
        assert off <= tolerance, f"{name} is off by {off:.2g}, more than {tolerance:.1g}"


def error_of(action: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[str, str]:
    """Return the type and the message of the error that an action raises."""
    try:
        action(*arguments, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""
