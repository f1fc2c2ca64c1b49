"""Places in shared memory that move from stage to stage, kept in registers, so that the main loop need not work out
again what part of them is the thread's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tvm
from tvm import tirx

from schedules.lowering.statements import integer, substitute, variables_of


class Cursor:
    """A thread's first element in the stage to read, or to write, of stages of `stride` elements each."""

    def __init__(self, first: Any, stride: int) -> None:
        self.first, self.stride = first, stride
        self.buffer = tirx.decl_buffer([1], "int32", "cursor", scope="local")

    @property
    def place(self) -> Any:
        return tirx.BufferLoad(self.buffer, [integer(0)])

    def set(self, stage: int) -> Any:
        # of a large tensor the thread's loops are 64 bits wide, a place in shared memory never is
        here = tirx.Cast("int32", self.first + stage * self.stride)
        return tirx.BufferStore(self.buffer, here, [integer(0)])

    def turn(self, wraps: Any, stages: int) -> Any:
        """The statement that goes to the next stage, or back to stage 0 if it `wraps`."""
        step = tirx.Select(wraps, integer(-(stages - 1) * self.stride), integer(self.stride))
        return tirx.BufferStore(self.buffer, self.place + step, [integer(0)])


def split(index: Any, moving: Collection[Any], analyzer: tvm.sym.Analyzer) -> tuple[Any, Any] | None:
    """`index` as (what it is where the variables `moving` are 0, what they add); None if that depends on others too."""
    first = substitute(index, {var: tirx.const(0, str(var.ty)) for var in moving})
    rest = analyzer.simplify(index - first)
    return None if any(var not in moving for var in variables_of(rest)) else (analyzer.simplify(first), rest)
