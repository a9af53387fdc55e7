"""Sharded parameters: DTensors in, local shards out. Placements are interpreted here alone.

A dimension of a device mesh *parts* the neurons of a parameter if it leaves each neuron whole on one process. It *cuts*
them if it spreads the elements of a neuron over processes. FSDP2 shards axis 0, which parts the neurons of most layers:
then a step needs no communication. Where neurons are cut, processes sum a few numbers per neuron.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nero.role import Role

#: A DeviceMesh. Not imported here: its module takes long to import.
Mesh: TypeAlias = Any


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this process, once collectives have made it; a plain tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    ready: Tensor = local.wait() if type(local) is not Tensor and hasattr(local, "wait") else local
    return ready


def spec_of(tensor: Tensor) -> object:
    """Return the mesh, placements and shape of a DTensor as one object; ``None`` for a plain tensor."""
    return tensor._spec if is_sharded(tensor) else None  # type: ignore[attr-defined]


def local_row(tensor: Any, row: int) -> int | None:
    """Return the local index of a row of a tensor; ``None`` if the row is on another process."""
    if not is_sharded(tensor):
        return row
    shape, offset = _local_range(tensor.shape, tensor.device_mesh, tuple(tensor.placements))
    return row - offset[0] if offset[0] <= row < offset[0] + shape[0] else None


def whole(tensor: Any) -> Tensor:
    """Gather a sharded tensor. All processes that share the tensor must call this."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered


class Sharding:
    """The distribution of a parameter's neurons over processes. A plain tensor is whole on every process.

    Attributes:
        role: the role of the parameter.
        is_cut: whether elements of a neuron are on different processes.
        is_first: whether this process holds the first of the neurons.
    """

    is_cut, is_first = False, True

    def __init__(self, role: Role) -> None:
        self.role = role

    def neurons(self, tensor: Tensor) -> Tensor:
        """Return the neurons that have elements on this process, as a plain tensor with the axes of ``role.view``.

        Neurons that are cut are gathered, which all processes must do. Otherwise the result shares the tensor's memory.
        """
        return self.role.view(tensor)

    def write(self, tensor: Tensor, neurons: Tensor) -> None:
        """Write back the result of :meth:`neurons` after the caller has changed it in place."""

    def state_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the statistics of the neurons that :meth:`neurons` returns."""
        return self.role.state_shape(tensor.shape)

    def as_state(self, local: Tensor) -> Tensor:
        """Make the state of a parameter from numbers of its neurons on this process."""
        return local

    def load_state(self, value: Tensor) -> Tensor:
        """Return this process's part of a loaded state, which may be sharded in another way."""
        return whole(value)

    def as_parameter(self, local: Tensor) -> Tensor:
        """Make a tensor that is sharded like the parameter from its part on this process."""
        return local

    def load_parameter(self, value: Tensor) -> Tensor:
        """Return this process's part of a loaded tensor of the parameter's shape."""
        return whole(value)

    def total(self, numbers: Tensor) -> Tensor:
        """Sum numbers over the processes that hold different neurons."""
        return numbers

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of all elements of a tensor that is sharded like the parameter."""
        return tensor.mean()


class MeshSharding(Sharding):
    """The sharding of a DTensor.

    Attributes:
        mesh: the mesh of processes.
        parting: the dimensions of the mesh that part neurons.
        cutting: the dimensions of the mesh that cut neurons.
    """

    def __init__(self, tensor: Any, role: Role) -> None:
        self.mesh: Mesh = tensor.device_mesh
        self._placements = tuple(tensor.placements)
        super().__init__(role)
        self._shape = tensor.shape
        dims = [dim for dim, place in enumerate(self._placements) if place.is_shard() or hasattr(place, "split_factor")]
        dims = [dim for dim in dims if self.mesh.size(dim) > 1]
        cuts = [dim for dim in dims if self._cuts(self._placements[dim].dim, dims)]
        self.cutting, self.parting = tuple(cuts), tuple(dim for dim in dims if dim not in cuts)
        self.is_cut = bool(self.cutting)
        place = self.mesh.get_coordinate()
        self.is_first = place is not None and all(place[dim] == 0 for dim in self.parting)

    @property
    def _group_rows(self) -> int:
        return int(self._shape[0]) // self.role.fan_in_groups

    def _cuts(self, axis: int, dims: Sequence[int]) -> bool:
        """Return whether a mesh dimension that shards an axis cuts neurons."""
        if axis not in (self.role.fan_in_axes or ()):
            return False
        if self.role.fan_in_groups == 1 or axis != 0:
            return True
        # rows of a grouped transposed convolution: whole if every process has whole groups
        sharing = [dim for dim in dims if self._placements[dim].dim == 0]
        chunk = -(-int(self._shape[0]) // self.mesh.size(sharing[0]))
        return len(sharing) > 1 or chunk % self._group_rows != 0

    def neurons(self, tensor: Any) -> Tensor:
        return self.view(local_of(tensor.redistribute(placements=self._gathered) if self.is_cut else tensor).detach())

    def view(self, local: Tensor) -> Tensor:
        """View rows of the parameter with their fan-in groups, if any, on an axis of their own."""
        rows = self._group_rows
        return local if self.role.fan_in_groups == 1 else local.view(local.shape[0] // rows, rows, *local.shape[1:])

    def write(self, tensor: Any, neurons: Tensor) -> None:
        if self.is_cut:
            if self.role.fan_in_groups > 1:
                neurons = neurons.flatten(0, 1)
            gathered = _dtensor(neurons, self.mesh, self._gathered, tensor.shape)
            local_of(tensor).copy_(local_of(gathered.redistribute(placements=self._placements)))
        increment_version(tensor)  # torch did not see the write to the local tensor

    @property
    def _gathered(self) -> tuple[Any, ...]:
        """The placements after neurons that are cut have been gathered."""
        from torch.distributed.tensor import Replicate

        return tuple(Replicate() if dim in self.cutting else place for dim, place in enumerate(self._placements))

    def state_shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(_local_range(self.role.state_shape(tensor.shape), self.mesh, self._state_placements)[0])

    def as_state(self, local: Tensor) -> Tensor:
        state: Tensor = _dtensor(local, self.mesh, self._state_placements, self.role.state_shape(self._shape))
        return state

    @property
    def _state_placements(self) -> tuple[Any, ...]:
        """The placements of the statistics, which have the axes of ``role.view``."""
        if self.role.fan_in_groups == 1:
            return self._gathered
        from torch.distributed.tensor import Shard

        places = self._gathered
        return tuple(Shard(place.dim + 1) if place.is_shard() and place.dim > 0 else place for place in places)

    def load_state(self, value: Any) -> Tensor:
        return _part_of(value, self.mesh, self._state_placements)

    def as_parameter(self, local: Tensor) -> Tensor:
        tensor: Tensor = _dtensor(local, self.mesh, self._placements, self._shape)
        return tensor

    def load_parameter(self, value: Any) -> Tensor:
        return _part_of(value, self.mesh, self._placements)

    def total(self, numbers: Tensor) -> Tensor:
        return Reduction(self.mesh, self.parting)(numbers)

    def mean(self, tensor: Tensor) -> Tensor:
        total = Reduction(self.mesh, (*self.parting, *self.cutting))(local_of(tensor).sum(dtype=torch.float64))
        return (total / tensor.numel()).to(tensor.dtype)

    @property
    def reduction(self) -> "Reduction":
        """The sum over the processes that hold elements of the same neurons."""
        return Reduction(self.mesh, self.cutting)

    @property
    def group_of_row(self) -> Tensor | None:
        """The fan-in group of each row on this process, where a grouped transposed convolution is cut."""
        if not self.is_cut or self.role.fan_in_groups == 1:
            return None
        shape, offset = _local_range(self._shape, self.mesh, self._placements)
        return torch.arange(offset[0], offset[0] + shape[0], device="cpu") // self._group_rows

    @property
    def coordinate(self) -> tuple[tuple[int, int, int], ...]:
        """The place of this process's part: equal on all replicas of the part, different on all other processes."""
        place = self.mesh.get_coordinate()
        return tuple((dim, self.mesh.size(dim), place[dim]) for dim in (*self.parting, *self.cutting))


class Reduction:
    """A sum over dimensions of a mesh. Two reductions are equal if they sum over the same processes."""

    def __init__(self, mesh: Mesh, dims: Iterable[int]) -> None:
        self._device: str = mesh.device_type
        is_member = mesh.get_coordinate() is not None
        self._groups = [mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1] if is_member else []
        self._names = tuple(group.group_name for group in self._groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reduction) and self._names == other._names

    def __hash__(self) -> int:
        return hash(self._names)

    def __call__(self, numbers: Tensor, op: str = "SUM") -> Tensor:
        """Reduce numbers; the result is new, and on the same device."""
        # parameters may be offloaded to a device on which the mesh cannot reduce
        reduced = numbers.to(self._device, copy=True)
        for group in self._groups:
            torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, op), group)
        return reduced.to(numbers.device)


def sharding_of(tensor: Tensor, role: Role) -> Sharding:
    """Return how the neurons of a parameter are spread over processes."""
    return MeshSharding(tensor, role) if is_sharded(tensor) else Sharding(role)


def agreed(numbers: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """Return the maximum of each number over all processes that share one of the tensors."""
    for reduction in _sharers(tensors):
        numbers = reduction(numbers, "MAX")
    return numbers


def agreed_flags(flags: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the flag of each tensor on any process that shares it, and whether any process has a flag of another.

    Processes need not have the same tensors, but those that they share: an expert may have a gradient on one alone.
    """
    flags = torch.cat([flags, flags.new_zeros(1)])
    for reduction, places in _sharers(tensors).items():
        reduced = reduction(torch.cat([flags[places], flags.amax(0, keepdim=True)]), "MAX")
        flags[places], flags[-1] = reduced[:-1], reduced[-1]
    return flags


def totals(counts: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """Sum the count of each parameter over the processes that hold its neurons; equal reductions are joined."""
    found = list(counts)
    together: dict[Reduction, list[int]] = {}
    for place, sharding in enumerate(shardings):
        if isinstance(sharding, MeshSharding):
            together.setdefault(Reduction(sharding.mesh, sharding.parting), []).append(place)
    for reduction, places in together.items():
        reduced = reduction(torch.stack([found[place] for place in places]))
        for place, count in zip(places, reduced.unbind(), strict=True):
            found[place] = count
    return found


def check_sharding(name: str, tensor: Any) -> None:
    """Raise if Nero cannot train a sharded parameter."""
    if not is_sharded(tensor):
        return
    if any(place.is_partial() for place in tensor.placements):
        raise ValueError(f"{name} is a partial sum, {tensor.placements}: redistribute it to Shard or Replicate first")
    try:
        Reduction(tensor.device_mesh, range(tensor.device_mesh.ndim))
    except (RuntimeError, KeyError, AssertionError, AttributeError) as error:
        raise ValueError(
            f"{name} is sharded on a mesh without process groups: make the mesh by "
            "torch.distributed.device_mesh.init_device_mesh"
        ) from error
    if tensor.device_mesh.get_coordinate() is None:
        raise ValueError(f"{name} is sharded over other processes: leave it out of the optimiser of this one")


def _local_range(shape: Iterable[int], mesh: Mesh, placements: tuple[Any, ...]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shape and the offset of this process's part of a tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)


def _part_of(value: Any, mesh: Mesh, placements: tuple[Any, ...]) -> Tensor:
    """Return this process's part of a tensor, which may be plain or sharded in another way."""
    if is_sharded(value):
        if value.device_mesh != mesh:
            return _part_of(value.full_tensor(), mesh, placements)
        return local_of(value.redistribute(placements=placements))
    sizes, starts = _local_range(value.shape, mesh, placements)
    local: Tensor = value[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    return local


def _sharers(tensors: Iterable[Any]) -> dict[Reduction, list[int]]:
    """Return the places of sharded tensors by the processes that share them."""
    found: dict[Reduction, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if is_sharded(tensor):
            mesh = tensor.device_mesh
            found.setdefault(Reduction(mesh, range(mesh.ndim)), []).append(place)
    return found


def _dtensor(local: Tensor, mesh: Mesh, placements: tuple[Any, ...], shape: Iterable[int]) -> Any:
    """Make a DTensor of local parts. DTensor.from_local would move offloaded parts to the mesh's device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)  # type: ignore[no-untyped-call]
