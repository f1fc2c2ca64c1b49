"""Square blocks that are turned as they are copied: in vectors, to the bit, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from schedules.lowering.turned import turned


def copied(rows: int, columns: int, side: int, *, to_rows: bool = False, scale: float = 1) -> tuple[tvm.IRModule, str]:
    """A (rows, columns) matrix into (columns, rows), or (rows, columns) with `to_rows`, in blocks of `side`, lowered;
    and what `turned` makes of it."""
    a = te.placeholder((rows, columns), name="a")
    if to_rows:
        b = te.compute((rows, columns), lambda j, i: a[j, i] * scale if scale != 1 else a[j, i], name="b")
    else:
        b = te.compute((columns, rows), lambda j, i: a[i, j] * scale if scale != 1 else a[i, j], name="b")
    sch = tvm.s_tir.Schedule(te.create_prim_func([a, b]))
    j, i = sch.get_loops(sch.get_sblock("b"))
    (jo, j), (io, i) = sch.split(j, [None, side]), sch.split(i, [None, side])
    sch.reorder(jo, io, i, j)
    passes = [tvm.s_tir.transform.LowerOpaqueBlock(), tirx.transform.FlattenBuffer(), tirx.transform.StmtSimplify()]
    first = [tvm.s_tir.transform.LowerInitBlock(), tvm.s_tir.transform.ConvertBlocksToOpaque()]
    mod = tvm.ir.transform.Sequential([*first, *passes])(sch.mod)
    return turned(mod), mod.script()


@pytest.mark.parametrize("side", [4, 8, 16])
def test_blocks_are_turned_in_vectors(side: int) -> None:
    mod, before = copied(3 * side, 2 * side, side)
    assert "T.Shuffle" not in before and "T.Shuffle" in mod.script()
    data = np.random.default_rng(0).random((3 * side, 2 * side), "float32")
    out = tvm.runtime.empty((2 * side, 3 * side))
    tirx.build(mod, "llvm")["main"](tvm.runtime.tensor(data), out)
    np.testing.assert_array_equal(out.numpy(), data.T)


@pytest.mark.parametrize(
    "other",
    [dict(side=6), dict(side=2), dict(side=8, to_rows=True), dict(side=8, scale=2.0), dict(side=8, rows=20)],
    ids=str,
)
def test_other_copies_stay(other: dict[str, float]) -> None:
    sizes = {"rows": 24, "columns": 24, **other}
    mod, before = copied(**sizes)  # type: ignore[arg-type]
    assert mod.script() == before
