// CUtensorMap as this emulator encodes it (tensor_map.py writes it): the driver's encoding is not public.
#pragma once
#include <cstdint>

constexpr uint64_t kTensorMapMagic = 0x70616d5f756d65;

// Dimensions run from the innermost; strides are in bytes, that of the innermost is the element.
struct CUtensorMap {
  uint64_t magic;
  uint64_t address;
  uint64_t dims[5];
  uint64_t strides[5];
  uint16_t box[5];
  uint8_t element_strides[5];
  uint8_t rank;
  uint8_t element_bytes;
  uint8_t swizzle;  // 0, or the log2 of its 16-byte chunks: 1, 2, 3 for 32, 64, 128 bytes
  uint8_t nan_fill;
  uint8_t to_tf32;  // float32 are rounded as they are loaded
  uint8_t reserved[12];
};
static_assert(sizeof(CUtensorMap) == 128, "as large as CUDA's");
