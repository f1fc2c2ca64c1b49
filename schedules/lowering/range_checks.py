"""Loads of AMD GPUs that give zero out of range, in place of branches around loads.

What is zero in a convolution's padding comes as  condition ? global : 0, of which LLVM makes a branch: it loads nothing
ahead over one, and waits for the lanes that take it.  A buffer load tests its offset against the buffer's size by
itself; here a lane whose condition does not hold asks for an offset that is in no buffer.
Sources: the ISA guides of CDNA and RDNA, "Buffer Addressing"; Triton's "ConvertToBufferOps" for AMD GPUs.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.lowering.statements import of_functions, zero_or

OUT_OF_RANGE = -(2**31)  # as an unsigned offset, behind every buffer of less than 2 GiB
# the last word of a buffer's descriptor: a format that is valid, and on RDNA a check of plain offsets
_CDNA = 7 << 12 | 4 << 15
_RDNA = _CDNA | 1 << 24 | 3 << 28


def range_checked(mod: tvm.IRModule) -> tvm.IRModule:
    """Lowered kernels for AMD GPUs with their conditional loads of 2, 4, 8 or 16 bytes by range checks."""
    return of_functions(mod, _checked, "rocm")


def _checked(function: tirx.PrimFunc) -> tirx.PrimFunc:
    wave = int(function.attrs["target"].attrs["thread_warp_size"])
    words = tirx.const(_CDNA if wave == 64 else _RDNA, "int32")

    def call(node: Any) -> Any:
        found = zero_or(node)
        if found is None or not isinstance(found[1], ir.TensorLoad):
            return node
        condition, load = found
        buffer, index, kind = load.source, load.indices[-1], tvm.DataType(str(load.ty))
        extents = [int(extent) if isinstance(extent, tirx.IntImm) else 2**31 for extent in buffer.shape]
        item = kind.bits // 8
        total = math.prod(extents) * item
        if isinstance(index, tirx.Ramp) and int(index.stride) != 1:  # each lane's element by itself
            places, size = [index.base + lane * index.stride for lane in range(kind.lanes)], item
        else:
            places, size = [index.base if isinstance(index, tirx.Ramp) else index], item * kind.lanes
        known = size in (2, 4, 8, 16) and total < 2**31 and str(places[0].ty) == "int32"
        if str(buffer.scope()) != "global" or not known:
            return node
        bits = "int16" if size == 2 else "int32" if size == 4 else f"int32x{size // 4}"
        loads = [
            tirx.call_extern(
                bits,
                f"schedules_load_{size}",
                buffer.data,
                tirx.const(total, "int64"),
                words,
                tirx.Select(condition, place * item, tirx.const(OUT_OF_RANGE, "int32")),
            )
            for place in places
        ]
        loaded = tirx.Shuffle(loads, list(range(len(loads)))) if len(loads) > 1 else loads[0]
        return tirx.reinterpret(str(load.ty), loaded)

    return function.with_body(tvm_ffi.structural_map(function.body, (ir.Call, call)))
