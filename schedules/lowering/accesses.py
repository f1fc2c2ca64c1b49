"""Global accesses of CUDA kernels that stay as wide as they are written, and ones that tell the caches what to keep.

The compiler takes a predicated vector store apart into its elements (st.global.u16 eight times for 16 bytes), and every
access of TVM's struct of four halves; not what CUDA's own access functions make.  Streaming accesses (ld.global.cs,
st.global.cs: evict first) are for what a kernel reads once and writes once, which need not push anything out of the L2
cache, nor wait there to be written.

Loads that L2 evicts last do the opposite for what is read once (inductor loads so what it reads twice).  Searches of
softmax on an H200 chose them; presumably lines of the output then leave the cache before lines of the input.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx

from schedules.lowering.statements import of_nodes

EVICT_LAST = 0x14F0000000000000  # a cache policy of L2, as createpolicy encodes it and CUTLASS writes it down
# by element type and lanes: the generated code's type of an access, and a built-in type of as many bytes
_TYPES = {
    ("float16", 4): ("half4", "uint2"),
    ("float16", 8): ("uint4", "uint4"),
    ("bfloat16", 4): ("nv_bfloat164", "uint2"),
    ("bfloat16", 8): ("uint4", "uint4"),
    ("float32", 1): ("float", "float"),
    ("float32", 2): ("float2", "float2"),
    ("float32", 4): ("float4", "float4"),
}


def _evict_last_load(carrier: str) -> str:
    """CUDA C++ that loads `value`, of the built-in type `carrier` (unsigned, uint2, float4, ...), from the address
    `from`, and has L2 evict its line last."""
    lanes = int(carrier[-1]) if carrier[-1].isdigit() else 1
    kinds = {"float": ("f", "f32"), "unsigned short": ("h", "u16")}
    constraint, kind = kinds.get(carrier.rstrip("1234"), ("r", "u32"))
    parts = [f"value.{lane}" for lane in "xyzw"[:lanes]] if lanes > 1 else ["value"]
    numbers = ", ".join(f"%{k}" for k in range(lanes))
    vector, target = (f".v{lanes}", f"{{{numbers}}}") if lanes > 1 else ("", numbers)
    outputs = ", ".join(f'"={constraint}"({part})' for part in parts)
    return (
        f'asm("ld.global.L2::cache_hint{vector}.{kind} {target}, [%{lanes}], %{lanes + 1};"\n'
        f'    : {outputs} : "l"(from), "l"({EVICT_LAST:#x}ull));'
    )


def load_statement(carrier: str, streaming: str) -> tuple[str, str]:
    """CUDA C++ that declares `value` and loads it, as `_evict_last_load` takes it, as `streaming` says; and what sets
    the names of such functions apart."""
    if streaming == "both":
        return "streaming_", f"{carrier} value = __ldcs((const {carrier}*)from);"
    if streaming == "evict_last":
        return "evict_last_", f"{carrier} value;\n  {_evict_last_load(carrier)}"
    return "", f"{carrier} value = *(const {carrier}*)from;"


def _load_source(kind: str, carrier: str, streaming: str) -> tuple[str, str]:
    how, value = load_statement(carrier, streaming)
    name = f"load_{how}{kind}"
    return name, (
        f"__device__ __forceinline__ {kind} {name}(const void* from) {{\n  {value}\n  return *({kind}*)&value;\n}}\n"
    )


def _store_source(kind: str, carrier: str, streaming: bool) -> tuple[str, str]:
    name = f"store_{'streaming_' if streaming else ''}{kind}"
    stored = f"*({carrier}*)&value"
    store = f"{'__stcs' if streaming else '__stwb'}(({carrier}*)to, {stored})"
    return name, f"__device__ __forceinline__ void {name}(void* to, {kind} value) {{\n  {store};\n}}\n"


def address(buffer: Any, indices: Any) -> tuple[int, Any] | None:
    """How many elements an access to global memory takes, and the address of the first, if they lie side by side."""
    from tvm.script import tirx as T

    if buffer.scope() != "global" or len(indices) != 1:
        return None
    first, lanes = indices[0], 1
    if isinstance(first, tirx.Ramp):
        if not isinstance(first.stride, tirx.IntImm) or first.stride.value != 1:
            return None
        first, lanes = first.base, int(first.lanes)
    return lanes, T.address_of(tirx.BufferLoad(buffer, [first]))


def _access(buffer: Any, indices: Any) -> tuple[tuple[str, str], Any] | None:
    """The types of an access to global memory and the address of its first element, if CUDA has functions for it."""
    found = address(buffer, indices)
    types = found and _TYPES.get((str(buffer.dtype), found[0]))
    return (types, found[1]) if found and types else None


def whole_accesses(mod: tvm.IRModule, streaming: str) -> tvm.IRModule:
    """`mod`, a module of CUDA kernels lowered to flat buffers, with global accesses that stay whole; its stores are
    streaming ones, or loads and stores, or none, or its loads ones that L2 evicts last (`streaming` of
    annotations.STREAMING).

    Such a store is not moved past other accesses, so this is for kernels that load everything before they store.
    """
    from tvm.script import tirx as T

    def load(node: Any) -> Any:
        found = _access(node.source, node.indices)
        if found is None or (streaming in ("no", "stores") and found[0][0] == found[0][1]):
            return node
        name, source = _load_source(*found[0], streaming)
        return T.cuda.func_call(name, found[1], source_code=source, return_type=str(node.ty))

    def store(node: Any) -> Any:
        found = _access(node.buffer, node.indices)
        streams = streaming in ("stores", "both")
        if found is None or (not streams and found[0][0] == "float"):
            return node
        name, source = _store_source(*found[0], streams)
        return tirx.Evaluate(T.cuda.func_call(name, found[1], node.value, source_code=source))

    return of_nodes(mod, ((ir.TensorLoad, load), (tirx.BufferStore, store)))
