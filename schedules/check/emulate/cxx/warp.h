// Shuffles, votes and __syncwarp with the mask and width rules of the CUDA C++ programming guide.
#pragma once
#include <cstdint>
#include <cstring>

#include "scheduler.h"

namespace emu {

enum class Shuffle { index, up, down, exclusive_or };
enum class Reduce { add, minimum, maximum, bit_and, bit_or, bit_xor };

void sync_warp(uint32_t mask, int line);
uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t value, int operand, int width, int line);
uint32_t ballot(uint32_t mask, bool predicate, int line);
uint32_t match_any(uint32_t mask, uint64_t value, int line);
int64_t reduce(Reduce kind, uint32_t mask, int64_t value, int line);

template <class T>
inline T shuffle(Shuffle kind, uint32_t mask, T value, int operand, int width, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most eight bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = shuffle(kind, mask, bits, operand, width, line);
  memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

}  // namespace emu

static inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) { emu::sync_warp(mask, line); }
static inline unsigned __activemask(int line = __builtin_LINE()) { return emu::active_mask(line); }

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  return emu::shuffle(emu::Shuffle::index, mask, value, source, width, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  return emu::shuffle(emu::Shuffle::up, mask, value, delta, width, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  return emu::shuffle(emu::Shuffle::down, mask, value, delta, width, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
  return emu::shuffle(emu::Shuffle::exclusive_or, mask, value, lanes, width, line);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return emu::ballot(mask, predicate != 0, line);
}
static inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return emu::ballot(mask, predicate != 0, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return emu::ballot(mask, predicate == 0, line) == 0;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, int line = __builtin_LINE()) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return emu::match_any(mask, bits, line);
}

#define EMU_REDUCE(name, kind)                                                          \
  static inline int name(unsigned mask, int value, int line = __builtin_LINE()) {       \
    return static_cast<int>(emu::reduce(kind, mask, value, line));                      \
  }                                                                                     \
  static inline unsigned name(unsigned mask, unsigned value, int line = __builtin_LINE()) { \
    return static_cast<unsigned>(emu::reduce(kind, mask, value, line));                 \
  }
EMU_REDUCE(__reduce_add_sync, emu::Reduce::add)
EMU_REDUCE(__reduce_min_sync, emu::Reduce::minimum)
EMU_REDUCE(__reduce_max_sync, emu::Reduce::maximum)
EMU_REDUCE(__reduce_and_sync, emu::Reduce::bit_and)
EMU_REDUCE(__reduce_or_sync, emu::Reduce::bit_or)
EMU_REDUCE(__reduce_xor_sync, emu::Reduce::bit_xor)
#undef EMU_REDUCE
