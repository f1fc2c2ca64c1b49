// Bulk asynchronous copies, their tensor form, known as TMA, and asynchronous stores (PTX ISA, "cp.async.bulk",
// "cp.async.bulk.tensor", "st.async").
//
// "Late" loads land when a thread waits for their mbarrier and nothing else can run, "late" stores read shared memory
// at the wait_group that requires it; "early" ones do so at issue. In both, a store fails if what it reads changes
// between.
#pragma once
#include <cstdint>

#include "tensor_map.h"

namespace emu {

// `blocks`: the ranks of the cluster to write to, as a mask; 0 for the block that `target` is in.
void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t mbarrier, uint32_t blocks, int line);
void bulk_load_tensor(uint32_t target, const void* map, const int32_t* coordinates, int rank, uint32_t mbarrier,
                      uint32_t blocks, bool pair, int line);  // `pair`: .cta_group::2
// From shared memory to that of a block of the cluster.
void bulk_copy_shared(uint32_t target, uint32_t source, uint32_t bytes, uint32_t mbarrier, int line);
// st.async: `data` of this thread to the shared memory of a block of the cluster.
void store_async(uint32_t target, const void* data, uint32_t bytes, uint32_t mbarrier, int line);
void bulk_store(void* target, uint32_t source, uint32_t bytes, int line);
void bulk_store_tensor(const void* map, const int32_t* coordinates, int rank, uint32_t source, int line);
void bulk_commit();
// Waits until at most `pending` groups of this thread are left; if `read`, only for their reads of shared memory.
void bulk_wait_group(unsigned pending, bool read, int line);

}  // namespace emu
