// ldmatrix, stmatrix and mma.sync with the fragment layouts of the PTX ISA ("Matrix multiply-accumulate instructions").
#pragma once
#include <cstdint>

namespace emu {

enum class Element { f16, bf16, tf32, f32, s8, u8, s32 };

struct MatrixShape {
  int m, n, k;
  Element a, b, sum;
  bool saturate;
};

// Loads `count` 8x8 matrices of 16-bit elements; lane 8*i+r gives the address of row r of matrix i.
void load_matrix(uint32_t* result, int count, bool transpose, uint32_t row_address, int line);

// Stores `count` of them; their rows are addressed alike.
void store_matrix(const uint32_t* words, int count, bool transpose, uint32_t row_address, int line);

// One warp's D = A * B + C. All operands are 32-bit registers in the order of the instruction.
void multiply_matrices(const MatrixShape& shape, uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                       int line);

}  // namespace emu
