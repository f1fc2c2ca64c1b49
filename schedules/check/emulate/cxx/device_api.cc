// The "CUDA device" that TVM's runtime sees: host memory, and a module kind whose kernels are functions of the worker.
#include <sys/mman.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/device_api.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "scheduler_internal.h"

namespace ffi = tvm::ffi;

namespace emu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGuard = 16 << 20;  // inaccessible address space on both sides of every allocation
constexpr unsigned char kPoison = 0xFF;  // NaN in every float type, -1 in every signed integer type

struct Allocation {
  size_t size, padded;  // the padding up to the allocation's alignment is poison that must stay untouched
  char* mapping;
  size_t mapping_size;
};
std::map<char*, Allocation> allocations;

class HostMemoryDevice final : public tvm::runtime::DeviceAPI {
 public:
  void SetDevice(tvm::Device) final {}
  void StreamSync(tvm::Device, TVMStreamHandle) final {}

  void GetAttr(tvm::Device, tvm::runtime::DeviceAttrKind kind, ffi::Any* value) final {
    switch (kind) {
      case tvm::runtime::kExist: *value = 1; break;
      case tvm::runtime::kMaxThreadsPerBlock: *value = 1024; break;
      case tvm::runtime::kWarpSize: *value = 32; break;
      case tvm::runtime::kMaxSharedMemoryPerBlock: *value = 49152; break;
      case tvm::runtime::kComputeVersion: *value = ffi::String("9.0"); break;
      case tvm::runtime::kDeviceName: *value = ffi::String("emulator"); break;
      default: break;
    }
  }

  // The memory ends at an inaccessible page, give or take its alignment, and begins behind another.
  void* AllocDataSpace(tvm::Device, size_t size, size_t, DLDataType) final {
    size_t alignment = tvm::runtime::kAllocAlignment;  // the host stub checks it
    size_t padded = (size + alignment - 1) / alignment * alignment;
    size_t pages = padded ? (padded + kPage - 1) / kPage * kPage : kPage;
    size_t mapping_size = pages + 2 * kGuard;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, mapping_size, PROT_NONE, flags, -1, 0);
    if (memory == MAP_FAILED) TVM_FFI_THROW(RuntimeError) << "out of memory: " << size << " bytes";
    char* mapping = static_cast<char*>(memory);
    mprotect(mapping + kGuard, pages, PROT_READ | PROT_WRITE);
    char* begin = mapping + kGuard + pages - padded;
    memset(mapping + kGuard, kPoison, pages);
    allocations[begin] = {size, padded, mapping, mapping_size};
    return begin;
  }

  void FreeDataSpace(tvm::Device, void* begin) final {
    auto it = allocations.find(static_cast<char*>(begin));
    munmap(it->second.mapping, it->second.mapping_size);
    allocations.erase(it);
  }

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t size, tvm::Device,
                      tvm::Device, DLDataType, TVMStreamHandle) final {
    memcpy(static_cast<char*>(to) + to_offset, static_cast<const char*>(from) + from_offset, size);
  }
};

HostMemoryDevice device;

struct DeviceAllocator {
  void AllocData(DLTensor* tensor) {
    tensor->data = device.AllocDataSpace(tensor->device, ffi::GetDataSize(*tensor), 0, tensor->dtype);
  }
  void FreeData(DLTensor* tensor) { device.FreeDataSpace(tensor->device, tensor->data); }
};

class EmulatedModule final : public ffi::ModuleObj {
 public:
  explicit EmulatedModule(ffi::Map<ffi::String, ffi::Function> kernels) : kernels_(std::move(kernels)) {}
  const char* kind() const final { return "cuda"; }
  int GetPropertyMask() const final { return ffi::Module::kRunnable; }
  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto it = kernels_.find(name);
    if (it == kernels_.end()) return std::nullopt;
    return (*it).second;
  }

 private:
  ffi::Map<ffi::String, ffi::Function> kernels_;
};

bool all_poison(const char* begin, const char* end) {
  for (const char* byte = begin; byte < end; ++byte) {
    if (static_cast<unsigned char>(*byte) != kPoison) return false;
  }
  return true;
}

// A text if some kernel wrote into the padding around a buffer, which no guard page can see; else empty.
ffi::String check_padding() {
  for (const auto& [begin, allocation] : allocations) {
    const char* what = nullptr;
    if (!all_poison(begin + allocation.size, begin + allocation.padded)) what = "past the end of";
    if (!all_poison(allocation.mapping + kGuard, begin)) what = "before the beginning of";
    if (!what) continue;
    std::string size = std::to_string(allocation.size);
    return std::string("the kernel wrote ") + what + " a device buffer of " + size + " bytes";
  }
  return "";
}

}  // namespace

bool describe_device_address(const void* address, char* text, size_t size) {
  auto* byte = static_cast<const char*>(address);
  for (const auto& [begin, allocation] : allocations) {
    if (byte < allocation.mapping || byte >= allocation.mapping + allocation.mapping_size) continue;
    if (byte >= begin) {
      snprintf(text, size, "%td bytes past the end of a device buffer of %zu bytes", byte - begin - allocation.size,
               allocation.size);
    } else {
      snprintf(text, size, "%td bytes before a device buffer of %zu bytes", begin - byte, allocation.size);
    }
    return true;
  }
  return false;
}

}  // namespace emu

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  // Replaces a real CUDA runtime that is already loaded, as long as nothing has used it: TVM caches the pointer.
  auto device_api = [](ffi::PackedArgs, ffi::Any* result) {
    *result = static_cast<void*>(static_cast<tvm::runtime::DeviceAPI*>(&emu::device));
  };
  for (const char* name : {"device_api.cuda", "device_api.rocm"}) {
    ffi::Function::SetGlobal(name, ffi::Function::FromPacked(device_api), true);
  }
  refl::GlobalDef()
      .def("schedules.emulate.module",
           [](ffi::Map<ffi::String, ffi::Function> kernels) {
             return ffi::Module(ffi::make_object<emu::EmulatedModule>(std::move(kernels)));
           })
      .def("schedules.emulate.tensor",
           [](ffi::Shape shape, DLDataType dtype, int device_type) {
             DLDevice device = {static_cast<DLDeviceType>(device_type), 0};
             return ffi::Tensor::FromNDAlloc(emu::DeviceAllocator(), shape, dtype, device);
           })
      .def("schedules.emulate.address",
           [](ffi::Tensor tensor) { return reinterpret_cast<int64_t>(tensor.data_ptr()); })
      .def("schedules.emulate.check_padding", emu::check_padding);
}
