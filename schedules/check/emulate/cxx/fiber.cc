#include "fiber.h"

#include <cstdint>

namespace emu {

#if defined(__x86_64__)

// swapcontext() makes two system calls per switch (the signal mask); a kernel with barriers switches millions of times.
extern "C" void emu_switch_stack(void** save, void* to);
asm(R"(
.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack, @function
emu_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emu_switch_stack, .-emu_switch_stack
)");

static void* scheduler_stack_pointer;

void Fiber::start(void (*entry)(), char* stack, size_t size) {
  auto* top = reinterpret_cast<uint64_t*>(stack + size - 64);
  *--top = 0;  // the return address of `entry`; also leaves the stack aligned as the ABI wants it after a call
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int saved_register = 0; saved_register < 6; ++saved_register) *--top = 0;
  stack_pointer_ = top;
}

void Fiber::resume() { emu_switch_stack(&scheduler_stack_pointer, stack_pointer_); }

void Fiber::suspend() { emu_switch_stack(&stack_pointer_, scheduler_stack_pointer); }

#else

static ucontext_t scheduler_context;

void Fiber::start(void (*entry)(), char* stack, size_t size) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = size;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
}

void Fiber::resume() { swapcontext(&scheduler_context, &context_); }

void Fiber::suspend() { swapcontext(&context_, &scheduler_context); }

#endif

}  // namespace emu
