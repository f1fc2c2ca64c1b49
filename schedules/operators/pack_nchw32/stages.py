"""Packing in three stages, for schedules that tile it: what is read, what is made of it, what is stored."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.core.tvm import PrimExpr, te, tirx
from schedules.definitions.epilogue import finish, placeholders
from schedules.definitions.implicit import at_run_time
from schedules.definitions.padding import select
from schedules.definitions.program import program_of
from schedules.definitions.scatter import scatter
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.operators.pack_nchw32.definition import PackProblem
from schedules.steps.tiles import widest, widest_vector


def channel_vector(problem: PackProblem, most: int = GROUP) -> int:
    """Neighbouring channels that the plain tensor keeps aligned: a vector of them is in the tensor or beyond it."""
    return widest_vector(problem.ci, min(widest(problem.dtype), most)) if problem.channels_last else 1


def staged(problem: PackProblem, vector: int) -> tirx.PrimFunc:
    """The stages ``fetched``, zero beyond the channels, ``tile`` and ``output``, all over (n, ci/lanes, pixel,
    lanes/vector, vector).

    The pixels of an image stay one index of the plain tensor's last axis of them: taken apart into rows and columns
    they no longer look like neighbours to TVM.  `vector` divides the channels where they are last.
    """
    p = at_run_time(problem)
    data, scale = placeholders(p).values()
    shape = (p.n, p.extents["gi"], p.h * p.w, p.lanes // vector, vector)

    def inside(at: Sequence[PrimExpr]) -> PrimExpr:
        _, g, _, block, _ = at
        return g * (p.lanes // vector) + block < p.ci // vector

    def index(axes: Sequence[str], at: Sequence[PrimExpr]) -> tuple[PrimExpr, ...]:
        n, g, pixel, block, lane = at
        li = block * vector + lane
        of = {"n": n, "gi": g, "h": tirx.const(0, str(pixel.ty)), "w": pixel, "li": li, "ci": g * p.lanes + li}
        return tuple(of[axis] for axis in axes)

    def fetch(*at: PrimExpr) -> PrimExpr:
        value = data(*index(p.data_axes, at))
        return value if p.unpack else select([(p.ci % p.lanes > 0, inside(at))], value)

    def place(*at: PrimExpr) -> tuple[PrimExpr | None, tuple[PrimExpr, ...]]:
        return inside(at) if p.unpack and p.ci % p.lanes else None, index(p.output_axes, at)

    fetched = te.compute(shape, fetch, name="fetched")
    tile = te.compute(shape, lambda *at: finish(p.epilogue, fetched(*at), [scale[0]]), name="tile")
    output = te.compute(shape, lambda *at: tile(*at), name="output")
    return scatter(program_of([data, scale, output]), p.shapes()[2], place)
