"""Parallel loops of CPU functions that come to a single task, known when the function runs.

TVM's runtime wakes its threads for such a loop too, and waits for them; that takes longer than a small problem.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from schedules.lowering.statements import of_nodes


def lone_tasks_in_caller(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod`, a module of lowered CPU functions, with parallel loops that run a single task in the caller's thread.

    A loop whose extent depends on the arguments is there twice, and its extent decides.
    """

    def parallel(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL or (isinstance(loop.extent, tirx.IntImm) and loop.extent.value > 1):
            return loop
        serial = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
        if isinstance(loop.extent, tirx.IntImm):
            return serial
        return tirx.IfThenElse(loop.extent <= 1, serial, loop)

    return tirx.transform.ConvertSSA()(of_nodes(mod, (tirx.For, parallel)))
