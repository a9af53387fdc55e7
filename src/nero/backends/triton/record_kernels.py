"""Records of tensors: their fields, how Triton kernels read them, and how launches wait for each other.

Launches of a step overlap on GPUs that can do so. The first after ``count`` lets the next start only after its own
wait, so that every later launch finds what ``count`` wrote. Later launches let the next start at once, and work on
other tensors, so they wait only before they end, unless they read what the one before wrote (``split_kernels.turn``).
The last launch is then the last to end, and what follows the step finds all of it done.
See :mod:`nero.backends.triton.kernels`.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a build for other GPUs
    gdc_launch_dependents = gdc_wait = None
CAN_OVERLAP = gdc_wait is not None

# the fields of a record, in the order of tables.RECORD_FIELDS
WEIGHT = tl.constexpr(0)
AVERAGE = tl.constexpr(1)
STEP = tl.constexpr(2)
SKIPPED = tl.constexpr(3)
SCALE = tl.constexpr(4)  # of gains and biases; 0 for none
RADIUS = tl.constexpr(5)  # 0 if the radius is one; see nero.rule.turn for negative radii
BUFFER = tl.constexpr(6)  # of momentum; 0 for none
NEURONS = tl.constexpr(7)
FAN_IN = tl.constexpr(8)
INNER = tl.constexpr(9)  # neuron i starts at (i // INNER) * OUTER_STRIDE + (i % INNER) * INNER_STRIDE
INNER_STRIDE = tl.constexpr(10)
OUTER_STRIDE = tl.constexpr(11)
RUN = tl.constexpr(12)  # its element k lies (k // RUN) * LEAP + (k % RUN) * STRIDE further
STRIDE = tl.constexpr(13)
LEAP = tl.constexpr(14)
BETA = tl.constexpr(15)
ONE_MINUS_BETA = tl.constexpr(16)  # given, since float32 cannot compute it from β
LOG_BETA = tl.constexpr(17)
LEAST_DIVISOR = tl.constexpr(18)  # 1 / longest_step, as a share of the gradient's norm; 0 for none
GIVEN_SCALE = tl.constexpr(19)  # the group's scale; 0 for the tensor's own
PULL = tl.constexpr(20)
GROUP = tl.constexpr(21)
SHAPE = tl.constexpr(22)  # of its tiles: 0 for gains and biases, else 2 * log2(width) + is_aligned
FIRST_TILE = tl.constexpr(23)
SUMS = tl.constexpr(24)  # the index of the first sum of split neurons
FIELDS = tl.constexpr(25)

#: Bits of ``OVERLAP``: a launch lets the next start at once; it waits for the end of the one before, first or last;
#: it lets the next start after the first wait.
LETS_NEXT, WAITS_FIRST, WAITS_LAST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
LETS_NEXT_THEN = tl.constexpr(8)


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Let the next launch start where this one leaves room, and wait for the one before; see the bits."""
    if LETS_NEXT & OVERLAP:
        gdc_launch_dependents()
    if WAITS_FIRST & OVERLAP:
        gdc_wait()
    if LETS_NEXT_THEN & OVERLAP:
        gdc_launch_dependents()


@triton.jit
def finish(OVERLAP: tl.constexpr):
    """Wait for the launch before, if :func:`begin` did not: a launch that follows must find all of them done."""
    if WAITS_LAST & OVERLAP:
        gdc_wait()


@triton.jit
def load_float(record, field: tl.constexpr):
    """Load a float from its bits."""
    return tl.load(record + field).to(tl.float64, bitcast=True)


@triton.jit
def load_new(pointer, OVERLAP: tl.constexpr):
    """Load a number that this step's first launch has written; past the processor's own cache, if without a wait."""
    return tl.load(pointer, cache_modifier=".cg" if WAITS_LAST & OVERLAP else "")


@triton.jit
def load_pointer(record, field: tl.constexpr, dtype: tl.constexpr):
    """Load an address."""
    return tl.load(record + field).to(tl.pointer_type(dtype))


@triton.jit
def offset_of(i, size, inner_stride, outer_stride):
    """Return the offset of item i in rows of rows; int32 division is several times faster than int64."""
    size = size.to(tl.int32)
    return (i // size).to(tl.int64) * outer_stride + (i % size).to(tl.int64) * inner_stride


@triton.jit
def neuron_offset(record, i):
    """Return the offset of neuron i."""
    inner_stride, outer_stride = tl.load(record + INNER_STRIDE), tl.load(record + OUTER_STRIDE)
    return offset_of(i, tl.load(record + INNER), inner_stride, outer_stride)


@triton.jit
def element_offset(record, k, CONTIGUOUS: tl.constexpr):
    """Return the offset of element k from the start of its neuron."""
    if not CONTIGUOUS:
        k = offset_of(k, tl.load(record + RUN), tl.load(record + STRIDE), tl.load(record + LEAP))
    return k
