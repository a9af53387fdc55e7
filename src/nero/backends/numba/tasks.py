"""The input of the compiled loops: settings, tasks, and memory at the addresses of tasks, also in bf16."""

import hashlib
from importlib.resources import files
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

#: The bits of a float32 that is infinite; those of bf16 are the upper half.
INFINITY_BITS = 0x7F800000

SETTINGS = np.dtype(
    [
        *((name, np.float64) for name in ("lr", "beta", "log_beta", "scale", "least", "momentum", "kept_by_step")),
        *((name, np.float64) for name in ("eps", "tiny", "low", "high", "largest")),
        *((name, np.bool_) for name in ("fix_mean", "fix_norm")),
    ]
)


class Pieces(NamedTuple):
    """The layout of a tensor's neurons, in elements from its start, and how many of them make a piece of work.

    Neuron i starts at ``i // inner * outer_stride + i % inner * inner_stride``, and has ``segments`` runs of
    ``run`` contiguous elements. Gains have no runs. A piece of columns lies within one row.
    """

    neurons: int
    inner: int
    outer_stride: int
    inner_stride: int
    segments: int
    segment_stride: int
    run: int
    each: int
    is_columns: bool = False

    @property
    def number(self) -> int:
        """The number of pieces."""
        if self.is_columns:
            return self.neurons // self.inner * -(-self.inner // self.each)
        return -(-self.neurons // self.each)


TASK = np.dtype(
    [
        *((name, np.int64) for name in ("weight", "grad", "average", "step", "skipped")),  # addresses
        ("size", np.int64),  # the address of the radii of neurons, or of the scale of gains; 0 if settings has it
        ("buffer", np.int64),  # the address of the momentum buffer; 0 without momentum
        *((name, np.int64) for name in Pieces._fields),
        ("pull", np.float64),
    ]
)

# not called from Python, so they compile sooner
subroutine = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
# sums in any order are vectorised; NaN and infinity keep their meaning. Inlined, because a call from code that was just
# compiled may reach another copy, with sums in another order, than a call from the cache
vector_subroutine = numba.njit(
    error_model="numpy",
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    forceinline=True,
    fastmath={"reassoc", "contract", "nsz"},
)


def digest_of_sources() -> str:
    """Return a digest of the files whose functions and constants the compiled functions contain."""
    sources = [source for source in files(__package__).iterdir() if source.name.endswith(".py")]
    contents = sorted(source.read_bytes() for source in (*sources, files("nero") / "rule.py"))
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


DIGEST = digest_of_sources()


def compiled(function):
    """Compile a function that Python calls; keep it on disk until a source changes.

    numba's cache follows the file of the function, not those of its subroutines. But names of cached files begin with
    the function's, so that a digest in its name stands for all of them.
    """
    function.__qualname__ += f"_{DIGEST}"
    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)


@intrinsic
def pointer(context: Any, address: Any) -> Any:  # noqa: ARG001
    """Convert an address to a pointer."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def fetch(context: Any, address: Any) -> Any:  # noqa: ARG001
    """Read the number at an address and increment it, atomically."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        number = context.get_value_type(types.int64)
        return builder.atomic_rmw("add", builder.inttoptr(args[0], number.as_pointer()), number(1), "seq_cst")

    return types.int64(types.int64), generate


@subroutine
def array(address, start, size, like):
    """View memory as an array of the dtype of ``like``."""
    return numba.carray(pointer(address + start * like.itemsize), (size,), like.dtype)


@subroutine
def start_of(task, neuron):
    """Return the place of a neuron's first element."""
    return neuron // task.inner * task.outer_stride + neuron % task.inner * task.inner_stride


@subroutine
def radius_of(task, neuron, like):
    """Return the radius of a neuron."""
    return np.float64(array(task.size, neuron, 1, like)[0]) if task.size else 1.0


@subroutine
def _halves(address, start, size):
    return numba.carray(pointer(address + 2 * start), (size,), np.uint16)


@subroutine
def widen(address, start, wide):
    """Convert bf16 numbers to float32, and return the address that the first of all would have in float32."""
    halves, bits = _halves(address, start, wide.size), wide.view(np.uint32)
    for i in range(wide.size):
        bits[i] = np.uint32(halves[i]) << 16
    return wide.ctypes.data - wide.itemsize * start


@subroutine
def narrow(address, start, wide, keys, number):
    """Round float32 numbers to bf16: with a random key for each task stochastically, without keys to nearest.

    See :func:`nero.rounding.rounded`. The noise is a hash of the key and the place of a number in its tensor.
    """
    halves, bits = _halves(address, start, wide.size), wide.view(np.uint32)
    if keys.size:
        first = keys[number] + np.uint32(start)
        for i in range(wide.size):
            halves[i] = _upper_half(bits[i], _hash(np.uint32(first + i)) >> 16)
    else:
        for i in range(wide.size):
            halves[i] = _upper_half(bits[i], 0x7FFF + ((bits[i] >> 16) & 1))


@subroutine
def _hash(x):
    x = np.uint32((x ^ (x >> 16)) * 0x85EBCA6B)
    x = np.uint32((x ^ (x >> 13)) * 0xC2B2AE35)
    return np.uint32(x ^ (x >> 16))


@subroutine
def _upper_half(bits, carry):
    """Add the carry to the lower half and return the upper; a finite number stays finite, NaN stays NaN."""
    size = bits & 0x7FFFFFFF
    if size >= INFINITY_BITS:
        return np.uint16((bits >> 16) | (0x40 if size > INFINITY_BITS else 0))
    upper = (bits + carry) >> 16
    return np.uint16(upper - ((upper & 0x7FFF) == INFINITY_BITS >> 16))
