"""What generated CUDA needs of libcu++, in a few lines: parsing the real headers takes NVRTC longer than the kernel.

TVM's code generator includes <cuda/std/cstdint> and <cuda/std/type_traits> in every source, and most of a small
kernel's compilation goes there.  NVRTC takes headers from memory; the instructions stay the same, and the cubin loses
libcu++'s constants, which nothing uses.
"""

from __future__ import annotations

import re

_TYPES = """
using int8_t = signed char;
using int16_t = signed short;
using int32_t = signed int;
using int64_t = signed long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
namespace cuda { namespace std {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
} }
"""
_TRAITS = """
namespace cuda { namespace std {
template <bool V> struct bool_constant { static constexpr bool value = V; };
template <class A, class B> struct is_same : bool_constant<false> {};
template <class A> struct is_same<A, A> : bool_constant<true> {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <class A, class... B> inline constexpr bool is_any_of = (is_same_v<A, B> || ...);
template <class A> struct is_signed
    : bool_constant<(char(-1) < 0 && is_same_v<A, char>) ||
                    is_any_of<A, signed char, short, int, long, long long, float, double>> {};
template <class A> struct is_unsigned
    : bool_constant<(char(-1) > 0 && is_same_v<A, char>) ||
                    is_any_of<A, bool, unsigned char, unsigned short, unsigned int, unsigned long,
                              unsigned long long>> {};
template <class A> struct is_floating_point : bool_constant<is_any_of<A, float, double>> {};
template <class A> struct is_integral
    : bool_constant<!is_floating_point<A>::value && (is_signed<A>::value || is_unsigned<A>::value)> {};
template <bool, class A = void> struct enable_if {};
template <class A> struct enable_if<true, A> { using type = A; };
template <bool, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
} }
"""
_GUARD = "#pragma once\n"
STAND_INS = {"cuda/std/cstdint": _GUARD + _TYPES, "cuda/std/type_traits": _GUARD + _TRAITS}
# headers that include nothing of libcu++ under NVRTC, or that NVRTC never reaches
_INDEPENDENT = {"cuda.h", "cstdint", "type_traits", "cuda_fp16.h", "cuda_bf16.h", "mma.h", "math_constants.h"} | {
    "sm_61_intrinsics.h"
}


def stand_ins(source: str) -> dict[str, str]:
    """Headers for NVRTC to take in the place of libcu++'s; none if `source` includes what needs the real ones."""
    included = set(re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", source, re.MULTILINE))
    return dict(STAND_INS) if included <= _INDEPENDENT | STAND_INS.keys() else {}
