// Launches a bundle's kernels on an AMD GPU by HIP's module functions: no TVM, no Python, no compiler.
//
//     launch_hip BUNDLE INPUT... OUTPUT...
//
// INPUT and OUTPUT are files of raw numbers, in the order of `arguments` in kernel.json; outputs are written.

#include <hip/hip_runtime_api.h>

#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "bundle.h"

namespace {

void check(hipError_t code, const std::string& what) {
  if (code == hipSuccess) return;
  const char* reason = "";
  (void)hipDrvGetErrorString(code, &reason);
  throw std::runtime_error(what + " failed (" + std::to_string(code) + ": " + reason + ")");
}

// Device memory by the name of a tensor or workspace.
std::map<std::string, void*> allocated(const bundle::Call& call) {
  std::map<std::string, void*> memory;
  for (const bundle::Tensor& tensor : call.tensors) {
    check(hipMalloc(&memory[tensor.name], tensor.bytes.size()), "hipMalloc");
    check(hipMemcpyHtoD(memory[tensor.name], const_cast<char*>(tensor.bytes.data()), tensor.bytes.size()), "a copy");
  }
  for (const bundle::Json& space : call.launches()["workspaces"].items)
    check(hipMalloc(&memory[space["name"].text], bundle::value(space["bytes"], call.sizes)), "hipMalloc");
  return memory;
}

void launch(hipModule_t module, const bundle::Json& kernel, const bundle::Call& call,
            const std::map<std::string, void*>& memory) {
  hipFunction_t function;
  check(hipModuleGetFunction(&function, module, kernel["symbol"].text.c_str()), "hipModuleGetFunction");
  const std::vector<bundle::Json>& passed = kernel["arguments"].items;
  std::vector<int64_t> cells(passed.size());  // little-endian, so that a smaller number lies at its start
  std::vector<void*> parameters;
  for (size_t i = 0; i < passed.size(); ++i) {
    cells[i] = passed[i].has("buffer") ? reinterpret_cast<int64_t>(memory.at(passed[i]["buffer"].text))
                                       : bundle::value(passed[i]["value"], call.sizes);
    parameters.push_back(&cells[i]);
  }
  auto grid = bundle::values<unsigned>(kernel["grid"], call.sizes);
  auto block = bundle::values<unsigned>(kernel["block"], call.sizes);
  auto shared = static_cast<unsigned>(bundle::value(kernel["shared"], call.sizes));
  check(hipModuleLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, nullptr,
                              parameters.data(), nullptr), "hipModuleLaunchKernel");
}

void run(const std::string& folder, const std::vector<std::string>& files) {
  bundle::Call call = bundle::open(folder, "rocm", files);
  check(hipInit(0), "hipInit");
  hipModule_t module;
  check(hipModuleLoadData(&module, call.code.data()),
        "hipModuleLoadData of code for " + call.manifest["target"]["arch"].text + ", code object version " +
            std::to_string(call.manifest["target"]["code_object"].number));
  std::map<std::string, void*> memory = allocated(call);
  for (const bundle::Json& kernel : call.launches()["kernels"].items) launch(module, kernel, call, memory);
  check(hipDeviceSynchronize(), "the kernel");
  for (bundle::Tensor& tensor : call.tensors)
    if (tensor.output) check(hipMemcpyDtoH(tensor.bytes.data(), memory[tensor.name], tensor.bytes.size()), "a copy");
  for (const auto& [name, address] : memory) check(hipFree(address), "hipFree");
  check(hipModuleUnload(module), "hipModuleUnload");
  bundle::write_outputs(call, files);
}

}  // namespace

int main(int argc, char** argv) { return bundle::main_of("launch_hip", argc, argv, run); }
