// A driver library without a GPU: NVIDIA's, or with -DHIP AMD's.  Memory is the host's; every launch is a line of JSON in
// the file that FAKE_DRIVER_LOG names.  FAKE_DRIVER_KERNELS has the bytes of each kernel's parameters, as
// "name=8,8,4;name=128".  FAKE_DRIVER_FAIL names a function that fails, FAKE_DRIVER_CAPTURE the id of a graph that is
// being captured.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#ifdef HIP
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif
#define API extern "C" __attribute__((visibility("default"))) int

namespace {

std::mutex one;                   // thread notes at a time
std::vector<std::string> maps;  // a tensor map holds the number of its line here
std::set<int64_t> allocated;       // what was allocated
std::map<std::pair<void*, int>, int> allowed;  // attributes of functions
thread_local int mode = 0;                     // of capturing
#ifdef HIP
thread_local int current = 0;  // device
int device() { return current; }
#else
thread_local void* current = nullptr;  // a device's context is its number and one
int device() { return static_cast<int>(reinterpret_cast<intptr_t>(current)) - 1; }
#endif

std::string variable(const char* name) {
  const char* found = std::getenv(name);
  return found ? found : "";
}

// Whether a graph is captured that the calling thread would spoil.
bool unsafe() { return !variable("FAKE_DRIVER_CAPTURE").empty() && mode != 2; }

int code(const char* function) { return variable("FAKE_DRIVER_FAIL") == function ? 209 : 0; }

std::vector<int> sizes(const std::string& kernel) {
  std::stringstream all(variable("FAKE_DRIVER_KERNELS"));
  std::vector<int> found;
  for (std::string entry; std::getline(all, entry, ';');) {
    if (entry.substr(0, entry.find('=')) != kernel) continue;
    std::stringstream numbers(entry.substr(entry.find('=') + 1));
    for (std::string number; std::getline(numbers, number, ',');) found.push_back(std::stoi(number));
  }
  return found;
}

template <typename T>
std::string list(const T* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

void say(const std::string& line) {
  if (FILE* log = std::fopen(variable("FAKE_DRIVER_LOG").c_str(), "a")) {
    std::fprintf(log, "%s\n", line.c_str());
    std::fclose(log);
  }
}

int launched(void* function, const unsigned* grid, const unsigned* block, const unsigned* cluster, unsigned shared,
             bool dependent, void* stream, void** parameters) {
  if (device() < 0) return 201;
  if (int failed = code("launch")) return failed;
  std::lock_guard<std::mutex> held(one);
#ifndef HIP
  if (shared > 48 << 10 && allowed[{function, 8}] < static_cast<int>(shared)) return 1;
  if (cluster[0] * cluster[1] * cluster[2] > 8 && !allowed[{function, 14}]) return 1;
#endif
  std::string kernel = *static_cast<std::string*>(function), passed, first;
  int at = 0;
  for (int size : sizes(kernel)) {
    int64_t value = 0;
    std::memcpy(&value, parameters[at++], size > 8 ? 8 : size);
    int byte = size == 8 && allocated.count(value) ? *reinterpret_cast<unsigned char*>(value) : -1;
    first += (at > 1 ? ", " : "") + std::to_string(byte);
    passed += (at > 1 ? ", " : "") + (size > 8 ? maps.at(value) : std::to_string(value));
  }
  say("{\"symbol\": \"" + kernel + "\", \"grid\": " + list(grid, 3) + ", \"block\": " + list(block, 3) + ", \"cluster\": " +
      list(cluster, 3) + ", \"shared\": " + std::to_string(shared) + ", \"dependent\": " +
      (dependent ? "true" : "false") + ", \"device\": " + std::to_string(device()) + ", \"stream\": " +
      std::to_string(reinterpret_cast<intptr_t>(stream)) + ", \"arguments\": [" + passed + "]}");
  say("{\"first\": [" + first + "]}");  // bytes of what the driver allocated
  return 0;
}

}  // namespace

API NAME(cuInit, hipInit)(unsigned) { return code("init"); }
API NAME(cuDeviceGetCount, hipGetDeviceCount)(int* count) { return *count = 2, 0; }
API NAME(cuGetErrorString, hipDrvGetErrorString)(int, const char** text) { return *text = "no kernel image", 0; }
API NAME(cuModuleLoadData, hipModuleLoadData)(void** module, const void* image) {
  *module = const_cast<void*>(image);
  return std::memcmp(image, "\177ELF", 4) ? 200 : code("load");
}
API NAME(cuModuleUnload, hipModuleUnload)(void*) { return say("\"unloaded\""), 0; }
API NAME(cuModuleGetFunction, hipModuleGetFunction)(void** function, void*, const char* name) {
  *function = new std::string(name);
  return 0;
}
API NAME(cuMemAlloc_v2, hipMalloc)(void** memory, size_t bytes) {
  if (unsafe()) return 900;
  say("{\"allocated\": " + std::to_string(bytes) + "}");
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*memory, 0, bytes);
  allocated.insert(reinterpret_cast<int64_t>(*memory));
  return 0;
}
API NAME(cuMemFree_v2, hipFree)(void* memory) {
  return unsafe() ? 900 : (std::free(memory), say("\"freed\""), 0);
}
API NAME(cuMemcpyHtoD_v2, hipMemcpyHtoD)(void* to, const void* from, size_t bytes) {
  return std::memcpy(to, from, bytes), 0;
}
API NAME(cuMemcpyDtoH_v2, hipMemcpyDtoH)(void* to, const void* from, size_t bytes) {
  return std::memcpy(to, from, bytes), 0;
}
API NAME(cuStreamGetCaptureInfo_v2, hipStreamGetCaptureInfo_v2)(void*, int* status, uint64_t* id, void*, void*, void*) {
  *id = std::strtoull(variable("FAKE_DRIVER_CAPTURE").c_str(), nullptr, 10);
  *status = *id != 0;
  return 0;
}
API NAME(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)(int* other) { return std::swap(mode, *other), 0; }
API NAME(cuCtxSynchronize, hipDeviceSynchronize)() { return 0; }
API NAME(cuLaunchKernel, hipModuleLaunchKernel)(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                                unsigned by, unsigned bz, unsigned shared, void* stream,
                                                void** parameters, void**) {
  unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz}, cluster[] = {1, 1, 1};
  return launched(function, grid, block, cluster, shared, false, stream, parameters);
}

#ifdef HIP
API hipGetDevice(int* device) { return *device = current, 0; }
API hipSetDevice(int device) { return current = device, 0; }
#else
API cuDeviceGet(int* device, int index) { return *device = index, 0; }
API cuDevicePrimaryCtxRetain(void** context, int device) { return *context = reinterpret_cast<void*>(device + 1L), 0; }
API cuCtxGetCurrent(void** context) { return *context = current, 0; }
API cuCtxSetCurrent(void* context) { return current = context, 0; }
API cuFuncSetAttribute(void* function, int which, int value) { return allowed[{function, which}] = value, 0; }

API cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  if (reinterpret_cast<uintptr_t>(map) % 64) return 1;
  int modes[] = {interleave, swizzle, promotion, fill};
  std::lock_guard<std::mutex> held(one);
  *map = maps.size();
  maps.push_back("[" + std::to_string(reinterpret_cast<int64_t>(address)) + ", " + std::to_string(type) + ", " +
                 list(dims, rank) + ", " + list(strides, rank - 1) + ", " + list(box, rank) + ", " + list(steps, rank) +
                 ", " + list(modes, 4) + "]");
  return 0;
}

struct Attribute {  // as CUlaunchAttribute
  int id, pad;
  unsigned value[16];
};
struct Config {  // as CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};

API cuLaunchKernelEx(const Config* config, void* function, void** parameters, void**) {
  unsigned cluster[] = {1, 1, 1};
  bool dependent = false;
  for (unsigned i = 0; i < config->count; ++i) {
    const Attribute& each = config->attributes[i];
    if (each.id == 4) std::memcpy(cluster, each.value, sizeof cluster);
    if (each.id == 6) dependent = each.value[0];
  }
  return launched(function, config->grid, config->block, cluster, config->shared, dependent, config->stream,
                  parameters);
}
#endif
