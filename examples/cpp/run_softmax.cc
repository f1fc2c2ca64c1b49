// Loads a softmax bundle, runs it on random rows and compares the result with a plain loop.
//
//     run_softmax BUNDLE [ROWS]
//
// The bundle is a folder that `schedules build softmax ... dtype=float32 --out BUNDLE` wrote, for a CPU or for CUDA.
// TVM's runtime library is looked for in the folder that TVM_LIBRARY_PATH names, then by the loader.

#include <dlfcn.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;
using ffi::json::Object;

namespace {

constexpr double kTolerance = 1e-5;  // of a float32 result, relative

// What this program needs of a bundle's kernel.json.
struct Manifest {
  std::string library;
  DLDevice device;
  int64_t rows, cols;
  double scale;
};

template <typename T>
T field(const Object& object, const std::string& name) {
  return object.at(ffi::String(name)).cast<T>();
}

double number(const Object& object, const std::string& name) {
  ffi::Any value = object.at(ffi::String(name));
  return value.as<int64_t>() ? static_cast<double>(*value.as<int64_t>()) : value.cast<double>();
}

Manifest read_manifest(const std::string& bundle) {
  std::ifstream file(bundle + "/kernel.json");
  if (!file) throw std::runtime_error(bundle + " is not a bundle: it has no kernel.json");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  auto manifest = ffi::json::Parse(text).cast<Object>();
  auto problem = field<Object>(manifest, "problem"), target = field<Object>(manifest, "target");
  if (field<std::string>(manifest, "operator") != "softmax" || field<std::string>(problem, "function") != "softmax" ||
      field<std::string>(problem, "dtype") != "float32" || field<std::string>(problem, "mask") != "none" ||
      number(problem, "keep") != 1) {
    throw std::runtime_error(bundle + " is not a plain softmax of float32; build one: "
                             "schedules build softmax rows=64 cols=1000 dtype=float32 --out DIR");
  }
  auto kind = field<std::string>(target, "kind");
  if (kind != "llvm" && kind != "cuda") throw std::runtime_error("built for " + kind + ", not for a CPU or CUDA");
  return {bundle + "/" + field<std::string>(manifest, "library"), {kind == "cuda" ? kDLCUDA : kDLCPU, 0},
          field<int64_t>(problem, "rows"), field<int64_t>(problem, "cols"), number(problem, "scale")};
}

void open_library(const std::string& name) {
  const char* folder = std::getenv("TVM_LIBRARY_PATH");
  std::string path = folder ? std::string(folder) + "/" + name : name;
  if (!dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    throw std::runtime_error(std::string(dlerror()) + "; set TVM_LIBRARY_PATH to the folder of " + name);
  }
}

ffi::Function runtime(const std::string& name) { return ffi::Function::GetGlobalRequired("runtime." + name); }

// float32 memory of a device, from TVM's runtime.
ffi::Tensor allocate(int64_t rows, int64_t cols, DLDevice device) {
  DLDataType float32{kDLFloat, 32, 1};
  return runtime("TVMTensorAllocWithScope")(ffi::Shape({rows, cols}), float32, device, nullptr).cast<ffi::Tensor>();
}

// The bundle's function of `x`, both (rows, cols).
std::vector<float> run(const Manifest& manifest, const std::vector<float>& x, int64_t rows) {
  open_library("libtvm_runtime.so");
  if (manifest.device.device_type == kDLCUDA) open_library("libtvm_runtime_cuda.so");
  ffi::Module module = ffi::Module::LoadFromFile(manifest.library);
  ffi::Function softmax = module->GetFunction("main").value();

  ffi::Tensor input = allocate(rows, manifest.cols, manifest.device);
  ffi::Tensor output = allocate(rows, manifest.cols, manifest.device);
  std::vector<float> y(x.size(), std::numeric_limits<float>::quiet_NaN());
  auto bytes = static_cast<int64_t>(x.size() * sizeof(float));
  runtime("TVMTensorCopyFromBytes")(input, static_cast<void*>(const_cast<float*>(x.data())), bytes);
  softmax(input, output);  // on CUDA's default stream, after which the copy waits
  runtime("TVMTensorCopyToBytes")(output, static_cast<void*>(y.data()), bytes);
  return y;
}

// The largest error of `y` beside the softmax of each row of scale * x, relative to it.
double largest_error(const std::vector<float>& x, const std::vector<float>& y, int64_t cols, double scale) {
  double worst = 0;
  for (size_t row = 0; row < x.size(); row += cols) {
    double peak = -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t j = 0; j < cols; ++j) peak = std::max(peak, scale * x[row + j]);
    for (int64_t j = 0; j < cols; ++j) total += std::exp(scale * x[row + j] - peak);
    for (int64_t j = 0; j < cols; ++j) {
      double wanted = std::exp(scale * x[row + j] - peak) / total, error = std::abs(y[row + j] - wanted) / wanted;
      if (!(error <= worst)) worst = error;  // NaN too
    }
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: run_softmax BUNDLE [ROWS]\n");
    return 2;
  }
  try {
    Manifest manifest = read_manifest(argv[1]);
    int64_t rows = argc > 2 ? std::atoll(argv[2]) : manifest.rows;
    if (rows < 1) throw std::runtime_error(std::string(argv[2]) + " is not a number of rows");
    std::vector<float> x(rows * manifest.cols);
    std::mt19937 generator(0);
    std::normal_distribution<float> normal(0, 2);
    std::generate(x.begin(), x.end(), [&] { return normal(generator); });
    double error = largest_error(x, run(manifest, x, rows), manifest.cols, manifest.scale);
    std::printf("%lld x %lld on %s: largest relative error %.2e\n", static_cast<long long>(rows),
                static_cast<long long>(manifest.cols), manifest.device.device_type == kDLCUDA ? "cuda" : "cpu", error);
    if (error <= kTolerance) return 0;
    std::fprintf(stderr, "error: wrong result\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return 1;
}
