"""A position in a loop nest, kept in registers and advanced without a division.  Its wheels may have bounds that each
block computes for itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx

from schedules.lowering.reach import Reach
from schedules.lowering.statements import integer, joined, substitute


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
        self.followed: list[
            tuple[tuple[int, ...], Any, Any]
        ] = []  # coefficients of the wheels, start, where it is kept

    @property
    def buffers(self) -> list[Any]:
        return [self.state, *(kept for _, _, kept in self.followed)]

    def follow(self, start: Any, expression: Any) -> Any:
        """`start` + `expression`, a sum of the nest's loop variables times constants, as a number that is kept and
        advances with the wheels.  None if it is not such a sum."""
        variables = [self.loops[axis].loop_var for axis in self.axes]
        found = tvm.sym.detect_linear_equation(expression, variables) if variables else [expression]
        if not found or not all(isinstance(part, tirx.IntImm) for part in found) or int(found[-1]):
            return None
        kept = tirx.decl_buffer([1], str(expression.ty), "along", scope="local")
        self.followed.append((tuple(int(part) for part in found[:-1]), start, kept))
        return tirx.BufferLoad(kept, [integer(0)])

    def _follow(self, slot: int, steps: Any) -> list[Any]:
        """Statements that add what `steps` of a wheel add to the numbers that are followed."""
        return [
            tirx.BufferStore(
                kept,
                tirx.BufferLoad(kept, [integer(0)])
                + tirx.Cast(str(kept.dtype), steps) * tirx.const(coefficients[slot], str(kept.dtype)),
                [integer(0)],
            )
            for coefficients, _, kept in self.followed
            if coefficients[slot]
        ]

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
        for coefficients, start, kept in self.followed:
            dtype = str(kept.dtype)  # that of the tensor's indices, not of the wheels
            turned = (tirx.Cast(dtype, self.get(slot)) * tirx.const(c, dtype) for slot, c in enumerate(coefficients))
            here = sum(turned, tirx.Cast(dtype, start))
            statements.append(tirx.BufferStore(kept, here, [integer(0)]))
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
            step = [self.set(slot, self.get(slot) + 1), *self._follow(slot, integer(1))]
            if statement is not None:
                back = self.first(axis) - self.end(axis)
                carry = [self.set(slot, self.first(axis)), *self._follow(slot, back), statement]
                step.append(tirx.IfThenElse(self.get(slot) == self.end(axis), joined(carry), None))
            statement = joined(step)
        return statement if statement is not None else tirx.Evaluate(integer(0))
