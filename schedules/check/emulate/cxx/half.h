// __half and __nv_bfloat16: arithmetic in float, rounded to nearest even after every operation, as the GPU does.
// Own types rather than _Float16, which g++ knows only from version 12 on and only on some CPUs.
#pragma once
#include <cstdint>
#include <cstring>

#include "vector_types.h"

namespace emu {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

struct HalfFormat {
  static float decode(uint16_t half) {
    uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return bits_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and makes subnormal numbers normal.
    return bits_float(sign | float_bits(bits_float(rest << 13) * 0x1p112f));
  }
  static uint16_t encode(float value) {
    uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return 0x7fff;
    if (rest >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or beyond
    if (rest < 0x38800000u) {                        // subnormal: let a float addition do the rounding
      return sign | (float_bits(bits_float(rest) + 0.5f) - float_bits(0.5f));
    }
    return sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13);
  }
};

struct BFloatFormat {
  static float decode(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }
  static uint16_t encode(float value) {
    uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  }
};

template <class Format>
struct Small {
  uint16_t bits;

  Small() = default;
  Small(const Small&) = default;
  Small(const volatile Small& other) : bits(other.bits) {}
  Small(float value) : bits(Format::encode(value)) {}
  Small(double value) : bits(Format::encode(static_cast<float>(value))) {}
  Small(int value) : Small(static_cast<float>(value)) {}
  Small(unsigned value) : Small(static_cast<float>(value)) {}
  Small(long value) : Small(static_cast<float>(value)) {}
  Small(unsigned long value) : Small(static_cast<float>(value)) {}
  Small(long long value) : Small(static_cast<float>(value)) {}
  Small(unsigned long long value) : Small(static_cast<float>(value)) {}
  template <class Other>
  explicit Small(const Small<Other>& other) : Small(static_cast<float>(other)) {}

  Small& operator=(const Small&) = default;
  void operator=(const volatile Small& other) { bits = other.bits; }
  void operator=(const Small& other) volatile { bits = other.bits; }
  void operator=(const volatile Small& other) volatile { bits = other.bits; }
  operator float() const { return Format::decode(bits); }
  operator float() const volatile { return Format::decode(bits); }
  static Small from_bits(uint16_t bits) {
    Small value;
    value.bits = bits;
    return value;
  }

  friend Small operator+(Small a, Small b) { return Small(float(a) + float(b)); }
  friend Small operator-(Small a, Small b) { return Small(float(a) - float(b)); }
  friend Small operator*(Small a, Small b) { return Small(float(a) * float(b)); }
  friend Small operator/(Small a, Small b) { return Small(float(a) / float(b)); }
  friend Small operator-(Small a) { return from_bits(a.bits ^ 0x8000u); }
  friend Small operator+(Small a) { return a; }
  friend bool operator==(Small a, Small b) { return float(a) == float(b); }
  friend bool operator!=(Small a, Small b) { return float(a) != float(b); }
  friend bool operator<(Small a, Small b) { return float(a) < float(b); }
  friend bool operator<=(Small a, Small b) { return float(a) <= float(b); }
  friend bool operator>(Small a, Small b) { return float(a) > float(b); }
  friend bool operator>=(Small a, Small b) { return float(a) >= float(b); }
  Small& operator+=(Small b) { return *this = *this + b; }
  Small& operator-=(Small b) { return *this = *this - b; }
  Small& operator*=(Small b) { return *this = *this * b; }
  Small& operator/=(Small b) { return *this = *this / b; }
};

template <class T>
struct alignas(4) Pair {
  T x, y;
  Pair() = default;
  Pair(T x_, T y_) : x(x_), y(y_) {}
  friend Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }
  friend Pair operator-(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }
  friend Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }
  friend Pair operator/(Pair a, Pair b) { return {a.x / b.x, a.y / b.y}; }
};

}  // namespace emu

using __half = emu::Small<emu::HalfFormat>;
using half = __half;
using __half2 = emu::Pair<__half>;
using half2 = __half2;
using __nv_bfloat16 = emu::Small<emu::BFloatFormat>;
using nv_bfloat16 = __nv_bfloat16;
using __nv_bfloat162 = emu::Pair<__nv_bfloat16>;
using nv_bfloat162 = __nv_bfloat162;
