from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.s_tir import Schedule

from schedules.build.builder import compiled
from schedules.core.arch import Arch
from schedules.lowering.lone_task import lone_tasks_in_caller


def doubled(extent: Any) -> tvm.IRModule:
    """(extent,) float32 times two, in parallel tasks of four."""
    a = te.placeholder((extent,), name="a")
    sch = Schedule(te.create_prim_func([a, te.compute((extent,), lambda i: a[i] * 2, name="b")]))
    task, _ = sch.split(sch.get_loops("b")[0], [None, 4], preserve_unit_iters=True)
    sch.parallel(task)
    return sch.mod


def loops(mod: tvm.IRModule) -> list[str]:
    """What becomes of the loop over tasks: its kinds, in program order."""
    kinds: list[str] = []

    def visit(loop: Any) -> None:
        if not (isinstance(loop.extent, tirx.IntImm) and loop.extent.value == 4):
            kinds.append(tirx.ForKind(loop.kind).name.lower())

    tvm_ffi.structural_walk(lone_tasks_in_caller(mod)["main"].body, (tirx.For, visit))
    return kinds


def test_the_number_of_tasks_decides_when_it_is_known() -> None:
    assert loops(doubled(te.var("n", "int64"))) == ["serial", "parallel"]
    assert loops(doubled(32)) == ["parallel"]
    assert loops(doubled(4)) == ["serial"]


@pytest.mark.parametrize("extent", [1, 4, 5, 64])
def test_both_ways_are_correct(host: Arch, extent: int) -> None:
    a = np.arange(extent, dtype=np.float32)
    b = np.full_like(a, np.nan)
    compiled(doubled(te.var("n", "int64")), host)["main"](a, b)
    np.testing.assert_array_equal(b, 2 * a)
