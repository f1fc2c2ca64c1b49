#include "warp.h"

namespace emu {
namespace {

struct ShuffleOperand {
  Shuffle kind;
  uint64_t value;
  int operand, width;
  uint64_t result;
};

// The lane that `lane` reads from; a source outside the lane's segment of `width` lanes means the lane itself.
int source_lane(const ShuffleOperand& o, int lane) {
  int first = lane & ~(o.width - 1), within = lane & (o.width - 1);
  switch (o.kind) {
    case Shuffle::index:
      return first + (o.operand & (o.width - 1));
    case Shuffle::up:
      return o.operand <= within ? lane - o.operand : lane;
    case Shuffle::down:
      return o.operand < o.width - within ? lane + o.operand : lane;
    case Shuffle::exclusive_or: {
      // A source in a later segment is out of range, one in an earlier segment is not.
      int source = lane ^ o.operand;
      return source < first + o.width && source >= 0 ? source : lane;
    }
  }
  return lane;
}

void execute_shuffle(void* const* operands, uint64_t lanes, int) {
  uint64_t results[32];
  for (int lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    int source = source_lane(*static_cast<ShuffleOperand*>(operands[lane]), lane);
    // Reading a lane that takes no part is undefined: give poison rather than a plausible value.
    results[lane] = lanes >> source & 1 ? static_cast<ShuffleOperand*>(operands[source])->value : ~uint64_t{0};
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes >> lane & 1) static_cast<ShuffleOperand*>(operands[lane])->result = results[lane];
  }
}

struct VoteOperand {
  uint64_t value;
  uint32_t result;
};

void execute_ballot(void* const* operands, uint64_t lanes, int) {
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes >> lane & 1 && static_cast<VoteOperand*>(operands[lane])->value) votes |= 1u << lane;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes >> lane & 1) static_cast<VoteOperand*>(operands[lane])->result = votes;
  }
}

void execute_match(void* const* operands, uint64_t lanes, int) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    auto* own = static_cast<VoteOperand*>(operands[lane]);
    own->result = 0;
    for (int other = 0; other < 32; ++other) {
      if (lanes >> other & 1 && static_cast<VoteOperand*>(operands[other])->value == own->value) {
        own->result |= 1u << other;
      }
    }
  }
}

struct ReduceOperand {
  Reduce kind;
  int64_t value, result;
};

int64_t combine(Reduce kind, int64_t a, int64_t b) {
  switch (kind) {
    case Reduce::add: return a + b;
    case Reduce::minimum: return a < b ? a : b;
    case Reduce::maximum: return a > b ? a : b;
    case Reduce::bit_and: return a & b;
    case Reduce::bit_or: return a | b;
    case Reduce::bit_xor: return a ^ b;
  }
  return a;
}

void execute_reduce(void* const* operands, uint64_t lanes, int) {
  int64_t total = 0;
  bool first = true;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    auto* operand = static_cast<ReduceOperand*>(operands[lane]);
    total = first ? operand->value : combine(operand->kind, total, operand->value);
    first = false;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes >> lane & 1) static_cast<ReduceOperand*>(operands[lane])->result = total;
  }
}

const WarpOperation kSync = {"__syncwarp", [](void* const*, uint64_t, int) {}, false};
const WarpOperation kShuffles[] = {{"__shfl_sync", execute_shuffle, false},
                                   {"__shfl_up_sync", execute_shuffle, false},
                                   {"__shfl_down_sync", execute_shuffle, false},
                                   {"__shfl_xor_sync", execute_shuffle, false}};
const WarpOperation kBallot = {"a warp vote", execute_ballot, false};
const WarpOperation kMatch = {"__match_any_sync", execute_match, false};
const WarpOperation kReduce = {"a warp reduction", execute_reduce, false};

}  // namespace

void sync_warp(uint32_t mask, int line) { warp_operation(kSync, mask, nullptr, line); }

uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t value, int operand, int width, int line) {
  if (width <= 0 || width > 32 || (width & (width - 1))) {
    fail(line, "shuffle width %d is not a power of two up to 32", width);
  }
  ShuffleOperand o = {kind, value, operand & 31, width, 0};
  warp_operation(kShuffles[static_cast<int>(kind)], mask, &o, line);
  return o.result;
}

uint32_t ballot(uint32_t mask, bool predicate, int line) {
  VoteOperand o = {predicate, 0};
  warp_operation(kBallot, mask, &o, line);
  return o.result;
}

uint32_t match_any(uint32_t mask, uint64_t value, int line) {
  VoteOperand o = {value, 0};
  warp_operation(kMatch, mask, &o, line);
  return o.result;
}

int64_t reduce(Reduce kind, uint32_t mask, int64_t value, int line) {
  ReduceOperand o = {kind, value, 0};
  warp_operation(kReduce, mask, &o, line);
  return o.result;
}

}  // namespace emu
