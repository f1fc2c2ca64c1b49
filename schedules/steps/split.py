"""A float32 tensor as the sum of two bfloat16 ones, for matrix cores: x = high + low + a rest of at most 2^-16 |x|.

Of a product x * y three of the four products of parts are computed, high * high + high * low + low * high.  What is
left out and the rests are at most 3 * 2^-16 |x * y| (`arithmetic.BF16X3`).  bfloat16 has the exponents of float32, so
that nothing is scaled.  Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (2019).
"""

from __future__ import annotations

from schedules.core.tvm import PrimExpr, Schedule, te, tirx
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, widest_vector

PART = "bfloat16"
LARGEST = 2.0**128 - 2.0**120  # of bfloat16
LARGEST_LOW = 2.0**120 - 2.0**112  # that with it is no more than float32 holds
LARGEST_FLOAT32 = 2.0**128 - 2.0**104
THREADS = 256  # of a block that splits
VECTOR = 8  # elements of a thread: 128 bits of each part


def split(given: te.Tensor) -> tuple[te.Tensor, te.Tensor]:
    """The stages ``<name>_high`` and ``<name>_low``, bfloat16, of the shape of `given` (float32, called <name>).

    Both parts of a finite number are rounded to nearest, but not to infinity.  An infinity is split into 1 with its
    sign and itself, NaN into 1 and NaN: were they the high part, their products with a low part, which is 0 or has
    either sign, would make NaN of every sum.  Where |x| < 2^-117 the low part is subnormal: the rest is then at most
    2^-134, and up to 2^-8 |x| on a device that flushes subnormals.
    """
    name = given.op.name

    def bounded(x: PrimExpr, most: float) -> PrimExpr:
        return te.max(te.min(x, tirx.const(most, "float32")), tirx.const(-most, "float32"))

    def is_finite(x: PrimExpr) -> PrimExpr:
        return tirx.abs(x) <= tirx.const(LARGEST_FLOAT32, "float32")

    def rounded(*at: PrimExpr) -> PrimExpr:
        x = given(*at)
        one = tirx.Select(x < 0, tirx.const(-1, "float32"), tirx.const(1, "float32"))
        return tirx.Select(is_finite(x), bounded(x, LARGEST), one).astype(PART)

    high = te.compute(given.shape, rounded, name=f"{name}_high")

    def rest(*at: PrimExpr) -> PrimExpr:
        x = given(*at)
        return tirx.Select(is_finite(x), bounded(x - high(*at).astype("float32"), LARGEST_LOW), x).astype(PART)

    return high, te.compute(given.shape, rest, name=f"{name}_low")


def schedule_split(sch: Schedule, name: str) -> None:
    """Schedule the stages that `split` makes of the argument `name`, whose rows are contiguous, as one kernel.

    A thread reads its elements of a row once, as wide as rows keep aligned, and stores both parts.
    """
    next_step(sch, f"A kernel that splits {name} into high and low parts, whose products make up the float32 one")
    high, low = (sch.get_sblock(f"{name}_{part}") for part in ("high", "low"))
    vector = widest_vector(int(sch.get(sch.get_loops(high)[-1]).extent), VECTOR)
    stored = [sch.cache_write(high, 0, "local", [low]), sch.cache_write(low, 0, "local")]
    *outer, row = sch.get_loops(high)
    row, lane = sch.split(row, [None, vector])
    vectors = sch.fuse(*outer, row)
    # no more threads than vectors: where all stages have but one, TVM 0.27 tests for the thread in the first only
    block, thread = sch.split(vectors, [None, min(THREADS, int(sch.get(vectors).extent))])
    bind(sch, (block, "blockIdx.x"), (thread, "threadIdx.x"))
    sch.reverse_compute_at(low, thread, preserve_unit_loops=True)
    given = sch.cache_read(high, 0, "local", [high, low])
    sch.compute_at(given, thread, preserve_unit_loops=True)
    for part, store in zip((high, low), stored, strict=True):
        sch.reverse_compute_at(store, thread, preserve_unit_loops=True)
        sch.unroll(sch.get_loops(part)[-1])
        sch.vectorize(sch.get_loops(store)[-1])
    vectors, lane = sch.split(sch.get_loops(given)[-1], [None, min(4, vector)])
    sch.unroll(vectors)
    sch.vectorize(lane)
