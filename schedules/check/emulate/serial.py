"""A scheduled GPU program as serial loops, to run on the CPU.

Threads become loops and vectors become scalars; everything else stays: tiles, predicates, padding, layouts, index
arithmetic, the stages' order.  What this cannot see: barriers, lowering, generated code.  A thread's registers become
an array over all threads' registers, which is why stages bound to threads stay correct when each runs to its end first.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.stmt import SBlock

_KINDS = (tirx.ForKind.THREAD_BINDING, tirx.ForKind.VECTORIZED, tirx.ForKind.UNROLLED)
# pipelines and pragmas speak of hardware; without them the loop means the same
_DROPPED = ("pragma_", "software_pipeline", "permuted_layout", "schedules.")


def serialize(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` (scheduled, not lowered) with serial loops only, to be built for LLVM."""

    def kept_of(node: Any) -> dict[Any, Any]:
        return {key: value for key, value in dict(node.annotations).items() if not str(key).startswith(_DROPPED)}

    def plain(block: Any) -> Any:
        kept = kept_of(block)
        if len(kept) == len(block.annotations):
            return block
        return SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            block.body,
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            kept,
        )

    def serial(loop: Any) -> Any:
        kept = kept_of(loop)
        if loop.kind in _KINDS:
            return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body, None, kept)
        if len(kept) != len(loop.annotations):
            return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, kept)
        return loop

    functions = {}
    for name, function in mod.functions.items():
        if isinstance(function, tirx.PrimFunc):
            function = function.with_body(tvm_ffi.structural_map(function.body, ((tirx.For, serial), (SBlock, plain))))
        functions[name] = function
    return tvm.IRModule(functions)
