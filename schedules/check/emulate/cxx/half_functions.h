// The functions of cuda_fp16.h and cuda_bf16.h that generated code calls, for both types at once.
#pragma once
#include "half.h"
#include "math_functions.h"

static inline half __float2half(float x) { return x; }
static inline half __float2half_rn(float x) { return x; }
static inline half __double2half(double x) { return x; }
static inline half __int2half_rn(int x) { return x; }
static inline half __uint2half_rn(unsigned x) { return x; }
static inline float __half2float(half x) { return x; }
static inline int __half2int_rn(half x) { return static_cast<int>(nearbyintf(x)); }
static inline int __half2int_rz(half x) { return static_cast<int>(float(x)); }
static inline unsigned short __half_as_ushort(half x) { return x.bits; }
static inline short __half_as_short(half x) { return static_cast<short>(x.bits); }
static inline half __ushort_as_half(unsigned short bits) { return half::from_bits(bits); }
static inline half __short_as_half(short bits) { return half::from_bits(bits); }

static inline nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline nv_bfloat16 __double2bfloat16(double x) { return x; }
static inline nv_bfloat16 __int2bfloat16_rn(int x) { return x; }
static inline float __bfloat162float(nv_bfloat16 x) { return x; }
static inline int __bfloat162int_rn(nv_bfloat16 x) { return static_cast<int>(nearbyintf(x)); }
static inline unsigned short __bfloat16_as_ushort(nv_bfloat16 x) { return x.bits; }
static inline nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return nv_bfloat16::from_bits(bits); }

static inline half2 make_half2(half x, half y) { return {x, y}; }
static inline half2 __halves2half2(half x, half y) { return {x, y}; }
static inline half2 __half2half2(half x) { return {x, x}; }
static inline half2 __float2half2_rn(float x) { return {x, x}; }
static inline half2 __floats2half2_rn(float x, float y) { return {x, y}; }
static inline half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
static inline float2 __half22float2(half2 v) { return {v.x, v.y}; }
static inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
static inline nv_bfloat162 __bfloat162bfloat162(nv_bfloat16 x) { return {x, x}; }
static inline nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
static inline nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
static inline nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
static inline float2 __bfloat1622float2(nv_bfloat162 v) { return {v.x, v.y}; }

#define EMU_UNARY(T, name, expression) \
  static inline T name(T value) {      \
    float x = value;                   \
    return T(expression);              \
  }

#define EMU_HALF_FUNCTIONS(T)                                                                        \
  static inline T __hadd(T a, T b) { return a + b; }                                                 \
  static inline T __hsub(T a, T b) { return a - b; }                                                 \
  static inline T __hmul(T a, T b) { return a * b; }                                                 \
  static inline T __hdiv(T a, T b) { return a / b; }                                                 \
  static inline T __hneg(T a) { return -a; }                                                         \
  static inline T __habs(T a) { return T::from_bits(a.bits & 0x7fffu); }                             \
  /* in double, so that the product is not rounded before the sum */                                 \
  static inline T __hfma(T a, T b, T c) { return T(double(float(a)) * float(b) + float(c)); }        \
  static inline T __hmax(T a, T b) { return T(fmaxf(a, b)); }                                        \
  static inline T __hmin(T a, T b) { return T(fminf(a, b)); }                                        \
  static inline bool __heq(T a, T b) { return a == b; }                                              \
  static inline bool __hne(T a, T b) { return a != b; }                                              \
  static inline bool __hlt(T a, T b) { return a < b; }                                               \
  static inline bool __hle(T a, T b) { return a <= b; }                                              \
  static inline bool __hgt(T a, T b) { return a > b; }                                               \
  static inline bool __hge(T a, T b) { return a >= b; }                                              \
  static inline bool __hisnan(T a) { return a != a; }                                                \
  EMU_UNARY(T, hexp, expf(x))                                                                        \
  EMU_UNARY(T, hexp2, exp2f(x))                                                                      \
  EMU_UNARY(T, hexp10, exp10f(x))                                                                    \
  EMU_UNARY(T, hlog, logf(x))                                                                        \
  EMU_UNARY(T, hlog2, log2f(x))                                                                      \
  EMU_UNARY(T, hlog10, log10f(x))                                                                    \
  EMU_UNARY(T, hsqrt, sqrtf(x))                                                                      \
  EMU_UNARY(T, hrsqrt, rsqrtf(x))                                                                    \
  EMU_UNARY(T, hrcp, 1.0f / x)                                                                       \
  EMU_UNARY(T, hsin, sinf(x))                                                                        \
  EMU_UNARY(T, hcos, cosf(x))                                                                        \
  EMU_UNARY(T, htanh, tanhf(x))                                                                      \
  EMU_UNARY(T, hfloor, floorf(x))                                                                    \
  EMU_UNARY(T, hceil, ceilf(x))                                                                      \
  EMU_UNARY(T, htrunc, truncf(x))                                                                    \
  EMU_UNARY(T, hrint, nearbyintf(x))                                                                 \
  static inline emu::Pair<T> __hadd2(emu::Pair<T> a, emu::Pair<T> b) { return a + b; }               \
  static inline emu::Pair<T> __hsub2(emu::Pair<T> a, emu::Pair<T> b) { return a - b; }               \
  static inline emu::Pair<T> __hmul2(emu::Pair<T> a, emu::Pair<T> b) { return a * b; }               \
  static inline emu::Pair<T> __h2div(emu::Pair<T> a, emu::Pair<T> b) { return a / b; }               \
  static inline emu::Pair<T> __hneg2(emu::Pair<T> a) { return {-a.x, -a.y}; }                        \
  static inline emu::Pair<T> __hfma2(emu::Pair<T> a, emu::Pair<T> b, emu::Pair<T> c) {               \
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                                           \
  }                                                                                                  \
  static inline emu::Pair<T> __hmax2(emu::Pair<T> a, emu::Pair<T> b) {                               \
    return {__hmax(a.x, b.x), __hmax(a.y, b.y)};                                                     \
  }                                                                                                  \
  static inline emu::Pair<T> __hmin2(emu::Pair<T> a, emu::Pair<T> b) {                               \
    return {__hmin(a.x, b.x), __hmin(a.y, b.y)};                                                     \
  }                                                                                                  \
  static inline emu::Pair<T> h2exp(emu::Pair<T> a) { return {hexp(a.x), hexp(a.y)}; }                \
  static inline emu::Pair<T> h2exp2(emu::Pair<T> a) { return {hexp2(a.x), hexp2(a.y)}; }             \
  static inline T __low2half(emu::Pair<T> a) { return a.x; }                                         \
  static inline T __high2half(emu::Pair<T> a) { return a.y; }                                        \
  static inline float __low2float(emu::Pair<T> a) { return a.x; }                                    \
  static inline float __high2float(emu::Pair<T> a) { return a.y; }

EMU_HALF_FUNCTIONS(half)
EMU_HALF_FUNCTIONS(nv_bfloat16)
#undef EMU_HALF_FUNCTIONS
#undef EMU_UNARY
