// What translated inline PTX is made of. The translator keeps every PTX register in an unsigned integer.
#pragma once
#include <cstdint>
#include <cstring>

#include "async_copy.h"
#include "bulk_copy.h"
#include "half.h"
#include "math_functions.h"
#include "matrix.h"
#include "mbarrier.h"
#include "scheduler.h"
#include "shared_memory.h"
#include "tcgen05.h"
#include "wgmma.h"

namespace emu {

// The register that a C operand is bound to.
template <class T>
inline auto to_register(T value) {
  if constexpr (sizeof(T) <= 4) {
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
  } else {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
  }
}
template <class T, class Register>
inline void from_register(T& target, Register bits) {
  static_assert(sizeof(T) <= sizeof(Register), "a register is at least as wide as its operand");
  memcpy(static_cast<void*>(&target), &bits, sizeof(T));
}
inline float as_float(uint32_t bits) { return bit_cast<float>(bits); }

template <class T>
inline T load(const void* address) {
  T value;
  memcpy(&value, address, sizeof(T));
  return value;
}
template <class T>
inline void store(void* address, T value) {
  memcpy(address, &value, sizeof(T));
}

// cvt.pack.sat.s8
inline uint32_t saturate_byte(uint32_t bits) {
  int value = static_cast<int>(bits);
  return static_cast<uint8_t>(value > 127 ? 127 : value < -128 ? -128 : value);
}

[[noreturn]] inline void unknown_ptx(const char* text, int line) { fail(line, "unknown PTX: %s", text); }

}  // namespace emu
