"""Barriers of kernels on AMD GPUs, and those of a main loop, which knows its own.

TVM 0.27 hands AMD's barrier to LLVM by itself.  That orders nothing: LLVM may move accesses over it, and on chips that
let a wave go to sleep at a barrier it does not wait for stores to LDS that are still under way.  With fences on both
sides, of LDS alone, a barrier is what the program means by it, and loads from global memory stay on their way.
Source: LLVM's "User Guide for AMDGPU Backend", "Memory Model" and "Memory Scopes"; "Memory Model Relaxation
Annotations".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.lowering.annotations import TURNS_APART
from schedules.lowering.multistage import OWN_BARRIERS
from schedules.lowering.statements import of_nodes

_BARRIER, _TURN = "schedules_barrier", "schedules_turn"  # of CODE
CODE = Path(__file__).with_name("amdgpu.ll")  # TVM links it with every kernel for AMD GPUs


def without_doubled(mod: tvm.IRModule) -> tvm.IRModule:
    """Lowered kernels whose main loops have no barriers but their own.

    TVM cannot tell the stage that threads read from the one that they write, and puts a barrier between the two.  Its
    barriers name the scope alone.
    """

    def barrier(statement: Any) -> Any:
        call = statement.value
        theirs = str(getattr(getattr(call, "op", None), "name", "")) == "tirx.tvm_storage_sync" and len(call.args) == 1
        return tirx.Evaluate(tirx.const(0, "int32")) if theirs else statement

    def scope(node: Any) -> Any:
        if node.attr_key != OWN_BARRIERS:
            return node
        return tvm_ffi.structural_map(node.body, (tirx.Evaluate, barrier))

    return of_nodes(mod, (tirx.AttrStmt, scope))


def turns_apart(mod: tvm.IRModule) -> tvm.IRModule:
    """Kernels for AMD GPUs whose loops with the annotation TURNS_APART LLVM leaves as they are."""
    turn = tirx.call_extern("void", _TURN)

    def loop(node: Any) -> Any:
        if TURNS_APART not in node.annotations:
            return node
        body = tirx.SeqStmt([node.body, tirx.Evaluate(turn)])
        kept = {key: value for key, value in node.annotations.items() if key != TURNS_APART}
        return tirx.For(node.loop_var, node.min, node.extent, node.kind, body, node.thread_binding, kept)

    return of_nodes(mod, (tirx.For, loop))


def fenced(mod: tvm.IRModule) -> tvm.IRModule:
    """Kernels for AMD GPUs with their barriers between fences."""

    def barrier(call: Any) -> Any:
        if str(getattr(call.op, "name", "")) != "tirx.tvm_storage_sync" or str(call.args[0].value) != "shared":
            return call
        return tirx.call_extern("void", _BARRIER)

    return of_nodes(mod, (ir.Call, barrier), "rocm")
