// wgmma: matrix multiplication by the four warps of a warpgroup (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions").
//
// The product is computed at the wait_group that requires it, once for the warpgroup; the accumulators keep their old
// values until then. Shared memory and registers that hold an operand must be the same at issue and at that time.
#pragma once
#include <cstdint>

#include "matrix.h"

namespace emu {

struct WarpgroupShape {
  int n;
  Element a, b;
  bool transpose_a, transpose_b;  // the operand in shared memory is MN-major
  int sign_a, sign_b;             // 1 or -1

  int bytes() const { return a == Element::s8 || a == Element::u8 ? 1 : a == Element::tf32 ? 4 : 2; }
  int depth() const { return 32 / bytes(); }
};

// `d` points to the n / 2 accumulators of the thread, `a` to its 4 registers of A, null if A is in shared memory.
void wgmma(const WarpgroupShape& shape, void* const* d, uint64_t a_descriptor, const void* const* a,
           uint64_t b_descriptor, bool accumulate, int line);
void wgmma_fence();
void wgmma_commit();
// Waits until at most `pending` groups of the warp are left.
void wgmma_wait(unsigned pending, int line);

}  // namespace emu
