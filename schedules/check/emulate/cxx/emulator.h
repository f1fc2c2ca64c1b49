// Included before every translated kernel: the CUDA C++ language as far as generated kernels use it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(bytes) alignas(bytes)
#define __grid_constant__

#include "scheduler.h"
#include "launch.h"
#include "shared_memory.h"
#include "vector_types.h"
#include "math_functions.h"
#include "half_functions.h"
#include "memory_functions.h"
#include "warp.h"
#include "async_copy.h"
#include "matrix.h"
#include "tensor_map.h"
#include "ptx.h"

#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_INF __builtin_inf()
#define CUDART_MAX_NORMAL_F 3.402823466e+38f
