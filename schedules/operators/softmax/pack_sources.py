"""CUDA C++ of what the row program on packs calls, where TIRx has no expression for it or one that compiles to more.

Loads and stores: TIR's have no cache policy and lose their width under a condition, and PTX by its name is volatile, so
that addresses are computed anew.  Parts of
packs: their units are of an alignment that only the width tells, in words that are addressed by bytes.

Device functions as text, most of them for `str.format`.  Words are `unsigned`; `a`, `b`, `c` and `d`, or `x` to `w`,
those of a pack in order.
"""

from __future__ import annotations

LOAD = """
__device__ __forceinline__ void pack_load_{name}({parameters}, const void* from) {{
  {load} {assign}
}}
"""
# elements from `first` to before `last` stay, the others are of other rows
FILL = """
__device__ __forceinline__ void pack_fill_{words}_{bits}({parameters}, int first, int last, unsigned neutral) {{
  unsigned v[{words}] = {{{names}}};
#pragma unroll
  for (int i = 0; i < {words}; ++i) {{
    unsigned own = 0;
#pragma unroll
    for (int k = 0; k < 32 / {bits}; ++k)
      if (i * (32 / {bits}) + k >= first && i * (32 / {bits}) + k < last) own |= {ones}u << ({bits} * k);
    v[i] = (v[i] & own) | (neutral & ~own);
  }}
  {out}
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
STORE_ONE = """
__device__ __forceinline__ void pack_store_one_{name}(unsigned a, void* to) {{ {store}((unsigned*)to, a); }}
"""
STORE_HALF = """
__device__ __forceinline__ void pack_store_half_{name}(unsigned a, void* to) {{
  {store}((unsigned short*)to, (unsigned short)a);
}}
"""
STORES = {  # by words
    4: ("pack_store", STORE),
    2: ("pack_store_two", STORE_TWO),
    1: ("pack_store_one", STORE_ONE),
    0: ("pack_store_half", STORE_HALF),
}
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
# of float16; a maximum of TIR's float16x2 is two comparisons and selections: 445 instructions instead of 378 of softmax
# of 1000 columns
LARGEST = """
__device__ __forceinline__ unsigned pack_{function}(unsigned a, unsigned b) {{
  half2 m = __h{function}2(*(half2*)&a, *(half2*)&b); return *(unsigned*)&m;
}}
"""
# of float32 without NaN, whose bits are ordered as integers are once those of negative numbers are turned over
LARGEST_OF_WARP = """
__device__ __forceinline__ float pack_largest_of_warp(float value) {
  int bits = __float_as_int(value);
  bits = __reduce_max_sync(0xffffffffu, bits ^ ((bits >> 31) & 0x7fffffff));
  return __int_as_float(bits ^ ((bits >> 31) & 0x7fffffff));
}
"""
