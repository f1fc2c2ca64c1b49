// One suspendable flow of control with its own stack; every CUDA thread of the running block is one.
#pragma once
#include <cstddef>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emu {

class Fiber {
 public:
  // Makes the next resume() begin at `entry` on the given stack; `entry` must never return.
  void start(void (*entry)(), char* stack, size_t size);
  // Runs the fiber until it suspends. Called by the scheduler only.
  void resume();
  // Goes back to the scheduler. Called by the running fiber only.
  void suspend();

 private:
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace emu
