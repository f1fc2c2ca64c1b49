#include "bulk_copy.h"

#include <cstring>
#include <deque>
#include <vector>

#include "mbarrier.h"
#include "scheduler.h"
#include "scheduler_internal.h"
#include "shared_memory.h"

namespace emu {
namespace {

using Bytes = std::vector<char>;

// The box of a tensor that one instruction copies.
struct Box {
  CUtensorMap map;
  int32_t coordinates[5];
};

struct Load {
  uint32_t target, bytes, mbarrier;
  const char* source;  // null: a box
  Box box;
  bool taken;  // the data were read at issue
  Bytes data;  // what was
  int line;
  bool pair;  // the mbarrier may be that of the block beside it
};

struct Store {
  uint32_t source, bytes;
  char* target;  // null: a box
  Box box;
  Bytes data;  // shared memory at issue
  int line;
  bool read;
};
using Group = std::vector<Store>;

struct Queue {
  std::deque<Group> groups;  // committed, oldest first
  Group open;
};

std::deque<Load> in_flight;
std::vector<Queue> queues;  // one per thread of the running cluster

// The bits of an address that a swizzle exchanges: 16-byte chunks with rows of 128 bytes.
uint32_t swizzled(uint32_t address, int swizzle) {
  return address ^ ((address >> 7 & ((1u << swizzle) - 1)) << 4);
}

int extent(const Box& box, int axis) {
  int step = box.map.element_strides[axis];
  return (box.map.box[axis] + step - 1) / step;
}

int box_bytes(const Box& box) {
  int bytes = box.map.element_bytes;
  for (int axis = 0; axis < box.map.rank; ++axis) bytes *= extent(box, axis);
  return bytes;
}

// Calls `row(offset in the box, address in the tensor or null if it is outside)` for every innermost row.
template <class Row>
void for_rows(const Box& box, const Row& row) {
  const CUtensorMap& map = box.map;
  int index[5] = {}, row_bytes = extent(box, 0) * map.element_bytes, offset = 0;
  for (;;) {
    int64_t distance = 0;
    bool inside = true;
    for (int axis = 1; axis < map.rank; ++axis) {
      int64_t at = int64_t{box.coordinates[axis]} + int64_t{index[axis]} * map.element_strides[axis];
      inside &= at >= 0 && at < static_cast<int64_t>(map.dims[axis]);
      distance += at * static_cast<int64_t>(map.strides[axis]);
    }
    row(offset, inside ? reinterpret_cast<char*>(map.address) + distance : nullptr);
    offset += row_bytes;
    int axis = 1;
    while (axis < map.rank && ++index[axis] == extent(box, axis)) index[axis++] = 0;
    if (axis >= map.rank) return;
  }
}

// The elements of a row that are inside the tensor.
struct Range {
  int begin, end;
};
Range inside(const Box& box) {
  int64_t first = box.coordinates[0], dim = static_cast<int64_t>(box.map.dims[0]), count = extent(box, 0);
  int64_t begin = first < 0 ? -first : 0, end = first + count > dim ? dim - first : count;
  if (begin > count) begin = count;
  return {static_cast<int>(begin), static_cast<int>(end < begin ? begin : end)};
}

void fill(char* to, int bytes, const CUtensorMap& map) {
  memset(to, 0, bytes);
  if (!map.nan_fill) return;
  for (int i = map.element_bytes - 1; i < bytes; i += map.element_bytes) {
    to[i] = 0x7f;
    memset(to + i - (map.element_bytes - 1), 0xFF, map.element_bytes - 1);
  }
}

// float32 to the nearest of 10 bits of mantissa, to even of two; infinities and NaN stay.
void round_to_tf32(char* data, int bytes) {
  for (int i = 0; i < bytes; i += 4) {
    uint32_t bits;
    memcpy(&bits, data + i, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) continue;
    bits = (bits + 0xfffu + (bits >> 13 & 1)) & 0xffffe000u;
    memcpy(data + i, &bits, 4);
  }
}

Bytes read_box(const Box& box) {
  Bytes data(box_bytes(box));
  int element = box.map.element_bytes, row_bytes = extent(box, 0) * element;
  Range range = inside(box);
  for_rows(box, [&](int offset, const char* row) {
    fill(data.data() + offset, row_bytes, box.map);
    if (!row) return;
    const char* from = row + (int64_t{box.coordinates[0]} + range.begin) * element;
    memcpy(data.data() + offset + range.begin * element, from, (range.end - range.begin) * element);
    if (box.map.to_tf32) round_to_tf32(data.data() + offset, row_bytes);
  });
  return data;
}

void write_box(const Box& box, const Bytes& data) {
  int element = box.map.element_bytes;
  Range range = inside(box);
  for_rows(box, [&](int offset, char* row) {
    if (!row) return;
    char* to = row + (int64_t{box.coordinates[0]} + range.begin) * element;
    memcpy(to, data.data() + offset + range.begin * element, (range.end - range.begin) * element);
  });
}

// Whether a phase of its mbarrier ends with it.
bool land(const Load& load) {
  if (load.source || load.taken) {
    write_async(load.target, load.source ? load.source : load.data.data(), load.bytes, load.line);
  } else {
    Bytes data = read_box(load.box);
    for (uint32_t offset = 0; offset < load.bytes; offset += 16) {
      uint32_t to = swizzled(load.target + offset, load.box.map.swizzle);
      write_async(to, data.data() + offset, 16, load.line);
    }
  }
  return mbarrier_complete(load.mbarrier, load.bytes, load.line);
}

// One copy for each block that it goes to: a multicast lands in each at its own time.
void start(Load load, uint32_t blocks, const char* what) {
  uint32_t here = static_cast<uint32_t>(shared_rank(load.target));
  for (uint32_t rank = 0; rank < 32; ++rank) {
    if (blocks ? !(blocks >> rank & 1) : rank != here) continue;
    Load copy = load;
    copy.target = shared_address_in(load.target, rank, load.line);
    copy.mbarrier = blocks ? shared_address_in(load.mbarrier, rank, load.line) : load.mbarrier;
    uint32_t bit = load.pair;  // of the rank, in which the two blocks differ
    if ((shared_rank(copy.mbarrier) | bit) != (rank | bit)) {
      fail(load.line, "%s: the mbarrier is not in the block that the data go to", what);
    }
    shared_pointer(copy.target, load.bytes, 1, what, load.line);
    mbarrier_check_visible(copy.mbarrier, what, load.line);
    if (copies_land_late()) {
      in_flight.push_back(std::move(copy));
    } else {
      land(copy);
    }
  }
}

void check_plain(uint32_t shared, uintptr_t other, uint32_t bytes, const char* what, int line) {
  if (!bytes || bytes % 16 || other % 16 || shared % 16) {
    fail(line, "%s of %u bytes: the size and both addresses must be multiples of 16 bytes", what, bytes);
  }
}

Box make_box(const void* map, const int32_t* coordinates, int rank, uint32_t shared, const char* what, int line) {
  Box box = {};
  memcpy(&box.map, map, sizeof box.map);
  if (box.map.magic != kTensorMapMagic) fail(line, "%s: the address is not that of a tensor map", what);
  if (box.map.rank != rank) fail(line, "%s: %d coordinates for a tensor map of rank %d", what, rank, box.map.rank);
  for (int i = 0; i < rank; ++i) box.coordinates[i] = coordinates[i];
  // Seen on an H200 for loads, whatever the box and the other coordinates, and taken to hold for stores; the driver
  // encodes such maps without complaint.
  if (int64_t{coordinates[0]} * box.map.element_bytes % 16) {
    fail(line, "illegal instruction: %s with an innermost coordinate of %d, which is not 16-byte aligned", what,
         coordinates[0]);
  }
  if (shared % 128) fail(line, "%s: shared address 0x%x is not aligned to 128 bytes", what, shared);
  return box;
}

// What the async proxy reads from the shared memory of the running block.
Bytes read_shared(uint32_t address, uint32_t bytes, int swizzle, const char* what, int line) {
  publish_shared_memory();
  Bytes data(bytes);
  for (uint32_t offset = 0; offset < bytes; offset += 16) {
    uint32_t from = shared_offset(swizzled(address + offset, swizzle));
    memcpy(data.data() + offset, read_async(shared_rank(address), from, what, line), 16);
  }
  return data;
}

// Performs the reads of a group from shared memory, which must still hold what it held at issue.
void read_group(Group& group) {
  for (Store& store : group) {
    if (store.read) continue;
    store.read = true;
    int swizzle = store.target ? 0 : store.box.map.swizzle;
    for (uint32_t offset = 0; offset < store.bytes; offset += 16) {
      char* from = shared_pointer(swizzled(store.source + offset, swizzle), 16, 16, "a bulk store", store.line);
      if (!memcmp(from, store.data.data() + offset, 16)) continue;
      fail(store.line, "a bulk store's shared memory was overwritten before a wait_group let it be read");
    }
  }
}

void write_group(const Group& group) {
  for (const Store& store : group) {
    if (store.target) {
      memcpy(store.target, store.data.data(), store.bytes);
    } else {
      write_box(store.box, store.data);
    }
  }
}

void start_store(Store store) {
  Queue& queue = queues[running_thread()];
  queue.open.push_back(std::move(store));
  if (!copies_land_late()) write_group({queue.open.back()});
}

}  // namespace

void forget_bulk_copies(int threads) {
  in_flight.clear();
  queues.resize(threads);
  for (Queue& queue : queues) {
    queue.groups.clear();
    queue.open.clear();
  }
}

void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t mbarrier, uint32_t blocks, int line) {
  check_plain(target, reinterpret_cast<uintptr_t>(source), bytes, "cp.async.bulk", line);
  Load load = {target, bytes, mbarrier, static_cast<const char*>(source), {}, false, {}, line};
  start(std::move(load), blocks, "cp.async.bulk");
}

void bulk_load_tensor(uint32_t target, const void* map, const int32_t* coordinates, int rank, uint32_t mbarrier,
                      uint32_t blocks, bool pair, int line) {
  const char* what = "cp.async.bulk.tensor";
  Box box = make_box(map, coordinates, rank, target, what, line);
  Load load = {target, static_cast<uint32_t>(box_bytes(box)), mbarrier, nullptr, box, false, {}, line, pair};
  start(std::move(load), blocks, what);
}

void bulk_copy_shared(uint32_t target, uint32_t source, uint32_t bytes, uint32_t mbarrier, int line) {
  check_plain(target, source, bytes, "cp.async.bulk", line);
  own_shared_pointer(source, bytes, 16, "cp.async.bulk", line);
  Bytes data = read_shared(source, bytes, 0, "cp.async.bulk", line);
  start({target, bytes, mbarrier, nullptr, {}, true, std::move(data), line}, 0, "cp.async.bulk");
}

void store_async(uint32_t target, const void* data, uint32_t bytes, uint32_t mbarrier, int line) {
  if (target % bytes) fail(line, "st.async: shared address 0x%x is not aligned to %u bytes", target, bytes);
  auto* begin = static_cast<const char*>(data);
  start({target, bytes, mbarrier, nullptr, {}, true, Bytes(begin, begin + bytes), line}, 0, "st.async");
}

void bulk_store(void* target, uint32_t source, uint32_t bytes, int line) {
  check_plain(source, reinterpret_cast<uintptr_t>(target), bytes, "cp.async.bulk", line);
  own_shared_pointer(source, bytes, 16, "cp.async.bulk", line);
  Bytes data = read_shared(source, bytes, 0, "cp.async.bulk", line);
  start_store({source, bytes, static_cast<char*>(target), {}, std::move(data), line, false});
}

void bulk_store_tensor(const void* map, const int32_t* coordinates, int rank, uint32_t source, int line) {
  const char* what = "cp.async.bulk.tensor";
  Box box = make_box(map, coordinates, rank, source, what, line);
  uint32_t bytes = static_cast<uint32_t>(box_bytes(box));
  own_shared_pointer(source, bytes, 1, what, line);
  Bytes data = read_shared(source, bytes, box.map.swizzle, what, line);
  start_store({source, bytes, nullptr, box, std::move(data), line, false});
}

void bulk_commit() {
  Queue& queue = queues[running_thread()];
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
}

void bulk_wait_group(unsigned pending, bool read, int) {
  Queue& queue = queues[running_thread()];
  for (size_t i = 0; i + pending < queue.groups.size(); ++i) read_group(queue.groups[i]);
  while (!read && queue.groups.size() > pending) {
    if (copies_land_late()) write_group(queue.groups.front());
    queue.groups.pop_front();
  }
}

void finish_bulk_stores() {
  Queue& queue = queues[running_thread()];
  if (!queue.open.empty()) fail(queue.open[0].line, "a bulk store that no cp.async.bulk.commit_group follows");
  for (const Group& group : queue.groups) {
    for (const Store& store : group) {
      if (!store.read) fail(store.line, "the thread exits before its bulk store has read shared memory");
    }
    if (copies_land_late()) write_group(group);
  }
  queue.groups.clear();
}

void finish_bulk_loads(int rank) {
  for (const Load& load : in_flight) {
    if (shared_rank(load.target) != rank) continue;
    fail(load.line, "the block exits while a copy into its shared memory is under way");
  }
}

bool land_awaited_copies() {
  bool any = false;
  for (auto load = in_flight.begin(); load != in_flight.end();) {
    if (!is_awaited(load->mbarrier)) {
      ++load;
      continue;
    }
    Load next = std::move(*load);
    load = in_flight.erase(load);
    any = true;
    if (land(next)) break;
  }
  return any;
}

}  // namespace emu
