#include "matrix.h"

#include <cmath>
#include <cstring>

#include "half.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace emu {
namespace {

constexpr uint32_t kWholeWarp = 0xffffffffu;

struct LoadOperand {
  uint32_t row_address;
  int count;
  bool transpose;
  uint32_t* result;
};

void execute_load(void* const* operands, uint64_t, int line) {
  auto lane_operand = [&](int lane) { return static_cast<LoadOperand*>(operands[lane]); };
  const LoadOperand& any = *lane_operand(0);
  for (int matrix = 0; matrix < any.count; ++matrix) {
    uint16_t rows[8][8];
    for (int row = 0; row < 8; ++row) {
      uint32_t address = lane_operand(8 * matrix + row)->row_address;
      memcpy(rows[row], shared_pointer(address, 16, 16, "ldmatrix", line), 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) {
        int row = lane / 4, column = lane % 4 * 2 + i;
        pair[i] = any.transpose ? rows[column][row] : rows[row][column];
      }
      memcpy(&lane_operand(lane)->result[matrix], pair, 4);
    }
  }
}

struct StoreOperand {
  uint32_t row_address;
  int count;
  bool transpose;
  const uint32_t* words;
};

void execute_store(void* const* operands, uint64_t, int line) {
  auto lane_operand = [&](int lane) { return static_cast<StoreOperand*>(operands[lane]); };
  const StoreOperand& any = *lane_operand(0);
  for (int matrix = 0; matrix < any.count; ++matrix) {
    uint16_t rows[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t pair = lane_operand(lane)->words[matrix];
      for (int i = 0; i < 2; ++i) {
        int row = lane / 4, column = lane % 4 * 2 + i;
        (any.transpose ? rows[column][row] : rows[row][column]) = static_cast<uint16_t>(pair >> 16 * i);
      }
    }
    for (int row = 0; row < 8; ++row) {
      uint32_t address = lane_operand(8 * matrix + row)->row_address;
      memcpy(own_shared_pointer(address, 16, 16, "stmatrix", line), rows[row], 16);
    }
  }
}

struct MultiplyOperand {
  const MatrixShape* shape;
  const uint32_t *a, *b, *c;
  uint32_t* d;
};

int element_bytes(Element type) {
  switch (type) {
    case Element::s8:
    case Element::u8: return 1;
    case Element::f16:
    case Element::bf16: return 2;
    default: return 4;
  }
}

// Element `index` of a register, as a number; every supported input is exact in a float.
float read_input(uint32_t word, int index, Element type) {
  uint32_t bits = word >> (8 * element_bytes(type) * index);
  switch (type) {
    case Element::f16: return HalfFormat::decode(static_cast<uint16_t>(bits));
    case Element::bf16: return BFloatFormat::decode(static_cast<uint16_t>(bits));
    case Element::s8: return static_cast<int8_t>(bits);
    case Element::u8: return static_cast<uint8_t>(bits);
    // The hardware ignores the 13 low bits of a float given as tf32.
    case Element::tf32: return bits_float(bits & 0xffffe000u);
    default: return 0;
  }
}

// Fragments run along k: four lanes hold one row (of B: one column), each `per` elements in a register. Of A with m = 16
// a pair of registers covers rows r and r + 8. Further registers cover further k.
struct Inputs {
  float a[16][32], b[32][8];
};

void gather_inputs(const MatrixShape& shape, void* const* operands, Inputs* inputs) {
  int per = 4 / element_bytes(shape.a), span = 4 * per, halves = shape.m / 8;
  for (int row = 0; row < shape.m; ++row) {
    for (int k = 0; k < shape.k; ++k) {
      auto* lane = static_cast<MultiplyOperand*>(operands[row % 8 * 4 + k % span / per]);
      inputs->a[row][k] = read_input(lane->a[k / span * halves + row / 8], k % per, shape.a);
    }
  }
  for (int column = 0; column < shape.n; ++column) {
    for (int k = 0; k < shape.k; ++k) {
      auto* lane = static_cast<MultiplyOperand*>(operands[column * 4 + k % span / per]);
      inputs->b[k][column] = read_input(lane->b[k / span], k % per, shape.b);
    }
  }
}

uint32_t multiply_integer(const MatrixShape& shape, const Inputs& inputs, int row, int column, uint32_t c) {
  int64_t sum = static_cast<int32_t>(c);
  for (int k = 0; k < shape.k; ++k) {
    sum += static_cast<int64_t>(inputs.a[row][k]) * static_cast<int64_t>(inputs.b[k][column]);
  }
  if (shape.saturate) sum = sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum;
  return static_cast<uint32_t>(sum);
}

// The hardware adds with a few more bits than a float has, and cuts the sum off towards zero (Fasi, Higham, Mikaitis
// and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).
float multiply_float(const MatrixShape& shape, const Inputs& inputs, int row, int column, float c) {
  double sum = c;
  for (int k = 0; k < shape.k; ++k) sum += static_cast<double>(inputs.a[row][k]) * inputs.b[k][column];
  float near = static_cast<float>(sum);
  bool away = std::isfinite(near) && std::fabs(static_cast<double>(near)) > std::fabs(sum);
  return away ? std::nextafterf(near, 0.0f) : near;
}

void execute_multiply(void* const* operands, uint64_t, int) {
  const MatrixShape shape = *static_cast<MultiplyOperand*>(operands[0])->shape;
  static Inputs inputs;
  gather_inputs(shape, operands, &inputs);
  for (int lane = 0; lane < 32; ++lane) {
    auto* own = static_cast<MultiplyOperand*>(operands[lane]);
    for (int half = 0; half < shape.m / 8; ++half) {
      int row = lane / 4 + 8 * half, column = lane % 4 * 2;
      if (shape.sum == Element::f16) {
        uint32_t c = own->c[half], d = 0;
        for (int i = 0; i < 2; ++i) {
          float sum = multiply_float(shape, inputs, row, column + i, read_input(c, i, Element::f16));
          d |= static_cast<uint32_t>(HalfFormat::encode(sum)) << (16 * i);
        }
        own->d[half] = d;
        continue;
      }
      for (int i = 0; i < 2; ++i) {
        uint32_t c = own->c[2 * half + i];
        own->d[2 * half + i] =
            shape.sum == Element::s32
                ? multiply_integer(shape, inputs, row, column + i, c)
                : float_bits(multiply_float(shape, inputs, row, column + i, bits_float(c)));
      }
    }
  }
}

const WarpOperation kLoad = {"ldmatrix", execute_load, true};
const WarpOperation kStore = {"stmatrix", execute_store, true};
const WarpOperation kMultiply = {"mma.sync", execute_multiply, true};

}  // namespace

void load_matrix(uint32_t* result, int count, bool transpose, uint32_t row_address, int line) {
  LoadOperand operand = {row_address, count, transpose, result};
  warp_operation(kLoad, kWholeWarp, &operand, line);
}

void store_matrix(const uint32_t* words, int count, bool transpose, uint32_t row_address, int line) {
  StoreOperand operand = {row_address, count, transpose, words};
  warp_operation(kStore, kWholeWarp, &operand, line);
}

void multiply_matrices(const MatrixShape& shape, uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                       int line) {
  MultiplyOperand operand = {&shape, a, b, c, d};
  warp_operation(kMultiply, kWholeWarp, &operand, line);
}

}  // namespace emu
