"""Loop-level steps: tiling a loop, and fetching a tile with all threads of a block."""

from __future__ import annotations

from schedules.core.arch import GRID
from schedules.core.problem import numpy_dtype
from schedules.core.tvm import LoopRV, SBlockRV, Schedule, tirx
from schedules.lowering.annotations import VECTOR_BYTES


def widest(dtype: str) -> int:
    """Elements of `dtype` in the widest access."""
    return VECTOR_BYTES // numpy_dtype(dtype).itemsize


def widest_vector(extent: int, limit: int) -> int:
    """The widest power-of-two vector, at most `limit` elements, that rows of `extent` elements keep aligned."""
    width = 1
    while width * 2 <= limit and extent % (width * 2) == 0:
        width *= 2
    return width


def block_exists(sch: Schedule, name: str) -> bool:
    """Whether the program still has a stage called `name`."""
    root = sch.get_sblock("root")
    return any(sch.get(block).name_hint == name for block in sch.get_child_blocks(root))


def inline_if_present(sch: Schedule, *names: str) -> None:
    """Inline the stages called `names`; a definition leaves out those that a problem does not need."""
    for name in names:
        if block_exists(sch, name):
            sch.compute_inline(name)


def bind(sch: Schedule, *pairs: tuple[LoopRV, str]) -> None:
    """Bind each loop to its thread axis."""
    for loop, thread in pairs:
        sch.bind(loop, thread)


def bind_grid(sch: Schedule, *loops: LoopRV) -> None:
    """Bind neighbouring loops, the outermost first, to the axes of the grid, the innermost to x; as one loop to x if
    the others are too long for the other axes, or that is not known before run time."""
    extents = [sch.get(loop).extent for loop in loops[:-1]]
    if any(not isinstance(extent, tirx.IntImm) or int(extent) > GRID[1] for extent in extents):
        loops = (sch.fuse(*loops),)
    bind(sch, *((loop, f"blockIdx.{axis}") for loop, axis in zip(loops, "zyx"[-len(loops) :], strict=True)))


def cooperative_fetch(sch: Schedule, block: SBlockRV, axes: int, threads: tuple[int, int], vector: int) -> None:
    """Share the copy of a tile among the (y, x) threads of a block.

    The innermost `axes` loops of `block` are dealt out as [rounds, y, x, vector]: neighbouring threads touch
    neighbouring vectors, so each round is one contiguous, coalesced access.  The vector is split off before the loops
    are fused, so that a border test on the fused index does not depend on the lane.
    """
    *outer, last = sch.get_loops(block)[-axes:]
    last, lane = sch.split(last, [None, vector])
    _, ty, tx = sch.split(sch.fuse(*outer, last), [None, *threads])
    bind(sch, (ty, "threadIdx.y"), (tx, "threadIdx.x"))
    if vector > 1:
        sch.vectorize(lane)
