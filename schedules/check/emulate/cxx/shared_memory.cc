#include "shared_memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "scheduler.h"
#include "scheduler_internal.h"

namespace emu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGuard = 256 << 10;       // inaccessible address space behind every variable (amdgcn.py has it too)
constexpr size_t kArenaBytes = 128 << 20;  // address space for all of them, for each block of a cluster
constexpr size_t kMaxBlockBytes = 227 << 10;    // the most that any arch up to sm_90 gives a block
constexpr size_t kDynamicAlignment = 1024;

// A window address has three parts: the offset that the hardware would give it, from which swizzles and matrix
// descriptors take their bits; the number of its variable, so that running out of one never hits another; and the
// rank of its block in the cluster.
constexpr int kOffsetBits = 18, kRankShift = 27;
constexpr uint32_t kOffsetMask = (1u << kOffsetBits) - 1, kRankMask = ~0u << kRankShift;
constexpr uint32_t kSystemBytes = 1024;  // shared memory that the hardware keeps for itself begins every block's

struct Span {
  char* begin;
  size_t size;
  uint32_t window;  // without the rank
};

struct Memory {  // of one block
  char* arena = nullptr;
  size_t used = 0;  // bytes of the arena that are laid out
  std::vector<Span> spans;
  std::vector<char*> variables;
  char* dynamic_begin = nullptr;
  std::vector<char> published;  // what the async proxy sees, by offset
  bool poisoned = false;        // `published` holds nothing but poison
  bool publish = false;         // a fence.proxy.async was met
};

std::vector<Memory> memories;
Memory* current;
SharedLayout* shared;
uint32_t offset_end;
uint16_t chunk_span[(1 << kOffsetBits) / 16];  // 1 + the number of the span that holds all of a 16-byte chunk, or 0

// Gives a variable at `address` its place in the window.
void number(Memory& memory, char* address, size_t size, size_t alignment) {
  offset_end = static_cast<uint32_t>((offset_end + alignment - 1) / alignment * alignment);
  uint32_t number = static_cast<uint32_t>(memory.spans.size()) + 1;
  memory.spans.push_back({address, size, number << kOffsetBits | offset_end});
  offset_end += static_cast<uint32_t>(size);
}

// Reserves `size` bytes that end, as nearly as the alignment permits, at an inaccessible page.
char* place(Memory& memory, size_t size, size_t alignment) {
  size_t pages = (size + kPage - 1) / kPage * kPage;
  if (!pages) pages = kPage;
  if (memory.used + pages + kGuard > kArenaBytes) fail(0, "too many shared variables");
  char* begin = memory.arena + memory.used;
  mprotect(begin, pages, PROT_READ | PROT_WRITE);
  memory.used += pages + kGuard;
  char* address = begin + (pages - size) / alignment * alignment;
  number(memory, address, size, alignment);
  return address;
}

const Span* find_span(const Memory& memory, const char* byte) {
  for (const Span& span : memory.spans) {
    if (byte >= span.begin && byte <= span.begin + span.size) return &span;
  }
  return nullptr;
}

const Span& span_at(const Memory& memory, uint32_t window) {
  size_t number = (window & ~kRankMask) >> kOffsetBits;
  static const Span none = {};
  return number && number <= memory.spans.size() ? memory.spans[number - 1] : none;
}

}  // namespace

void layout_shared_memory(SharedLayout* layout, size_t dynamic_bytes, int blocks) {
  shared = layout;
  if (static_cast<int>(memories.size()) < blocks) memories.resize(blocks);
  size_t total = dynamic_bytes;
  for (int i = 0; i < layout->count; ++i) total += layout->size[i];
  if (total > kMaxBlockBytes) {
    fail(0, "a block needs %zu bytes of shared memory; at most %zu exist", total, kMaxBlockBytes);
  }
  for (Memory& memory : memories) {
    if (!memory.arena) {
      void* space = mmap(nullptr, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (space == MAP_FAILED) fail(0, "no address space for shared memory");
      memory.arena = static_cast<char*>(space);
    } else if (memory.used) {
      mprotect(memory.arena, memory.used, PROT_NONE);
    }
    memory.used = 0;
    memory.spans.clear();
    memory.variables.clear();
    offset_end = kSystemBytes;
    for (int i = 0; i < layout->count; ++i) {
      char* address = layout->address[i];
      if (layout->placed) {
        uintptr_t begin = reinterpret_cast<uintptr_t>(address), end = begin + layout->size[i];
        mprotect(reinterpret_cast<void*>(begin / kPage * kPage - kGuard), kGuard, PROT_NONE);
        mprotect(reinterpret_cast<void*>((end + kPage - 1) / kPage * kPage), kGuard, PROT_NONE);
        number(memory, address, layout->size[i], layout->alignment[i]);
      } else {
        address = place(memory, layout->size[i], layout->alignment[i]);
      }
      memory.variables.push_back(address);
    }
    memory.dynamic_begin = dynamic_bytes ? place(memory, dynamic_bytes, kDynamicAlignment) : nullptr;
    if (offset_end > kOffsetMask) fail(0, "the alignments of the shared variables need too much space");
    memory.published.resize(offset_end);
    memory.poisoned = false;
  }
  memset(chunk_span, 0, sizeof chunk_span);
  const std::vector<Span>& spans = memories[0].spans;
  for (size_t i = 0; i < spans.size(); ++i) {
    size_t begin = spans[i].window & kOffsetMask;
    for (size_t chunk = (begin + 15) / 16; 16 * chunk + 16 <= begin + spans[i].size; ++chunk) {
      chunk_span[chunk] = static_cast<uint16_t>(i + 1);
    }
  }
}

void poison_shared_memory() {
  for (int rank = 0; rank < cluster_size(); ++rank) {
    Memory& memory = memories[rank];
    for (const Span& span : memory.spans) memset(span.begin, 0xFF, span.size);
    if (!memory.poisoned) memset(memory.published.data(), 0xFF, memory.published.size());
    memory.poisoned = true;
    memory.publish = false;
  }
}

void enter_shared_memory(int rank) {
  current = &memories[rank];
  for (int i = 0; i < shared->count; ++i) shared->address[i] = current->variables[i];
}

void* dynamic_shared_memory(size_t alignment) {
  if (!current->dynamic_begin) fail(0, "the kernel uses dynamic shared memory and was launched with none");
  if (alignment > kDynamicAlignment) fail(0, "dynamic shared memory aligned to %zu bytes", alignment);
  return current->dynamic_begin;
}

uint32_t shared_address(const void* pointer, int line) {
  auto* byte = static_cast<const char*>(pointer);
  const Span* span = find_span(*current, byte);
  uint32_t rank = static_cast<uint32_t>(running_block());
  for (int other = 0; !span && other < cluster_size(); ++other) {
    span = find_span(memories[other], byte);
    rank = other;
  }
  if (!span) fail(line, "__cvta_generic_to_shared of an address that is not in shared memory");
  return rank << kRankShift | (span->window + static_cast<uint32_t>(byte - span->begin));
}

uint32_t shared_address_in(uint32_t address, uint32_t rank, int line) {
  if (rank >= static_cast<uint32_t>(cluster_size())) {
    fail(line, "mapa to block %u of a cluster of %d", rank, cluster_size());
  }
  return (address & ~kRankMask) | rank << kRankShift;
}

int shared_rank(uint32_t address) { return static_cast<int>(address >> kRankShift); }
uint32_t shared_offset(uint32_t address) { return address & kOffsetMask; }

char* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* what, int line) {
  int rank = shared_rank(address);
  if (rank < cluster_size()) {
    if (block_exited(rank)) fail(line, "%s: block %d of the cluster, whose shared memory this is, has exited", what, rank);
    if (block_may_not_have_begun(rank)) {
      fail(line, "%s: block %d of the cluster, whose shared memory this is, may not have begun; a barrier.cluster first",
           what, rank);
    }
    const Span& span = span_at(memories[rank], address);
    uint32_t offset = (address & ~kRankMask) - span.window;
    if (span.size && offset + bytes <= span.size) {
      if (address % alignment) {
        fail(line, "%s: shared address 0x%x is not aligned to %zu bytes", what, address, alignment);
      }
      return span.begin + offset;
    }
  }
  fail(line, "%s: %zu bytes at shared address 0x%x are outside the block's shared memory", what, bytes, address);
}

char* own_shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* what, int line) {
  if (shared_rank(address) != running_block()) fail(line, "%s: the address is in another block of the cluster", what);
  return shared_pointer(address, bytes, alignment, what, line);
}

// ---- The async proxy ----

void fence_async_proxy() { current->publish = true; }

void publish_shared_memory() {
  for (int rank = 0; rank < cluster_size(); ++rank) {
    Memory& memory = memories[rank];
    if (!memory.publish) continue;
    memory.publish = memory.poisoned = false;
    for (const Span& span : memory.spans) {
      memcpy(memory.published.data() + (span.window & kOffsetMask), span.begin, span.size);
    }
  }
}

void write_async(uint32_t address, const void* data, size_t bytes, int line) {
  char* target = shared_pointer(address, bytes, 1, "a bulk copy", line);
  Memory& memory = memories[shared_rank(address)];
  memory.poisoned = false;
  memcpy(target, data, bytes);
  memcpy(memory.published.data() + shared_offset(address), data, bytes);
}

const char* shared_chunk(int rank, uint32_t offset, const char* what, int line) {
  uint16_t number = offset < 1u << kOffsetBits ? chunk_span[offset / 16] : 0;
  if (!number) fail(line, "%s reads shared offset 0x%x, which is outside the block's shared memory", what, offset);
  const Span& span = memories[rank].spans[number - 1];
  return span.begin + (offset / 16 * 16 - (span.window & kOffsetMask));
}

const char* read_async(int rank, uint32_t offset, const char* what, int line) {
  const char* chunk = shared_chunk(rank, offset, what, line);
  if (memcmp(chunk, memories[rank].published.data() + offset / 16 * 16, 16)) {
    fail(line, "%s reads what ordinary stores wrote to shared memory without a fence.proxy.async between", what);
  }
  return chunk;
}

bool describe_shared_address(const void* address, char* text, size_t size) {
  auto* byte = static_cast<const char*>(address);
  for (const Memory& memory : memories) {
    for (const Span& span : memory.spans) {
      const char* end = span.begin + span.size;
      if (byte >= end && byte < end + kGuard) {
        snprintf(text, size, "%td bytes past the end of a shared variable of %zu bytes", byte - end, span.size);
        return true;
      }
    }
    if (memory.arena && byte >= memory.arena && byte < memory.arena + kArenaBytes) {
      snprintf(text, size, "outside the shared memory of the block");
      return true;
    }
  }
  return false;
}

}  // namespace emu
