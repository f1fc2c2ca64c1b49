"""tcgen05 as functions of CUDA C++: TVM's table names lanes to leave out for each product, and has no loads that are
waited for in the statement that issues them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.blackwell.config import LANES
from schedules.hopper.geometry import Work
from schedules.hopper.shared import SharedTile
from schedules.tirx.types import Expr, Pointer

# of an instruction descriptor (PTX ISA, "Instruction descriptor"): the type of sums, and that of both operands
_FORMATS = {"float16": (1, 0), "bfloat16": (1, 1), "int8": (2, 1)}
EIGHT = 8  # columns of sums in a unit of tcgen05.ld.16x256b, of which a thread has four registers
HALF = 16  # lanes that it reads
_MMA = """
__device__ __forceinline__ void blackwell_mma_{name}(
    unsigned int sums, unsigned long long a, unsigned long long b, unsigned int shape, int add) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %4, 0;\\n"
    "tcgen05.mma.cta_group::{group}.kind::{kind} [%0], %1, %2, %3, p;\\n}}\\n"
    :: "r"(sums), "l"(a), "l"(b), "r"(shape), "r"(add) : "memory");
}}
"""


@dataclass(frozen=True)
class Multiply:
    """The tcgen05.mma of LANES rows of each of `cta_group` blocks by `n` columns, of `dtype`, both operands K-major in
    shared memory."""

    dtype: str
    n: int
    cta_group: int

    @classmethod
    def of(cls, work: Work) -> Multiply:
        """That of `work`."""
        config = work.config
        return cls(work.dtype, config.block_n, config.cta_group)

    @property
    def accumulator(self) -> str:
        return "int32" if self.dtype == "int8" else "float32"

    @property
    def descriptor(self) -> int:
        """Of the instruction."""
        total, operand = _FORMATS[self.dtype]
        m = LANES * self.cta_group
        return total << 4 | operand << 7 | operand << 10 | self.n // 8 << 17 | m // 16 << 24

    def emit(self, sums: Expr, a: Expr, b: Expr, add: Expr) -> None:
        """The sums from column `sums` of tensor memory on (+)= a x b, by descriptors; they begin anew where `add` is
        false."""
        kind = "i8" if self.dtype == "int8" else "f16"
        name = f"{kind}_{self.cta_group}"
        source = _MMA.format(name=name, group=self.cta_group, kind=kind)
        shape = T.uint32(self.descriptor)
        call = f"blackwell_mma_{name}", sums, a, b, shape, T.Cast("int32", add)
        T.evaluate(T.cuda.func_call(*call, source_code=source))


def descriptor(name: str, tile: SharedTile, pointer: Pointer) -> Expr:
    """The shared memory descriptor of the tile that `pointer` points to."""
    cell = T.alloc_local((1,), "uint64")
    IRBuilder.name(name, cell)
    T.evaluate(T.cuda.tcgen05.encode_matrix_descriptor(T.address_of(cell[0]), pointer, *tile.descriptor))
    return cell[0]


def read_sums(targets: Sequence[Expr], at: Expr, dtype: str) -> None:
    """Bring sums of `dtype` from `at` in tensor memory on, where the warp's first lane is, to a thread's registers: of
    each of its lanes' halves and of each EIGHT columns four, as the fragments of ``mma.sync`` have them.

    They are waited for in the same statement: no compiler can then read them too early.
    """
    count = len(targets)
    columns = count * EIGHT // (4 * (32 // HALF))
    kind, letter = ("int", "r") if dtype == "int32" else ("float", "f")
    name = f"blackwell_sums_{kind}_{columns}"
    lines = []
    for half in range(32 // HALF):
        first = 0
        while first < columns:  # units of a load are a power of two
            units = 1 << ((columns - first) // EIGHT).bit_length() - 1
            begin = (half * columns + first) * 4 // EIGHT
            registers = ", ".join(f"%{begin + i}" for i in range(4 * units))
            place = f"%{count} + {(half * HALF << 16) + first}"
            lines.append(f'    "tcgen05.ld.sync.aligned.16x256b.x{units}.b32 {{{registers}}}, [{place}];\\n"')
            first += units * EIGHT
    source = f"""
__device__ __forceinline__ void {name}({", ".join(f"{kind}& d{i}" for i in range(count))}, unsigned int at) {{
  asm volatile(
{chr(10).join(lines)}
    "tcgen05.wait::ld.sync.aligned;\\n"
    : {", ".join(f'"={letter}"(d{i})' for i in range(count))} : "r"(at) : "memory");
}}
"""
    T.evaluate(T.cuda.func_call(name, *targets, at, source_code=source))
