// Arithmetic that CUDA has and the C library has not.
#pragma once
// The C library's alone: what libstdc++ adds is nine tenths of all that a compiler would read for each kernel.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stdlib.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include <cstdint>
#include <cstring>

#include "vector_types.h"

// The C library declares its own __expf and others in <math.h>; rename what the kernel calls.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf

// What CUDA's <math.h> has as libstdc++'s has: the C functions for other types.
#if defined(__GLIBCXX__) && !defined(_GLIBCXX_CMATH)
#define EMU_FLOAT(name) \
  static inline float name(float x) { return name##f(x); }
EMU_FLOAT(fabs)
EMU_FLOAT(ceil)
EMU_FLOAT(floor)
EMU_FLOAT(trunc)
EMU_FLOAT(round)
EMU_FLOAT(rint)
EMU_FLOAT(nearbyint)
EMU_FLOAT(sqrt)
EMU_FLOAT(exp)
EMU_FLOAT(exp2)
EMU_FLOAT(log)
EMU_FLOAT(log2)
EMU_FLOAT(log10)
EMU_FLOAT(sin)
EMU_FLOAT(cos)
EMU_FLOAT(tan)
EMU_FLOAT(tanh)
EMU_FLOAT(erf)
#undef EMU_FLOAT
static inline float pow(float x, float y) { return powf(x, y); }
static inline float fmod(float x, float y) { return fmodf(x, y); }
static inline long abs(long x) { return labs(x); }
static inline long long abs(long long x) { return llabs(x); }
static inline float abs(float x) { return fabsf(x); }
static inline double abs(double x) { return fabs(x); }
#endif

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __saturatef(float x) { return x > 0.0f ? fminf(x, 1.0f) : 0.0f; }
static inline float normcdff(float x) { return 0.5f * erfcf(x * -0.70710678f); }
static inline float sigmoidf(float x) { return 1.0f / (1.0f + expf(-x)); }

#define EMU_MIN_MAX(T)                                         \
  static inline T min(T a, T b) { return a < b ? a : b; }      \
  static inline T max(T a, T b) { return a > b ? a : b; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
static inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
static inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
static inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
static inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
// Unlike a comparison, these drop a NaN, as CUDA does.
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(float a, double b) { return fmin(a, b); }
static inline double min(double a, float b) { return fmin(a, b); }
static inline double max(float a, double b) { return fmax(a, b); }
static inline double max(double a, float b) { return fmax(a, b); }

namespace emu {
template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// Float to integer as the GPU does it: out of range saturates and NaN gives 0, where C++ leaves both undefined.
inline int to_int(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  return x < -2147483648.0f ? -2147483647 - 1 : static_cast<int>(x);
}

inline int dot4(int a, bool a_signed, int b, bool b_signed, int sum) {
  for (int byte = 0; byte < 4; ++byte) {
    int x = a >> (8 * byte) & 0xff, y = b >> (8 * byte) & 0xff;
    sum += (a_signed ? static_cast<int8_t>(x) : x) * (b_signed ? static_cast<int8_t>(y) : y);
  }
  return sum;
}
}  // namespace emu

static inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
static inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
static inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
static inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }
static inline long long __double_as_longlong(double x) { return emu::bit_cast<long long>(x); }
static inline double __longlong_as_double(long long x) { return emu::bit_cast<double>(x); }
static inline int __float2int_rn(float x) { return emu::to_int(nearbyintf(x)); }
static inline int __float2int_rz(float x) { return emu::to_int(x); }
static inline int __float2int_rd(float x) { return emu::to_int(floorf(x)); }
static inline int __float2int_ru(float x) { return emu::to_int(ceilf(x)); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

static inline unsigned __vmaxs2(unsigned a, unsigned b) {
  auto larger = [&](int shift) { return unsigned(uint16_t(int16_t(a >> shift) > int16_t(b >> shift) ? a >> shift : b >> shift)) << shift; };
  return larger(0) | larger(16);
}
static inline int __dp4a(int a, int b, int sum) { return emu::dot4(a, true, b, true, sum); }
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  return static_cast<unsigned>(emu::dot4(a, false, b, false, sum));
}
static inline int __dp4a(char4 a, char4 b, int sum) {
  return __dp4a(emu::bit_cast<int>(a), emu::bit_cast<int>(b), sum);
}
static inline unsigned __dp4a(uchar4 a, uchar4 b, unsigned sum) {
  return __dp4a(emu::bit_cast<unsigned>(a), emu::bit_cast<unsigned>(b), sum);
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
static inline int __mul24(int a, int b) { return a * b; }
static inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int bit = 0; bit < 32; ++bit) result |= (x >> bit & 1) << (31 - bit);
  return result;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned choice = selector >> (4 * i), byte = bytes >> (8 * (choice & 7)) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
