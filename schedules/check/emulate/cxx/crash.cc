// Turns a fault inside a kernel into one last message to the parent process.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "scheduler.h"
#include "scheduler_internal.h"

namespace emu {
namespace {

int report_descriptor = -1;

void* program_counter(void* context) {
#if defined(__x86_64__)
  return reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#else
  return nullptr;
#endif
}

void describe_fault(int number, const siginfo_t* info, char* text, size_t size) {
  if (number == SIGTERM) {
    snprintf(text, size, "still running at the time limit");
  } else if (number == SIGFPE) {
    snprintf(text, size, "integer division by zero");
  } else if (number == SIGSEGV || number == SIGBUS) {
    char what[160];
    bool known = describe_shared_address(info->si_addr, what, sizeof what) ||
                 describe_device_address(info->si_addr, what, sizeof what) ||
                 describe_stack_address(info->si_addr, what, sizeof what);
    if (!known) snprintf(what, sizeof what, "address %p", info->si_addr);
    snprintf(text, size, "memory fault: %s", what);
  } else {
    snprintf(text, size, "%s", strsignal(number));
  }
}

// Writes a frame of the worker's protocol (a little-endian length, then JSON without payload) and ends the process.
// The texts below hold no character that JSON would have to escape, and the worker writes nothing during a launch.
void report_and_exit(int number, siginfo_t* info, void* context) {
  char fault[224], where[128] = "", frame[1024];
  describe_fault(number, info, fault, sizeof fault);
  describe_position(where, sizeof where);
  void* counter = program_counter(context);
  Dl_info module = {};
  bool known = counter && dladdr(counter, &module) && !strpbrk(module.dli_fname, "\"\\");
  if (!known) module.dli_fname = "";
  long offset = static_cast<char*>(counter) - static_cast<char*>(module.dli_fbase);
  int length = snprintf(frame + 4, sizeof frame - 4,
                        "{\"crash\": \"%s\", \"where\": \"%s\", \"module\": \"%s\", \"offset\": %ld}", fault, where,
                        module.dli_fname, offset);
  if (length > 0 && length < static_cast<int>(sizeof frame) - 4) {
    for (int i = 0; i < 4; ++i) frame[i] = static_cast<char>(length >> (8 * i));
    ssize_t written = write(report_descriptor, frame, length + 4);
    (void)written;
  }
  _exit(70);
}

void handle(int number, siginfo_t* info, void* context) {
  if (in_launch()) report_and_exit(number, info, context);
  signal(number, SIG_DFL);
  raise(number);
}

}  // namespace
}  // namespace emu

// Reports faults during a launch on the pipe `descriptor`.
extern "C" void emu_report_crashes(int descriptor) {
  emu::report_descriptor = descriptor;
  static char stack[64 << 10];  // a fault may be the overflow of the stack it happens on
  stack_t alternate = {};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = emu::handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGTERM}) sigaction(number, &action, nullptr);
}
