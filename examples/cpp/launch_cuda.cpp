// Launches a bundle's kernels on an NVIDIA GPU by CUDA's driver API: no TVM, no Python, no compiler.
//
//     launch_cuda BUNDLE INPUT... OUTPUT...
//
// INPUT and OUTPUT are files of raw numbers, in the order of `arguments` in kernel.json; outputs are written.

#include <cuda.h>

#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "bundle.h"

namespace {

void check(CUresult code, const std::string& what) {
  if (code == CUDA_SUCCESS) return;
  const char* reason = "";
  cuGetErrorString(code, &reason);
  throw std::runtime_error(what + " failed (" + std::to_string(code) + ": " + reason + ")");
}

// Device memory by the name of a tensor or workspace.
std::map<std::string, CUdeviceptr> allocated(const bundle::Call& call) {
  std::map<std::string, CUdeviceptr> memory;
  for (const bundle::Tensor& tensor : call.tensors) {
    check(cuMemAlloc(&memory[tensor.name], tensor.bytes.size()), "cuMemAlloc");
    check(cuMemcpyHtoD(memory[tensor.name], tensor.bytes.data(), tensor.bytes.size()), "a copy");
  }
  for (const bundle::Json& space : call.launches()["workspaces"].items)
    check(cuMemAlloc(&memory[space["name"].text], bundle::value(space["bytes"], call.sizes)), "cuMemAlloc");
  return memory;
}

// The tensor maps for TMA, by name; nodes of a map do not move.
std::map<std::string, CUtensorMap> encoded(const bundle::Call& call, const std::map<std::string, CUdeviceptr>& memory) {
  std::map<std::string, CUtensorMap> made;
  for (const auto& [name, told] : call.launches()["maps"].fields) {
    auto dims = bundle::values<cuuint64_t>(told["dims"], call.sizes);
    auto strides = bundle::values<cuuint64_t>(told["strides"], call.sizes);
    auto box = bundle::values<cuuint32_t>(told["box"], call.sizes);
    auto steps = bundle::values<cuuint32_t>(told["element_strides"], call.sizes);
    check(cuTensorMapEncodeTiled(&made[name], static_cast<CUtensorMapDataType>(told["type"].number), dims.size(),
                                 reinterpret_cast<void*>(memory.at(told["buffer"].text)), dims.data(), strides.data(),
                                 box.data(), steps.data(), static_cast<CUtensorMapInterleave>(told["interleave"].number),
                                 static_cast<CUtensorMapSwizzle>(told["swizzle"].number),
                                 static_cast<CUtensorMapL2promotion>(told["promotion"].number),
                                 static_cast<CUtensorMapFloatOOBfill>(told["fill"].number)), "cuTensorMapEncodeTiled");
  }
  return made;
}

void launch(CUmodule module, const bundle::Json& kernel, const bundle::Call& call,
            const std::map<std::string, CUdeviceptr>& memory, std::map<std::string, CUtensorMap>& maps) {
  CUfunction function;
  check(cuModuleGetFunction(&function, module, kernel["symbol"].text.c_str()), "cuModuleGetFunction");
  const std::vector<bundle::Json>& passed = kernel["arguments"].items;
  std::vector<int64_t> cells(passed.size());  // little-endian, so that a smaller number lies at its start
  std::vector<void*> parameters;
  for (size_t i = 0; i < passed.size(); ++i) {
    if (passed[i].has("buffer")) cells[i] = static_cast<int64_t>(memory.at(passed[i]["buffer"].text));
    if (passed[i].has("value")) cells[i] = bundle::value(passed[i]["value"], call.sizes);
    parameters.push_back(passed[i].has("map") ? static_cast<void*>(&maps.at(passed[i]["map"].text)) : &cells[i]);
  }
  auto grid = bundle::values<unsigned>(kernel["grid"], call.sizes);
  auto block = bundle::values<unsigned>(kernel["block"], call.sizes);
  auto cluster = bundle::values<unsigned>(kernel["cluster"], call.sizes);
  unsigned blocks = cluster[0] * cluster[1] * cluster[2];
  auto shared = static_cast<unsigned>(bundle::value(kernel["shared"], call.sizes));
  check(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(shared)),
        "a launch with so much shared memory");
  if (blocks > 8) check(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1), "a cluster");
  std::vector<CUlaunchAttribute> attributes;
  auto add = [&](CUlaunchAttributeID id, auto set) {
    CUlaunchAttribute attribute{};
    attribute.id = id;
    set(attribute.value);
    attributes.push_back(attribute);
  };
  if (blocks > 1)
    add(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        [&](CUlaunchAttributeValue& v) { v.clusterDim = {cluster[0], cluster[1], cluster[2]}; });
  if (kernel["dependent"].number)
    add(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        [](CUlaunchAttributeValue& v) { v.programmaticStreamSerializationAllowed = 1; });
  if (kernel["cooperative"].number)
    add(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, [](CUlaunchAttributeValue& v) { v.cooperative = 1; });
  CUlaunchConfig config{grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, nullptr, attributes.data(),
                        static_cast<unsigned>(attributes.size())};
  check(cuLaunchKernelEx(&config, function, parameters.data(), nullptr), "cuLaunchKernelEx");
}

void run(const std::string& folder, const std::vector<std::string>& files) {
  bundle::Call call = bundle::open(folder, "cuda", files);
  CUdevice device;
  CUcontext context;
  CUmodule module;
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuModuleLoadData(&module, call.code.data()), "cuModuleLoadData of code for " + call.manifest["target"]["arch"].text);
  std::map<std::string, CUdeviceptr> memory = allocated(call);
  std::map<std::string, CUtensorMap> maps = encoded(call, memory);
  for (const bundle::Json& kernel : call.launches()["kernels"].items) launch(module, kernel, call, memory, maps);
  check(cuCtxSynchronize(), "the kernel");
  for (bundle::Tensor& tensor : call.tensors)
    if (tensor.output) check(cuMemcpyDtoH(tensor.bytes.data(), memory[tensor.name], tensor.bytes.size()), "a copy");
  for (const auto& [name, address] : memory) check(cuMemFree(address), "cuMemFree");
  check(cuModuleUnload(module), "cuModuleUnload");
  bundle::write_outputs(call, files);
}

}  // namespace

int main(int argc, char** argv) { return bundle::main_of("launch_cuda", argc, argv, run); }
