#include "async_copy.h"

#include <cstring>
#include <deque>
#include <vector>

#include "mbarrier.h"
#include "scheduler.h"
#include "scheduler_internal.h"
#include "shared_memory.h"

namespace emu {
namespace {

struct Copy {
  char* target;
  unsigned bytes;
  char data[16];
  bool landed;
};
using Group = std::vector<Copy>;

struct Queue {
  std::deque<Group> groups;  // committed, oldest first
  Group open;                // issued since the last commit
  uint64_t issued, landed;   // how many copies, in all
};

// An arrival on an mbarrier that waits for the first `copies` that a thread issued.
struct Arrival {
  uint32_t mbarrier;
  int thread, line;
  uint64_t copies;
};

std::vector<Queue> queues;  // one per thread of the running cluster
std::deque<Arrival> arrivals;

// Lands copies of a group in order until the queue has landed `limit`.
void land(Queue& queue, Group& group, uint64_t limit) {
  for (Copy& copy : group) {
    if (copy.landed) continue;
    if (queue.landed >= limit) return;
    memcpy(copy.target, copy.data, copy.bytes);
    copy.landed = true;
    ++queue.landed;
  }
}

}  // namespace

void forget_async_copies(int threads) {
  queues.resize(threads);
  for (Queue& queue : queues) {
    queue.groups.clear();
    queue.open.clear();
    queue.issued = queue.landed = 0;
  }
  arrivals.clear();
}

void async_copy(uint32_t shared, const void* global, unsigned bytes, unsigned source_bytes, int line) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail(line, "cp.async of %u bytes", bytes);
  if (source_bytes > bytes) fail(line, "cp.async of %u bytes from a source of %u", bytes, source_bytes);
  if (source_bytes && reinterpret_cast<uintptr_t>(global) % bytes) {
    fail(line, "cp.async: global address %p is not aligned to %u bytes", global, bytes);
  }
  Copy copy = {own_shared_pointer(shared, bytes, bytes, "cp.async", line), bytes, {}, false};
  memcpy(copy.data, global, source_bytes);
  if (copies_land_late()) {
    Queue& queue = queues[running_thread()];
    queue.open.push_back(copy);
    ++queue.issued;
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
    land(queue, queue.groups.front(), UINT64_MAX);
    queue.groups.pop_front();
  }
}

void async_wait_all() {
  async_wait_group(0);
  Queue& queue = queues[running_thread()];
  land(queue, queue.open, UINT64_MAX);
  queue.open.clear();
}

void async_arrive(uint32_t mbarrier, bool counted, int line) {
  mbarrier_expect_arrival(mbarrier, !counted, line);
  const Queue& queue = queues[running_thread()];
  if (copies_land_late() && queue.landed < queue.issued) {
    arrivals.push_back({mbarrier, running_thread(), line, queue.issued});
  } else {
    mbarrier_arrive(mbarrier, 1, line);
  }
}

bool land_awaited_arrival() {
  for (auto arrival = arrivals.begin(); arrival != arrivals.end(); ++arrival) {
    if (!is_awaited(arrival->mbarrier)) continue;
    Queue& queue = queues[arrival->thread];
    for (Group& group : queue.groups) land(queue, group, arrival->copies);
    land(queue, queue.open, arrival->copies);
    Arrival next = *arrival;
    arrivals.erase(arrival);
    mbarrier_arrive(next.mbarrier, 1, next.line);
    return true;
  }
  return false;
}

}  // namespace emu
