"""bfloat16 on AMD GPUs: what is moved stays 16 bits wide.

TVM 0.27 computes with bfloat16 in float32 there, and widens every buffer of the program's own with it: twice the LDS
and registers, and matrix instructions do not take them.  LDS, and registers that elements only pass through, hold their
bits instead; arithmetic is TVM's as before.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.lowering.statements import of_functions

BITS = "uint16"


def bits_in_buffers(mod: tvm.IRModule) -> tvm.IRModule:
    """Kernels with flat buffers, in which those of bfloat16 that they allocate hold bits."""
    return of_functions(mod, _with_bits)


def _with_bits(function: tirx.PrimFunc) -> tirx.PrimFunc:
    held: dict[Any, Any] = {}

    def allocation(statement: Any) -> None:
        buffer = statement.buffer
        if str(buffer.dtype) == "bfloat16":
            held[buffer] = tirx.decl_buffer(buffer.shape, BITS, buffer.name, scope=buffer.scope())

    def stored(store: Any) -> None:
        if store.buffer in held and _bits(store.value) is None:
            del held[store.buffer]
        computed.subtract(_moved(store.value))

    def reinterpreted(call: Any) -> None:
        if _named(call, "reinterpret"):
            computed.subtract(_moved(call.args[0]))

    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, allocation))
    if not held:
        return function
    computed = Counter[Any]()  # of each buffer: loads that are not moves
    tvm_ffi.structural_walk(function.body, (ir.TensorLoad, lambda load: computed.update([load.source])))
    tvm_ffi.structural_walk(function.body, ((tirx.BufferStore, stored), (ir.Call, reinterpreted)))
    # registers to compute with are float32 already
    held = {buffer: new for buffer, new in held.items() if str(new.scope()) != "local" or not computed[buffer]}

    def load(node: Any) -> Any:
        if node.source not in held:
            return node
        return tirx.reinterpret(str(node.ty), tirx.BufferLoad(held[node.source], node.indices))

    def call(node: Any) -> Any:
        if not _named(node, "reinterpret"):
            return node
        inner = _bits(node.args[0]) if str(node.args[0].ty).startswith("bfloat16") else None
        return node if inner is None else tirx.reinterpret(str(node.ty), inner)

    def store(node: Any) -> Any:
        return tirx.BufferStore(held[node.buffer], _bits(node.value), node.indices) if node.buffer in held else node

    def allocated(node: Any) -> Any:
        return tirx.AllocBuffer(held[node.buffer], node.annotations) if node.buffer in held else node

    changes = ((ir.TensorLoad, load), (ir.Call, call), (tirx.BufferStore, store), (tirx.AllocBuffer, allocated))
    return function.with_body(tvm_ffi.structural_map(function.body, changes))


def _moved(value: Any) -> list[Any]:
    """The buffers that a value of bfloat16 which is moved may come from."""
    if isinstance(value, ir.TensorLoad):
        return [value.source]
    if isinstance(value, tirx.Select):
        return [*_moved(value.true_value), *_moved(value.false_value)]
    if _named(value, "if_then_else"):
        return [buffer for branch in value.args[1:] for buffer in _moved(branch)]
    return []


def _named(node: Any, name: str) -> bool:
    return isinstance(node, ir.Call) and str(getattr(node.op, "name", "")).endswith(f".{name}")


def _typed(node: Any, dtype: str) -> str:
    """`dtype` with the lanes of `node`."""
    lanes = int(tvm.DataType(str(node.ty)).lanes)
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _bits(value: Any) -> Any | None:
    """The bits of a value of bfloat16 that is moved, constant or rounded; None of one that is computed."""
    if isinstance(value, ir.TensorLoad):
        return tirx.reinterpret(_typed(value, BITS), value)
    if isinstance(value, tirx.FloatImm):
        word = int(np.float32(value.value).view(np.uint32))
        return tirx.const(word + 0x7FFF + (word >> 16 & 1) >> 16, BITS)
    if isinstance(value, tirx.Broadcast):
        inner = _bits(value.value)
        return None if inner is None else tirx.Broadcast(inner, value.lanes)
    if isinstance(value, tirx.Cast) and str(value.value.ty).startswith("float32"):
        word = tirx.reinterpret(_typed(value, "uint32"), value.value)
        half, one, sixteen = (_constant(value, number) for number in (0x7FFF, 1, 16))
        rounded = (word + half + ((word >> sixteen) & one)) >> sixteen  # to nearest, ties to even
        return tirx.Cast(_typed(value, BITS), rounded)
    if _named(value, "reinterpret") and str(value.args[0].ty).startswith(BITS):
        return value.args[0]
    if isinstance(value, tirx.Select):
        parts = [_bits(part) for part in (value.true_value, value.false_value)]
        return None if any(part is None for part in parts) else tirx.Select(value.condition, *parts)
    if _named(value, "if_then_else"):
        condition, *branches = value.args
        parts = [_bits(branch) for branch in branches]
        return None if any(part is None for part in parts) else tirx.if_then_else(condition, *parts)
    return None


def _constant(like: Any, number: int) -> Any:
    lanes = int(tvm.DataType(str(like.ty)).lanes)
    made = tirx.const(number, "uint32")
    return made if lanes == 1 else tirx.Broadcast(made, lanes)
