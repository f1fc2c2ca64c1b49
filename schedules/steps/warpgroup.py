"""wgmma within the schedule language: four warps multiply tiles that lie in shared memory, without fragments of them.

The sums of a warp, 16 rows of the 64 that a warpgroup multiplies, lie as those of mma.sync do, so that the schedule of
a product (`schedules.steps.tensor_core`) stays what it is: the intrinsic stands for a warp's rows, and gives the
instruction those of its warpgroup.  The swizzle of shared memory is wgmma's own for rows of 32, 64 or 128 bytes.
Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.problem import Config, numpy_dtype
from schedules.lowering.annotations import PREFIX
from schedules.steps.fragments import MMA, Atom
from schedules.steps.intrinsics import Intrinsic, register_once
from schedules.steps.launch import MinBlocks

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

K = 16  # of the reduction in one wgmma of two-byte operands
SWIZZLES = {32: 3, 64: 2, 128: 1}  # bytes of a row to the layout type in a matrix descriptor
DTYPES = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class WarpgroupConfig(MinBlocks, Config):
    tf32: ClassVar[bool] = False

    block_m: int = 128  # output tile of a block; each warp has 16 of its rows
    block_n: int = 256
    block_k: int = 64  # of the reduction in shared memory at a time
    stages: int = 4  # tiles of the reduction in shared memory at once
    min_blocks: int = 1  # blocks a multiprocessor should hold, for the compiler's register budget; 0 leaves it open

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.block_m, self.block_n, self.block_k

    @property
    def warps_m(self) -> int:
        return self.block_m // 16

    @property
    def warps_n(self) -> int:
        return 1

    @property
    def warps(self) -> int:
        return self.warps_m

    def shared_bytes(self, dtype: str) -> int:
        """Shared memory of a block; the output's tile reuses the operands'."""
        item = numpy_dtype(dtype).itemsize
        operands = self.stages * (self.block_m + self.block_n) * self.block_k * item
        return max(operands, self.block_m * self.block_n * item)

    @classmethod
    def unfit(cls, problem: Any, arch: Arch) -> str | None:
        if problem.dtype not in DTYPES:
            return f"dtype={problem.dtype} is not {' or '.join(DTYPES)}"
        return None if "wgmma" in arch.features else f"{arch} has no wgmma; choose another --schedule"

    def check(self, problem: Any, arch: Arch) -> str | None:
        dtype, reason = problem.dtype, self.unfit(problem, arch)
        if reason:
            return reason
        for field in fields(self):
            value, least = getattr(self, field.name), {"min_blocks": 0, "stages": 2}.get(field.name, 1)
            if value < least:
                return f"{field.name}={value} must be at least {least}"
        if self.block_m % 64:
            return f"block_m={self.block_m} is not a multiple of 64, the rows of a warpgroup"
        if self.block_n % 16 or self.block_n > 256:
            return f"block_n={self.block_n} is not a multiple of 16 up to 256"
        if self.block_k not in (16, 32, 64):
            return f"block_k={self.block_k} is not 16, 32 or 64"
        threads = self.warps * 32
        if threads * max(1, self.min_blocks) > arch.threads_sm or threads > arch.max_threads:
            return f"block_m={self.block_m} and min_blocks={self.min_blocks} are {threads} threads a block, too many"
        shared = self.shared_bytes(dtype)
        if shared > arch.shared_block:
            return f"stages={self.stages} needs {shared} bytes of shared memory, {arch} has {arch.shared_block}"
        registers = self.block_n // 2 + 48
        most = min(arch.registers_thread, arch.registers_sm // (threads * max(1, self.min_blocks)) // 8 * 8)
        if registers > most:
            return f"block_n={self.block_n} needs about {registers} registers a thread, {most} are left to it"
        return None

    def atom(self, dtype: str, arch: Arch) -> Atom:
        """The product whose fragment of sums a warp's are made of."""
        return MMA[dtype]


def multiply_shared(dtype: str, n: int, k: int, scope: str) -> Intrinsic:
    """c (16, n) += a (16, k) x b (n, k), `a` and `b` swizzled rows of shared memory, c the fragments of n / 8 products;
    the four warps of a warpgroup together.  It is under way afterwards: `async_copy.settle` waits for it."""
    name = f"{PREFIX}wgmma_n{n}k{k}_{DTYPES[dtype]}_{scope}"
    return register_once(name, lambda: (_describe(dtype, n, k, scope), _implement(dtype, n, k, scope)))


def _source(dtype: str, n: int, k: int) -> tuple[str, str]:
    """Name and text of the CUDA function ``(sums, a, b)``: this warp's sums, its rows of a, all of b."""
    kind, row, count = DTYPES[dtype], k * 2, n // 2
    name = f"wgmma_n{n}k{k}_{kind}"
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    high = f"(unsigned long long){SWIZZLES[row]} << 62 | (unsigned long long){8 * row // 16} << 32 | 1ull << 16"
    return name, (
        f"__device__ __forceinline__ void {name}(float* c, const void* a_rows, const void* b_rows) {{\n"
        f"  unsigned a_at = (unsigned)__cvta_generic_to_shared(a_rows) - (threadIdx.y & 3) * {16 * row};\n"
        "  unsigned b_at = (unsigned)__cvta_generic_to_shared(b_rows);\n"
        f"  unsigned long long a = {high} | (a_at & 0x3ffff) >> 4, b = {high} | (b_at & 0x3ffff) >> 4;\n"
        '  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");\n'
        f"  #pragma unroll\n  for (int k = 0; k < {k // K}; ++k) {{\n"
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k{K}.f32.{kind}.{kind} '
        f'{{{sums}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;"\n'
        f'      : {outputs} : "l"(a + {K * 2 // 16} * k), "l"(b + {K * 2 // 16} * k));\n  }}\n'
        '  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");\n}\n'
    )


def _describe(dtype: str, n: int, k: int, scope: str) -> PrimFunc:
    from tvm.script import tirx as T

    atom = MMA[dtype]
    products, slots = n // atom.n, atom.slots[2]

    @T.prim_func(s_tir=True)
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (16, k), dtype, offset_factor=1, scope=scope)
        B = T.match_buffer(b, (n, k), dtype, offset_factor=1, scope=scope)
        C = T.match_buffer(c, (products, 32, slots), atom.sum, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:products, 0:32, 0:slots], A[0:16, 0:k], B[0:n, 0:k])
            T.writes(C[0:products, 0:32, 0:slots])
            for i, j, l in T.grid(16, n, k):  # noqa: E741 - the reduction
                with T.sblock("update"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                    lane, slot = T.meta_var(atom.c(vi, vj % atom.n))
                    T.reads(C[vj // atom.n, lane, slot], A[vi, vk], B[vj, vk])
                    T.writes(C[vj // atom.n, lane, slot])
                    C[vj // atom.n, lane, slot] = C[vj // atom.n, lane, slot] + T.Cast(atom.sum, A[vi, vk]) * T.Cast(
                        atom.sum, B[vj, vk]
                    )

    return description


def _implement(dtype: str, n: int, k: int, scope: str) -> PrimFunc:
    from tvm.script import tirx as T

    atom = MMA[dtype]
    products, slots = n // atom.n, atom.slots[2]
    function, source = _source(dtype, n, k)

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        a0, a1, b0, b1 = T.int32(), T.int32(), T.int32(), T.int32()
        A = T.match_buffer(a, (16, k), dtype, offset_factor=1, scope=scope, strides=[a0, a1])
        B = T.match_buffer(b, (n, k), dtype, offset_factor=1, scope=scope, strides=[b0, b1])
        C = T.match_buffer(c, (products, 32, slots), atom.sum, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:products, 0:32, 0:slots], A[0:16, 0:k], B[0:n, 0:k])
            T.writes(C[0:products, 0:32, 0:slots])
            for lane in T.thread_binding(0, 32, "threadIdx.x"):
                T.evaluate(
                    T.cuda.func_call(
                        function,
                        T.address_of(C[0, lane, 0]),
                        T.address_of(A[0, 0]),
                        T.address_of(B[0, 0]),
                        source_code=source,
                    )
                )

    return implementation
