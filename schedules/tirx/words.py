"""Numbers of 8 and 16 bits as parts of 32-bit words, in TIRx programs: rounded and packed, read and widened."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script import tirx as T

from schedules.core.problem import numpy_dtype
from schedules.tirx.types import Buffer, Expr, Pointer
from schedules.tirx.values import named

_PACK_16 = """
__device__ __forceinline__ unsigned int pack_{0}(float a, float b) {{
  unsigned int r; asm("cvt.rn.{0}x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r;
}}
"""
_WIDE = {"int8": "int32", "float16": "float32", "bfloat16": "float32"}
_KINDS_16 = {"float16": "f16", "bfloat16": "bf16"}
# 1.5 * 2**23: what is added to it is rounded to a whole number, to nearest even, in the lowest bits, if within
# WHOLE; not to be contracted with the product before it.  A conversion saturates by itself, on a pipe of half the rate
_PACK_8 = """
__device__ __forceinline__ int pack_whole(float y) {{ return {1}; }}
__device__ __forceinline__ unsigned int pack_{0}(float a, float b, float c, float d) {{
  unsigned int high, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(pack_whole(d)), "r"(pack_whole(c)), "r"(0));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(pack_whole(b)), "r"(pack_whole(a)), "r"(high));
  return all;
}}
"""
_ROUNDED = {"s8": "__float_as_int(__fadd_rn(y, 12582912.f)) - 0x4b400000", "any_s8": "__float2int_rn(y)"}
WHOLE = 2**22 - 1  # float32 up to here are rounded to whole numbers by adding a constant
# of an element in memory: how C++ reads it, and makes a 32-bit number of it
_ELEMENTS = {
    "int8": ("int", "signed char", "{}"),
    "int32": ("int", "int", "{}"),
    "float32": ("float", "float", "{}"),
    "float16": ("float", "unsigned short", "__half2float(__ushort_as_half({}))"),
    "bfloat16": ("float", "unsigned short", "__uint_as_float((unsigned int)({}) << 16)"),
}
_WORDS = {16: "unsigned short", 32: "unsigned int", 64: "unsigned long long"}
_READ_WORD = """
__device__ __forceinline__ {1} {0}(const void* at) {{ return {2}; }}
"""
# volatile, since the compiler otherwise loads all of a thread's at once, and spills the sums for them
_READ = """
__device__ __forceinline__ {0} read_element_{1}(const void* at, bool inside) {{
  return inside ? {2} : 0;
}}
"""


def pack_16(dtype: str, a: Expr, b: Expr) -> Expr:
    """The word of two float32 numbers rounded to float16 or bfloat16, `a` in its low half."""
    kind = _KINDS_16[dtype]
    return T.cuda.func_call(f"pack_{kind}", a, b, source_code=_PACK_16.format(kind), return_type="uint32")


def pack_8(values: Sequence[Expr], bound: float) -> Expr:
    """The word of four float32 numbers rounded to int8, to nearest even, and saturated, the first in its lowest byte;
    none is greater than `bound`."""
    name = "any_s8" if bound > WHOLE else "s8"
    source = _PACK_8.format(name, _ROUNDED[name])
    return T.cuda.func_call(f"pack_{name}", *values, source_code=source, return_type="uint32")


def widened(value: Expr) -> Expr:
    """A number of 8 or 16 bits as one of 32."""
    return value.astype(_WIDE.get(str(value.ty), str(value.ty)))


def read_pair(name: str, elements: Buffer, at: Expr) -> Sequence[Expr]:
    """The elements at `at`, which is even, and behind it, by one load, as numbers of 32 bits; nobody writes them."""
    return _halves(name, str(elements.dtype), "read_pair", "__ldg((const {}*)at)", elements.ptr_to([at]))


def read_shared_pair(name: str, dtype: str, at: Pointer) -> Sequence[Expr]:
    """Two elements of `dtype` side by side in shared memory, by one load, as numbers of 32 bits."""
    return _halves(name, dtype, "read_shared_pair", "*(const {}*)at", at)


def _halves(name: str, dtype: str, call: str, loaded: str, at: Pointer) -> Sequence[Expr]:
    bits = numpy_dtype(dtype).itemsize * 8
    word, kind = f"uint{2 * bits}", _WORDS[2 * bits]
    source = _READ_WORD.format(f"{call}_{bits}", kind, loaded.format(kind))
    both = named(f"{name}_pair", T.cuda.func_call(f"{call}_{bits}", at, source_code=source, return_type=word))
    halves = (T.Cast(f"uint{bits}", half) for half in (both, T.shift_right(both, tirx.const(bits, word))))
    return [named(name, widened(T.reinterpret(dtype, half))) for half in halves]


def read(elements: Buffer, at: Expr | tuple[Expr, ...], inside: Expr) -> Expr:
    """The element at an index, or at one for each axis, as a number of 32 bits, or 0 if not `inside`."""
    dtype = str(elements.dtype)
    kind, stored, wide = _ELEMENTS[dtype]
    source = _READ.format(kind, dtype, wide.format(f"*(const volatile {stored}*)at"))
    result = {"int": "int32", "float": "float32"}[kind]
    return T.cuda.func_call(
        f"read_element_{dtype}",
        elements.ptr_to(list(at) if isinstance(at, tuple) else [at]),
        inside,
        source_code=source,
        return_type=result,
    )
