// What a kernel calls to synchronise: block barriers, named barriers and operations of a whole warp.
//
// Between two barriers each warp runs as far as it can before the next one starts, and within a warp each lane runs
// as far as it can before the next lane starts. That is the order furthest from lock step which the CUDA memory model
// permits, so a missing barrier changes the result instead of going unnoticed.
#pragma once
#include <cstdint>

struct uint3 { unsigned x, y, z; };

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emu {

// The running thread, as threadIdx, blockIdx, blockDim and gridDim show it; a launch without clusters has one block in
// each.
struct Position {
  uint3 thread, block;
  dim3 block_size, grid_size, cluster_size;
  unsigned cluster_rank;  // of the block: %cluster_ctarank
};
extern Position position;
inline unsigned cluster_blocks() {
  return position.cluster_size.x * position.cluster_size.y * position.cluster_size.z;
}

// Ends the launch with a message. `line` is the line of the kernel source, 0 if unknown.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(int line, const char* format, ...);

// __syncthreads() and its voting variants: returns how many threads of the block passed a true predicate.
int block_barrier(int predicate, int line, const char* name = "__syncthreads");

// bar.sync / bar.arrive: `count` threads take part, the whole block if it is 0; only `wait`ing threads are held.
void named_barrier(int id, int count, bool wait, int line);

// barrier.cluster.arrive and .wait: all threads of the cluster that still run take part.
void cluster_arrive(int line);
void cluster_wait(int line);

// Lets every other thread of the block run first (a spin loop has to call this to make progress).
void pause(int line = 0);

// setmaxnreg: `increase` waits until the registers that other warps have released suffice.
void set_registers(int count, bool increase, int line);

int lane_id();
int wave();             // lanes of a warp: 32, or 64 on some AMD GPUs

// An operation of several lanes. Each lane suspends with a pointer to its operand; when the last lane of `mask` has
// arrived, `execute` runs once with all operands (null for lanes outside `lanes`) and writes the results into them.
// An aligned operation (`.aligned` in PTX) must be reached by all 32 lanes at the same place of the program.
constexpr int kMaxWave = 64;
using WarpFunction = void (*)(void* const operands[kMaxWave], uint64_t lanes, int line);
struct WarpOperation {
  const char* name;
  WarpFunction execute;
  bool aligned;
};
void warp_operation(const WarpOperation& operation, uint64_t mask, void* operand, int line);

// An operation of the lanes that hardware would have converged at this line: it is executed when no lane of the warp
// can go on, for all that wait at the lowest line.
void converged_operation(const WarpOperation& operation, void* operand, int line);

uint32_t active_mask(int line);

// elect.sync: true for one lane of the mask, the one that runs first.
bool elect(uint32_t mask, int line);

}  // namespace emu

#define threadIdx (emu::position.thread)
#define blockIdx (emu::position.block)
#define blockDim (emu::position.block_size)
#define gridDim (emu::position.grid_size)
#define warpSize 32

static inline void __syncthreads(int line = __builtin_LINE()) { emu::block_barrier(0, line); }
static inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  return emu::block_barrier(predicate != 0, line);
}
static inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return emu::block_barrier(predicate != 0, line) > 0;
}
static inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
  unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  return emu::block_barrier(predicate != 0, line) == static_cast<int>(threads);
}

// Device memory is one flat host memory and threads switch only at the calls above: fences have nothing to order.
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) { emu::pause(); }
