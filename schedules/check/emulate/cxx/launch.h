// How a compiled kernel and the runtime library find each other.
#pragma once
#include <cstddef>
#include <utility>

namespace emu {

constexpr int kMaxSharedVariables = 256;

// The __shared__ variables of one kernel, in the order of their registration.
struct SharedLayout {
  int count;
  int placed;  // 1: `address` says where they lie, in memory of the kernel library (cxx/amdgcn.cc)
  size_t size[kMaxSharedVariables], alignment[kMaxSharedVariables];
  char* address[kMaxSharedVariables];  // filled in by the runtime at launch

  int add(size_t bytes, size_t align) {
    if (count == kMaxSharedVariables) __builtin_trap();
    size[count] = bytes;
    alignment[count] = align;
    return count++;
  }
};

struct Kernel {
  void (*run)(void** arguments);  // arguments[i] points to the value of parameter i
  SharedLayout* shared;
  int parameters;
};

struct LaunchOptions {
  int grid[3], block[3], cluster[3];
  int dynamic_shared;  // bytes
  int late_copies;     // 1: the data of asynchronous copies land at the wait that requires them; 0: at issue
  int order;           // 0 forward, 1 reverse, 2 strided
  int wave;            // threads of a warp, 32 or 64
};

// Unpacks the argument cells for a kernel of any signature.
template <class... Parameters, size_t... Index>
inline void invoke(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Index...>) {
  kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Parameters>>*>(arguments[Index])...);
}
template <class... Parameters>
inline void invoke(void (*kernel)(Parameters...), void** arguments) {
  invoke(kernel, arguments, std::index_sequence_for<Parameters...>{});
}
template <class... Parameters>
constexpr int count_parameters(void (*)(Parameters...)) {
  return sizeof...(Parameters);
}

}  // namespace emu

// Runs one kernel; returns 0, or 1 with a text in `message`.
extern "C" int emu_launch(const emu::Kernel* kernel, void** arguments, const emu::LaunchOptions* options, char* message,
                          int message_size);

// Placed once per kernel behind the translated source.
#define EMU_EXPORT_KERNEL(name, number)                                                        \
  static_assert(number < emu::kMaxKernels, "more kernels of one source than are emulated");    \
  extern "C" __attribute__((visibility("default"))) const emu::Kernel emu_kernel_##name = {    \
      [](void** arguments) { emu::invoke(&name, arguments); }, &emu::shared_layouts[number],   \
      emu::count_parameters(&name)};
