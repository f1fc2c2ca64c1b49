"""Workspaces as arguments: memory between the kernels of a function, for callers that allocate it themselves.

A function of several kernels has TVM allocate what they hand on, from a pool of the calling thread that knows no
streams: two streams of a thread get the same memory, and a larger wish frees the smaller memory that a captured CUDA
graph still replays with.  A caller with an allocator that knows streams gives the memory instead; a bundle's launcher
(`bundle.package.launch`) has memory of its own.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.stmt import SBlock, SBlockRealize

from schedules.core.errors import BuildError
from schedules.core.problem import Argument
from schedules.lowering.pipeline import is_tirx


def workspaces_as_arguments(mod: tvm.IRModule) -> tuple[tvm.IRModule, tuple[Argument, ...]]:
    """A program for a GPU whose workspaces are arguments after all others, and these arguments.

    `runtime_axis` of such an argument has the run-time extent of the problem's.  A program without workspaces stays as
    it is.  Raises BuildError for a workspace whose extent is a formula.
    """
    function = mod["main"]
    body, found = _written(function.body) if is_tirx(mod) else _scheduled(function.body)
    if not found:
        return mod, ()
    changed = tirx.PrimFunc([*function.params, *found], body, function.ret_type, function.attrs)
    return tvm.IRModule({"main": changed}), tuple(_argument(buffer) for buffer in found)


def _written(body: Any) -> tuple[Any, list[Any]]:
    """The body of a program in TIRx without its statements that allocate workspaces, and these."""
    found: list[Any] = []

    def visit(statement: Any) -> Any:
        if statement.buffer.scope() != "global":
            return statement
        found.append(statement.buffer)
        return tirx.Evaluate(0)

    return tvm_ffi.structural_map(body, (tirx.AllocBuffer, visit)), found


def _scheduled(body: Any) -> tuple[Any, list[Any]]:
    """The same of a scheduled program, whose root block allocates them."""
    root = body.block
    found = [buffer for buffer in root.alloc_buffers if buffer.scope() == "global"]
    kept = [buffer for buffer in root.alloc_buffers if buffer.scope() != "global"]
    block = SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        root.body,
        root.init,
        kept,
        root.match_buffers,
        root.annotations,
    )
    return SBlockRealize(body.iter_values, body.predicate, block), found


def _argument(buffer: Any) -> Argument:
    shape, runtime = [], None
    for axis, extent in enumerate(buffer.shape):
        if isinstance(extent, tirx.IntImm):
            shape.append(int(extent))
        elif isinstance(extent, tirx.Var) and runtime is None:
            shape.append(1)
            runtime = axis
        else:
            raise BuildError(f"workspace {buffer.name} has the extent {extent}, not a number or a run-time extent")
    return Argument(str(buffer.name), tuple(shape), str(buffer.dtype), output=True, runtime_axis=runtime)
