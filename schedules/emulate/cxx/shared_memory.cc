#include "shared_memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#include "scheduler.h"
#include "scheduler_internal.h"

namespace emu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGuard = 256 << 10;       // inaccessible address space behind every variable
constexpr size_t kArenaBytes = 128 << 20;  // address space for all of them
constexpr size_t kMaxBlockBytes = 227 << 10;    // the most that any arch up to sm_90 gives a block
constexpr size_t kDynamicAlignment = 1024;

struct Span {
  char* begin;
  size_t size;
};

char* arena;
Span spans[kMaxSharedVariables + 1];
int span_count;
char* dynamic_begin;
size_t used;  // bytes of the arena that are laid out

// Reserves `size` bytes that end, as nearly as the alignment permits, at an inaccessible page.
char* place(size_t size, size_t alignment) {
  size_t pages = (size + kPage - 1) / kPage * kPage;
  if (!pages) pages = kPage;
  if (used + pages + kGuard > kArenaBytes) fail(0, "too many shared variables");
  char* begin = arena + used;
  mprotect(begin, pages, PROT_READ | PROT_WRITE);
  used += pages + kGuard;
  char* address = begin + (pages - size) / alignment * alignment;
  spans[span_count++] = {address, size};
  return address;
}

}  // namespace

void layout_shared_memory(SharedLayout* layout, size_t dynamic_bytes) {
  if (!arena) {
    void* memory = mmap(nullptr, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail(0, "no address space for shared memory");
    arena = static_cast<char*>(memory);
  } else if (used) {
    mprotect(arena, used, PROT_NONE);
  }
  used = kGuard;  // so that no variable has address 0 of the shared window
  span_count = 0;
  size_t total = dynamic_bytes;
  for (int i = 0; i < layout->count; ++i) {
    total += layout->size[i];
    layout->address[i] = place(layout->size[i], layout->alignment[i]);
  }
  if (total > kMaxBlockBytes) {
    fail(0, "a block needs %zu bytes of shared memory; at most %zu exist", total, kMaxBlockBytes);
  }
  dynamic_begin = dynamic_bytes ? place(dynamic_bytes, kDynamicAlignment) : nullptr;
}

void poison_shared_memory() {
  for (int i = 0; i < span_count; ++i) memset(spans[i].begin, 0xFF, spans[i].size);
}

void* dynamic_shared_memory(size_t alignment) {
  if (!dynamic_begin) fail(0, "the kernel uses dynamic shared memory and was launched with none");
  if (alignment > kDynamicAlignment) fail(0, "dynamic shared memory aligned to %zu bytes", alignment);
  return dynamic_begin;
}

uint32_t shared_address(const void* pointer, int line) {
  auto* byte = static_cast<const char*>(pointer);
  for (int i = 0; i < span_count; ++i) {
    if (byte >= spans[i].begin && byte <= spans[i].begin + spans[i].size) return static_cast<uint32_t>(byte - arena);
  }
  fail(line, "__cvta_generic_to_shared of an address that is not in shared memory");
}

char* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* what, int line) {
  char* byte = arena + address;
  for (int i = 0; i < span_count; ++i) {
    if (byte < spans[i].begin || byte + bytes > spans[i].begin + spans[i].size) continue;
    if (address % alignment) {
      fail(line, "%s: shared address 0x%x is not aligned to %zu bytes", what, address, alignment);
    }
    return byte;
  }
  fail(line, "%s: %zu bytes at shared address 0x%x are outside the block's shared memory", what, bytes, address);
}

bool describe_shared_address(const void* address, char* text, size_t size) {
  auto* byte = static_cast<const char*>(address);
  if (!arena || byte < arena || byte >= arena + kArenaBytes) return false;
  for (int i = 0; i < span_count; ++i) {
    const char* end = spans[i].begin + spans[i].size;
    if (byte >= end && byte < end + kGuard) {
      snprintf(text, size, "%td bytes past the end of a shared variable of %zu bytes", byte - end, spans[i].size);
      return true;
    }
  }
  snprintf(text, size, "outside the shared memory of the block");
  return true;
}

}  // namespace emu
