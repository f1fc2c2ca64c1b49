"""Elements stored elsewhere, and only where a condition holds."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import te

from schedules.core.arch import Arch
from schedules.definitions.scatter import scatter


def test_elements_go_where_place_says(host: Arch) -> None:
    source = te.placeholder((4, 6), name="source", dtype="int32")
    doubled = te.compute((4, 6), lambda i, j: source[i, j] * 2, name="doubled")
    program = scatter(te.create_prim_func([source, doubled]), (5, 4), lambda i, j: (te.all(j < 5, i > 0), (j, i)))
    module = tvm.tirx.build(tvm.IRModule({"main": program}), target=host.target())
    given = np.arange(24, dtype="int32").reshape(4, 6)
    into = tvm.runtime.tensor(np.full((5, 4), -1, dtype="int32"))
    module["main"](tvm.runtime.tensor(given), into)
    wanted = np.full((5, 4), -1, dtype="int32")
    wanted[:, 1:] = given[1:, :5].T * 2
    assert np.array_equal(into.numpy(), wanted)
