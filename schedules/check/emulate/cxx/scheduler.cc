#include "scheduler.h"

#include <sys/mman.h>

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <algorithm>
#include <vector>

#include "fiber.h"
#include "scheduler_internal.h"

namespace emu {

Position position;

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kGuardBytes = 4096;
constexpr int kMaxThreads = 1024;
constexpr int kMaxClusterBlocks = 16;
constexpr int kNamedBarriers = 16;
constexpr int kBlockRegisters = 64 << 10;
// Rounds in which nothing but polling threads ran: they wait for what does not come.
constexpr int kMaxIdleRounds = 50000;

enum class State : uint8_t { ready, paused, at_barrier, in_warp_operation, converging, waiting, done };

struct Thread {
  Fiber fiber;
  uint3 index;
  int lane, warp, block;  // the warp in its block, the block in its cluster
  State state;
  int line;  // of the synchronisation the thread waits in
  // waiting:
  const Wait* wait;
  uint64_t argument;
  uint32_t mbarrier;  // also of a paused thread that polls one
  // of barrier.cluster:
  bool cluster_arrived;
  uint64_t cluster_phase;
  int registers;
  // at_barrier:
  int barrier, barrier_count, predicate, votes;
  const char* block_wide;  // the name of a barrier of the whole block, null for a named one
  // in_warp_operation and converging:
  const WarpOperation* operation;
  uint64_t mask;
  void* operand;
};

struct Barrier {
  int expected;  // 0: not in use
  int arrived;   // by bar.arrive, which does not wait
};

struct Block {
  uint3 index;
  int live;       // threads that have not exited
  int registers;  // that no warp holds
  bool met;       // a thread has waited at barrier.cluster: all blocks have begun
  Barrier barriers[kNamedBarriers];
};

std::vector<Thread> threads;  // of the running cluster, block after block
std::vector<Block> blocks;
int threads_per_block, warps_per_block;
uint64_t cluster_phase;  // of barrier.cluster
int cluster_arrivals;
uint64_t activity;  // counts what threads do other than polling
Thread* running;  // null while the scheduler itself runs
char* stacks;
int prepared_stacks;  // those with a guard page
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

// Makes threadIdx, blockIdx and the shared memory those of a thread.
void enter(const Thread& thread) {
  position.thread = thread.index;
  if (static_cast<int>(position.cluster_rank) == thread.block) return;
  position.cluster_rank = thread.block;
  position.block = blocks[thread.block].index;
  enter_shared_memory(thread.block);
}

void select(Thread* thread) {
  running = thread;
  enter(*thread);
}

void suspend(State state, int line) {
  running->state = state;
  activity += state != State::paused;
  running->line = line;
  running->fiber.suspend();
}

void thread_main() {
  kernel->run(kernel_arguments);
  finish_bulk_stores();
  finish_warpgroup();
  finish_tensor_loads();
  if (--blocks[running->block].live == 0) {
    finish_bulk_loads(running->block);
    finish_tensor_memory(running->block);
  }
  suspend(State::done, 0);
  __builtin_trap();
}

uint64_t live_lanes(const Thread* warp, int lanes) {
  uint64_t live = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    if (warp[lane].state != State::done) live |= uint64_t{1} << lane;
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
  uint64_t participants = leader.mask & live_lanes(warp, lanes);
  if (leader.operation->aligned) {
    participants = leader.mask;
    if (participants >> (lanes - 1) > 1) return false;
  }
  void* operands[kMaxWave] = {};
  for (int lane = 0; lane < lanes; ++lane) {
    if (!(participants >> lane & 1)) continue;
    if (!joins(warp[lane], leader)) return false;
    operands[lane] = warp[lane].operand;
  }
  enter(leader);
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

// Once the rest of the warp cannot move, the lanes at one place are the ones that hardware would have converged there.
// Those of the lowest line go first: the others, beyond a branch or a loop, wait for them.
bool execute_converged(Thread* warp, int lanes) {
  Thread* first = nullptr;
  for (Thread* thread = warp; thread < warp + lanes; ++thread) {
    if (thread->state == State::converging && (!first || thread->line < first->line)) first = thread;
  }
  if (!first) return false;
  void* operands[kMaxWave] = {};
  uint64_t mask = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    Thread& thread = warp[lane];
    if (thread.state != State::converging || thread.line != first->line || thread.operation != first->operation) continue;
    mask |= uint64_t{1} << lane;
    operands[lane] = thread.operand;
    thread.state = State::ready;
  }
  enter(*first);
  first->operation->execute(operands, mask, first->line);
  return true;
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
    if (execute_warp_operations(warp, lanes) || execute_converged(warp, lanes)) ran = true;
    if (!ran) return progress;
    progress = true;
  }
}

// ---- Barriers ----

// Hardware counts whole warps at a barrier: a part of a warp must not be there alone.
void check_whole_warps(Thread* block, int barrier) {
  for (Thread* thread = block; thread < block + threads_per_block; ++thread) {
    if (thread->state != State::at_barrier || thread->barrier != barrier) continue;
    for (int lane = 0; lane < options.wave; ++lane) {
      int other = thread->warp * options.wave + lane;
      if (other >= threads_per_block) break;
      bool there = block[other].state == State::at_barrier && block[other].barrier == barrier;
      if (!there) {
        enter(block[other]);
        fail(thread->line, "barrier %d reached by only a part of warp %d", barrier, thread->warp);
      }
    }
  }
}

bool release_barrier(int rank, int id) {
  Barrier& barrier = blocks[rank].barriers[id];
  if (!barrier.expected) return false;
  Thread* begin = &threads[rank * threads_per_block];
  int arrived = barrier.arrived, votes = 0, line = 0;
  for (Thread* t = begin; t < begin + threads_per_block; ++t) {
    Thread& thread = *t;
    if (thread.state != State::at_barrier || thread.barrier != id) continue;
    ++arrived;
    votes += thread.predicate;
    if (thread.block_wide && line && line != thread.line) {
      enter(thread);
      fail(thread.line, "divergent %s: other threads of the block wait at line %d", thread.block_wide, line);
    }
    line = thread.line;
  }
  if (arrived > barrier.expected) fail(line, "barrier %d expects %d threads and got %d", id, barrier.expected, arrived);
  if (arrived < barrier.expected) return false;
  check_whole_warps(begin, id);
  for (Thread* t = begin; t < begin + threads_per_block; ++t) {
    Thread& thread = *t;
    if (thread.state != State::at_barrier || thread.barrier != id) continue;
    thread.votes = votes;
    thread.state = State::ready;
  }
  barrier = {};
  return true;
}

void arrive(int id, int count, int line) {
  if (id < 0 || id >= kNamedBarriers) fail(line, "barrier %d does not exist: there are %d", id, kNamedBarriers);
  if (count % options.wave && count != threads_per_block) {
    fail(line, "barrier %d with %d threads: not a multiple of a warp", id, count);
  }
  if (count > warps_per_block * options.wave) {
    fail(line, "barrier %d expects %d threads, the block has %d", id, count, threads_per_block);
  }
  Barrier& barrier = blocks[running->block].barriers[id];
  if (barrier.expected && barrier.expected != count) {
    fail(line, "barrier %d used with %d threads while others wait for %d", id, count, barrier.expected);
  }
  barrier.expected = count;
}

// ---- Clusters ----

bool at_cluster_barrier(const Thread& thread) {
  return thread.cluster_arrived && thread.cluster_phase == cluster_phase;
}

// Threads that have exited are not waited for.
bool release_cluster() {
  if (!cluster_arrivals) return false;
  for (const Thread& thread : threads) {
    if (thread.state != State::done && !at_cluster_barrier(thread)) return false;
  }
  cluster_arrivals = 0;
  ++cluster_phase;
  return true;
}

bool cluster_ready(uint64_t phase) { return cluster_phase > phase; }
void describe_cluster(uint64_t, char* text, size_t size) {
  int missing = 0;
  for (const Thread& thread : threads) missing += thread.state != State::done && !at_cluster_barrier(thread);
  snprintf(text, size, "%d threads of the cluster have not arrived", missing);
}
const Wait kClusterWait = {"barrier.cluster.wait", cluster_ready, describe_cluster};

bool registers_free(uint64_t count) { return blocks[position.cluster_rank].registers >= static_cast<int>(count); }
void describe_registers(uint64_t count, char* text, size_t size) {
  snprintf(text, size, "%d registers of the block are free, each thread needs %d more",
           blocks[position.cluster_rank].registers, static_cast<int>(count));
}
const Wait kRegisterWait = {"setmaxnreg.inc", registers_free, describe_registers};

bool wake_waiting() {
  bool any = false;
  for (Thread& thread : threads) {
    if (thread.state != State::waiting) continue;
    enter(thread);
    if (!thread.wait->ready(thread.argument)) continue;
    thread.state = State::ready;
    thread.mbarrier = 0;
    any = true;
  }
  return any;
}

// ---- Deadlocks ----

// For a thread that waits for an event rather than for other threads at the same place.
[[noreturn]] void fail_waiting(const Thread& blocked, const char* others) {
  enter(blocked);
  if (blocked.state == State::paused) {
    fail(blocked.line, "deadlock: a thread polls %s that never changes%s",
         blocked.mbarrier ? "an mbarrier" : "something", others);
  }
  char missing[160];
  blocked.wait->describe(blocked.argument, missing, sizeof missing);
  fail(blocked.line, "deadlock: %s never ends: %s%s", blocked.wait->name, missing, others);
}

[[noreturn]] void fail_deadlock() {
  const Thread* blocked = nullptr;
  int there = 0, exited = 0;
  for (const Thread& thread : threads) {
    if (thread.state == State::done) ++exited;
    if (!blocked && thread.state != State::done) blocked = &thread;
  }
  for (const Thread& thread : threads) {  // the cause more often than a barrier that others wait in
    if (thread.state != State::waiting && thread.state != State::paused) continue;
    blocked = &thread;
    break;
  }
  const Thread* elsewhere = nullptr;
  for (const Thread& thread : threads) {
    bool same = thread.state == blocked->state && thread.line == blocked->line && thread.block == blocked->block &&
                (thread.state != State::waiting || thread.argument == blocked->argument);
    if (same) ++there;
    if (!same && thread.state != State::done && !elsewhere && thread.block == blocked->block) elsewhere = &thread;
  }
  char others[128] = "";
  if (elsewhere) {
    snprintf(others, sizeof others, "; thread (%u,%u,%u) waits at line %d", elsewhere->index.x, elsewhere->index.y,
             elsewhere->index.z, elsewhere->line);
  } else if (exited) {
    snprintf(others, sizeof others, "; %d threads have exited", exited);
  }
  if (blocked->state == State::waiting || blocked->state == State::paused) fail_waiting(*blocked, others);
  enter(*blocked);
  if (blocked->state == State::at_barrier) {
    fail(blocked->line, "divergent %s: reached by only %d of %d threads%s",
         blocked->block_wide ? blocked->block_wide : "barrier", there, threads_per_block, others);
  }
  fail(blocked->line, "divergent %s: mask 0x%" PRIx64 ", but only %d threads of the block are there%s",
       blocked->operation->name, blocked->mask, there, others);
}

// ---- Blocks ----

void start_cluster() {
  position.cluster_rank = ~0u;
  poison_shared_memory();
  forget_async_copies(static_cast<int>(threads.size()));
  forget_mbarriers();
  forget_bulk_copies(static_cast<int>(threads.size()));
  forget_warpgroups(cluster_size(), threads_per_block);
  forget_tensor_memory(cluster_size(), static_cast<int>(threads.size()));
  cluster_phase = 0;
  cluster_arrivals = 0;
  // What the compiler may give each thread of a block that has a multiprocessor for itself.
  int registers = kBlockRegisters / threads_per_block / 8 * 8;
  if (registers > 255) registers = 255;
  for (Block& block : blocks) {
    block.live = threads_per_block;
    block.registers = kBlockRegisters - registers * threads_per_block;
    block.met = false;
    for (Barrier& barrier : block.barriers) barrier = {};
  }
  for (size_t i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[i];
    thread.state = State::ready;
    thread.mbarrier = 0;
    thread.cluster_arrived = false;
    thread.registers = registers;
    thread.fiber.start(thread_main, stacks + i * (kStackBytes + kGuardBytes) + kGuardBytes, kStackBytes);
  }
}

void run_cluster() {
  start_cluster();
  size_t warps = blocks.size() * warps_per_block;
  for (int idle_rounds = 0;;) {
    uint64_t before = activity;
    for (size_t step = 0; step < warps; ++step) {
      size_t warp = order_index(step, warps);
      size_t block = warp / warps_per_block, first = warp % warps_per_block * options.wave;
      size_t lanes = std::min<size_t>(threads_per_block - first, options.wave);
      run_warp(&threads[block * threads_per_block + first], static_cast<int>(lanes));
      publish_shared_memory();
    }
    bool progress = activity != before;
    for (int rank = 0; rank < cluster_size(); ++rank) {
      for (int id = 0; id < kNamedBarriers; ++id) progress |= release_barrier(rank, id);
    }
    progress |= release_cluster();
    progress |= wake_waiting();
    // The latest moment for a copy: nothing else can move.
    if (!progress) progress = land_awaited_copies() || land_awaited_arrival() || land_awaited_commit();
    bool all_done = true, polling = false;
    for (Thread& thread : threads) {
      all_done &= thread.state == State::done;
      if (thread.state != State::paused) continue;
      polling = true;
      if (progress || idle_rounds < kMaxIdleRounds) thread.state = State::ready;
    }
    if (all_done) return;
    idle_rounds = progress ? 0 : idle_rounds + 1;
    if (!progress && (!polling || idle_rounds > kMaxIdleRounds)) fail_deadlock();
  }
}

void prepare_stacks(int count) {
  size_t stride = kStackBytes + kGuardBytes;
  if (!stacks) {
    void* memory = mmap(nullptr, stride * kMaxThreads * kMaxClusterBlocks, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail(0, "no address space for the stacks of a block");
    stacks = static_cast<char*>(memory);
  }
  for (; prepared_stacks < count; ++prepared_stacks) {
    mprotect(stacks + prepared_stacks * stride, kGuardBytes, PROT_NONE);
  }
}

// Checks the launch, and lays out the threads of a cluster.
void prepare_cluster() {
  const int *block = options.block, *cluster = options.cluster;
  int64_t size = int64_t{block[0]} * block[1] * block[2];
  if (size < 1 || size > kMaxThreads) fail(0, "a block of %d x %d x %d threads", block[0], block[1], block[2]);
  int64_t count = int64_t{cluster[0]} * cluster[1] * cluster[2];
  if (count < 1 || count > kMaxClusterBlocks) {
    fail(0, "a cluster of %d x %d x %d blocks", cluster[0], cluster[1], cluster[2]);
  }
  for (int axis = 0; axis < 3; ++axis) {
    const int* grid = options.grid;
    if (grid[axis] < 1) fail(0, "a grid of %d x %d x %d blocks", grid[0], grid[1], grid[2]);
    if (grid[axis] % cluster[axis]) {
      fail(0, "a grid of %d x %d x %d blocks is not made of clusters of %d x %d x %d", grid[0], grid[1], grid[2],
           cluster[0], cluster[1], cluster[2]);
    }
  }
  threads_per_block = static_cast<int>(size);
  warps_per_block = (threads_per_block + options.wave - 1) / options.wave;
  blocks.assign(count, Block());
  prepare_stacks(static_cast<int>(size * count));
  layout_shared_memory(kernel->shared, options.dynamic_shared, cluster_size());
  threads.assign(size * count, Thread());
  for (size_t i = 0; i < threads.size(); ++i) {
    int in_block = static_cast<int>(i % size);
    threads[i].index = {static_cast<unsigned>(in_block % block[0]), static_cast<unsigned>(in_block / block[0] % block[1]),
                        static_cast<unsigned>(in_block / block[0] / block[1])};
    threads[i].lane = in_block % options.wave;
    threads[i].warp = in_block / options.wave;
    threads[i].block = static_cast<int>(i / size);
  }
  position.block_size = dim3(block[0], block[1], block[2]);
  position.grid_size = dim3(options.grid[0], options.grid[1], options.grid[2]);
  position.cluster_size = dim3(cluster[0], cluster[1], cluster[2]);
}

void run_grid() {
  prepare_cluster();
  const dim3 &grid = position.grid_size, &cluster = position.cluster_size;
  for (unsigned z = 0; z < grid.z; z += cluster.z) {
    for (unsigned y = 0; y < grid.y; y += cluster.y) {
      for (unsigned x = 0; x < grid.x; x += cluster.x) {
        for (unsigned rank = 0; rank < blocks.size(); ++rank) {
          blocks[rank].index = {x + rank % cluster.x, y + rank / cluster.x % cluster.y,
                                z + rank / cluster.x / cluster.y};
        }
        run_cluster();
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
int running_block() { return static_cast<int>(position.cluster_rank); }
int block_size() { return threads_per_block; }
int cluster_size() { return static_cast<int>(blocks.size()); }
bool block_exited(int rank) { return blocks[rank].live == 0; }

bool block_may_not_have_begun(int rank) {
  return running && running->block != rank && !blocks[running->block].met;
}
bool copies_land_late() { return options.late_copies; }

void describe_position(char* text, size_t size) {
  const uint3 &b = position.block, &t = position.thread;
  snprintf(text, size, "block (%u,%u,%u), thread (%u,%u,%u)", b.x, b.y, b.z, t.x, t.y, t.z);
}

bool describe_stack_address(const void* address, char* text, size_t size) {
  auto* byte = static_cast<const char*>(address);
  if (!stacks || byte < stacks || byte >= stacks + (kStackBytes + kGuardBytes) * kMaxThreads * kMaxClusterBlocks) {
    return false;
  }
  snprintf(text, size, "the local variables of a thread exceed %zu KiB", kStackBytes >> 10);
  return true;
}

int block_barrier(int predicate, int line, const char* name) {
  arrive(0, threads_per_block, line);
  running->barrier = 0;
  running->block_wide = name;
  running->predicate = predicate;
  suspend(State::at_barrier, line);
  return running->votes;
}

void named_barrier(int id, int count, bool wait, int line) {
  arrive(id, count ? count : threads_per_block, line);
  if (!wait) {
    ++blocks[running->block].barriers[id].arrived;
    return;
  }
  running->barrier = id;
  running->block_wide = nullptr;
  running->predicate = 0;
  suspend(State::at_barrier, line);
}

void wait_until(const Wait& wait, uint64_t argument, uint32_t mbarrier, int line) {
  if (wait.ready(argument)) return;
  running->wait = &wait;
  running->argument = argument;
  running->mbarrier = mbarrier;
  suspend(State::waiting, line);
}

void poll(uint32_t mbarrier, int line) {
  running->mbarrier = mbarrier;
  pause(line);
  running->mbarrier = 0;
}

bool is_awaited(uint32_t mbarrier) {
  for (const Thread& thread : threads) {
    if (thread.state == State::done || thread.mbarrier != mbarrier) continue;
    return true;
  }
  return false;
}

void cluster_arrive(int line) {
  if (running->cluster_arrived) fail(line, "barrier.cluster.arrive twice without a wait between");
  running->cluster_arrived = true;
  running->cluster_phase = cluster_phase;
  ++cluster_arrivals;
}

void cluster_wait(int line) {
  if (!running->cluster_arrived) fail(line, "barrier.cluster.wait without an arrive");
  wait_until(kClusterWait, running->cluster_phase, 0, line);
  running->cluster_arrived = false;
  blocks[running->block].met = true;
}

void pause(int line) { suspend(State::paused, line); }

void set_registers(int count, bool increase, int line) {
  const char* name = increase ? "setmaxnreg.inc" : "setmaxnreg.dec";
  if (count % 8 || count < 24 || count > 256) fail(line, "%s of %d registers", name, count);
  int more = count - running->registers;
  Block& block = blocks[running->block];
  while (increase && block.registers < more) wait_until(kRegisterWait, more, 0, line);
  block.registers -= more;
  running->registers = count;
}

int lane_id() { return running->lane; }

int wave() { return options.wave; }

void warp_operation(const WarpOperation& operation, uint64_t mask, void* operand, int line) {
  if (!(mask >> running->lane & 1)) {
    fail(line, "%s with mask 0x%" PRIx64 ", which does not name the calling lane %d", operation.name, mask,
         running->lane);
  }
  running->operation = &operation;
  running->mask = mask;
  running->operand = operand;
  suspend(State::in_warp_operation, line);
}

void converged_operation(const WarpOperation& operation, void* operand, int line) {
  running->operation = &operation;
  running->operand = operand;
  suspend(State::converging, line);
}

bool elect(uint32_t mask, int line) {
  static const WarpOperation election = {"elect.sync", [](void* const*, uint64_t, int) {}, false};
  warp_operation(election, mask, nullptr, line);
  int lane = options.order == 1 ? 31 - __builtin_clz(mask) : __builtin_ctz(mask);
  return running->lane == lane;
}

uint32_t active_mask(int line) {
  auto execute = [](void* const* operands, uint64_t lanes, int) {
    for (int lane = 0; lane < 32; ++lane) {
      if (lanes >> lane & 1) *static_cast<uint32_t*>(operands[lane]) = static_cast<uint32_t>(lanes);
    }
  };
  static const WarpOperation query = {"__activemask", execute, false};
  uint32_t mask = 0;
  converged_operation(query, &mask, line);
  return mask;
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
