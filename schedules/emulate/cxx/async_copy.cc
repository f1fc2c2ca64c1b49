#include "async_copy.h"

#include <cstring>
#include <deque>
#include <vector>

#include "scheduler.h"
#include "scheduler_internal.h"
#include "shared_memory.h"

namespace emu {
namespace {

struct Copy {
  char* target;
  unsigned bytes;
  char data[16];
};
using Group = std::vector<Copy>;

struct Queue {
  std::deque<Group> groups;  // committed, oldest first
  Group open;                // issued since the last commit
};

std::vector<Queue> queues;  // one per thread of the running block

void land(const Group& group) {
  for (const Copy& copy : group) memcpy(copy.target, copy.data, copy.bytes);
}

}  // namespace

void forget_async_copies(int threads) {
  queues.resize(threads);
  for (Queue& queue : queues) {
    queue.groups.clear();
    queue.open.clear();
  }
}

void async_copy(uint32_t shared, const void* global, unsigned bytes, unsigned source_bytes, int line) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail(line, "cp.async of %u bytes", bytes);
  if (source_bytes > bytes) fail(line, "cp.async of %u bytes from a source of %u", bytes, source_bytes);
  if (source_bytes && reinterpret_cast<uintptr_t>(global) % bytes) {
    fail(line, "cp.async: global address %p is not aligned to %u bytes", global, bytes);
  }
  Copy copy = {shared_pointer(shared, bytes, bytes, "cp.async", line), bytes, {}};
  memcpy(copy.data, global, source_bytes);
  if (copies_land_late()) {
    queues[running_thread()].open.push_back(copy);
  } else {
    memcpy(copy.target, copy.data, bytes);
  }
}

void async_commit() {
  Queue& queue = queues[running_thread()];
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
}

void async_wait_group(unsigned pending) {
  Queue& queue = queues[running_thread()];
  while (queue.groups.size() > pending) {
    land(queue.groups.front());
    queue.groups.pop_front();
  }
}

void async_wait_all() {
  async_wait_group(0);
  Queue& queue = queues[running_thread()];
  land(queue.open);
  queue.open.clear();
}

}  // namespace emu
