#include "mbarrier.h"

#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "scheduler.h"
#include "scheduler_internal.h"
#include "shared_memory.h"

namespace emu {
namespace {

constexpr uint32_t kMaxCount = (1u << 20) - 1;  // of arrivals, and of bytes
constexpr uint64_t kContents = 0x7261626d5f756d65;  // what shared memory holds where an object is

struct Mbarrier {
  uint32_t expected, pending;
  int64_t bytes;   // expected and not yet copied
  uint64_t phase;  // how many have ended
  bool visible;    // to the async proxy
};

std::unordered_map<uint32_t, Mbarrier> mbarriers;  // by shared address

Mbarrier& find(uint32_t address, const char* what, int line) {
  char* memory = shared_pointer(address, 8, 8, what, line);
  auto it = mbarriers.find(address);
  if (it == mbarriers.end()) fail(line, "%s: there is no initialised mbarrier at shared address 0x%x", what, address);
  if (memcmp(memory, &kContents, 8)) fail(line, "%s: the mbarrier at shared address 0x%x was overwritten", what, address);
  return it->second;
}

bool end_phase(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return false;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  return true;
}

void expect(Mbarrier& barrier, uint32_t bytes, const char* what, int line) {
  if (bytes > kMaxCount) fail(line, "%s of %u bytes: at most %u", what, bytes, kMaxCount);
  barrier.bytes += bytes;
}

uint64_t arrive(Mbarrier& barrier, uint32_t count, const char* what, int line) {
  if (count < 1 || count > kMaxCount) fail(line, "%s with a count of %u", what, count);
  if (count > barrier.pending) {
    fail(line, "%s: more arrivals than the %u of a phase", what, barrier.expected);
  }
  uint64_t phase = barrier.phase;
  barrier.pending -= count;
  end_phase(barrier);
  return phase;
}

// A condition holds a shared address and either a state or, with the top bit, a parity.
constexpr uint64_t kParity = uint64_t{1} << 63;

bool has_ended(uint64_t condition) {
  auto it = mbarriers.find(static_cast<uint32_t>(condition));
  if (it == mbarriers.end()) return false;
  uint64_t phase = it->second.phase;
  if (condition & kParity) return (phase & 1) != (condition >> 32 & 1);
  return (phase & 0x7fffffff) != condition >> 32;
}

void describe(uint64_t condition, char* text, size_t size) {
  auto it = mbarriers.find(static_cast<uint32_t>(condition));
  if (it == mbarriers.end()) return static_cast<void>(snprintf(text, size, "the mbarrier is gone"));
  const Mbarrier& barrier = it->second;
  snprintf(text, size, "phase %llu of the mbarrier at shared address 0x%x lacks %u of %u arrivals and %lld bytes",
           static_cast<unsigned long long>(barrier.phase), static_cast<uint32_t>(condition), barrier.pending,
           barrier.expected, static_cast<long long>(barrier.bytes));
}

const Wait kWait = {"mbarrier.try_wait", has_ended, describe};

uint64_t condition(uint32_t address, uint64_t state, bool parity, const char* what, int line) {
  if (shared_rank(address) != running_block()) fail(line, "%s: the mbarrier is in another block of the cluster", what);
  find(address, what, line);
  if (parity && state > 1) fail(line, "%s: a phase parity of %llu", what, static_cast<unsigned long long>(state));
  return (parity ? kParity : 0) | (state & 0x7fffffff) << 32 | address;
}

bool try_wait(uint32_t address, uint64_t state, bool parity, int line) {
  wait_until(kWait, condition(address, state, parity, kWait.name, line), address, line);
  return true;
}

bool test_wait(uint32_t address, uint64_t state, bool parity, int line) {
  uint64_t wanted = condition(address, state, parity, "mbarrier.test_wait", line);
  if (has_ended(wanted)) return true;
  poll(address, line);
  return false;
}

}  // namespace

void forget_mbarriers() { mbarriers.clear(); }

void mbarrier_init(uint32_t address, uint32_t count, int line) {
  char* memory = own_shared_pointer(address, 8, 8, "mbarrier.init", line);
  if (count < 1 || count > kMaxCount) fail(line, "mbarrier.init with a count of %u", count);
  if (mbarriers.count(address)) fail(line, "mbarrier.init of shared address 0x%x, where a valid mbarrier is", address);
  memcpy(memory, &kContents, 8);
  mbarriers[address] = {count, count, 0, 0, false};
}

void mbarrier_invalidate(uint32_t address, int line) {
  find(address, "mbarrier.inval", line);
  mbarriers.erase(address);
}

uint64_t mbarrier_arrive(uint32_t address, uint32_t count, int line) {
  return arrive(find(address, "mbarrier.arrive", line), count, "mbarrier.arrive", line);
}

uint64_t mbarrier_arrive_drop(uint32_t address, uint32_t count, int line) {
  Mbarrier& barrier = find(address, "mbarrier.arrive_drop", line);
  if (count > barrier.expected) fail(line, "mbarrier.arrive_drop of %u of %u arrivals", count, barrier.expected);
  barrier.expected -= count;
  return arrive(barrier, count, "mbarrier.arrive_drop", line);
}

uint64_t mbarrier_arrive_expect(uint32_t address, uint32_t bytes, int line) {
  Mbarrier& barrier = find(address, "mbarrier.arrive.expect_tx", line);
  expect(barrier, bytes, "mbarrier.arrive.expect_tx", line);
  return arrive(barrier, 1, "mbarrier.arrive.expect_tx", line);
}

void mbarrier_expect_arrival(uint32_t address, bool more, int line) {
  find(address, "cp.async.mbarrier.arrive", line).pending += more;
}

void mbarrier_expect(uint32_t address, uint32_t bytes, int line) {
  expect(find(address, "mbarrier.expect_tx", line), bytes, "mbarrier.expect_tx", line);
}

bool mbarrier_complete(uint32_t address, uint32_t bytes, int line) {
  Mbarrier& barrier = find(address, "mbarrier.complete_tx", line);
  barrier.bytes -= bytes;
  if (barrier.bytes < -int64_t{kMaxCount}) fail(line, "mbarrier.complete_tx of more bytes than any phase expects");
  return end_phase(barrier);
}

bool mbarrier_try_wait(uint32_t address, uint64_t state, int line) { return try_wait(address, state, false, line); }
bool mbarrier_test_wait(uint32_t address, uint64_t state, int line) { return test_wait(address, state, false, line); }
bool mbarrier_try_wait_parity(uint32_t address, uint32_t parity, int line) {
  return try_wait(address, parity, true, line);
}
bool mbarrier_test_wait_parity(uint32_t address, uint32_t parity, int line) {
  return test_wait(address, parity, true, line);
}

void fence_mbarriers() {
  for (auto& [address, barrier] : mbarriers) {
    if (shared_rank(address) == running_block()) barrier.visible = true;
  }
}

void mbarrier_check_visible(uint32_t address, const char* what, int line) {
  if (find(address, what, line).visible) return;
  fail(line, "%s: no fence.mbarrier_init or fence.proxy.async after the init of its mbarrier", what);
}

}  // namespace emu
