// mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
//
// A phase ends when no arrivals and no bytes of asynchronous copies are missing. What the object holds is kept beside
// the shared memory; the eight bytes themselves only tell whether something overwrote them.
#pragma once
#include <cstdint>

namespace emu {

void mbarrier_init(uint32_t address, uint32_t count, int line);
void mbarrier_invalidate(uint32_t address, int line);
// Returns the state to give to a test_wait: the number of the phase.
uint64_t mbarrier_arrive(uint32_t address, uint32_t count, int line);
uint64_t mbarrier_arrive_drop(uint32_t address, uint32_t count, int line);
uint64_t mbarrier_arrive_expect(uint32_t address, uint32_t bytes, int line);
// Makes the running phase expect one arrival more, if `more`.
void mbarrier_expect_arrival(uint32_t address, bool more, int line);
void mbarrier_expect(uint32_t address, uint32_t bytes, int line);
bool mbarrier_complete(uint32_t address, uint32_t bytes, int line);
// try_wait returns when the phase has ended and never gives up; test_wait lets others run before it says no.
bool mbarrier_try_wait(uint32_t address, uint64_t state, int line);
bool mbarrier_test_wait(uint32_t address, uint64_t state, int line);
bool mbarrier_try_wait_parity(uint32_t address, uint32_t parity, int line);
bool mbarrier_test_wait_parity(uint32_t address, uint32_t parity, int line);
// fence.mbarrier_init, or a proxy fence: the initialised objects may be used by copies.
void fence_mbarriers();
// Fails if `address` is no mbarrier, or one whose initialisation copies need not see.
void mbarrier_check_visible(uint32_t address, const char* what, int line);

}  // namespace emu
