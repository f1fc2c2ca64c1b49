"""The order in which blocks start: those with the most work first, so that the last to finish are short ones.

Source: longest-processing-time-first scheduling (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from schedules.lowering.annotations import INSIDE_FIRST
from schedules.lowering.statements import joined, of_functions, substitute


def marked(body: Any) -> Any:
    """`body` with what the annotation of a loop over blockIdx.x asks for kept within it, for `reordered`."""

    def visit(loop: Any) -> Any:
        kept = dict(loop.annotations)
        asked = kept.pop(INSIDE_FIRST, None)
        if asked is None:
            return loop
        inner = tirx.AttrStmt(asked, INSIDE_FIRST, tirx.const(0), loop.body)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, inner, loop.thread_binding, kept)

    return tvm_ffi.structural_map(body, (tirx.For, visit))


def reordered(mod: tvm.IRModule) -> tvm.IRModule:
    """Lowered kernels with their blocks in the order that they were `marked` with.

    The place of a block has many cases.  TVM's analysis would look at all of them wherever it looks at an index, and
    take five times as long: hence here, where no pass is left that does.
    """

    def function(kernel: Any) -> Any:
        asked: list[int] = []
        if isinstance(kernel, tirx.PrimFunc):
            tvm_ffi.structural_walk(kernel.body, (tirx.AttrStmt, lambda scope: asked.extend(_asked(scope))))
        if not asked:
            return kernel
        *geometry, lead = asked

        def visit(scope: Any) -> Any:
            if scope.attr_key == INSIDE_FIRST:
                return scope.body
            if scope.attr_key != "thread_extent" or str(scope.node.thread_tag) != "blockIdx.x":
                return scope
            index, bound = scope.node.var, []
            turn, block = (tirx.Var(name, str(index.ty)) for name in ("turn", "block"))
            body = substitute(scope.body, {index: block})
            if lead:  # a variable of its own: it stands dozens of times in the place
                bound, index = [tirx.Bind(turn, _led(index, geometry, lead))], turn
            bound.append(tirx.Bind(block, inside_first(index, geometry)))
            return tirx.AttrStmt(scope.node, scope.attr_key, scope.value, joined([*bound, body]))

        return kernel.with_body(tvm_ffi.structural_map(kernel.body, (tirx.AttrStmt, visit)))

    return of_functions(mod, function)


def _asked(scope: Any) -> list[int]:
    return [int(value) for value in scope.node] if scope.attr_key == INSIDE_FIRST else []


def inside_first(index: Any, geometry: Sequence[int], lead: int = 0) -> Any:
    """The place in row-major order of the block that comes at `index`: pixels of a window first, then those beside it,
    then the rows above and below.

    `geometry` is (blocks of a pixel, width of the image, first row of the window, its height, first column, its width).
    The first `lead` blocks that are not the window's come before it: one for each multiprocessor, and the blocks that a
    multiprocessor holds at once no longer end together, so that the last to finish is a smaller part of the work.
    """
    blocks, width, top, rows, left, columns = geometry
    index = _led(index, geometry, lead)
    pixel, rest = index // blocks, index % blocks
    beside = width - columns  # pixels of a row that lie outside
    y, x = top + pixel // columns, left + pixel % columns
    if beside:
        other = pixel - rows * columns
        column = other % beside
        outside = tirx.Select(column < left, column, column + columns)
        y = tirx.Select(other < 0, y, top + other // beside)
        x = tirx.Select(other < 0, x, outside)
    last = pixel - rows * width
    row = last // width
    y = tirx.Select(last < 0, y, tirx.Select(row < top, row, row + rows))
    x = tirx.Select(last < 0, x, last % width)
    return (y * width + x) * blocks + rest


def _led(index: Any, geometry: Sequence[int], lead: int) -> Any:
    """The turn without a lead of the block that comes at `index` with it."""
    blocks, _, _, rows, _, columns = geometry
    inside = rows * columns * blocks
    after = tirx.Select(index < lead + inside, index - lead, index)
    return tirx.Select(index < lead, index + inside, after) if lead else index
