"""Which conditions of a copy bound a block's loops: those of the block's indices and one loop, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import tvm_ffi
from tvm import ir, tirx

from schedules.lowering.reach import Reach, find

BLOCK, THREAD, RY, RX, ONE = (tirx.Var(name, "int32") for name in ("block", "thread", "ry", "rx", "one"))
LOOPS = [
    tirx.For(var, tirx.const(0), tirx.const(extent), tirx.ForKind.SERIAL, tirx.Evaluate(0))
    for var, extent in ((RY, 3), (RX, 5), (ONE, 1))
]


def found_for(condition: Any) -> tuple[Reach, Any]:
    """The reach of one copy under `condition`, and what is left of the condition (None: nothing)."""
    shared = tirx.decl_buffer([8], "float32", "tile", scope="shared")
    data = tirx.decl_buffer([8], "float32", "data")
    value = tirx.op.if_then_else(condition, tirx.BufferLoad(data, [THREAD]), tirx.const(0, "float32"))
    reach, (copy,) = find([tirx.BufferStore(shared, value, [THREAD])], LOOPS, [BLOCK])
    return reach, copy.value.args[0] if isinstance(copy.value, ir.Call) else None


@pytest.mark.parametrize("condition", [BLOCK + RY >= 1, BLOCK * 2 + RY * 3 - 1 < 14, RY + ONE >= 1])
def test_a_linear_condition_bounds_its_loop_and_goes(condition: Any) -> None:
    reach, left = found_for(condition)
    assert list(reach.of_axis) == [0] and len(reach.of_axis[0]) == 1 and not reach.always and left is None


def test_another_condition_of_one_loop_bounds_it_and_stays() -> None:
    reach, left = found_for(tirx.floormod(RX + BLOCK, tirx.const(2, "int32")) < 1)
    assert list(reach.of_axis) == [1] and left is not None


def test_a_condition_of_the_block_alone_gates_everything() -> None:
    reach, left = found_for(tirx.all(BLOCK >= 1, BLOCK + ONE < 4))
    assert not reach.of_axis and len(reach.always) == 2 and left is None


@pytest.mark.parametrize("condition", [THREAD < 5, THREAD + RY < 5, RY + RX < 5])
def test_what_no_loop_can_be_bounded_by_stays(condition: Any) -> None:
    reach, left = found_for(condition)
    assert not reach and tvm_ffi.structural_equal(left, condition)


def test_the_parts_of_a_condition_go_their_ways() -> None:
    reach, left = found_for(tirx.all(BLOCK + RY >= 1, BLOCK + RX >= 1, THREAD < 5, BLOCK + RY < 9))
    assert {axis: len(parts) for axis, parts in reach.of_axis.items()} == {0: 2, 1: 1}
    assert tvm_ffi.structural_equal(left, THREAD < 5)
