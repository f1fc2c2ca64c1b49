#include "scheduler.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <vector>

#include "fiber.h"
#include "scheduler_internal.h"

namespace emu {

Position position;

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kGuardBytes = 4096;
constexpr int kMaxThreads = 1024;
constexpr int kNamedBarriers = 16;

enum class State : uint8_t { ready, paused, at_barrier, in_warp_operation, in_active_mask, done };

struct Thread {
  Fiber fiber;
  uint3 index;
  int lane, warp;
  State state;
  int line;  // of the synchronisation the thread waits in
  // at_barrier:
  int barrier, barrier_count, predicate, votes;
  bool block_wide;  // __syncthreads rather than a named barrier
  // in_warp_operation and in_active_mask:
  const WarpOperation* operation;
  uint32_t mask;
  void* operand;
};

struct Barrier {
  int expected;  // 0: not in use
  int arrived;   // by bar.arrive, which does not wait
};

std::vector<Thread> threads;
Thread* running;  // null while the scheduler itself runs
char* stacks;
Barrier barriers[kNamedBarriers];
const Kernel* kernel;
void** kernel_arguments;
LaunchOptions options;
bool launched, failed;
char failure[1024];

size_t order_index(size_t step, size_t count) {
  switch (options.order) {
    case 1: return count - 1 - step;
    case 2: return (step * 7919 + count / 2) % count;  // a permutation: 7919 is a prime above every count
    default: return step;
  }
}

void select(Thread* thread) {
  running = thread;
  position.thread = thread->index;
}

void suspend(State state, int line) {
  running->state = state;
  running->line = line;
  running->fiber.suspend();
}

void thread_main() {
  kernel->run(kernel_arguments);
  suspend(State::done, 0);
  __builtin_trap();
}

int block_size() { return static_cast<int>(threads.size()); }

uint32_t live_lanes(const Thread* warp, int lanes) {
  uint32_t live = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    if (warp[lane].state != State::done) live |= 1u << lane;
  }
  return live;
}

// ---- Operations of a warp ----

bool joins(const Thread& thread, const Thread& leader) {
  return thread.state == State::in_warp_operation && thread.operation == leader.operation &&
         thread.mask == leader.mask && (!leader.operation->aligned || thread.line == leader.line);
}

// Executes the operation that `leader` waits in if every lane of its mask that still runs has arrived at it.
bool try_execute(Thread* warp, int lanes, Thread& leader) {
  uint32_t participants = leader.mask & live_lanes(warp, lanes);
  if (leader.operation->aligned) {
    participants = leader.mask;
    if (participants >> (lanes - 1) > 1) return false;
  }
  void* operands[32] = {};
  for (int lane = 0; lane < lanes; ++lane) {
    if (!(participants >> lane & 1)) continue;
    if (!joins(warp[lane], leader)) return false;
    operands[lane] = warp[lane].operand;
  }
  position.thread = leader.index;
  leader.operation->execute(operands, participants, leader.line);
  for (int lane = 0; lane < lanes; ++lane) {
    if (participants >> lane & 1) warp[lane].state = State::ready;
  }
  return true;
}

bool execute_warp_operations(Thread* warp, int lanes) {
  bool any = false;
  for (int lane = 0; lane < lanes; ++lane) {
    if (warp[lane].state == State::in_warp_operation) any |= try_execute(warp, lanes, warp[lane]);
  }
  return any;
}

// __activemask() is answered once the rest of the warp cannot move: the lanes asking at one place are then the ones
// that hardware would have converged there.
bool answer_active_masks(Thread* warp, int lanes) {
  bool any = false;
  for (int lane = 0; lane < lanes; ++lane) {
    if (warp[lane].state != State::in_active_mask) continue;
    int line = warp[lane].line;
    uint32_t mask = 0;
    for (int other = lane; other < lanes; ++other) {
      if (warp[other].state == State::in_active_mask && warp[other].line == line) mask |= 1u << other;
    }
    for (int other = lane; other < lanes; ++other) {
      if (mask >> other & 1) {
        warp[other].mask = mask;
        warp[other].state = State::ready;
      }
    }
    any = true;
  }
  return any;
}

bool run_warp(Thread* warp, int lanes) {
  bool progress = false;
  for (;;) {
    bool ran = false;
    for (int step = 0; step < lanes; ++step) {
      Thread& thread = warp[order_index(step, lanes)];
      if (thread.state != State::ready) continue;
      select(&thread);
      thread.fiber.resume();
      running = nullptr;
      if (failed) throw LaunchFailed();
      ran = true;
    }
    if (execute_warp_operations(warp, lanes) || answer_active_masks(warp, lanes)) ran = true;
    if (!ran) return progress;
    progress = true;
  }
}

// ---- Barriers ----

// Hardware counts whole warps at a barrier: a part of a warp must not be there alone.
void check_whole_warps(int barrier) {
  for (Thread& thread : threads) {
    if (thread.state != State::at_barrier || thread.barrier != barrier) continue;
    for (int lane = 0; lane < 32; ++lane) {
      int other = thread.warp * 32 + lane;
      if (other >= block_size()) break;
      bool there = threads[other].state == State::at_barrier && threads[other].barrier == barrier;
      if (!there) {
        position.thread = threads[other].index;
        fail(thread.line, "barrier %d reached by only a part of warp %d", barrier, thread.warp);
      }
    }
  }
}

bool release_barrier(int id) {
  Barrier& barrier = barriers[id];
  if (!barrier.expected) return false;
  int arrived = barrier.arrived, votes = 0, line = 0;
  for (Thread& thread : threads) {
    if (thread.state != State::at_barrier || thread.barrier != id) continue;
    ++arrived;
    votes += thread.predicate;
    if (thread.block_wide && line && line != thread.line) {
      position.thread = thread.index;
      fail(thread.line, "divergent __syncthreads: other threads of the block wait at line %d", line);
    }
    line = thread.line;
  }
  if (arrived > barrier.expected) fail(line, "barrier %d expects %d threads and got %d", id, barrier.expected, arrived);
  if (arrived < barrier.expected) return false;
  check_whole_warps(id);
  for (Thread& thread : threads) {
    if (thread.state != State::at_barrier || thread.barrier != id) continue;
    thread.votes = votes;
    thread.state = State::ready;
  }
  barrier = {};
  return true;
}

void arrive(int id, int count, int line) {
  if (id < 0 || id >= kNamedBarriers) fail(line, "barrier %d does not exist: there are %d", id, kNamedBarriers);
  if (count % 32 && count != block_size()) {
    fail(line, "barrier %d with %d threads: not a multiple of a warp", id, count);
  }
  if (count > (block_size() + 31) / 32 * 32) {
    fail(line, "barrier %d expects %d threads, the block has %d", id, count, block_size());
  }
  Barrier& barrier = barriers[id];
  if (barrier.expected && barrier.expected != count) {
    fail(line, "barrier %d used with %d threads while others wait for %d", id, count, barrier.expected);
  }
  barrier.expected = count;
}

[[noreturn]] void fail_deadlock() {
  const Thread* blocked = nullptr;
  int there = 0, exited = 0;
  for (const Thread& thread : threads) {
    if (thread.state == State::done) ++exited;
    if (!blocked && thread.state != State::done) blocked = &thread;
  }
  const Thread* elsewhere = nullptr;
  for (const Thread& thread : threads) {
    bool same = thread.state == blocked->state && thread.line == blocked->line;
    if (same) ++there;
    if (!same && thread.state != State::done && !elsewhere) elsewhere = &thread;
  }
  char others[128] = "";
  if (elsewhere) {
    snprintf(others, sizeof others, "; thread (%u,%u,%u) waits at line %d", elsewhere->index.x, elsewhere->index.y,
             elsewhere->index.z, elsewhere->line);
  } else if (exited) {
    snprintf(others, sizeof others, "; %d threads have exited", exited);
  }
  position.thread = blocked->index;
  if (blocked->state == State::at_barrier) {
    fail(blocked->line, "divergent %s: reached by only %d of %d threads%s",
         blocked->block_wide ? "__syncthreads" : "barrier", there, block_size(), others);
  }
  fail(blocked->line, "divergent %s: mask 0x%x, but only %d threads of the block are there%s",
       blocked->operation->name, blocked->mask, there, others);
}

// ---- Blocks ----

void run_block() {
  poison_shared_memory();
  forget_async_copies(block_size());
  for (Barrier& barrier : barriers) barrier = {};
  for (size_t i = 0; i < threads.size(); ++i) {
    threads[i].state = State::ready;
    threads[i].fiber.start(thread_main, stacks + i * (kStackBytes + kGuardBytes) + kGuardBytes, kStackBytes);
  }
  size_t warps = (threads.size() + 31) / 32;
  for (;;) {
    bool progress = false;
    for (size_t step = 0; step < warps; ++step) {
      size_t first = order_index(step, warps) * 32;
      size_t lanes = threads.size() - first < 32 ? threads.size() - first : 32;
      progress |= run_warp(&threads[first], static_cast<int>(lanes));
    }
    for (int id = 0; id < kNamedBarriers; ++id) progress |= release_barrier(id);
    bool all_done = true;
    for (Thread& thread : threads) {
      all_done &= thread.state == State::done;
      if (thread.state != State::paused) continue;
      thread.state = State::ready;
      progress = true;
    }
    if (all_done) return;
    if (!progress) fail_deadlock();
  }
}

void prepare_stacks() {
  if (stacks) return;
  size_t stride = kStackBytes + kGuardBytes;
  void* memory = mmap(nullptr, stride * kMaxThreads, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail(0, "no address space for the stacks of a block");
  stacks = static_cast<char*>(memory);
  for (int i = 0; i < kMaxThreads; ++i) mprotect(stacks + i * stride, kGuardBytes, PROT_NONE);
}

void run_grid() {
  const int* block = options.block;
  int64_t size = int64_t{block[0]} * block[1] * block[2];
  if (size < 1 || size > kMaxThreads) fail(0, "a block of %d x %d x %d threads", block[0], block[1], block[2]);
  for (int extent : options.grid) {
    if (extent < 1) fail(0, "a grid of %d x %d x %d blocks", options.grid[0], options.grid[1], options.grid[2]);
  }
  prepare_stacks();
  layout_shared_memory(kernel->shared, options.dynamic_shared);
  threads.assign(size, Thread());
  for (int i = 0; i < size; ++i) {
    threads[i].index = {static_cast<unsigned>(i % block[0]), static_cast<unsigned>(i / block[0] % block[1]),
                        static_cast<unsigned>(i / block[0] / block[1])};
    threads[i].lane = i % 32;
    threads[i].warp = i / 32;
  }
  position.block_size = dim3(block[0], block[1], block[2]);
  position.grid_size = dim3(options.grid[0], options.grid[1], options.grid[2]);
  for (unsigned z = 0; z < position.grid_size.z; ++z) {
    for (unsigned y = 0; y < position.grid_size.y; ++y) {
      for (unsigned x = 0; x < position.grid_size.x; ++x) {
        position.block = {x, y, z};
        run_block();
      }
    }
  }
}

}  // namespace

// ---- What kernels and the rest of the runtime call ----

void fail(int line, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(failure, sizeof failure, format, arguments);
  va_end(arguments);
  char where[128], at_line[32] = "";
  describe_position(where, sizeof where);
  if (line > 0) snprintf(at_line, sizeof at_line, "kernel line %d, ", line);
  if (length < 0 || length > 800) length = length < 0 ? 0 : 800;
  snprintf(failure + length, sizeof failure - length, " (%s%s)", at_line, where);
  failed = true;
  if (running) running->fiber.suspend();  // the scheduler throws in its stead: a fiber has no one to catch
  throw LaunchFailed();
}

bool in_launch() { return launched; }
int running_thread() { return static_cast<int>(running - threads.data()); }
bool copies_land_late() { return options.late_copies; }

void describe_position(char* text, size_t size) {
  const uint3 &b = position.block, &t = position.thread;
  snprintf(text, size, "block (%u,%u,%u), thread (%u,%u,%u)", b.x, b.y, b.z, t.x, t.y, t.z);
}

bool describe_stack_address(const void* address, char* text, size_t size) {
  auto* byte = static_cast<const char*>(address);
  if (!stacks || byte < stacks || byte >= stacks + (kStackBytes + kGuardBytes) * kMaxThreads) return false;
  snprintf(text, size, "the local variables of a thread exceed %zu KiB", kStackBytes >> 10);
  return true;
}

int block_barrier(int predicate, int line) {
  arrive(0, block_size(), line);
  running->barrier = 0;
  running->block_wide = true;
  running->predicate = predicate;
  suspend(State::at_barrier, line);
  return running->votes;
}

void named_barrier(int id, int count, bool wait, int line) {
  arrive(id, count ? count : block_size(), line);
  if (!wait) {
    ++barriers[id].arrived;
    return;
  }
  running->barrier = id;
  running->block_wide = false;
  running->predicate = 0;
  suspend(State::at_barrier, line);
}

void pause() { suspend(State::paused, 0); }

int lane_id() { return running->lane; }

uint32_t lanes_of_warp() {
  int lanes = block_size() - running->warp * 32;
  return lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
}

void warp_operation(const WarpOperation& operation, uint32_t mask, void* operand, int line) {
  if (!(mask >> running->lane & 1)) {
    fail(line, "%s with mask 0x%x, which does not name the calling lane %d", operation.name, mask, running->lane);
  }
  running->operation = &operation;
  running->mask = mask;
  running->operand = operand;
  suspend(State::in_warp_operation, line);
}

uint32_t active_mask(int line) {
  static const WarpOperation query = {"__activemask", nullptr, false};
  running->operation = &query;
  suspend(State::in_active_mask, line);
  return running->mask;
}

}  // namespace emu

extern "C" int emu_launch(const emu::Kernel* kernel, void** arguments, const emu::LaunchOptions* options, char* message,
                          int message_size) {
  using namespace emu;
  emu::kernel = kernel;
  emu::options = *options;
  kernel_arguments = arguments;
  position = {};
  running = nullptr;
  failed = false;
  launched = true;
  int status = 0;
  try {
    run_grid();
  } catch (const LaunchFailed&) {
    snprintf(message, message_size, "%s", failure);
    status = 1;
  }
  running = nullptr;
  launched = false;
  return status;
}
