"""Stores of CPU functions that go past the caches.

A store first fetches the line that it changes, a third more traffic where two tensors are read and one is written, and
leaves it in the caches in place of something that may be read again.  Stores marked non-temporal do neither.  They pay
where a function's tensors are more than the last cache holds, and cost where they are less: from there the C library's
memcpy copies so too (glibc's `x86.non_temporal_threshold`).
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm.sym
import tvm_ffi
from tvm import ir, tirx

from schedules.lowering.accesses import address
from schedules.lowering.annotations import LEAST
from schedules.lowering.statements import of_functions

LINE = 64  # bytes: an output whose stores are such begins at a multiple of it
_ELEMENTS = {"float32": ("float", 4), "float16": ("half", 2), "uint16": ("i16", 2)}  # bfloat16 is uint16 by then
_ALIGNED, _FENCE = "past_caches_aligned", "past_caches_fence"
# stores past the caches wait for nothing but a full fence, where other stores are seen in their order
_SOURCE = f"""
define i32 @{_ALIGNED}(ptr %buffer) {{
  %at = ptrtoint ptr %buffer to i64
  %beyond = and i64 %at, {LINE - 1}
  %aligned = icmp eq i64 %beyond, 0
  %told = zext i1 %aligned to i32
  ret i32 %told
}}
define void @{_FENCE}() {{
  fence seq_cst
  ret void
}}
!0 = !{{i32 1}}
"""


def _store_source(dtype: str, lanes: int, alignment: int) -> tuple[str, str]:
    """The name and LLVM IR of a store of `lanes` elements to a multiple of `alignment` bytes."""
    name, vector = f"past_caches_{dtype}x{lanes}_{alignment}", f"<{lanes} x {_ELEMENTS[dtype][0]}>"
    return name, (
        f"define void @{name}(ptr %to, {vector} %value) {{\n"
        f"  store {vector} %value, ptr %to, align {alignment}, !nontemporal !0\n"
        "  ret void\n"
        "}\n"
    )


def stores_past_caches(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod`, a module of CPU functions lowered to flat buffers, with the vector stores of their parallel loops to
    global memory past the caches.

    Those of buffers that the function does not read, at multiples of 16 bytes from the buffer's first; and only
    if such buffers begin at a multiple of 64 bytes when the function runs, else stores are as ever.  Each task ends
    when its stores are seen by all.
    """
    return tirx.transform.ConvertSSA()(of_functions(mod, _lowered))


def _lowered(function: tirx.PrimFunc) -> tirx.PrimFunc:
    from tvm.script import tirx as T

    read: set[str] = set()
    tvm_ffi.structural_walk(function.body, (ir.TensorLoad, lambda load: read.add(str(load.source.name))))
    analyzer = tvm.sym.Analyzer()
    sources: dict[str, str] = {}

    def task(body: Any) -> Any:
        written: dict[str, Any] = {}

        def store(node: Any) -> Any:
            buffer, dtype = node.buffer, str(node.buffer.dtype)
            found = None if str(buffer.name) in read else address(buffer, node.indices)
            if found is None or dtype not in _ELEMENTS:
                return node
            lanes, at = found
            size = _ELEMENTS[dtype][1]
            multiples = analyzer.modular_set(at.args[0].indices[0])
            alignment = math.gcd(LINE, multiples.coeff * size, multiples.base * size)
            if alignment % LEAST or lanes * size % LEAST:
                return node
            name, source = _store_source(dtype, lanes, alignment)
            sources[name] = source
            written[str(buffer.name)] = T.address_of(tirx.BufferLoad(buffer, [tirx.const(0, "int64")]))
            return tirx.Evaluate(tirx.call_extern("void", name, at, node.value))

        past = tvm_ffi.structural_map(body, (tirx.BufferStore, store))
        if not written:
            return body
        aligned = [tirx.call_extern("int32", _ALIGNED, begin) == 1 for begin in written.values()]
        fence = tirx.Evaluate(tirx.call_extern("void", _FENCE))
        return tirx.IfThenElse(tirx.all(*aligned), tirx.SeqStmt([past, fence]), body)

    def parallel(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, task(loop.body), annotations=loop.annotations)

    body = tvm_ffi.structural_map(function.body, (tirx.For, parallel))
    if not sources:
        return function
    text = ir.StringImm("".join([*sources.values(), _SOURCE]))
    return function.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body))
