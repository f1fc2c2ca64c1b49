// Shared between the parts of the runtime; kernels do not see it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "launch.h"

namespace emu {

// Thrown on the scheduler's stack once fail() has stored its message.
struct LaunchFailed {};

bool in_launch();
int running_thread();  // number of the running thread in its cluster
int running_block();   // rank of its block in the cluster
int block_size();      // threads of a block
int cluster_size();    // blocks of a cluster
bool block_exited(int rank);
bool block_may_not_have_begun(int rank);  // for all that the running thread knows
bool copies_land_late();
// "block (0,0,0), thread (5,0,0)", for messages.
void describe_position(char* text, size_t size);

// Something that a thread waits for and that other threads, or copies under way, bring about.
struct Wait {
  const char* name;
  bool (*ready)(uint64_t argument);
  // Says what is missing, for the message about a deadlock.
  void (*describe)(uint64_t argument, char* text, size_t size);
};
// Suspends the running thread until `wait.ready(argument)`. `mbarrier` is the one that it waits for, 0 if none.
void wait_until(const Wait& wait, uint64_t argument, uint32_t mbarrier, int line);
// Lets every other thread run first, as pause() does, while it polls an mbarrier.
void poll(uint32_t mbarrier, int line);
// Whether some suspended thread waits for this mbarrier, or polls it.
bool is_awaited(uint32_t mbarrier);

void layout_shared_memory(SharedLayout* layout, size_t dynamic_bytes, int blocks);
void poison_shared_memory();
void enter_shared_memory(int rank);  // makes the shared variables those of this block of the cluster
void publish_shared_memory();        // carries out what fence.proxy.async asked for
void forget_async_copies(int threads);
void forget_mbarriers();
void forget_bulk_copies(int threads);
void forget_warpgroups(int blocks, int threads);
void forget_tensor_memory(int blocks, int threads);

// When nothing else can move: lands what a thread waits for; false if there is none.
bool land_awaited_copies();   // bulk copies, up to one with which a phase of its mbarrier ends
bool land_awaited_arrival();  // one: what a cp.async.mbarrier.arrive stands for
bool land_awaited_commit();   // the arrival of a tcgen05.commit, after the products before it
// What a thread, and a block, must not leave behind.
void finish_bulk_stores();
void finish_warpgroup();
void finish_tensor_loads();
void finish_tensor_memory(int rank);
void finish_bulk_loads(int rank);

// What lies at a faulting address, for the crash handler; false if it is nothing this runtime knows.
bool describe_shared_address(const void* address, char* text, size_t size);
bool describe_stack_address(const void* address, char* text, size_t size);
bool describe_device_address(const void* address, char* text, size_t size);

}  // namespace emu
