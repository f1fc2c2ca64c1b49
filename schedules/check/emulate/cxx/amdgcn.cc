// What LLVM IR for AMD GPUs calls (llvm.amdgcn.*), after LLVM's "User Guide for AMDGPU Backend" and AMD's ISA documents.
//
// The translator (amdgcn.py) gives every intrinsic the same form: its whole name, where its result goes, its operands
// in memory, and its line.  A function here stands for all overloads of one; its name is that without their types.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "half.h"
#include "scheduler.h"
#include "scheduler_internal.h"

namespace emu {
namespace {

struct Value {
  char* data;
  int64_t bytes;

  template <class T>
  T as(int64_t index = 0) const {
    T value;
    memcpy(static_cast<void*>(&value), data + index * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void set(T value, int64_t index = 0) const {
    memcpy(data + index * sizeof(T), &value, sizeof(T));
  }
  void copy(const Value& other) const { memcpy(data, other.data, bytes); }
  void zero() const { memset(data, 0, bytes); }
};

struct Call {
  const char* name;
  Value result;
  const Value* operands;
  int line;
};

bool has(uint64_t lanes, int lane) { return lane >= 0 && lane < kMaxWave && lanes >> lane & 1; }

// The calls of a wave, lane by lane.
struct Wave {
  void* const* operands;
  uint64_t lanes;

  const Call& operator[](int lane) const { return *static_cast<const Call*>(operands[lane]); }
  bool has(int lane) const { return emu::has(lanes, lane); }
  int first() const { return __builtin_ctzll(lanes); }
  const Value& operand(int lane, int index) const { return (*this)[lane].operands[index]; }
  template <class Function>
  void each(Function function) const {
    for (int lane = 0; lane < kMaxWave; ++lane) {
      if (has(lane)) function(lane, (*this)[lane]);
    }
  }
};

}  // namespace
}  // namespace emu

// EMU_LANE: what a lane does by itself.  EMU_WAVE: what the lanes that are there do together.
#define EMU_LANE(name, label)                                                                                     \
  static void name##_lane(const emu::Call& call);                                                                 \
  extern "C" void emu_amdgcn_##name(const char* full, emu::Value* result, const emu::Value* operands, int line)   \
      asm("emu.amdgcn." label);                                                                                   \
  extern "C" void emu_amdgcn_##name(const char* full, emu::Value* result, const emu::Value* operands, int line) { \
    name##_lane({full, *result, operands, line});                                                                 \
  }                                                                                                               \
  static void name##_lane([[maybe_unused]] const emu::Call& call)

#define EMU_WAVE(name, label)                                                                                     \
  static void name##_wave(const emu::Wave& wave);                                                                 \
  extern "C" void emu_amdgcn_##name(const char* full, emu::Value* result, const emu::Value* operands, int line)   \
      asm("emu.amdgcn." label);                                                                                   \
  extern "C" void emu_amdgcn_##name(const char* full, emu::Value* result, const emu::Value* operands, int line) { \
    auto execute = [](void* const* calls, uint64_t lanes, int) { name##_wave({calls, lanes}); };                  \
    static const emu::WarpOperation operation = {"llvm.amdgcn." label, execute, false};                           \
    emu::Call call = {full, *result, operands, line};                                                             \
    emu::converged_operation(operation, &call, line);                                                             \
  }                                                                                                               \
  static void name##_wave([[maybe_unused]] const emu::Wave& wave)

// ---- Where a thread is ----

EMU_LANE(workitem_x, "workitem.id.x") { call.result.set(emu::position.thread.x); }
EMU_LANE(workitem_y, "workitem.id.y") { call.result.set(emu::position.thread.y); }
EMU_LANE(workitem_z, "workitem.id.z") { call.result.set(emu::position.thread.z); }
EMU_LANE(workgroup_x, "workgroup.id.x") { call.result.set(emu::position.block.x); }
EMU_LANE(workgroup_y, "workgroup.id.y") { call.result.set(emu::position.block.y); }
EMU_LANE(workgroup_z, "workgroup.id.z") { call.result.set(emu::position.block.z); }
EMU_LANE(wave_size, "wavefrontsize") { call.result.set(emu::wave()); }

static int lanes_below(uint32_t mask, int lane) {
  return lane <= 0 ? 0 : __builtin_popcount(lane >= 32 ? mask : mask & ((1u << lane) - 1));
}
EMU_LANE(mbcnt_low, "mbcnt.lo") {
  call.result.set(lanes_below(call.operands[0].as<uint32_t>(), emu::lane_id()) + call.operands[1].as<int>());
}
EMU_LANE(mbcnt_high, "mbcnt.hi") {
  call.result.set(lanes_below(call.operands[0].as<uint32_t>(), emu::lane_id() - 32) + call.operands[1].as<int>());
}

// ---- Barriers and hints ----

// Whole waves arrive.  Within a wave nothing is ordered by it but what all of its threads wait for.
EMU_LANE(barrier, "s.barrier") { emu::block_barrier(0, call.line, "s_barrier"); }
// With no release fence before it LLVM has no wave wait for its stores first, on GPUs whose barriers do not by themselves.
EMU_LANE(bare_barrier, "s.barrier.bare") {
  if (emu::block_size() > emu::wave()) {
    emu::fail(call.line, "s_barrier with no release fence before it: a wave's stores may be seen only after it");
  }
  emu::block_barrier(0, call.line, "s_barrier");
}
EMU_WAVE(wave_barrier, "wave.barrier") {}
// Before a volatile access, which TVM makes where the threads of a wave share memory without a barrier: hardware has
// all of them do one before any does the next.
EMU_WAVE(lockstep, "lockstep") {}
EMU_LANE(wait_count, "s.waitcnt") {}
EMU_LANE(wait_data_share, "s.wait.dscnt") {}
EMU_LANE(wait_loads, "s.wait.loadcnt") {}
EMU_LANE(wait_stores, "s.wait.storecnt") {}
EMU_LANE(set_priority, "s.setprio") {}
EMU_LANE(sleep, "s.sleep") { emu::pause(call.line); }
EMU_LANE(scheduling_barrier, "sched.barrier") {}
EMU_LANE(scheduling_groups, "sched.group.barrier") {}
EMU_LANE(scheduling_hint, "iglp.opt") {}

// ---- Arithmetic ----

template <class Function>
static void unary(const emu::Call& call, Function function) {
  const emu::Value &x = call.operands[0], &y = call.result;
  if (y.bytes == 2) return y.set(__half(static_cast<float>(function(static_cast<double>(float(x.as<__half>()))))));
  if (y.bytes == 4) return y.set(static_cast<float>(function(static_cast<double>(x.as<float>()))));
  y.set(function(x.as<double>()));
}
EMU_LANE(rcp, "rcp") { unary(call, [](double x) { return 1 / x; }); }
EMU_LANE(rsq, "rsq") { unary(call, [](double x) { return 1 / std::sqrt(x); }); }
EMU_LANE(sqrt, "sqrt") { unary(call, [](double x) { return std::sqrt(x); }); }
EMU_LANE(exp2, "exp2") { unary(call, [](double x) { return std::exp2(x); }); }
EMU_LANE(log2, "log") { unary(call, [](double x) { return std::log2(x); }); }
EMU_LANE(fract, "fract") { unary(call, [](double x) { return x - std::floor(x); }); }
EMU_LANE(sin, "sin") { unary(call, [](double x) { return std::sin(x * 2 * M_PI); }); }
EMU_LANE(cos, "cos") { unary(call, [](double x) { return std::cos(x * 2 * M_PI); }); }

EMU_LANE(median, "fmed3") {
  auto value = [&](int i) {
    const emu::Value& operand = call.operands[i];
    return operand.bytes == 2 ? float(operand.as<__half>()) : operand.as<float>();
  };
  float a = value(0), b = value(1), c = value(2);
  float median = std::fmax(std::fmin(a, b), std::fmin(std::fmax(a, b), c));
  if (call.result.bytes == 2) return call.result.set(__half(median));
  call.result.set(median);
}

// Two floats to halves, toward zero.
EMU_LANE(pack_halves, "cvt.pkrtz") {
  for (int i = 0; i < 2; ++i) {
    float x = call.operands[i].as<float>();
    __half rounded(x);
    if (std::fabs(float(rounded)) > std::fabs(x)) rounded = __half::from_bits(rounded.bits - 1);
    call.result.set(rounded, i);
  }
}

static int extended(uint32_t word, int element, int bits, bool is_signed) {
  uint32_t value = word >> (element * bits) & ((1u << bits) - 1);
  return is_signed && value >> (bits - 1) ? static_cast<int>(value) - (1 << bits) : static_cast<int>(value);
}
static int64_t dot(uint32_t a, bool a_signed, uint32_t b, bool b_signed, int bits) {
  int64_t sum = 0;
  for (int i = 0; i < 32 / bits; ++i) sum += extended(a, i, bits, a_signed) * extended(b, i, bits, b_signed);
  return sum;
}
static void finish_dot(const emu::Call& call, int64_t sum, bool is_signed, bool clamp) {
  int64_t least = is_signed ? INT32_MIN : 0, most = is_signed ? int64_t{INT32_MAX} : int64_t{UINT32_MAX};
  if (clamp) sum = sum < least ? least : sum > most ? most : sum;
  call.result.set(static_cast<int32_t>(sum));
}
static void plain_dot(const emu::Call& call, bool is_signed, int bits) {
  const emu::Value* o = call.operands;
  int64_t sum = is_signed ? int64_t{o[2].as<int32_t>()} : int64_t{o[2].as<uint32_t>()};
  sum += dot(o[0].as<uint32_t>(), is_signed, o[1].as<uint32_t>(), is_signed, bits);
  finish_dot(call, sum, is_signed, o[3].as<bool>());
}
static void mixed_dot(const emu::Call& call, int bits) {
  const emu::Value* o = call.operands;
  int64_t sum = dot(o[1].as<uint32_t>(), o[0].as<bool>(), o[3].as<uint32_t>(), o[2].as<bool>(), bits);
  finish_dot(call, o[4].as<int32_t>() + sum, true, o[5].as<bool>());
}
EMU_LANE(sdot2, "sdot2") { plain_dot(call, true, 16); }
EMU_LANE(udot2, "udot2") { plain_dot(call, false, 16); }
EMU_LANE(sdot4, "sdot4") { plain_dot(call, true, 8); }
EMU_LANE(udot4, "udot4") { plain_dot(call, false, 8); }
EMU_LANE(sdot8, "sdot8") { plain_dot(call, true, 4); }
EMU_LANE(udot8, "udot8") { plain_dot(call, false, 4); }
EMU_LANE(sudot4, "sudot4") { mixed_dot(call, 8); }
EMU_LANE(sudot8, "sudot8") { mixed_dot(call, 4); }
EMU_LANE(fdot2, "fdot2") {
  bool halves = !strcmp(call.name, "fdot2");
  if (!halves && strcmp(call.name, "fdot2.f32.bf16")) emu::fail(call.line, "llvm.amdgcn.%s is not emulated", call.name);
  auto element = [&](int operand, int i) {
    const emu::Value& value = call.operands[operand];
    return halves ? float(value.as<__half>(i)) : float(value.as<__nv_bfloat16>(i));
  };
  call.result.set(call.operands[2].as<float>() + element(0, 0) * element(1, 0) + element(0, 1) * element(1, 1));
}
EMU_LANE(perm, "perm") {
  uint64_t bytes = uint64_t{call.operands[0].as<uint32_t>()} << 32 | call.operands[1].as<uint32_t>();
  uint32_t selector = call.operands[2].as<uint32_t>(), result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t choice = selector >> (8 * i) & 0xff, byte = 0;
    if (choice < 8) byte = bytes >> (8 * choice) & 0xff;
    else if (choice < 12) byte = bytes >> (16 * (choice - 8) + 15) & 1 ? 0xff : 0;
    else if (choice > 12) byte = 0xff;
    result |= byte << (8 * i);
  }
  call.result.set(result);
}
EMU_LANE(unsigned_field, "ubfe") {
  uint32_t offset = call.operands[1].as<uint32_t>() & 31, width = call.operands[2].as<uint32_t>() & 31;
  call.result.set(call.operands[0].as<uint32_t>() >> offset & ((1u << width) - 1));
}
EMU_LANE(signed_field, "sbfe") {
  uint32_t offset = call.operands[1].as<uint32_t>() & 31, width = call.operands[2].as<uint32_t>() & 31;
  uint32_t field = call.operands[0].as<uint32_t>() >> offset & ((1u << width) - 1);
  if (width && field >> (width - 1)) field |= ~((1u << width) - 1);
  call.result.set(field);
}
EMU_LANE(align_byte, "alignbyte") {
  uint64_t bytes = uint64_t{call.operands[0].as<uint32_t>()} << 32 | call.operands[1].as<uint32_t>();
  call.result.set(static_cast<uint32_t>(bytes >> (8 * (call.operands[2].as<uint32_t>() & 3))));
}

// What LLVM calls where the CPU has no instruction for it, and older C compilers' libraries lack.  Sixteen bits are passed
// as the lowest of a register of floats.
static float low_bits(uint16_t bits) { return emu::bits_float(bits); }
extern "C" float emu_float_to_bfloat(float x) asm("__truncsfbf2");
extern "C" float emu_double_to_bfloat(double x) asm("__truncdfbf2");
extern "C" float emu_float_to_half(float x) asm("__truncsfhf2");
extern "C" float emu_double_to_half(double x) asm("__truncdfhf2");
extern "C" float emu_half_to_float(float x) asm("__extendhfsf2");
float emu_float_to_bfloat(float x) { return low_bits(__nv_bfloat16(x).bits); }
float emu_double_to_bfloat(double x) { return low_bits(__nv_bfloat16(x).bits); }
float emu_float_to_half(float x) { return low_bits(__half(x).bits); }
float emu_double_to_half(double x) { return low_bits(__half(x).bits); }
float emu_half_to_float(float x) { return __half::from_bits(static_cast<uint16_t>(emu::float_bits(x))); }

// ---- Between the lanes of a wave ----

EMU_WAVE(read_first_lane, "readfirstlane") {
  wave.each([&](int, const emu::Call& call) { call.result.copy(wave.operand(wave.first(), 0)); });
}
// The lane must be the same for all.
EMU_WAVE(read_lane, "readlane") {
  int from = wave.operand(wave.first(), 1).as<int>() & (emu::wave() - 1);
  wave.each([&](int, const emu::Call& call) {
    if (wave.has(from)) return call.result.copy(wave.operand(from, 0));
    memset(call.result.data, 0xff, call.result.bytes);  // a register that the kernel did not write here
  });
}
EMU_WAVE(write_lane, "writelane") {
  int to = wave.operand(wave.first(), 1).as<int>() & (emu::wave() - 1);
  wave.each([&](int lane, const emu::Call& call) { call.result.copy(call.operands[lane == to ? 0 : 2]); });
}
EMU_WAVE(ballot, "ballot") {
  uint64_t votes = 0;
  wave.each([&](int lane, const emu::Call& call) { votes |= uint64_t{call.operands[0].as<bool>()} << lane; });
  wave.each([&](int, const emu::Call& call) { memcpy(call.result.data, &votes, call.result.bytes); });
}
EMU_WAVE(pull, "ds.bpermute") {
  wave.each([&](int, const emu::Call& call) {
    int from = call.operands[0].as<uint32_t>() / 4 % emu::wave();
    wave.has(from) ? call.result.copy(wave.operand(from, 1)) : call.result.zero();
  });
}
EMU_WAVE(push, "ds.permute") {
  wave.each([&](int, const emu::Call& call) { call.result.zero(); });
  wave.each([&](int, const emu::Call& call) {
    int to = call.operands[0].as<uint32_t>() / 4 % emu::wave();
    if (wave.has(to)) wave[to].result.copy(call.operands[1]);
  });
}
EMU_WAVE(swizzle, "ds.swizzle") {
  wave.each([&](int lane, const emu::Call& call) {
    int pattern = call.operands[1].as<int>() & 0xffff, group = lane & ~31, within = lane & 31, from;
    if (pattern >= 0xc000) emu::fail(call.line, "ds_swizzle with the pattern 0x%x is not emulated", pattern);
    if (pattern & 0x8000) from = (lane & ~3) + (pattern >> (2 * (lane & 3)) & 3);
    else from = group + ((((within & pattern) | pattern >> 5) ^ pattern >> 10) & 31);
    wave.has(from) ? call.result.copy(wave.operand(from, 0)) : call.result.zero();
  });
}

// The lane that `lane` reads from by "data parallel primitives", -1 if there is none.
static int primitive_source(int lane, int control, int line) {
  int row = lane & ~15, within = lane & 15, n = control & 15;
  if (control < 0x100) return (lane & ~3) + (control >> (2 * (lane & 3)) & 3);
  switch (control & 0x1f0) {
    case 0x100: return within + n < 16 ? lane + n : -1;  // row_shl
    case 0x110: return within >= n ? lane - n : -1;      // row_shr
    case 0x120: return row + (within - n + 16) % 16;     // row_ror
    case 0x150: return row + n;                          // row_share, row_newbcast
    case 0x160: return row + (within ^ n);               // row_xmask
  }
  switch (control) {
    case 0x130: return lane + 1 < emu::wave() ? lane + 1 : -1;            // wave_shl
    case 0x134: return (lane + 1) % emu::wave();                          // wave_rol
    case 0x138: return lane - 1;                                          // wave_shr
    case 0x13c: return (lane + emu::wave() - 1) % emu::wave();            // wave_ror
    case 0x140: return row + 15 - within;                                 // row_mirror
    case 0x141: return (lane & ~7) + 7 - (lane & 7);                      // row_half_mirror
    case 0x142: return row - 1;                                           // row_bcast:15
    case 0x143: return lane >= 32 ? 31 : -1;                              // row_bcast:31
  }
  emu::fail(line, "the DPP control 0x%x is not emulated", control);
}
// `old`: what a lane keeps that is masked out or has no source; none for mov.dpp, where it is undefined.
static void move_by_primitive(const emu::Wave& wave, int old) {
  wave.each([&](int lane, const emu::Call& call) {
    const emu::Value* o = call.operands + old;  // the value, the control, the masks of rows and banks, the bound
    int from = primitive_source(lane, o[1].as<int>(), call.line);
    bool masked = !(o[2].as<int>() >> lane / 16 & 1) || !(o[3].as<int>() >> lane % 16 / 4 & 1);
    if (!masked && wave.has(from)) return call.result.copy(wave.operand(from, old));
    if (!masked && o[4].as<bool>()) return call.result.zero();
    if (old) return call.result.copy(call.operands[0]);
    memset(call.result.data, 0xff, call.result.bytes);
  });
}
EMU_WAVE(update_primitive, "update.dpp") { move_by_primitive(wave, 1); }
EMU_WAVE(move_primitive, "mov.dpp") { move_by_primitive(wave, 0); }

static void permute_rows(const emu::Wave& wave, int flip) {
  wave.each([&](int lane, const emu::Call& call) {
    const emu::Value* o = call.operands;  // old, value, two words of selectors, whether to fetch inactive lanes, bound
    uint64_t selectors = uint64_t{o[3].as<uint32_t>()} << 32 | o[2].as<uint32_t>();
    int from = ((lane & ~15) ^ flip) + static_cast<int>(selectors >> (4 * (lane & 15)) & 15);
    if (wave.has(from)) return call.result.copy(wave.operand(from, 1));
    o[5].as<bool>() ? call.result.zero() : call.result.copy(o[0]);
  });
}
EMU_WAVE(permute_row, "permlane16") { permute_rows(wave, 0); }
EMU_WAVE(permute_other_row, "permlanex16") { permute_rows(wave, 16); }
EMU_WAVE(permute_halves, "permlane64") {
  wave.each([&](int lane, const emu::Call& call) {
    wave.has(lane ^ 32) ? call.result.copy(wave.operand(lane ^ 32, 0)) : call.result.zero();
  });
}
// Exchanges the odd rows of `rows` lanes of the first operand with the even ones of the second.
static void swap_rows(const emu::Wave& wave, int rows) {
  wave.each([&](int lane, const emu::Call& call) {
    bool odd = lane & rows;
    int other = lane ^ rows;
    const emu::Value &first = odd ? wave.operand(other, 1) : wave.operand(lane, 0),
                     &second = odd ? wave.operand(lane, 1) : wave.operand(other, 0);
    call.result.set(first.as<uint32_t>(), 0);
    call.result.set(second.as<uint32_t>(), 1);
  });
}
EMU_WAVE(swap_16, "permlane16.swap") { swap_rows(wave, 16); }
EMU_WAVE(swap_32, "permlane32.swap") { swap_rows(wave, 32); }

// ---- Matrices ----

namespace emu {
namespace {

enum class Kind { f32, xf32, f16, bf16, i8, u8, i4, u4 };

int bits_of(Kind kind) {
  switch (kind) {
    case Kind::f32: case Kind::xf32: return 32;
    case Kind::f16: case Kind::bf16: return 16;
    case Kind::i8: case Kind::u8: return 8;
    default: return 4;
  }
}

double element(const Value& value, int index, Kind kind) {
  switch (kind) {
    case Kind::f32: return value.as<float>(index);
    case Kind::xf32: {  // a mantissa of 10 bits; gfx942 cuts off the rest (github.com/ROCm/rocm-libraries/pull/9176)
      uint32_t bits = value.as<uint32_t>(index);
      if ((bits & 0x7f800000) != 0x7f800000) bits &= ~0x1fffu;
      return bits_float(bits);
    }
    case Kind::f16: return float(value.as<__half>(index));
    case Kind::bf16: return float(value.as<__nv_bfloat16>(index));
    case Kind::i8: return value.as<int8_t>(index);
    case Kind::u8: return value.as<uint8_t>(index);
    default: {
      int nibble = value.as<uint8_t>(index / 2) >> (index % 2 * 4) & 15;
      return kind == Kind::i4 && nibble & 8 ? nibble - 16 : nibble;
    }
  }
}

struct Product {
  int m, n, k, blocks;
  Kind a, b;
  int operand_a, operand_b, operand_c;
};

// Where an element lies: which lane, and which element of its operand.
struct Place {
  int lane, index;
};

using InputPlace = Place (*)(const Product& p, int extent, int row, int k, int block, int elements);
using SumPlace = Place (*)(const Product& p, int row, int column, int block);

// D = A * B + C for each block; sums in the precision that `Sum` has.
template <class Sum, class Element = Sum>
void multiply(const Wave& wave, const Product& p, InputPlace input, SumPlace sum, bool clamp = false) {
  const Call& any = wave[wave.first()];
  uint64_t all = emu::wave() == 64 ? ~uint64_t{0} : (uint64_t{1} << emu::wave()) - 1;
  if (wave.lanes != all) fail(any.line, "llvm.amdgcn.%s reached by only a part of a wave", any.name);
  int a_elements = static_cast<int>(any.operands[p.operand_a].bytes) * 8 / bits_of(p.a);
  int b_elements = static_cast<int>(any.operands[p.operand_b].bytes) * 8 / bits_of(p.b);
  wave.each([&](int, const Call& call) { call.result.copy(call.operands[p.operand_c]); });
  std::vector<Sum> a(p.m * p.k), b(p.k * p.n);
  for (int block = 0; block < p.blocks; ++block) {
    for (int k = 0; k < p.k; ++k) {
      for (int i = 0; i < p.m; ++i) {
        Place from = input(p, p.m, i, k, block, a_elements);
        a[i * p.k + k] = static_cast<Sum>(element(wave.operand(from.lane, p.operand_a), from.index, p.a));
      }
      for (int j = 0; j < p.n; ++j) {
        Place from = input(p, p.n, j, k, block, b_elements);
        b[j * p.k + k] = static_cast<Sum>(element(wave.operand(from.lane, p.operand_b), from.index, p.b));
      }
    }
    for (int i = 0; i < p.m; ++i) {
      for (int j = 0; j < p.n; ++j) {
        Place to = sum(p, i, j, block);
        const Value& result = wave[to.lane].result;
        Sum total = static_cast<Sum>(result.template as<Element>(to.index));
        for (int k = 0; k < p.k; ++k) total += a[i * p.k + k] * b[j * p.k + k];
        if (clamp) total = total < INT32_MIN ? Sum(INT32_MIN) : total > INT32_MAX ? Sum(INT32_MAX) : total;
        result.set(static_cast<Element>(total), to.index);
      }
    }
  }
}

[[noreturn]] void not_emulated(const Call& call) {
  fail(call.line, "the emulator does not know llvm.amdgcn.%s in waves of %d", call.name, wave());
}

Kind kind_of(const std::string& text, const Call& call) {
  static const std::map<std::string, Kind> kinds = {
      {"f32", Kind::f32}, {"xf32", Kind::xf32}, {"f16", Kind::f16}, {"bf16", Kind::bf16}, {"bf16.1k", Kind::bf16},
      {"i8", Kind::i8}, {"iu8", Kind::i8}, {"iu4", Kind::i4}};
  auto found = kinds.find(text);
  if (found == kinds.end()) not_emulated(call);
  return found->second;
}

// "mfma.f32.16x16x16f16", "mfma.i32.16x16x32.i8": an operand's elements are consecutive along k, the lanes go along the
// rows (columns of B) first, then along the blocks, then along k; sums are in groups of four rows.
Place mfma_input(const Product& p, int extent, int row, int k, int block, int elements) {
  return {row + extent * (block + p.blocks * (k / elements)), k % elements};
}
Place mfma_sum(const Product& p, int row, int column, int block) {
  if (p.m == 4) return {column + 4 * block, row};
  int groups = 64 / p.n;  // of lanes that hold the same column
  return {column + p.n * (row / 4 % groups), row % 4 + 4 * (row / 4 / groups) + p.m * p.n / 64 * block};
}

// "wmma.f32.16x16x16.f16.v8f32.v16f16" in waves of 32.  Of gfx11: both halves of a wave hold all of k, and every second
// row of sums each.  Of gfx12: each half has consecutive ones.
Place wmma_whole_input(const Product&, int, int row, int k, int, int) { return {row, k}; }
Place wmma_split_input(const Product&, int, int row, int k, int, int elements) {
  return {row + 16 * (k / elements), k % elements};
}
Place wmma_whole_sum(const Product&, int row, int column, int) { return {column + 16 * (row % 2), row / 2}; }
Place wmma_split_sum(const Product&, int row, int column, int) { return {column + 16 * (row / 8), row % 8}; }
// Halves of gfx11 take the lower or the upper parts of registers.
Place wmma_low_sum(const Product&, int row, int column, int) { return {column + 16 * (row % 2), row / 2 * 2}; }
Place wmma_high_sum(const Product&, int row, int column, int) { return {column + 16 * (row % 2), row / 2 * 2 + 1}; }

}  // namespace
}  // namespace emu

EMU_WAVE(mfma, "mfma") {
  using namespace emu;
  const Call& call = wave[wave.first()];
  char sum[4], type[16];
  Product p = {};
  p.operand_b = 1, p.operand_c = 2;
  if (sscanf(call.name, "mfma.%3[a-z0-9].%dx%dx%d%15s", sum, &p.m, &p.n, &p.k, type) != 5) not_emulated(call);
  p.a = p.b = kind_of(type[0] == '.' ? type + 1 : type, call);
  for (int i = 3; i < 6; ++i) {
    if (call.operands[i].as<int>()) fail(call.line, "llvm.amdgcn.%s with a broadcast is not emulated", call.name);
  }
  int elements = static_cast<int>(call.operands[0].bytes) * 8 / bits_of(p.a);
  p.blocks = elements * emu::wave() / (p.m * p.k);
  if (emu::wave() != 64 || p.m != p.n || p.blocks < 1) not_emulated(call);
  if (!strcmp(sum, "i32")) return multiply<int32_t>(wave, p, mfma_input, mfma_sum);
  multiply<float>(wave, p, mfma_input, mfma_sum);
}

EMU_WAVE(wmma, "wmma") {
  using namespace emu;
  const Call& call = wave[wave.first()];
  char sum[8], type[8];
  Product p = {16, 16, 0, 1, Kind::f32, Kind::f32, 0, 1, 2};
  if (sscanf(call.name, "wmma.%7[a-z0-9].16x16x%d.%7[a-z0-9]", sum, &p.k, type) != 3) not_emulated(call);
  p.a = p.b = kind_of(type, call);
  bool integers = !strcmp(sum, "i32"), clamp = false;
  if (integers) {  // each input behind its sign
    p.operand_a = 1, p.operand_b = 3, p.operand_c = 4;
    if (!call.operands[0].as<bool>()) p.a = p.a == Kind::i8 ? Kind::u8 : Kind::u4;
    if (!call.operands[2].as<bool>()) p.b = p.b == Kind::i8 ? Kind::u8 : Kind::u4;
    clamp = call.operands[5].as<bool>();
  }
  int elements = static_cast<int>(call.operands[p.operand_a].bytes) * 8 / bits_of(p.a);
  bool whole = elements == p.k;
  if (emu::wave() != 32 || (!whole && 2 * elements != p.k)) not_emulated(call);
  InputPlace input = whole ? wmma_whole_input : wmma_split_input;
  SumPlace place = whole ? wmma_whole_sum : wmma_split_sum;
  if (integers) {
    return clamp ? multiply<int64_t, int32_t>(wave, p, input, place, true) : multiply<int32_t>(wave, p, input, place);
  }
  if (!strcmp(sum, "f32")) return multiply<float>(wave, p, input, place);
  if (whole) place = call.operands[3].as<bool>() ? wmma_high_sum : wmma_low_sum;
  if (!strcmp(sum, "f16")) return multiply<float, __half>(wave, p, input, place);
  if (!strcmp(sum, "bf16")) return multiply<float, __nv_bfloat16>(wave, p, input, place);
  not_emulated(call);
}

// ---- Buffers ----

namespace emu {
namespace {

struct Resource {
  char* base;
  uint64_t records;
};

// Kernels ask by this offset for what is not in a buffer, and get zero (lowering/range_checks.py); LLVM asks for some
// elements of a vector, of so many bytes, alone.  Any other that is not there is a mistake.
constexpr uint32_t kOutOfRange = uint32_t{1} << 31, kVector = 16;

}  // namespace
}  // namespace emu

EMU_LANE(make_resource, "make.buffer.rsrc") {
  static std::map<std::pair<char*, uint64_t>, emu::Resource> resources;  // as many as the process sees buffers
  const emu::Value* o = call.operands;
  if (o[1].as<uint16_t>()) emu::fail(call.line, "a buffer with a stride is not emulated");
  std::pair<char*, uint64_t> key = {o[0].as<char*>(), o[2].bytes == 8 ? o[2].as<uint64_t>() : o[2].as<uint32_t>()};
  call.result.set(&resources.try_emplace(key, emu::Resource{key.first, key.second}).first->second);
}
EMU_LANE(load_buffer, "raw.ptr.buffer.load") {
  const emu::Resource& buffer = *call.operands[0].as<const emu::Resource*>();
  uint64_t offset = call.operands[1].as<uint32_t>();
  bool is_out = offset - emu::kOutOfRange <= emu::kVector - call.result.bytes;
  if (is_out && offset >= buffer.records) return call.result.zero();
  offset += call.operands[2].as<uint32_t>();
  if (offset + call.result.bytes > buffer.records) {
    emu::fail(call.line, "a load past the end of a device buffer of %llu bytes",
              static_cast<unsigned long long>(buffer.records));
  }
  memcpy(call.result.data, buffer.base + offset, call.result.bytes);
}
