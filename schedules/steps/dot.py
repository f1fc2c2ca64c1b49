"""Four int8 products summed into an int32: `dp4a` on NVIDIA, `v_dot4` on AMD."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from schedules.core.arch import Arch
from schedules.lowering.annotations import PREFIX
from schedules.steps.intrinsics import Intrinsic

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

PACK = 4


@lru_cache
def dot4(arch: Arch) -> Intrinsic:
    """c += a[0] * b[0] + .. + a[3] * b[3], all in registers of scope "local"."""
    from tvm.s_tir import TensorIntrin

    made = Intrinsic(f"{PREFIX}dot4_{arch.name}", _description(), _implementation(arch))
    TensorIntrin.register(made.name, made.description, made.implementation)
    return made


def _description() -> PrimFunc:
    from tvm.script import tirx as T

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
    from tvm.script import tirx as T

    def dot(a: Any, b: Any, c: Any) -> Any:
        if arch.kind == "cuda":
            return T.call_pure_extern("int32", "__dp4a", a, b, c)
        a, b = T.reinterpret("int32", a), T.reinterpret("int32", b)
        if arch.name.startswith("gfx11"):  # the two flags say that a and b are signed
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
