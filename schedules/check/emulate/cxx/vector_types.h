// float2, uint4 and the other vector types of CUDA, with its alignments.
#pragma once

#define EMU_VECTORS(name, scalar)                                                                          \
  struct name##1 { scalar x; };                                                                            \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };                                             \
  struct name##3 { scalar x, y, z; };                                                                      \
  struct alignas(4 * sizeof(scalar) > 16 ? 16 : 4 * sizeof(scalar)) name##4 { scalar x, y, z, w; };        \
  static inline name##1 make_##name##1(scalar x) { return {x}; }                                           \
  static inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                              \
  static inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }                 \
  static inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

// uint3 is declared by scheduler.h, which needs it for threadIdx.
#define uint3 emu_unused_uint3
EMU_VECTORS(uint, unsigned int)
#undef uint3
EMU_VECTORS(char, signed char)
EMU_VECTORS(uchar, unsigned char)
EMU_VECTORS(short, short)
EMU_VECTORS(ushort, unsigned short)
EMU_VECTORS(int, int)
EMU_VECTORS(long, long)
EMU_VECTORS(ulong, unsigned long)
EMU_VECTORS(longlong, long long)
EMU_VECTORS(ulonglong, unsigned long long)
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)
#undef EMU_VECTORS
