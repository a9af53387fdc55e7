"""The projection of many tensors at once: by kernels on a GPU, in place on a CPU, else by the rule on batches."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from nero import rule
from nero.backends.foreach import MAX_STACK_ELEMENTS
from nero.backends.foreach_cpu import MAX_SMALL_ELEMENTS
from nero.backends.job import Neurons
from nero.backends.matrix import MAX_FAN_IN, is_ordinary, norm_along, sum_along
from nero.backends.triton.project import Kernels
from nero.rounding import rounded

#: Elements of a piece of a matrix on a CPU: 4 MB in float32.
PIECE_ELEMENTS = 1 << 20
#: The longest mean, as a vector, relative to a neuron that the fast path takes. A step of a balanced one is far below.
MAX_DRIFT = 0.5


class Projector:
    """The projection of a list of tensors. A neuron that is balanced to the rounding of its dtype keeps its bits.

    Args:
        fix_mean: project to zero mean.
        fix_norm: project to the radius.
    """

    def __init__(self, *, fix_mean: bool, fix_norm: bool) -> None:
        self._fix_mean, self._fix_norm = fix_mean, fix_norm
        self._kernels = Kernels(fix_mean=fix_mean, fix_norm=fix_norm)

    @torch.no_grad()
    def __call__(self, neurons: Sequence[Neurons], active: Sequence[bool] | None = None) -> None:
        """Project tensors in place.

        Args:
            neurons: the tensors. The tables of the kernels are made once for the same list.
            active: whether to project each of them; ``None`` for all.
        """
        if not (self._fix_mean or self._fix_norm):
            return
        wanted = [each.tensor.numel() > 0 and (active is None or active[at]) for at, each in enumerate(neurons)]
        may_run_kernels = not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None
        plain = [at for at, each in enumerate(neurons) if may_run_kernels and _is_plain(each.tensor)]
        done = self._kernels([neurons[at] for at in plain], [wanted[at] for at in plain]) if plain else set()
        left = [neurons[at] for number, at in enumerate(plain) if wanted[at] and number not in done]
        for batch in _batches(left):
            self._project_batch(batch)
        for at in set(range(len(neurons))).difference(plain):
            if wanted[at]:
                self._by_rule(neurons[at])

    def _project_batch(self, batch: Sequence[Neurons]) -> None:
        """Project neurons of equal fan-in, device and dtype."""
        if len(batch) == 1:
            self._project(batch[0])
            return
        by_neuron = [_by_neuron(each) for each in batch]
        rows = torch.cat([view.reshape(-1, batch[0].fan_in) for view in by_neuron])
        radius = batch[0].radius
        if isinstance(radius, Tensor):
            radius = torch.cat([torch.as_tensor(each.radius, device=rows.device).reshape(-1, 1) for each in batch])
        self._project(Neurons(rows, (1,), radius))
        parts = rows.split_with_sizes([view.numel() // batch[0].fan_in for view in by_neuron])
        torch._foreach_copy_(by_neuron, [part.view(view.shape) for part, view in zip(parts, by_neuron, strict=True)])

    def _project(self, neurons: Neurons) -> None:
        matrix = _matrix(neurons)
        if matrix is None:
            self._by_rule(neurons)
            return
        with torch.autocast("cpu", enabled=False):  # some sums are matrix products, which must stay in float32
            for piece in _pieces(matrix):
                if not self._project_quickly(piece):
                    self._by_rule(piece)

    def _by_rule(self, neurons: Neurons) -> None:
        tensor, axes, radius = neurons
        options = {"fix_mean": self._fix_mean, "fix_norm": self._fix_norm}
        wide = tensor.to(rule.statistics_dtype(tensor.dtype))  # sums in half precision lose too much
        off = rule.distance(wide, axes, **options, radius=radius)
        size = rule.bound(radius) if self._fix_norm else rule.norm(wide, axes)
        projected = rule.project(wide, axes, **options, radius=radius).tensor
        balanced = torch.where(off <= rule.rounding_error(tensor.dtype) * size, wide, projected)
        tensor.copy_(rounded(balanced, tensor.dtype, "nearest"))

    def _project_quickly(self, matrix: Neurons) -> bool:
        """Project a matrix in place, if its values are ordinary and its means small; return whether they are."""
        weight, (axis,), radius = matrix
        whole, mean = norm_along(weight, axis, weight.new_empty(weight.numel() if axis == 0 else 0)), None
        drift = torch.zeros_like(whole)
        if self._fix_mean and matrix.fan_in != 2:
            mean = rule.held(sum_along(weight, axis).div_(matrix.fan_in), radius)
            drift = mean.abs() * math.sqrt(matrix.fan_in)
        if not (is_ordinary(whole) and is_ordinary(rule.bound(radius)) and bool((drift <= MAX_DRIFT * whole).all())):
            return False
        size = (whole.square() - drift.square()).sqrt_()  # of the neuron without its mean
        off, stretch = torch.zeros_like(size), torch.ones_like(size)
        allowed: rule.Number = rule.bound(radius) if self._fix_norm else whole
        if self._fix_norm:
            off, stretch = rule.excess(size, radius), rule.stretch(size, radius)
        balanced = torch.hypot(off, drift) <= rule.rounding_error(weight.dtype) * allowed  # these keep their bits
        if not bool(balanced.all()):
            if mean is not None:
                weight.sub_(torch.where(balanced, 0.0, mean))
            if self._fix_norm:
                weight.mul_(torch.where(balanced, 1.0, stretch))
        return True


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is an ordinary one that no transform wraps, and that may be written."""
    if type(tensor) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_inference() and not torch.is_inference_mode_enabled())


def _batches(neurons: Sequence[Neurons]) -> Iterator[list[Neurons]]:
    """Batch tensors of equal fan-in; on a CPU only small ones, where an operation costs more than a copy."""
    alike: dict[object, list[Neurons]] = {}
    for each in neurons:
        tensor, is_one = each.tensor, not isinstance(each.radius, Tensor)
        if tensor.is_cpu and tensor.numel() > MAX_SMALL_ELEMENTS:
            yield [each]
        else:
            kind = (tensor.device, tensor.dtype, each.fan_in, is_one and each.radius)
            alike.setdefault(kind, []).append(each)
    for members in alike.values():
        most = PIECE_ELEMENTS if members[0].tensor.is_cpu else MAX_STACK_ELEMENTS
        batch: list[Neurons] = []
        for each in members:
            if batch and sum(other.tensor.numel() for other in [*batch, each]) > most:
                yield batch
                batch = []
            batch.append(each)
        yield batch


def _by_neuron(neurons: Neurons) -> Tensor:
    """View a tensor with the axes of its neurons first."""
    tensor, axes, _ = neurons
    if axes == tuple(range(tensor.dim() - len(axes), tensor.dim())):
        return tensor
    return tensor.permute([axis for axis in range(tensor.dim()) if axis not in axes] + list(axes))


def _matrix(neurons: Neurons) -> Neurons | None:
    """View neurons on a CPU as a matrix; ``None`` if they need the rule."""
    tensor, axes, radius = neurons
    if not tensor.is_cpu or tensor.dtype not in (torch.float32, torch.float64) or not 1 < neurons.fan_in <= MAX_FAN_IN:
        return None
    if isinstance(radius, Tensor) and (
        radius.dtype != tensor.dtype or radius.numel() * neurons.fan_in != tensor.numel()
    ):
        return None
    if tensor.dim() == 2 and len(axes) == 1:
        return Neurons(tensor.detach(), axes, radius)
    try:
        rows = _by_neuron(neurons).detach().view(-1, neurons.fan_in)
    except RuntimeError:  # the strides do not allow a view
        return None
    return Neurons(rows, (1,), radius.reshape(-1, 1) if isinstance(radius, Tensor) else radius)


def _pieces(matrix: Neurons) -> Iterator[Neurons]:
    """Cut a matrix between neurons into pieces, so that one odd neuron does not leave all to the rule."""
    weight, (axis,), radius = matrix
    across = 1 - axis
    total, most = weight.shape[across], max(1, PIECE_ELEMENTS // matrix.fan_in)
    for start in range(0, total, most):
        cut = (across, start, min(most, total - start))
        yield Neurons(weight.narrow(*cut), (axis,), radius.narrow(*cut) if isinstance(radius, Tensor) else radius)
