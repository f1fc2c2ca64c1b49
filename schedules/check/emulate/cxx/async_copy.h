// cp.async: copies from global to shared memory that are only guaranteed to have landed after a wait.
//
// "Late" copies land at the wait that requires them and not before, so a missing or too weak wait reads poison;
// "early" copies land at issue, so a write to a buffer that other threads still read is seen.
#pragma once
#include <cstdint>

namespace emu {

// Copies `source_bytes` and fills up to `bytes` (4, 8 or 16) with zeros; a source of no bytes is not read.
void async_copy(uint32_t shared, const void* global, unsigned bytes, unsigned source_bytes, int line);
void async_commit();
// Lands the oldest groups of this thread until at most `pending` are left.
void async_wait_group(unsigned pending);
// Lands everything this thread has issued, committed or not.
void async_wait_all();
// cp.async.mbarrier.arrive: arrives once what this thread has issued has landed. Unless `counted` (.noinc), the phase
// expects one arrival more.
void async_arrive(uint32_t mbarrier, bool counted, int line);

}  // namespace emu
