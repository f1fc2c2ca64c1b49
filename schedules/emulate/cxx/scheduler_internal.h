// Shared between the parts of the runtime; kernels do not see it.
#pragma once
#include <cstddef>

#include "launch.h"

namespace emu {

// Thrown on the scheduler's stack once fail() has stored its message.
struct LaunchFailed {};

bool in_launch();
int running_thread();  // number of the running thread in its block
bool copies_land_late();
// "block (0,0,0), thread (5,0,0)", for messages.
void describe_position(char* text, size_t size);

void layout_shared_memory(SharedLayout* layout, size_t dynamic_bytes);
void poison_shared_memory();
void forget_async_copies(int threads);

// What lies at a faulting address, for the crash handler; false if it is nothing this runtime knows.
bool describe_shared_address(const void* address, char* text, size_t size);
bool describe_stack_address(const void* address, char* text, size_t size);
bool describe_device_address(const void* address, char* text, size_t size);

}  // namespace emu
