"""A position in a loop nest, kept in registers and advanced without a division.  Its wheels may have bounds that each
block computes for itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx

from schedules.primitives.reach import Reach
from schedules.primitives.statements import integer, joined, substitute


class Odometer:
    """A wheel for each of the nest's `loops` that has more than one step; within `reach`, if that asks for any."""

    def __init__(self, loops: Sequence[Any], reach: Reach) -> None:
        self.loops, self.reach = loops, reach
        self.extents = [int(loop.extent) for loop in loops]
        self.most = math.prod(self.extents)  # steps of a block at most
        self.axes = [axis for axis, extent in enumerate(self.extents) if extent > 1]
        count = len(self.axes)
        bounded = sorted(reach.of_axis)
        self.bounds = {axis: (count + 2 * i, count + 2 * i + 1) for i, axis in enumerate(bounded)}  # slots: first, end
        self.left_of_all = count + 2 * len(bounded)  # slot of the number of steps
        self.state = tirx.decl_buffer([self.left_of_all + 1], "int32", "at", scope="local")

    def get(self, slot: int) -> Any:
        return tirx.BufferLoad(self.state, [integer(slot)])

    def set(self, slot: int, value: Any) -> Any:
        return tirx.BufferStore(self.state, tirx.convert(value), [integer(slot)])

    @property
    def total(self) -> Any:
        """The number of steps, after `start`."""
        return self.get(self.left_of_all) if self.reach else integer(self.most)

    def first(self, axis: int) -> Any:
        return self.get(self.bounds[axis][0]) if axis in self.bounds else integer(0)

    def end(self, axis: int) -> Any:
        return self.get(self.bounds[axis][1]) if axis in self.bounds else integer(self.extents[axis])

    def start(self) -> list[Any]:
        """Statements that put every wheel at its first step."""
        statements = [piece for axis in self.bounds for piece in self._find_bounds(axis)]
        statements += [self.set(slot, self.first(axis)) for slot, axis in enumerate(self.axes)]
        if self.reach:
            steps = integer(1)
            for axis in self.axes:
                steps = steps * (self.end(axis) - self.first(axis))
            if self.reach.always:
                steps = tirx.Select(tirx.all(*self.reach.always), steps, integer(0))
            statements.append(self.set(self.left_of_all, steps))
        return statements

    def _find_bounds(self, axis: int) -> list[Any]:
        """The first step and the one after the last where all conditions on `axis` hold; 0 and 0 where none does."""
        loop, (first, end) = self.loops[axis], self.bounds[axis]
        variable = tirx.Var(loop.loop_var.name, "int32")
        here = {loop.loop_var: tirx.Cast(str(loop.loop_var.ty), variable)}
        needed = tirx.all(*(substitute(condition, here) for condition in self.reach.of_axis[axis]))
        found = joined(
            [
                tirx.IfThenElse(self.get(end) == 0, self.set(first, variable), None),
                self.set(end, variable + 1),
            ]
        )
        search = tirx.IfThenElse(needed, found, None)
        every = tirx.For(variable, integer(0), integer(self.extents[axis]), tirx.ForKind.UNROLLED, search)
        return [self.set(first, integer(0)), self.set(end, integer(0)), every]

    def position(self) -> dict[Any, Any]:
        """The values of the nest's loop variables."""
        values = {loop.loop_var: tirx.const(0, str(loop.loop_var.ty)) for loop in self.loops}
        for slot, axis in enumerate(self.axes):
            loop = self.loops[axis]
            values[loop.loop_var] = tirx.Cast(str(loop.loop_var.ty), self.get(slot))
        return values

    def advance(self) -> Any:
        """The statement that goes one step further."""
        statement: Any = None
        for slot, axis in enumerate(self.axes):  # outermost first: each inner wheel carries into what was built
            step = self.set(slot, self.get(slot) + 1)
            if statement is None:
                statement = step
                continue
            carry = joined([self.set(slot, self.first(axis)), statement])
            statement = joined([step, tirx.IfThenElse(self.get(slot) == self.end(axis), carry, None)])
        return statement if statement is not None else tirx.Evaluate(integer(0))
