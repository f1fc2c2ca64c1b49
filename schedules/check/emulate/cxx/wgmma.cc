#include "wgmma.h"

#include <cstdio>
#include <cstring>
#include <deque>
#include <vector>

#include "operands.h"
#include "scheduler.h"
#include "scheduler_internal.h"
#include "shared_memory.h"

namespace emu {
namespace {

constexpr int kThreads = 128, kRows = 64, kMaxColumns = 256, kMaxDepth = 32;
constexpr const char* kName = "wgmma.mma_async";

Descriptor decode(uint64_t bits) {
  static const int swizzles[4] = {0, 3, 2, 1};
  auto field = [&](int shift) { return static_cast<uint32_t>(bits >> shift & 0x3fff) << 4; };
  return {field(0), field(16), field(32), static_cast<int>(bits >> 49 & 7), swizzles[bits >> 62]};
}

// One wgmma of a warpgroup, from the first thread that issues it until it is computed.
struct Multiply {
  WarpgroupShape shape;
  uint64_t a_descriptor, b_descriptor;
  bool a_in_registers, accumulate;
  int line, issued;
  uint64_t contents;                      // hash of the operands in shared memory at issue
  char* accumulators[kThreads];           // null: scattered
  std::vector<void*> scattered[kThreads];
  uint32_t a[kThreads][4];
  const void* a_registers[kThreads][4];
};

struct Member {  // a thread of a warpgroup
  uint64_t issued;                // how many it has issued
  std::deque<uint64_t> groups;    // `issued` at each commit, oldest first
  bool fenced;                    // since the last that it issued
  char* accumulators;             // of the last that was computed, and what it left there
  int registers;
  uint64_t contents;
};

struct Warpgroup {
  std::deque<Multiply> queue;
  uint64_t computed;  // how many have left the queue
  Member members[kThreads];
};

std::vector<Warpgroup> warpgroups;
int warpgroups_per_block;

int own_warpgroup() { return running_block() * warpgroups_per_block + running_thread() % block_size() / kThreads; }
int own_member() { return running_thread() % block_size() % kThreads; }

Operand a_operand(const Multiply& m) {
  return {decode(m.a_descriptor), kRows, m.shape.depth(), m.shape.bytes(), m.shape.transpose_a};
}
Operand b_operand(const Multiply& m) {
  return {decode(m.b_descriptor), m.shape.n, m.shape.depth(), m.shape.bytes(), m.shape.transpose_b};
}

template <class Read>
uint64_t hash_operands(const Multiply& m, const Read& read) {
  uint64_t hash = 0;
  int block = running_block();
  auto add = [&](uint32_t offset, int, int) { hash = mix(hash, hash_bytes(read(block, offset, kName, m.line), 2)); };
  if (!m.a_in_registers) for_chunks(a_operand(m), add);
  for_chunks(b_operand(m), add);
  return hash;
}

// Elements of both operands as numbers; the integers are exact in 32 bits.
template <class Number>
struct Inputs {
  Number a[kRows][kMaxDepth], b[kMaxDepth][kMaxColumns];
};

template <class Number>
void gather(const Multiply& m, int block, Inputs<Number>* inputs) {
  Element a = m.shape.a, b = m.shape.b;
  int per = 16 / m.shape.bytes();
  Number values[16];
  auto load_a = [&](uint32_t offset, int row, int k) {
    unpack(shared_chunk(block, offset, kName, m.line), a, per, values);
    for (int i = 0; i < per; ++i) {
      if (m.shape.transpose_a) inputs->a[row + i][k] = values[i] * m.shape.sign_a;
      else inputs->a[row][k + i] = values[i] * m.shape.sign_a;
    }
  };
  auto load_b = [&](uint32_t offset, int column, int k) {
    unpack(shared_chunk(block, offset, kName, m.line), b, per, values);
    for (int i = 0; i < per; ++i) {
      if (m.shape.transpose_b) inputs->b[k][column + i] = values[i] * m.shape.sign_b;
      else inputs->b[k + i][column] = values[i] * m.shape.sign_b;
    }
  };
  for_chunks(b_operand(m), load_b);
  if (!m.a_in_registers) {
    for_chunks(a_operand(m), load_a);
    return;
  }
  int in_register = per / 4;
  for (int thread = 0; thread < kThreads; ++thread) {
    int row = thread / 32 * 16 + thread % 32 / 4, first = thread % 4 * in_register;
    for (int word = 0; word < 4; ++word) {
      unpack(reinterpret_cast<const char*>(&m.a[thread][word]), a, in_register, values);
      for (int i = 0; i < in_register; ++i) {
        inputs->a[row + word % 2 * 8][first + word / 2 * 4 * in_register + i] = values[i] * m.shape.sign_a;
      }
    }
  }
}

EMU_VECTORISED void multiply(const Inputs<float>& inputs, int n, int depth, float (*sums)[kMaxColumns]) {
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < depth; ++k) {
      float a = inputs.a[row][k];
      for (int column = 0; column < n; ++column) sums[row][column] += a * inputs.b[k][column];
    }
  }
}
EMU_VECTORISED void multiply(const Inputs<int32_t>& inputs, int n, int depth, int32_t (*sums)[kMaxColumns]) {
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < depth; ++k) {
      int32_t a = inputs.a[row][k];
      for (int column = 0; column < n; ++column) sums[row][column] += a * inputs.b[k][column];
    }
  }
}

// The fragment of D: two neighbours in a row, then two in the row eight below, then eight columns further.
template <class Number, class Visit>
void for_accumulators(Multiply& m, const Visit& visit) {
  for (int thread = 0; thread < kThreads; ++thread) {
    int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    auto* together = reinterpret_cast<Number*>(m.accumulators[thread]);
    for (int i = 0; i < m.shape.n / 2; ++i) {
      Number& target = together ? together[i] : *static_cast<Number*>(m.scattered[thread][i]);
      visit(target, row + i / 2 % 2 * 8, column + i / 4 * 8 + i % 2);
    }
  }
}

template <class Number>
void compute(Multiply& m, int block) {
  static Inputs<Number> inputs;
  static Number sums[kRows][kMaxColumns];
  gather(m, block, &inputs);
  if (m.accumulate) {
    for_accumulators<Number>(m, [&](Number& target, int row, int column) { sums[row][column] = target; });
  } else {
    memset(sums, 0, sizeof sums);
  }
  multiply(inputs, m.shape.n, m.shape.depth(), sums);
  for_accumulators<Number>(m, [&](Number& target, int row, int column) { target = sums[row][column]; });
}

// Whether the registers of A are what they were at issue.
bool fragments_kept(const Multiply& m) {
  for (int thread = 0; m.a_in_registers && thread < kThreads; ++thread) {
    for (int i = 0; i < 4; ++i) {
      if (memcmp(&m.a[thread][i], m.a_registers[thread][i], 4)) return false;
    }
  }
  return true;
}

void compute_first(Warpgroup& group, int block) {
  Multiply& m = group.queue.front();
  if (!fragments_kept(m)) fail(m.line, "%s: a register of A changed before a wgmma.wait_group ended its use", kName);
  if (hash_operands(m, shared_chunk) != m.contents) {
    fail(m.line, "%s: an operand in shared memory changed before a wgmma.wait_group ended its use", kName);
  }
  if (m.shape.bytes() == 1) {
    compute<int32_t>(m, block);
  } else {
    compute<float>(m, block);
  }
  for (int thread = 0; thread < kThreads; ++thread) {
    Member& member = group.members[thread];
    member.accumulators = m.accumulators[thread];
    member.registers = m.shape.n / 2;
    if (member.accumulators) member.contents = hash_bytes(member.accumulators, member.registers / 2);
  }
  ++group.computed;
  group.queue.pop_front();
}

// Whether all threads of the warpgroup have issued so many; the argument holds them and the warpgroup.
bool all_issued(uint64_t argument) {
  const Warpgroup& group = warpgroups[argument & 0xffff];
  uint64_t wanted = argument >> 16;
  for (const Member& member : group.members) {
    if (member.issued < wanted) return false;
  }
  return true;
}

void describe_issued(uint64_t argument, char* text, size_t size) {
  const Warpgroup& group = warpgroups[argument & 0xffff];
  int behind = 0;
  for (const Member& member : group.members) behind += member.issued < argument >> 16;
  snprintf(text, size, "%d of %d threads of the warpgroup have not issued a wgmma that is waited for", behind, kThreads);
}

const Wait kIssuedWait = {"wgmma.wait_group", all_issued, describe_issued};
const WarpOperation kWaitOperation = {"wgmma.wait_group", [](void* const*, uint64_t, int) {}, true};

// Other instructions may touch an accumulator only before a wgmma.fence ("wgmma.fence").
void check_fence(const Warpgroup& group, const Member& member, const Multiply& m, int thread) {
  if (member.fenced) return;
  if (!member.issued) fail(m.line, "%s without a wgmma.fence before it", kName);
  bool same = member.issued == group.computed && m.accumulate && member.accumulators == m.accumulators[thread];
  if (!same || !member.accumulators || member.registers != m.shape.n / 2) return;
  if (hash_bytes(member.accumulators, member.registers / 2) != member.contents) {
    fail(m.line, "%s: an accumulator was written without a wgmma.fence after it", kName);
  }
}

bool same_instruction(const Multiply& m, const WarpgroupShape& shape, uint64_t a, bool in_registers, uint64_t b,
                      bool accumulate) {
  return !memcmp(&m.shape, &shape, sizeof shape) && m.a_descriptor == a && m.a_in_registers == in_registers &&
         m.b_descriptor == b && m.accumulate == accumulate;
}

}  // namespace

void forget_warpgroups(int blocks, int threads) {
  warpgroups_per_block = threads / kThreads;
  warpgroups.resize(blocks * warpgroups_per_block);
  for (Warpgroup& group : warpgroups) {
    group.queue.clear();
    group.computed = 0;
    for (Member& member : group.members) member = {};
  }
}

void wgmma(const WarpgroupShape& shape, void* const* d, uint64_t a_descriptor, const void* const* a,
           uint64_t b_descriptor, bool accumulate, int line) {
  if (running_thread() % block_size() / kThreads >= warpgroups_per_block) {
    fail(line, "%s: the block has %d threads, not a whole number of warpgroups", kName, block_size());
  }
  Warpgroup& group = warpgroups[own_warpgroup()];
  int thread = own_member();
  Member& member = group.members[thread];
  uint64_t position = member.issued - group.computed;
  if (position == group.queue.size()) {
    group.queue.emplace_back();
    Multiply& fresh = group.queue.back();
    fresh.shape = shape;
    fresh.a_descriptor = a_descriptor;
    fresh.b_descriptor = b_descriptor;
    fresh.a_in_registers = a != nullptr;
    fresh.accumulate = accumulate;
    fresh.line = line;
    fresh.issued = 0;
  }
  Multiply& m = group.queue[position];
  if (!same_instruction(m, shape, a_descriptor, a != nullptr, b_descriptor, accumulate)) {
    fail(line, "%s: the threads of the warpgroup differ in the instruction or its descriptors", kName);
  }
  int registers = shape.n / 2;
  m.accumulators[thread] = static_cast<char*>(d[0]);
  for (int i = 1; i < registers; ++i) {
    if (d[i] != m.accumulators[thread] + 4 * i) {
      m.accumulators[thread] = nullptr;
      m.scattered[thread].assign(d, d + registers);
      break;
    }
  }
  for (int i = 0; a && i < 4; ++i) {
    m.a_registers[thread][i] = a[i];
    memcpy(&m.a[thread][i], a[i], 4);
  }
  check_fence(group, member, m, thread);
  member.fenced = false;
  ++member.issued;
  if (++m.issued == kThreads) {
    publish_shared_memory();
    m.contents = hash_operands(m, read_async);
  }
}

void wgmma_fence() {
  if (running_thread() % block_size() / kThreads < warpgroups_per_block) {
    warpgroups[own_warpgroup()].members[own_member()].fenced = true;
  }
}

void wgmma_commit() {
  if (running_thread() % block_size() / kThreads >= warpgroups_per_block) return;
  Member& member = warpgroups[own_warpgroup()].members[own_member()];
  member.groups.push_back(member.issued);
}

void wgmma_wait(unsigned pending, int line) {
  warp_operation(kWaitOperation, ~0u, nullptr, line);
  if (running_thread() % block_size() / kThreads >= warpgroups_per_block) return;
  int number = own_warpgroup();
  Warpgroup& group = warpgroups[number];
  Member& member = group.members[own_member()];
  uint64_t wanted = 0;
  while (member.groups.size() > pending) {
    wanted = member.groups.front();
    member.groups.pop_front();
  }
  if (wanted <= group.computed) return;
  wait_until(kIssuedWait, wanted << 16 | static_cast<uint64_t>(number), 0, line);
  while (group.computed < wanted) compute_first(group, running_block());
}

void finish_warpgroup() {
  if (running_thread() % block_size() / kThreads >= warpgroups_per_block) return;
  const Warpgroup& group = warpgroups[own_warpgroup()];
  if (group.members[own_member()].issued <= group.computed) return;
  fail(group.queue.front().line, "the thread exits before its %s is waited for", kName);
}

}  // namespace emu
