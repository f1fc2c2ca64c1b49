"""Where matrix instructions keep their operands: for each element of a small matrix, the lane and the register slot.

A fragment buffer has scope "local" and ends in the axes (lane, slot).  A lane only touches its own slots, so that the
lane axis vanishes when the program is lowered (`lowering.annotated`); as serial loops it holds them all.  An atom may
have k in another order than its vendor, the same for both operands: the sum is over all of it.
Sources: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "m16n8k32"; AMD's ISA guides of CDNA 1 to 4, "MFMA", and of
RDNA 3 and 4, "WMMA"; "AMD Matrix Instruction Calculator".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from schedules.core.arch import Arch
from schedules.core.errors import ConfigError
from schedules.core.problem import numpy_dtype
from schedules.steps.tiles import widest

Place = tuple[Any, Any]  # lane, slot


@dataclass(frozen=True)
class Atom:
    """One matrix product  c (m, n) += a (m, k) x b (n, k)  by the lanes of a wave.

    `source` and `sum` are dtypes; `word` is how many elements with neighbouring k a lane keeps together.  On AMD, where
    that is what LDS hands a lane at once, 16 bytes or, if `doubled`, more, the product is `parts` times `instruction`,
    LLVM's name for it or a function of `lowering/amdgpu.ll`, each of an equal part of a lane's slots, taken as
    `packed`; a lane holds `run` neighbouring rows of c at a time; and if `doubled`, both halves of the wave hold both
    operands.  Of float32 with `tf32` it takes no more than TF32's 10 bits of mantissa.
    """

    m: int
    n: int
    k: int
    source: str
    sum: str
    wave: int
    word: int
    instruction: str = ""
    packed: str = ""
    parts: int = 1
    run: int = 4
    doubled: bool = False
    tf32: bool = False

    @property
    def name(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}_{self.source}"

    @property
    def least_k(self) -> int:
        """Of a tile in shared memory: rows of 64 bytes."""
        return max(self.k, 64 // numpy_dtype(self.source).itemsize)

    @property
    def ldmatrix(self) -> bool:
        """Whether fragments are NVIDIA's, which `ldmatrix` loads."""
        return not self.instruction

    @property
    def holders(self) -> int:
        """Lanes that hold an operand."""
        return self.wave // 2 if self.doubled else self.wave

    @property
    def slots(self) -> tuple[int, int, int]:
        """Slots of a lane for a, b and c."""
        return self.m * self.k // self.holders, self.n * self.k // self.holders, self.m * self.n // self.wave

    def a(self, i: Any, k: Any) -> Place:
        """Place of a[i, k]."""
        if not self.ldmatrix:
            return i + k // self.word * self.m, k % self.word
        half = 4 * self.word
        return i % 8 * 4 + k % half // self.word, k // half * (2 * self.word) + i // 8 * self.word + k % self.word

    def b(self, j: Any, k: Any) -> Place:
        """Place of b[j, k]."""
        if not self.ldmatrix:
            return j + k // self.word * self.n, k % self.word
        half = 4 * self.word
        return j * 4 + k % half // self.word, k // half * self.word + k % self.word

    def c(self, i: Any, j: Any) -> Place:
        """Place of c[i, j]."""
        if not self.ldmatrix:
            rows = self.run * self.row_lanes
            return j + i // self.run % self.row_lanes * self.n, i // rows * self.run + i % self.run
        return i % 8 * 4 + j // 2, i // 8 * 2 + j % 2

    @property
    def row_lanes(self) -> int:
        """Lanes that share a column of c, on AMD."""
        return self.wave // self.n


MMA = {
    "float16": Atom(16, 8, 16, "float16", "float32", 32, 2),
    "bfloat16": Atom(16, 8, 16, "bfloat16", "float32", 32, 2),
    "int8": Atom(16, 8, 32, "int8", "int32", 32, 4),
}


def _mfma(source: str, instruction: str, packed: str = "", parts: int = 1) -> Atom:
    total, of = ("int32", "i32") if source == "int8" else ("float32", "f32")
    name = instruction if instruction.startswith("schedules") else f"llvm.amdgcn.mfma.{of}.16x16x{instruction}"
    word = widest(source)
    return Atom(16, 16, 4 * word, source, total, 64, word, name, packed, parts)


def _wmma(source: str, operand: str, packed: str, *, doubled: bool) -> Atom:
    total, of = ("int32", "i32") if source == "int8" else ("float32", "f32")
    name = f"llvm.amdgcn.wmma.{of}.16x16x16.{operand}"
    if doubled:
        return Atom(16, 16, 16, source, total, 32, 16, name, packed, run=1, doubled=True)
    word = widest(source)
    return Atom(16, 16, 2 * word, source, total, 32, word, name, packed, word // 8, run=8)


# of AMD: the feature that has it, the widest first
MATRIX = (
    ("mfma_f16_k32", _mfma("float16", "32.f16")),
    ("mfma", _mfma("float16", "16f16", parts=2)),
    ("mfma_f16_k32", _mfma("bfloat16", "schedules_mfma_16x16x32_bf16", "int16x8")),
    ("mfma_bf16_k16", _mfma("bfloat16", "16bf16.1k", "int16x4", parts=2)),
    ("mfma_bf16_k8", _mfma("bfloat16", "8bf16", "int16x2", parts=4)),
    ("mfma", _mfma("float32", "4f32", parts=4)),
    ("mfma_xf32", replace(_mfma("float32", "8.xf32", parts=2), tf32=True)),
    ("mfma_i8_k64", _mfma("int8", "64.i8", "int32x4")),
    ("mfma_i8_k32", _mfma("int8", "32.i8", "int64", parts=2)),
    ("mfma_i8_k16", _mfma("int8", "16i8", "int32", parts=4)),
    ("wmma_doubled", _wmma("float16", "f16", "", doubled=True)),
    ("wmma_doubled", _wmma("bfloat16", "bf16", "int16x16", doubled=True)),
    ("wmma_doubled", _wmma("int8", "iu8", "int32x4", doubled=True)),
    ("wmma_split", _wmma("float16", "f16", "", doubled=False)),
    ("wmma_split", _wmma("bfloat16", "bf16", "int16x8", doubled=False)),
    ("wmma_split", _wmma("int8", "iu8", "int32x2", doubled=False)),
)


def _atom(dtype: str, arch: Arch, tf32: bool) -> Atom | None:
    if arch.kind == "cuda":
        return None if tf32 or (dtype == "bfloat16" and "bf16" not in arch.features) else MMA.get(dtype)
    return next((a for has, a in MATRIX if has in arch.features and (a.source, a.tf32) == (dtype, tf32)), None)


def why_no_atom(dtype: str, arch: Arch, tf32: bool = False) -> str | None:
    """Why `arch` has no matrix instruction for operands of `dtype`, or for such rounded to TF32; None if it has one."""
    if _atom(dtype, arch, tf32):
        return None
    if tf32 and dtype != "float32":
        return f"dtype={dtype} is not float32, which alone is rounded to TF32; choose another --schedule"
    if tf32:
        return f"{arch} has no matrix instruction that takes float32 as TF32 here; choose another --schedule"
    if arch.kind == "cuda" and dtype == "bfloat16":
        return f"dtype=bfloat16 needs sm_80 or newer tensor cores, not {arch}"
    return f"{arch} has no matrix instruction for dtype={dtype} here"


def atom_for(dtype: str, arch: Arch, tf32: bool = False) -> Atom:
    """The matrix product that `arch` has for operands of `dtype`, or for such rounded to TF32.  Raises ConfigError if
    there is none.

    sm_75 takes the same fragments as its successors: its smaller instructions are halves and quarters of theirs.
    """
    atom = _atom(dtype, arch, tf32)
    if atom is None:
        raise ConfigError(why_no_atom(dtype, arch, tf32) or "")
    return atom
