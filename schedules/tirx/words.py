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
# A conversion is 16 to a cycle of a multiprocessor, a multiply-add 128.  A float32 below 2**-125 is its bits times
# 2**-149: by a factor of that, y is rounded to nearest even to a whole number, which its bits are.  Below 0 `.sat` has
# 0, which is relu; to keep what is there, 1.5 * 2**-126 is added and its bits taken off.  No y is too large for that.
_PACK_8 = """
__device__ __forceinline__ int {0}_whole(float y) {{
  int bits;
  asm("fma.rn.sat.f32 %0, %1, 0f00000001, 0f{1:08X};" : "=r"(bits) : "f"(y));
  return bits - {1:#x};
}}
__device__ __forceinline__ unsigned int {0}(float a, float b, float c, float d) {{
  unsigned int high, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"({0}_whole(d)), "r"({0}_whole(c)), "r"(0));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"({0}_whole(b)), "r"({0}_whole(a)), "r"(high));
  return all;
}}
"""
_FLOAT_8 = """
__device__ __forceinline__ float float_s8_{0}(unsigned int bytes) {{
  return __uint_as_float(__byte_perm(bytes ^ 0x8080, 0x4b000000, 0x765{0})) - 8388736.f;
}}
"""
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


def pack_8(values: Sequence[Expr], relu: bool) -> Expr:
    """The word of four float32 numbers rounded to int8, to nearest even, and saturated, the first in its lowest byte;
    with `relu` those below 0 are 0."""
    name, offset = ("pack_relu_s8", 0) if relu else ("pack_s8", 0xC00000)
    return T.cuda.func_call(name, *values, source_code=_PACK_8.format(name, offset), return_type="uint32")


def widened(value: Expr) -> Expr:
    """A number of 8 or 16 bits as one of 32."""
    return value.astype(_WIDE.get(str(value.ty), str(value.ty)))


def read_pair(name: str, elements: Buffer, at: Expr) -> Sequence[Expr]:
    """The elements at `at`, which is even, and behind it, by one load, as numbers of 32 bits; nobody writes them."""
    return _halves(name, str(elements.dtype), "read_pair", "__ldg((const {}*)at)", elements.ptr_to([at]))


def read_shared_pair(name: str, dtype: str, at: Pointer) -> Sequence[Expr]:
    """Two elements of `dtype` side by side in shared memory, by one load, as numbers of 32 bits; int8 as float32."""
    return _halves(name, dtype, "read_shared_pair", "*(const {}*)at", at)


def _halves(name: str, dtype: str, call: str, loaded: str, at: Pointer) -> Sequence[Expr]:
    bits = numpy_dtype(dtype).itemsize * 8
    word, kind = f"uint{2 * bits}", _WORDS[2 * bits]
    source = _READ_WORD.format(f"{call}_{bits}", kind, loaded.format(kind))
    both = named(f"{name}_pair", T.cuda.func_call(f"{call}_{bits}", at, source_code=source, return_type=word))
    if dtype == "int8":  # their bytes become the lowest bits of 2**23 + 128 + element
        call, wide = "float_s8_{}", T.Cast("uint32", both)
        return [
            named(name, T.cuda.func_call(call.format(i), wide, source_code=_FLOAT_8.format(i), return_type="float32"))
            for i in range(2)
        ]
    halves = (T.Cast(f"uint{bits}", half) for half in (both, T.shift_right(both, tirx.const(bits, word))))
    return [named(name, widened(T.reinterpret(dtype, half))) for half in halves]


def read_shared_apart(name: str, dtype: str, places: Sequence[Pointer]) -> Sequence[Expr]:
    """Elements of `dtype`, of 16 bits, in shared memory, as numbers of 32 bits."""
    name_of_call, kind = "read_shared_16", _WORDS[16]
    source = _READ_WORD.format(name_of_call, kind, f"*(const {kind}*)at")
    halves = [T.cuda.func_call(name_of_call, at, source_code=source, return_type="uint16") for at in places]
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
