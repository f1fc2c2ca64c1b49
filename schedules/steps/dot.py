"""A few int8 products summed into an int32: `dp4a` on NVIDIA, `v_dot4` on AMD; on CPUs `vpdpbusd` or `pmaddwd`, which
make a vector of such sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from schedules.core.arch import Arch
from schedules.core.tvm import PrimExpr, PrimFunc, T
from schedules.lowering.annotations import PREFIX
from schedules.steps.intrinsics import Intrinsic, register_once

PACK = 4


@lru_cache
def dot4(arch: Arch) -> Intrinsic:
    """c += a[0] * b[0] + .. + a[3] * b[3], all in registers of scope "local"."""
    from tvm.s_tir import TensorIntrin

    made = Intrinsic(f"{PREFIX}dot4_{arch.name}", _description(), _implementation(arch))
    TensorIntrin.register(made.name, made.description, made.implementation)
    return made


def _description() -> PrimFunc:
    @T.prim_func(s_tir=True)
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (PACK,), "int8", offset_factor=1, align=4, scope="local")
        B = T.match_buffer(b, (PACK,), "int8", offset_factor=1, align=4, scope="local")
        C = T.match_buffer(c, (1,), "int32", offset_factor=1, align=4, scope="local")
        with T.sblock("root"):
            T.reads(C[0:1], A[0:PACK], B[0:PACK])
            T.writes(C[0:1])
            for k in range(PACK):
                with T.sblock("update"):
                    vk = T.axis.remap("R", [k])
                    C[0] = C[0] + T.Cast("int32", A[vk]) * T.Cast("int32", B[vk])

    return description


def _implementation(arch: Arch) -> PrimFunc:
    def dot(a: Any, b: Any, c: Any) -> Any:
        if arch.kind == "cuda":
            return T.call_pure_extern("int32", "__dp4a", a, b, c)
        a, b = T.reinterpret("int32", a), T.reinterpret("int32", b)
        if "sudot4" in arch.features:  # the two flags say that a and b are signed
            signed = T.bool(True)
            return T.call_llvm_pure_intrin("int32", "llvm.amdgcn.sudot4", signed, a, signed, b, c, T.bool(False))
        return T.call_llvm_pure_intrin("int32", "llvm.amdgcn.sdot4", a, b, c, T.bool(False))

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (PACK,), "int8", offset_factor=1, align=4, scope="local")
        B = T.match_buffer(b, (PACK,), "int8", offset_factor=1, align=4, scope="local")
        C = T.match_buffer(c, (1,), "int32", offset_factor=1, align=4, scope="local")
        with T.sblock("root"):
            T.reads(C[0:1], A[0:PACK], B[0:PACK])
            T.writes(C[0:1])
            C[0] = dot(A[T.ramp(0, 1, PACK)], B[T.ramp(0, 1, PACK)], C[0])

    return implementation


def dot_taps(step: int) -> Intrinsic:
    """c[i] += a[0, i] * b[i, 0] + a[step, i] * b[i, 1] + .. for four channels i and four pixels `step` apart, by `dp4a`
    of words that have a channel's pixels.  The compiler makes each word, and the pairs that it is made of, once."""
    reach = (PACK - 1) * step + 1

    def permuted(a: Any, b: Any, order: int) -> Any:
        return T.call_pure_extern("uint32", "__byte_perm", a, b, T.uint32(order))

    def summed(a: Any, b: Any, c: Any, channel: int) -> Any:
        first, second, third, fourth = (T.reinterpret("uint32", a[i * step, T.ramp(0, 1, PACK)]) for i in range(PACK))
        pair = 0x7362 if channel >= 2 else 0x5140  # two channels' bytes of two pixels
        halves = permuted(first, second, pair), permuted(third, fourth, pair)
        word = T.reinterpret("int32", permuted(*halves, 0x7632 if channel % 2 else 0x5410))
        return T.call_pure_extern("int32", "__dp4a", word, b[channel, T.ramp(0, 1, PACK)], c[channel])

    def make() -> tuple[PrimFunc, PrimFunc]:
        @T.prim_func(s_tir=True)
        def description(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.match_buffer(a, (reach, PACK), "int8", offset_factor=1, align=4, scope="local")
            B = T.match_buffer(b, (PACK, PACK), "int8", offset_factor=1, align=4, scope="local")
            C = T.match_buffer(c, (PACK,), "int32", offset_factor=1, align=4, scope="local")
            with T.sblock("root"):
                T.reads(C[0:PACK], A[0:reach, 0:PACK], B[0:PACK, 0:PACK])
                T.writes(C[0:PACK])
                for i, k in T.grid(PACK, PACK):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        C[vi] = C[vi] + T.Cast("int32", A[vk * step, vi]) * T.Cast("int32", B[vi, vk])

        @T.prim_func(s_tir=True)
        def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
            a0, b0 = T.int32(), T.int32()
            A = T.match_buffer(a, (reach, PACK), "int8", offset_factor=1, align=4, scope="local", strides=[a0, 1])
            B = T.match_buffer(b, (PACK, PACK), "int8", offset_factor=1, align=4, scope="local", strides=[b0, 1])
            C = T.match_buffer(c, (PACK,), "int32", offset_factor=1, align=4, scope="local")
            with T.sblock("root"):
                T.reads(C[0:PACK], A[0:reach, 0:PACK], B[0:PACK, 0:PACK])
                T.writes(C[0:PACK])
                C[0] = summed(A, B, C, 0)
                C[1] = summed(A, B, C, 1)
                C[2] = summed(A, B, C, 2)
                C[3] = summed(A, B, C, 3)

        return description, implementation

    return register_once(f"{PREFIX}dot_taps_{step}", make)


@dataclass(frozen=True)
class VectorDot:
    """An instruction of a CPU: `lanes` int32 sums, each of `pack` products, of `data` that all lanes share and of
    `filter`; the data are int8 numbers plus `shift`.  Without lanes there is none, and any loop does."""

    name: str = ""
    lanes: int = 0
    pack: int = 1
    data: str = "int8"
    filter: str = "int8"
    shift: int = 0
    llvm: str = ""

    def shifted(self, value: PrimExpr) -> PrimExpr:
        """An int8 number as `data`."""
        if not self.shift:
            return value.astype(self.data)
        return (value.astype("int32") + self.shift).astype(self.data)

    @cached_property
    def intrinsic(self) -> Intrinsic:
        """c[i] += a[0] * b[i * pack] + .. for each lane i."""
        return register_once(f"{PREFIX}{self.name}_{self.lanes}", self._made)

    def _made(self) -> tuple[PrimFunc, PrimFunc]:
        pack, lanes, data, filters = self.pack, self.lanes, self.data, self.filter
        count = pack * lanes

        @T.prim_func(s_tir=True)
        def description(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.match_buffer(a, (pack,), data, offset_factor=1, scope="local")
            B = T.match_buffer(b, (count,), filters, offset_factor=1)
            C = T.match_buffer(c, (lanes,), "int32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(C[0:lanes], A[0:pack], B[0:count])
                T.writes(C[0:lanes])
                for i, k in T.grid(lanes, pack):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        C[vi] = C[vi] + T.Cast("int32", A[vk]) * T.Cast("int32", B[vi * pack + vk])

        def dot(c: Any, a: Any, b: Any) -> Any:
            same = T.reinterpret(f"{filters}x{count}", T.Broadcast(T.reinterpret("int32", a), lanes))
            summed = (c,) if self.shift else ()  # as vpdpbusd does
            products = T.call_llvm_pure_intrin(f"int32x{lanes}", self.llvm, *summed, same, b)
            return products if summed else c + products

        @T.prim_func(s_tir=True)
        def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.match_buffer(a, (pack,), data, offset_factor=1, scope="local")
            B = T.match_buffer(b, (count,), filters, offset_factor=1)
            C = T.match_buffer(c, (lanes,), "int32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(C[0:lanes], A[0:pack], B[0:count])
                T.writes(C[0:lanes])
                C[T.ramp(0, 1, lanes)] = dot(C[T.ramp(0, 1, lanes)], A[T.ramp(0, 1, pack)], B[T.ramp(0, 1, count)])

        return description, implementation


@lru_cache
def vector_dot(arch: Arch) -> VectorDot:
    """The widest that the CPU has."""
    from tvm.target import codegen

    target = arch.target()

    def has(feature: str) -> bool:
        return bool(codegen.target_has_features(feature, target))

    def bytes_4(lanes: int) -> VectorDot:
        return VectorDot("vpdpbusd", lanes, 4, "uint8", "int8", 128, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}")

    def words_2(lanes: int, name: str) -> VectorDot:
        return VectorDot("pmaddwd", lanes, 2, "int16", "int16", llvm=f"llvm.x86.{name}")

    for feature, dot in (
        ("avx512vnni", bytes_4(16)),
        ("avxvnni", bytes_4(8)),
        ("avx512bw", words_2(16, "avx512.pmaddw.d.512")),
        ("avx2", words_2(8, "avx2.pmadd.wd")),
        ("sse2", words_2(4, "sse2.pmadd.wd")),
    ):
        if has(feature):
            return dot
    return VectorDot()
