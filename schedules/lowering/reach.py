"""The steps of a reduction that a block can leave out: those whose tile of an operand lies in the padding, all zeros.

A copy  shared = condition ? global : 0  says itself where its tile is zero.  The parts of its condition that no thread
and no element of the tile takes part in hold for a whole block and step, so that they bound the block's loops instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.lowering.statements import reads_memory, stores_of, substitute, variables_of, zero_or


@dataclass
class Reach:
    """When a block has anything to do at all (`always` conditions on its indices), and for each loop of the nest the
    conditions on its variable and the block's indices; a step is needed where all of them hold."""

    always: list[Any] = field(default_factory=list)
    of_axis: dict[int, list[Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.always or self.of_axis)


def find(copies: Sequence[Any], loops: Sequence[Any], blocks: Sequence[Any]) -> tuple[Reach, list[Any]]:
    """The reach of a nest with `loops` that fetches its tiles by the statements `copies`, and these without the
    conditions that then always hold.  `blocks` are the variables of the grid.

    A condition that is linear in a loop's variable holds on an interval, and is dropped; any other still bounds the
    loop by its first and last value, and stays.
    """
    reach = Reach()
    units = {loop.loop_var: tirx.const(0, str(loop.loop_var.ty)) for loop in loops if int(loop.extent) == 1}
    axes = {loop.loop_var: axis for axis, loop in enumerate(loops) if int(loop.extent) > 1}

    def stays(condition: Any) -> bool:
        """Whether the copy has to test `condition`; what of it bounds the block's loops goes to `reach`."""
        condition = substitute(condition, units)
        variables = set(variables_of(condition))
        mine = [variable for variable in variables if variable in axes]
        if reads_memory(condition) or len(mine) > 1 or any(v not in axes and v not in blocks for v in variables):
            return True
        if not mine:
            reach.always.append(condition)
            return False
        reach.of_axis.setdefault(axes[mine[0]], []).append(condition)
        return not _is_linear(condition, mine[0])

    def tested(store: Any) -> Any:
        found = zero_or(store.value)
        if found is None:
            return store
        condition, value = found
        kept = [part for part in _conjuncts(condition) if stays(part)]
        if kept:
            value = tirx.op.if_then_else(tirx.all(*kept), value, tirx.const(0, str(value.ty)))
        return tirx.BufferStore(store.buffer, value, store.indices)

    changed = [
        tvm_ffi.structural_map(copy, (tirx.BufferStore, tested)) if len(stores_of(copy)) == 1 else copy
        for copy in copies
    ]
    return reach, changed


def _conjuncts(condition: Any) -> list[Any]:
    if isinstance(condition, tirx.And):
        return [*_conjuncts(condition.a), *_conjuncts(condition.b)]
    return [condition]


def _is_linear(condition: Any, variable: ir.Var) -> bool:
    if not isinstance(condition, tirx.LT | tirx.LE | tirx.GT | tirx.GE):
        return False
    return bool(tvm.sym.detect_linear_equation(condition.a - condition.b, [variable]))
