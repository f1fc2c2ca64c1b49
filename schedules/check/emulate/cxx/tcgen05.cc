#include "tcgen05.h"

#include <cstdio>
#include <cstring>
#include <deque>
#include <vector>

#include "mbarrier.h"
#include "operands.h"
#include "scheduler.h"
#include "scheduler_internal.h"
#include "shared_memory.h"

namespace emu {
namespace {

constexpr int kLanes = 128, kColumns = 512, kWarpLanes = 32, kMaxRows = 2 * kLanes, kMaxColumns = 256, kMaxDepth = 32;
constexpr const char *kMultiply = "tcgen05.mma", *kLoad = "tcgen05.ld", *kCommit = "tcgen05.commit";

struct Column {
  int group;             // .cta_group of its allocation, 0 if there is none
  uint32_t first;        // column of that
  int under_way;         // products that will write it
  uint64_t written;      // when the last did
  uint32_t loading;      // warps whose loads of it have not been waited for
  uint32_t unreleased;   // warps that have loaded it, without a fence since
  uint64_t released;     // when the last fence of those that loaded it was
  int reader;            // number of the last warp that loaded it, -1 if none since it was written
};

struct TensorMemory {  // of one block
  std::vector<uint32_t> words;  // by column, then lane
  Column columns[kColumns];
  bool relinquished;
};

struct Shape {
  int rows, columns, depth, bytes;
  Element a, b;
};

struct Product {
  Shape shape;
  uint32_t sums;
  Descriptor a, b;
  bool accumulate;
  int rank, group, line;
  uint64_t contents;  // hash of the operands at issue
};

struct Arrival {
  uint32_t mbarrier;
  uint64_t products;  // of the thread, that come before
  int line;
};

struct PendingLoad {
  std::vector<void*> targets;
  std::vector<uint32_t> values;
  uint32_t first;
  int columns, line;
};

struct Issuer {  // a thread of the cluster
  std::deque<Product> queue;
  uint64_t issued, computed;
  std::deque<Arrival> arrivals;
  std::vector<PendingLoad> loads;
  uint64_t fenced;  // when its last fence::after_thread_sync was
};

std::vector<TensorMemory> memories;
std::vector<Issuer> issuers;
uint64_t now;

int own_warp() { return running_thread() % block_size() / kWarpLanes; }

bool is_size(uint32_t columns) { return columns >= 32 && columns <= kColumns && !(columns & (columns - 1)); }

void check_group(int group, const char* what, int line) {
  int other = running_block() ^ 1;
  if (group == 1) return;
  if (other >= cluster_size()) fail(line, "%s of .cta_group::2 in a block without another beside it", what);
  if (block_may_not_have_begun(other)) {
    fail(line, "%s of .cta_group::2: the block beside it may not have begun; a barrier.cluster first", what);
  }
}

// Decodes the shared memory descriptor (PTX ISA, "Shared memory descriptor").
Descriptor decode(uint64_t bits, int line) {
  static const int swizzles[8] = {0, -1, 3, -1, 2, -1, 1, -1};
  auto field = [&](int shift) { return static_cast<uint32_t>(bits >> shift & 0x3fff) << 4; };
  int swizzle = swizzles[bits >> 61];
  if ((bits >> 46 & 7) != 1 || (bits >> 52 & 0x1ff) || swizzle < 0) {
    fail(line, "%s: 0x%llx is no shared memory descriptor that the emulator knows", kMultiply,
         static_cast<unsigned long long>(bits));
  }
  return {field(0), field(16), field(32), static_cast<int>(bits >> 49 & 7), swizzle};
}

// Decodes the instruction descriptor (PTX ISA, "Instruction descriptor").
Shape decode_shape(uint32_t bits, int bytes, int group, int line) {
  int total = bits >> 4 & 3, a = bits >> 7 & 7, b = bits >> 10 & 7;
  Shape shape = {static_cast<int>(bits >> 24 & 31) * 16, static_cast<int>(bits >> 17 & 63) * 8, 32 / bytes, bytes,
                 Element::f16, Element::f16};
  bool known = !(bits & 0xe081e04f) && a < 2 && b < 2 && total == (bytes == 1 ? 2 : 1);
  auto type = [&](int number) {
    return bytes == 1 ? (number ? Element::s8 : Element::u8) : number ? Element::bf16 : Element::f16;
  };
  shape.a = type(a), shape.b = type(b);
  int step = 16 * group;
  if (!known || shape.rows != kLanes * group || !shape.columns || shape.columns % step || shape.columns > kMaxColumns) {
    fail(line, "%s: 0x%x is no instruction descriptor that the emulator knows for .cta_group::%d", kMultiply, bits, group);
  }
  return shape;
}

Column* columns_at(int rank, uint32_t address, uint32_t count, const char* what, int line) {
  uint32_t first = address & 0xffff;
  Column* columns = memories[rank].columns;
  bool inside = first + count <= kColumns;
  for (uint32_t i = 0; inside && i < count; ++i) {
    inside = columns[first + i].group && columns[first + i].first == columns[first].first;
  }
  if (!inside) {
    fail(line, "%s: columns %u to %u of tensor memory are not of one allocation of block %d", what, first,
         first + count - 1, rank);
  }
  return columns + first;
}

// Ranks of the blocks that a product reads from and writes to.
struct Ranks {
  int begin, end;
};
Ranks ranks_of(const Product& product) { return {product.rank, product.rank + product.group}; }

Operand a_operand(const Product& p) { return {p.a, kLanes, p.shape.depth, p.shape.bytes, false}; }
Operand b_operand(const Product& p) { return {p.b, p.shape.columns / p.group, p.shape.depth, p.shape.bytes, false}; }

template <class Read>
uint64_t hash_operands(const Product& product, const Read& read) {
  uint64_t hash = 0;
  Ranks ranks = ranks_of(product);
  for (int rank = ranks.begin; rank < ranks.end; ++rank) {
    auto add = [&](uint32_t offset, int, int) { hash = mix(hash, hash_bytes(read(rank, offset, kMultiply, product.line), 2)); };
    for_chunks(a_operand(product), add);
    for_chunks(b_operand(product), add);
  }
  return hash;
}

template <class Number>
struct Inputs {
  Number a[kMaxRows][kMaxDepth], b[kMaxDepth][kMaxColumns];
};

template <class Number>
void gather(const Product& p, Inputs<Number>* inputs) {
  int per = 16 / p.shape.bytes, part = p.shape.columns / p.group;
  Number values[16];
  Ranks ranks = ranks_of(p);
  for (int rank = ranks.begin; rank < ranks.end; ++rank) {
    int number = rank - ranks.begin;
    for_chunks(a_operand(p), [&](uint32_t offset, int row, int k) {
      unpack(shared_chunk(rank, offset, kMultiply, p.line), p.shape.a, per, values);
      for (int i = 0; i < per; ++i) inputs->a[number * kLanes + row][k + i] = values[i];
    });
    for_chunks(b_operand(p), [&](uint32_t offset, int column, int k) {
      unpack(shared_chunk(rank, offset, kMultiply, p.line), p.shape.b, per, values);
      for (int i = 0; i < per; ++i) inputs->b[k + i][number * part + column] = values[i];
    });
  }
}

EMU_VECTORISED void multiply(const Inputs<float>& inputs, int row, int n, int depth, float* sums) {
  for (int k = 0; k < depth; ++k) {
    float a = inputs.a[row][k];
    for (int column = 0; column < n; ++column) sums[column] += a * inputs.b[k][column];
  }
}
EMU_VECTORISED void multiply(const Inputs<int32_t>& inputs, int row, int n, int depth, int32_t* sums) {
  for (int k = 0; k < depth; ++k) {
    int32_t a = inputs.a[row][k];
    for (int column = 0; column < n; ++column) sums[column] += a * inputs.b[k][column];
  }
}

template <class Number>
void compute(const Product& p) {
  static Inputs<Number> inputs;
  gather(p, &inputs);
  for (int row = 0; row < p.shape.rows; ++row) {
    uint32_t* words = memories[p.rank + row / kLanes].words.data() + size_t{p.sums & 0xffff} * kLanes + row % kLanes;
    Number sums[kMaxColumns] = {};
    for (int i = 0; p.accumulate && i < p.shape.columns; ++i) memcpy(&sums[i], &words[size_t(i) * kLanes], 4);
    multiply(inputs, row, p.shape.columns, p.shape.depth, sums);
    for (int i = 0; i < p.shape.columns; ++i) memcpy(&words[size_t(i) * kLanes], &sums[i], 4);
  }
}

void compute_first(Issuer& issuer) {
  const Product& p = issuer.queue.front();
  if (hash_operands(p, shared_chunk) != p.contents) {
    fail(p.line, "%s: an operand in shared memory changed before a commit ended its use", kMultiply);
  }
  if (p.shape.bytes == 1) {
    compute<int32_t>(p);
  } else {
    compute<float>(p);
  }
  ++now;
  Ranks ranks = ranks_of(p);
  for (int rank = ranks.begin; rank < ranks.end; ++rank) {
    Column* columns = memories[rank].columns + (p.sums & 0xffff);
    for (int i = 0; i < p.shape.columns; ++i) --columns[i].under_way, columns[i].written = now;
  }
  ++issuer.computed;
  issuer.queue.pop_front();
}

void land(Issuer& issuer, const Arrival& arrival) {
  while (issuer.computed < arrival.products) compute_first(issuer);
  if (block_exited(shared_rank(arrival.mbarrier))) {
    fail(arrival.line, "%s: the block whose mbarrier it arrives at has exited", kCommit);
  }
  mbarrier_arrive(arrival.mbarrier, 1, arrival.line);
}

// A load or a product that follows what another thread did needs the fences of both.
void check_released(const Column& column, int warp, const char* what, int line) {
  uint32_t others = warp < 0 ? ~0u : ~(1u << warp);
  if (column.loading) fail(line, "%s: a %s of the same columns has not been waited for", what, kLoad);
  if (column.unreleased & others) {
    fail(line, "%s: no tcgen05.fence::before_thread_sync since another warp read the same columns", what);
  }
  if (column.reader >= 0 && column.reader != warp && column.released >= issuers[running_thread()].fenced) {
    fail(line, "%s: no tcgen05.fence::after_thread_sync since another warp read the same columns", what);
  }
}

uint32_t own_columns_mask() { return 1u << own_warp(); }

// The warp operations check that all lanes give the same operands; the first lane acts.
struct WarpCall {
  uint32_t first, second;
  int group;
};
void check_same(void* const operands[kMaxWave], uint64_t lanes, const char* what, int line) {
  const WarpCall* call = nullptr;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    auto* own = static_cast<const WarpCall*>(operands[lane]);
    if (call && memcmp(call, own, sizeof *call)) fail(line, "%s: the lanes of the warp differ in its operands", what);
    call = own;
  }
}
bool begin_warp(const WarpOperation& operation, WarpCall call, int line) {
  warp_operation(operation, ~0u, &call, line);
  return lane_id() == 0;
}

const WarpOperation kAllocate = {"tcgen05.alloc", [](void* const operands[kMaxWave], uint64_t lanes, int line) {
  check_same(operands, lanes, "tcgen05.alloc", line);
  auto* call = static_cast<const WarpCall*>(operands[0]);
  TensorMemory& memory = memories[running_block()];
  if (!is_size(call->second)) fail(line, "tcgen05.alloc of %u columns: not a power of two from 32 to 512", call->second);
  if (memory.relinquished) fail(line, "tcgen05.alloc after a tcgen05.relinquish_alloc_permit");
  uint32_t first = 0;
  auto is_free = [&] {
    for (uint32_t i = 0; i < call->second; ++i) {
      if (memory.columns[first + i].group) return false;
    }
    return true;
  };
  while (first + call->second <= kColumns && !is_free()) first += 32;
  if (first + call->second > kColumns) fail(line, "tcgen05.alloc of %u columns: so many are not free", call->second);
  memory.words.resize(size_t{kLanes} * kColumns);
  for (uint32_t i = first; i < first + call->second; ++i) {
    memory.columns[i] = {call->group, first, 0, 0, 0, 0, 0, -1};
    for (int lane = 0; lane < kLanes; ++lane) memory.words[size_t{i} * kLanes + lane] = ~0u;
  }
  memcpy(own_shared_pointer(call->first, 4, 4, "tcgen05.alloc", line), &first, 4);
}, true};

const WarpOperation kDeallocate = {"tcgen05.dealloc", [](void* const operands[kMaxWave], uint64_t lanes, int line) {
  check_same(operands, lanes, "tcgen05.dealloc", line);
}, true};

const WarpOperation kRelinquish = {"tcgen05.relinquish_alloc_permit", [](void* const*, uint64_t, int) {
  memories[running_block()].relinquished = true;
}, true};

const WarpOperation kLoadOperation = {kLoad, [](void* const operands[kMaxWave], uint64_t lanes, int line) {
  check_same(operands, lanes, kLoad, line);
}, true};
const WarpOperation kWaitOperation = {"tcgen05.wait::ld", [](void* const*, uint64_t, int) {}, true};

}  // namespace

void forget_tensor_memory(int blocks, int threads) {
  memories.resize(blocks);
  for (TensorMemory& memory : memories) {
    for (Column& column : memory.columns) column = {0, 0, 0, 0, 0, 0, 0, -1};
    memory.relinquished = false;
  }
  issuers.assign(threads, Issuer());
  now = 1;
}

void tensor_alloc(uint32_t target, uint32_t columns, int group, int line) {
  check_group(group, "tcgen05.alloc", line);
  begin_warp(kAllocate, {target, columns, group}, line);
}

void tensor_dealloc(uint32_t address, uint32_t count, int group, int line) {
  const char* what = "tcgen05.dealloc";
  if (!begin_warp(kDeallocate, {address, count, group}, line)) return;
  if (!is_size(count)) fail(line, "%s of %u columns: not a power of two from 32 to 512", what, count);
  Column* columns = columns_at(running_block(), address, count, what, line);
  for (uint32_t i = 0; i < count; ++i) {
    if (columns[i].group != group || columns[i].first != (address & 0xffff)) {
      fail(line, "%s of columns that were not allocated so", what);
    }
    if (columns[i].under_way) fail(line, "%s of columns that a %s under way writes", what, kMultiply);
    check_released(columns[i], -1, what, line);
    columns[i].group = 0;
  }
}

void tensor_relinquish(int group, int line) { begin_warp(kRelinquish, {0, 0, group}, line); }

void tensor_multiply(uint32_t sums, uint64_t a, uint64_t b, uint32_t shape, bool accumulate, int bytes, int group,
                     int line) {
  check_group(group, kMultiply, line);
  if (group == 2 && running_block() % 2) fail(line, "%s of .cta_group::2 in the second of two blocks", kMultiply);
  if (sums >> 16) fail(line, "%s: sums begin at lane %u of tensor memory", kMultiply, sums >> 16);
  Issuer& issuer = issuers[running_thread()];
  Product p = {decode_shape(shape, bytes, group, line), sums, decode(a, line), decode(b, line), accumulate,
               running_block(), group, line, 0};
  Ranks ranks = ranks_of(p);
  for (int rank = ranks.begin; rank < ranks.end; ++rank) {
    Column* columns = columns_at(rank, sums, p.shape.columns, kMultiply, line);
    for (int i = 0; i < p.shape.columns; ++i) {
      if (columns[i].group != group) fail(line, "%s of .cta_group::%d into columns of another", kMultiply, group);
      check_released(columns[i], -1, kMultiply, line);
      ++columns[i].under_way;
      columns[i].reader = -1;
    }
  }
  publish_shared_memory();
  p.contents = hash_operands(p, read_async);
  issuer.queue.push_back(p);
  ++issuer.issued;
  if (!copies_land_late()) compute_first(issuer);
}

void tensor_commit(uint32_t mbarrier, uint32_t blocks, int group, int line) {
  check_group(group, kCommit, line);
  Issuer& issuer = issuers[running_thread()];
  uint32_t here = static_cast<uint32_t>(shared_rank(mbarrier));
  for (uint32_t rank = 0; rank < 32; ++rank) {
    if (blocks ? !(blocks >> rank & 1) : rank != here) continue;
    Arrival arrival = {shared_address_in(mbarrier, rank, line), issuer.issued, line};
    mbarrier_check_visible(arrival.mbarrier, kCommit, line);
    if (copies_land_late()) {
      issuer.arrivals.push_back(arrival);
    } else {
      land(issuer, arrival);
    }
  }
}

bool land_awaited_commit() {
  // The latest that is awaited: what is behind another product may well arrive before what is behind an earlier one.
  for (Issuer& issuer : issuers) {
    for (size_t i = issuer.arrivals.size(); i-- > 0;) {
      Arrival next = issuer.arrivals[i];
      if (!is_awaited(next.mbarrier)) continue;
      issuer.arrivals.erase(issuer.arrivals.begin() + i);
      land(issuer, next);
      return true;
    }
  }
  return false;
}

void tensor_load(void* const* targets, int count, bool wide, uint32_t address, int line) {
  begin_warp(kLoadOperation, {address, static_cast<uint32_t>(count), wide}, line);
  int rank = running_block(), lane = lane_id();
  uint32_t first_lane = address >> 16, first = address & 0xffff, columns = wide ? count * 2 : count;
  uint32_t lanes = wide ? 16 : 32, own = own_warp() % 4 * kWarpLanes;
  if (first_lane < own || first_lane + lanes > own + kWarpLanes || first_lane % lanes) {
    fail(line, "%s: lanes %u to %u of tensor memory, of which warp %d reads %u to %u", kLoad, first_lane,
         first_lane + lanes - 1, own_warp(), own, own + kWarpLanes - 1);
  }
  Column* found = columns_at(rank, address, columns, kLoad, line);
  Issuer& issuer = issuers[running_thread()];
  for (uint32_t i = 0; i < columns; ++i) {
    if (found[i].under_way) fail(line, "%s of columns that a %s under way writes; wait for its commit", kLoad, kMultiply);
    if (found[i].written >= issuer.fenced) {
      fail(line, "%s: no tcgen05.fence::after_thread_sync since the columns were written", kLoad);
    }
    found[i].loading |= own_columns_mask();
    found[i].unreleased |= own_columns_mask();
    found[i].reader = own_warp();
  }
  PendingLoad load = {{targets, targets + count}, {}, first, static_cast<int>(columns), line};
  for (int i = 0; i < count; ++i) {
    uint32_t at_lane = first_lane + (wide ? lane / 4 + i / 2 % 2 * 8 : lane);
    uint32_t column = first + (wide ? i / 4 * 8 + lane % 4 * 2 + i % 2 : i);
    load.values.push_back(memories[rank].words[size_t{column} * kLanes + at_lane]);
    memset(targets[i], 0xff, 4);
  }
  issuer.loads.push_back(std::move(load));
}

void tensor_wait_loads(int line) {
  warp_operation(kWaitOperation, ~0u, nullptr, line);
  Issuer& issuer = issuers[running_thread()];
  for (const PendingLoad& load : issuer.loads) {
    for (size_t i = 0; i < load.targets.size(); ++i) memcpy(load.targets[i], &load.values[i], 4);
    Column* columns = memories[running_block()].columns + load.first;
    for (int i = 0; i < load.columns; ++i) columns[i].loading &= ~own_columns_mask();
  }
  issuer.loads.clear();
}

void tensor_fence(bool after, int) {
  ++now;
  if (after) {
    issuers[running_thread()].fenced = now;
    return;
  }
  for (Column& column : memories[running_block()].columns) {
    if (!(column.unreleased & own_columns_mask())) continue;
    column.unreleased &= ~own_columns_mask();
    column.released = now;
  }
}

void finish_tensor_loads() {
  const Issuer& issuer = issuers[running_thread()];
  if (!issuer.loads.empty()) fail(issuer.loads[0].line, "the thread exits before its %s is waited for", kLoad);
  if (issuer.issued && (issuer.arrivals.empty() ? issuer.computed < issuer.issued : false)) {
    fail(issuer.queue[0].line, "the thread exits before its %s is committed", kMultiply);
  }
}

void finish_tensor_memory(int rank) {
  for (const Issuer& issuer : issuers) {
    for (const Arrival& arrival : issuer.arrivals) {
      if (shared_rank(arrival.mbarrier) != rank) continue;
      fail(arrival.line, "the block exits while the arrival of a %s at its mbarrier is under way", kCommit);
    }
  }
  for (const Column& column : memories[rank].columns) {
    if (column.group) fail(0, "the block exits without a tcgen05.dealloc of its tensor memory");
  }
}

}  // namespace emu
