// tcgen05: products of one thread into tensor memory (PTX ISA, "TensorCore 5th Generation Family Instructions").
//
// A block's tensor memory is 128 lanes of 512 columns of 32 bits; an address is a lane in its upper half and a column in
// its lower. A product is computed before the arrival of a commit behind it: "late" ones when a thread waits for that
// and nothing else can run, "early" ones at issue. Shared memory that holds an operand must be the same at both times,
// and no load or product may touch sums that another is still to write or to read. Loads give poison until they are
// waited for.
//
// Known are dense products of both operands K-major in shared memory, of 128 rows of each block: one tile of sums on all
// lanes.
#pragma once
#include <cstdint>

#include "matrix.h"

namespace emu {

// `target`: where the address is written, in shared memory. All lanes of a warp execute these three.
void tensor_alloc(uint32_t target, uint32_t columns, int group, int line);
void tensor_dealloc(uint32_t address, uint32_t columns, int group, int line);
void tensor_relinquish(int group, int line);

// `shape` is the instruction descriptor; `bytes` of the kind: kind::i8 or kind::f16.
void tensor_multiply(uint32_t sums, uint64_t a, uint64_t b, uint32_t shape, bool accumulate, int bytes, int group,
                     int line);
// `blocks`: ranks of the cluster whose mbarriers at that address are arrived at, as a mask; 0 for that of the address.
void tensor_commit(uint32_t mbarrier, uint32_t blocks, int group, int line);

// .32x32b (`wide` false): a lane has `count` columns of its own lane of tensor memory. .16x256b: as the fragments of
// mma.sync, of 16 lanes, four registers for eight columns.
void tensor_load(void* const* targets, int count, bool wide, uint32_t address, int line);
void tensor_wait_loads(int line);
void tensor_fence(bool after, int line);

}  // namespace emu
