// What examples/cpp/launch_hip.cpp uses of HIP's header, where there is no ROCm: as HIP declares it.

#pragma once

#include <stddef.h>

extern "C" {
typedef enum { hipSuccess = 0 } hipError_t;
typedef struct ihipModule_t* hipModule_t;
typedef struct ihipModuleSymbol_t* hipFunction_t;
typedef struct ihipStream_t* hipStream_t;
typedef void* hipDeviceptr_t;

hipError_t hipInit(unsigned int flags);
hipError_t hipDrvGetErrorString(hipError_t error, const char** text);
hipError_t hipMalloc(void** memory, size_t bytes);
hipError_t hipFree(void* memory);
hipError_t hipMemcpyHtoD(hipDeviceptr_t to, const void* from, size_t bytes);
hipError_t hipMemcpyDtoH(void* to, hipDeviceptr_t from, size_t bytes);
hipError_t hipDeviceSynchronize(void);
hipError_t hipModuleLoadData(hipModule_t* module, const void* image);
hipError_t hipModuleUnload(hipModule_t module);
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name);
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                 unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                                 hipStream_t stream, void** parameters, void** extra);
}
