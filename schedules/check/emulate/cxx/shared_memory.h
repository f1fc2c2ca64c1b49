// Shared memory of the running block. Every __shared__ variable lies in pages of its own and ends at an inaccessible
// page, so running over its end faults; all of it is filled with 0xFF (NaN) before each block.
#pragma once
#include <cstddef>
#include <cstdint>

#include "launch.h"

namespace emu {

constexpr int kMaxKernels = 64;
static SharedLayout shared_layouts[kMaxKernels];  // of the kernels of one compiled source, a single translation unit

namespace {  // internal linkage: the loader must not merge the numbering of two kernel libraries
// The translator turns `__shared__ T name[n];` into
// `auto& name = emu::shared_variable<T[n], alignment, kernel, number>();`.
template <class T, size_t alignment, int kernel, int number>
struct SharedVariable {
  static inline const int index =
      shared_layouts[kernel].add(sizeof(T), alignment > alignof(T) ? alignment : alignof(T));
};
}  // namespace
template <class T, size_t alignment, int kernel, int number>
inline T& shared_variable() {
  return *reinterpret_cast<T*>(shared_layouts[kernel].address[SharedVariable<T, alignment, kernel, number>::index]);
}

// `extern __shared__ T name[];` becomes `T* name = emu::dynamic_shared<T, alignment>();`.
void* dynamic_shared_memory(size_t alignment);
template <class T, size_t alignment>
inline T* dynamic_shared() {
  return static_cast<T*>(dynamic_shared_memory(alignment));
}

// The 32-bit shared window of the cluster: an address says which block, which variable and which byte.
uint32_t shared_address(const void* pointer, int line);
// mapa: the same variable in another block of the cluster.
uint32_t shared_address_in(uint32_t address, uint32_t rank, int line);
int shared_rank(uint32_t address);
// The low bits, as the hardware has them: what a matrix descriptor holds and a swizzle is taken from.
uint32_t shared_offset(uint32_t address);
// The memory behind `bytes` bytes of the window; fails if they are not inside one variable, or not aligned, or in a
// block that has exited. `own_shared_pointer` also fails in another block than the running one.
char* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* what, int line);
char* own_shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* what, int line);

// The async proxy (PTX ISA, "Proxies"): bulk copies and wgmma see what ordinary stores wrote only after a
// fence.proxy.async. Reading earlier fails; the fence stands for all threads of the block that ran before it.
void fence_async_proxy();
void write_async(uint32_t address, const void* data, size_t bytes, int line);
// The 16-byte chunk at an offset of block `rank`, as the async proxy may read it and without that check.
const char* read_async(int rank, uint32_t offset, const char* what, int line);
const char* shared_chunk(int rank, uint32_t offset, const char* what, int line);

}  // namespace emu

static inline size_t __cvta_generic_to_shared(const volatile void* pointer, int line = __builtin_LINE()) {
  return emu::shared_address(const_cast<const void*>(pointer), line);
}
