"""CUDA C++ of what the row program on packs calls: device functions as text, most of them for `str.format`.

Words are `unsigned`; `a`, `b`, `c` and `d`, or `x` to `w`, those of a pack in order.
"""

from __future__ import annotations

LOAD = """
__device__ __forceinline__ void pack_load_{name}({parameters}, const void* from) {{
  {load} {assign}
}}
"""
# elements from `first` to before `last` stay, the others are of other rows
FILL = """
__device__ __forceinline__ void pack_fill_{bits}(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
    int first, int last, unsigned neutral) {{
  unsigned w[4] = {{a, b, c, d}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {{
    unsigned own = 0;
#pragma unroll
    for (int k = 0; k < 32 / {bits}; ++k)
      if (i * (32 / {bits}) + k >= first && i * (32 / {bits}) + k < last) own |= {ones}u << ({bits} * k);
    w[i] = (w[i] & own) | (neutral & ~own);
  }}
  a = w[0]; b = w[1]; c = w[2]; d = w[3];
}}
"""
STORE = """
__device__ __forceinline__ void pack_store_{name}(unsigned a, unsigned b, unsigned c, unsigned d, void* to) {{
  {store}((uint4*)to, make_uint4(a, b, c, d));
}}
"""
STORE_SHARED = """
__device__ __forceinline__ void pack_store_shared(unsigned a, unsigned b, unsigned c, unsigned d, void* to) {
  *(uint4*)to = make_uint4(a, b, c, d);
}
"""
STORE_TWO = """
__device__ __forceinline__ void pack_store_two_{name}(unsigned a, unsigned b, void* to) {{
  {store}((uint2*)to, make_uint2(a, b));
}}
"""
# bytes from `first` to before `last`, both multiples of {unit}, in as few stores as their alignment allows
STORE_SOME = """
__device__ __forceinline__ void pack_store_some_{unit}(unsigned a, unsigned b, unsigned c, unsigned d, void* to,
    int first, int last) {{
  unsigned v[4] = {{a, b, c, d}};
#pragma unroll
  for (int i = 0; i < 4; i += 2) {{
    if (4 * i >= first && 4 * i + 8 <= last) ((uint2*)to)[i / 2] = make_uint2(v[i], v[i + 1]);
    else if ({unit} < 8)
#pragma unroll
      for (int j = i; j < i + 2; ++j) {{
        if (4 * j >= first && 4 * j + 4 <= last) ((unsigned*)to)[j] = v[j];
        else if ({unit} < 4) {{
          if (4 * j >= first && 4 * j + 2 <= last) ((unsigned short*)to)[2 * j] = (unsigned short)v[j];
          if (4 * j + 2 >= first && 4 * j + 4 <= last) ((unsigned short*)to)[2 * j + 1] = (unsigned short)(v[j] >> 16);
        }}
      }}
  }}
}}
"""
ZERO = """
__device__ __forceinline__ unsigned pack_zero(long long elements) { return (unsigned)(elements >> 63); }
"""
WIDEN = {  # the low and the high half of a word
    "float16": tuple(f"__half2float(__ushort_as_half((unsigned short)({half})))" for half in ("w", "w >> 16")),
    "bfloat16": ("__uint_as_float(w << 16)", "__uint_as_float(w & 0xffff0000u)"),
    "float32": ("__uint_as_float(w)",),
}
ELEMENT = """
__device__ __forceinline__ float pack_element_{name}(unsigned w) {{ return {value}; }}
"""
LARGEST = """
__device__ __forceinline__ unsigned pack_{function}_{type}(unsigned a, unsigned b) {{
  {type} m = __h{function}2(*({type}*)&a, *({type}*)&b); return *(unsigned*)&m;
}}
"""
ACROSS = """
__device__ __forceinline__ float pack_{kind}_{lanes}(float v) {{
#pragma unroll
  for (int m = {lanes} / 2; m > 0; m /= 2) {{
    float other = __shfl_xor_sync(0xffffffffu, v, m);
    v = {combine};
  }}
  return v;
}}
"""
PACK = """
__device__ __forceinline__ unsigned pack_two_{type}(float a, float b) {{
  {type} r = {convert}(a, b); return *(unsigned*)&r;
}}
"""
FMA = """
__device__ __forceinline__ float pack_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
"""
TIMES = """
__device__ __forceinline__ float pack_times(float a, float b) { return __fmul_rn(a, b); }
"""
TWO = {  # the type of two elements in a word, and what rounds to them
    "float16": ("half2", "__floats2half2_rn"),
    "bfloat16": ("nv_bfloat162", "__floats2bfloat162_rn"),
}
COMBINE = {"max": "fmaxf(v, other)", "sum": "v + other"}
