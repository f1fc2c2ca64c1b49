// Operands of a product as they lie in shared memory, which wgmma and tcgen05.mma read alike.
#pragma once
#include <cstdint>
#include <cstring>

#include "half.h"
#include "matrix.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EMU_VECTORISED __attribute__((optimize("O3"), target_clones("avx2", "default")))
#else
#define EMU_VECTORISED
#endif

namespace emu {

// What a matrix descriptor says (PTX ISA, "Matrix Descriptor Format"); sizes and addresses in bytes.
struct Descriptor {
  uint32_t start, leading, stride;
  int base, swizzle;  // log2 of the swizzle's 16-byte chunks, 0 for none
};

// One operand as it lies in shared memory: `rows` (of A, columns of B) by the depth of the instruction.
struct Operand {
  Descriptor descriptor;
  int rows, depth, bytes;  // bytes of an element
  bool transposed;
};

// Calls `chunk(offset, row, k)` for each 16 bytes: 4, 8 or 16 elements along k, or along the rows if transposed. These
// are the canonical layouts of the PTX ISA ("Shared Memory Matrix Layout", "Strides"); the swizzle exchanges chunks by
// the bits of the address.
template <class Chunk>
void for_chunks(const Operand& operand, const Chunk& chunk) {
  const Descriptor& d = operand.descriptor;
  int per = 16 / operand.bytes, span = 16 << d.swizzle;  // bytes of a row of the swizzle's pattern
  auto visit = [&](uint32_t address, int row, int k) {
    address &= 0x3ffff;
    uint32_t pattern_row = (address >> 7) - d.base;
    chunk(address ^ (pattern_row & ((1u << d.swizzle) - 1)) << 4, row, k);
  };
  if (operand.transposed) {
    int wide = span / operand.bytes;  // rows side by side in a row of the pattern
    for (int k = 0; k < operand.depth; ++k) {
      for (int row = 0; row < operand.rows; row += per) {
        uint32_t outer = row / wide, deep = k / 8;
        // Without a swizzle the two strides change places.
        uint32_t distance = d.swizzle ? outer * d.leading + deep * d.stride : outer * d.stride + deep * d.leading;
        visit(d.start + distance + k % 8 * span + row % wide * operand.bytes, row, k);
      }
    }
    return;
  }
  for (int row = 0; row < operand.rows; ++row) {
    uint32_t begin = d.start + row / 8 * d.stride + row % 8 * span;
    for (int k = 0; k < operand.depth; k += per) {
      visit(begin + k / per * (d.swizzle ? 16 : d.leading), row, k);
    }
  }
}

inline uint64_t mix(uint64_t hash, uint64_t word) { return (hash ^ word) * 0x9e3779b97f4a7c15u ^ hash >> 29; }

inline uint64_t hash_bytes(const char* data, size_t words) {
  uint64_t hash = 0;
  for (size_t i = 0; i < words; ++i) {
    uint64_t word;
    memcpy(&word, data + 8 * i, 8);
    hash = mix(hash, word);
  }
  return hash;
}

inline const float* half_values() {
  static float values[1 << 16];
  static bool filled = false;
  for (int bits = 0; !filled && bits < 1 << 16; ++bits) values[bits] = HalfFormat::decode(static_cast<uint16_t>(bits));
  filled = true;
  return values;
}

inline void unpack(const char* from, Element type, int count, float* to) {
  static const float* halves = half_values();
  for (int i = 0; i < count; ++i) {
    if (type == Element::tf32) {  // of a float32 the low bits are left out
      uint32_t word;
      memcpy(&word, from + 4 * i, 4);
      to[i] = bits_float(word & 0xffffe000u);
      continue;
    }
    uint16_t bits;
    memcpy(&bits, from + 2 * i, 2);
    to[i] = type == Element::f16 ? halves[bits] : BFloatFormat::decode(bits);
  }
}
inline void unpack(const char* from, Element type, int count, int32_t* to) {
  for (int i = 0; i < count; ++i) {
    to[i] = type == Element::s8 ? static_cast<int8_t>(from[i]) : static_cast<uint8_t>(from[i]);
  }
}

}  // namespace emu
