"""Extents at run time: a function refuses those that it was not built for before it runs anything."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx

from schedules.core.errors import BuildError
from schedules.core.problem import Argument


def bounded(mod: tvm.IRModule, arguments: Sequence[Argument]) -> tvm.IRModule:
    """`mod`, whose function takes `arguments`, with a test of the range of their extent at run time if it has one.

    The function raises ValueError.  Raises BuildError if the program takes one extent only.
    """
    at, argument = next(((at, a) for at, a in enumerate(arguments) if a.least is not None), (0, None))
    if argument is None or argument.ranged_axis is None or argument.least is None:
        return mod
    function, axis = mod["main"], argument.ranged_axis
    extent, least, most = function.params[at].shape[axis], argument.least, argument.shape[axis]
    if isinstance(extent, tirx.IntImm):
        raise BuildError(f"the schedule is built for one shape, not for {least} to {most} along axis {axis}")
    told = f"{argument.name}.shape[{axis}] must be {least} to {most}, the range that this kernel was built for"
    test = tirx.AssertStmt(
        tirx.all(extent >= least, extent <= most), tvm.ir.StringImm("ValueError"), [tvm.ir.StringImm(told)]
    )
    body = tirx.SeqStmt([test, function.body])
    return tvm.IRModule({"main": tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)}, mod.attrs)
