"""wgmma as functions of CUDA C++: TVM's own table has not every shape, and passes what it has by other rules.

D fragment of a consumer: register 4 * g + 2 * half + j of lane l in warp w is the sum of row 16 * w + 8 * half + l // 4
and column 8 * g + l % 4 * 2 + j (PTX ISA, "Register Fragments for wgmma.mma_async").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script import tirx as T

from schedules.core.problem import numpy_dtype
from schedules.hopper.config import K_BYTES, ROWS, WARPGROUP
from schedules.tirx.types import Expr, Index

_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32", "int8": "s8"}
FRAGMENT = 4  # 32-bit registers of a thread that hold operand a for one wgmma


@dataclass(frozen=True)
class Multiply:
    """The wgmma of ROWS x `n` sums for operands of `dtype` in shared memory; transposed operands are MN-major, which
    only those of 16 bits may be.  Or for operand a in registers, if `from_registers`.

    Of float32 the tensor cores take the upper 19 bits, TF32.
    """

    dtype: str
    n: int
    transposed_a: bool
    transposed_b: bool
    from_registers: bool = False

    @property
    def registers(self) -> int:
        """Accumulators of a thread."""
        return ROWS * self.n // WARPGROUP

    @property
    def accumulator(self) -> str:
        return "int32" if self.dtype == "int8" else "float32"

    @property
    def instruction(self) -> str:
        k = K_BYTES // numpy_dtype(self.dtype).itemsize
        source = _TYPES[self.dtype]
        total = "s32" if self.dtype == "int8" else "f32"
        return f"wgmma.mma_async.sync.aligned.m{ROWS}n{self.n}k{k}.{total}.{source}.{source}"

    @property
    def name(self) -> str:
        return f"hopper_wgmma_m{ROWS}n{self.n}_{_TYPES[self.dtype]}{'_registers' if self.from_registers else ''}"

    def source(self) -> str:
        count, constraint = self.registers, "r" if self.dtype == "int8" else "f"
        kind = "int" if self.dtype == "int8" else "float"
        parameters = ", ".join(f"{kind}& d{i}" for i in range(count))
        sums = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+{constraint}"(d{i})' for i in range(count))
        # signs of both operands, then whether each is MN-major
        transposed = [self.transposed_b] if self.from_registers else [self.transposed_a, self.transposed_b]
        flags = [] if self.dtype == "int8" else [1, 1]
        if numpy_dtype(self.dtype).itemsize == 2:
            flags += [int(flag) for flag in transposed]
        names = [f"a{i}" for i in range(FRAGMENT)] if self.from_registers else ["a"]
        a_kind, a_constraint = ("unsigned int&", "r") if self.from_registers else ("unsigned long long", "l")
        places = [f"%{count + i}" for i in range(len(names))]
        b = count + len(names)
        return f"""
__device__ __forceinline__ void {self.name}({parameters},
    {", ".join(f"{a_kind} {name}" for name in names)}, unsigned long long b, int add) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"
    "{self.instruction} {{{sums}}}, {f"{{{', '.join(places)}}}" if self.from_registers else places[0]}, %{b}, p{
            "".join(f", {flag}" for flag in flags)
        };\\n}}\\n"
    : {outputs} : {", ".join(f'"{a_constraint}"({name})' for name in names)}, "l"(b), "r"(add));
}}
"""

    def emit(self, sums: Sequence[Expr], a: Sequence[Expr], b: Expr, add: Expr) -> None:
        """sums (+)= a x b; `a` is a descriptor or FRAGMENT registers, `b` a descriptor, sums begin anew where `add` is
        false."""
        T.evaluate(T.cuda.func_call(self.name, *sums, *a, b, T.Cast("int32", add), source_code=self.source()))

    def settle(self, sums: Sequence[Expr]) -> None:
        """Keep the compiler from moving reads of `sums` above the wait for wgmma before it."""
        kind, constraint = ("int", "r") if self.dtype == "int8" else ("float", "f")
        source = (
            f"__device__ __forceinline__ void hopper_settle({kind}& sum) "
            f'{{ asm volatile("" : "+{constraint}"(sum) :: "memory"); }}\n'
        )
        for value in sums:
            T.evaluate(T.cuda.func_call("hopper_settle", value, source_code=source))


def row_mask(cluster_n: int, first: Index) -> Expr | None:
    """The blocks that share operand a, a row of the cluster from rank `first`, as bits; None if it is but one."""
    return None if cluster_n == 1 else _mask((1 << cluster_n) - 1, first)


def column_mask(cluster_m: int, cluster_n: int, first: Index) -> Expr | None:
    """The blocks that share operand b, a column of the cluster from rank `first`."""
    return None if cluster_m == 1 else _mask(sum(1 << (row * cluster_n) for row in range(cluster_m)), first)


def _mask(bits: int, first: Index) -> Expr:
    if isinstance(first, int):
        return T.uint16(bits << first)
    return T.Cast("uint16", T.shift_left(T.int32(bits), first))


def peer_of(index: Expr, rank_m: Index, rank_n: Index, cluster_m: int, cluster_n: int) -> Expr:
    """The rank of block number `index` of those in the row, then in the column, of (rank_m, rank_n)."""
    if cluster_m == 1 or cluster_n == 1:
        return index
    row = index - cluster_n
    row = T.Select(row < rank_m, row, row + 1)
    return T.Select(index < cluster_n, rank_m * cluster_n + index, row * cluster_n + rank_n)
