// Shared memory of the running block. Every __shared__ variable lies in pages of its own and ends at an inaccessible
// page, so running over its end faults; all of it is filled with 0xFF (NaN) before each block.
#pragma once
#include <cstddef>
#include <cstdint>

#include "launch.h"

namespace emu {

static SharedLayout shared_layout;  // one per compiled source: a kernel library is a single translation unit

namespace {  // internal linkage: the loader must not merge the numbering of two kernel libraries
// The translator turns `__shared__ T name[n];` into `auto& name = emu::shared_variable<T[n], alignment, number>();`.
template <class T, size_t alignment, int number>
struct SharedVariable {
  static inline const int index = shared_layout.add(sizeof(T), alignment > alignof(T) ? alignment : alignof(T));
};
}  // namespace
template <class T, size_t alignment, int number>
inline T& shared_variable() {
  return *reinterpret_cast<T*>(shared_layout.address[SharedVariable<T, alignment, number>::index]);
}

// `extern __shared__ T name[];` becomes `T* name = emu::dynamic_shared<T, alignment>();`.
void* dynamic_shared_memory(size_t alignment);
template <class T, size_t alignment>
inline T* dynamic_shared() {
  return static_cast<T*>(dynamic_shared_memory(alignment));
}

// The 32-bit shared window: its addresses are offsets into the block's shared memory.
uint32_t shared_address(const void* pointer, int line);
// The memory behind `bytes` bytes of the window; fails if they are not inside one variable, or not aligned.
char* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* what, int line);

}  // namespace emu

static inline size_t __cvta_generic_to_shared(const volatile void* pointer, int line = __builtin_LINE()) {
  return emu::shared_address(const_cast<const void*>(pointer), line);
}
