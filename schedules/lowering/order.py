"""The order in which blocks start: those with the most work first, so that the last to finish are short ones.

Source: longest-processing-time-first scheduling (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import tirx

from schedules.lowering.annotations import INSIDE_FIRST
from schedules.lowering.statements import joined, substitute


def reorder(body: Any) -> Any:
    """`body` with the blocks of every annotated loop over blockIdx.x in the order that the annotation asks for."""

    def visit(loop: Any) -> Any:
        annotations = dict(loop.annotations)
        if INSIDE_FIRST not in annotations:
            return loop
        kept = {key: value for key, value in annotations.items() if key != INSIDE_FIRST}
        turn, block = (tirx.Var(name, str(loop.loop_var.ty)) for name in ("turn", "block"))
        *geometry, lead = (int(value) for value in annotations[INSIDE_FIRST])
        index, bound = loop.loop_var, []
        if lead:  # a variable of its own: it stands dozens of times in the place, which would take TVM 20 s
            index, bound = turn, [tirx.Bind(turn, _led(index, geometry, lead))]
        bound.append(tirx.Bind(block, inside_first(index, geometry)))
        inner = joined([*bound, substitute(loop.body, {loop.loop_var: block})])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, inner, loop.thread_binding, kept)

    return tvm_ffi.structural_map(body, (tirx.For, visit))


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
