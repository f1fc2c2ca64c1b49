"""Stores of CPU functions that go past the caches.

A store first fetches the line that it changes, a third more traffic where two tensors are read and one is written, and
leaves it in the caches in place of something that may be read again.  Stores marked non-temporal do neither.  They pay
where a function's tensors are more than the last cache holds, and cost where they are less: from there the C library's
memcpy copies so too (glibc's `x86.non_temporal_threshold`).
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.primitives.accesses import address

ALIGNED = 16  # bytes: the least alignment that a whole register of such a store needs
_ELEMENTS = {"float32": ("float", 4), "float16": ("half", 2), "uint16": ("i16", 2)}  # bfloat16 is uint16 by then
_FENCE = "past_caches_fence"
# stores past the caches wait for nothing but a full fence, where other stores are seen in their order
_FENCE_SOURCE = f"define void @{_FENCE}() {{\n  fence seq_cst\n  ret void\n}}\n!0 = !{{i32 1}}\n"


def _store_source(dtype: str, lanes: int) -> tuple[str, str]:
    """The name and LLVM IR of a store of `lanes` elements, past the caches if the address allows it."""
    element, size = _ELEMENTS[dtype]
    name, vector = f"past_caches_{dtype}x{lanes}", f"<{lanes} x {element}>"
    return name, (
        f"define void @{name}(ptr %to, {vector} %value) {{\n"
        "  %at = ptrtoint ptr %to to i64\n"
        f"  %beyond = and i64 %at, {ALIGNED - 1}\n"
        "  %aligned = icmp eq i64 %beyond, 0\n"
        "  br i1 %aligned, label %past, label %through\n"
        "past:\n"
        f"  store {vector} %value, ptr %to, align {ALIGNED}, !nontemporal !0\n"
        "  ret void\n"
        "through:\n"
        f"  store {vector} %value, ptr %to, align {size}\n"
        "  ret void\n"
        "}\n"
    )


def stores_past_caches(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod`, a module of CPU functions lowered to flat buffers, its vector stores to global memory past the caches.

    Vectors of no whole number of 16 bytes, and those whose address is no multiple of 16 when the function runs, are
    stored as ever.  Each task of a parallel loop, and the function, ends when its stores are seen by all.
    """
    return tvm.IRModule({name: _lowered(function) for name, function in mod.functions.items()}, attrs=mod.attrs)


def _lowered(function: tirx.PrimFunc) -> tirx.PrimFunc:
    sources: dict[str, str] = {}

    def store(node: Any) -> Any:
        found = address(node.buffer, node.indices)
        element = _ELEMENTS.get(str(node.buffer.dtype))
        if found is None or element is None or found[0] * element[1] % ALIGNED:
            return node
        name, source = _store_source(str(node.buffer.dtype), found[0])
        sources[name] = source
        return tirx.Evaluate(tirx.call_extern("void", name, found[1], node.value))

    def fenced(body: Any) -> Any:
        return tirx.SeqStmt([body, tirx.Evaluate(tirx.call_extern("void", _FENCE))])

    def parallel(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, fenced(loop.body), annotations=loop.annotations
        )

    def scope(statement: Any) -> Any:
        if statement.attr_key != "compute_scope":
            return statement
        return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, fenced(statement.body))

    body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, store))
    if not sources:
        return function
    body = tvm_ffi.structural_map(body, ((tirx.For, parallel), (tirx.AttrStmt, scope)))
    text = ir.StringImm("".join([*sources.values(), _FENCE_SOURCE]))
    return function.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body))
