"""Where matrix instructions keep their operands: for each element of a small matrix, the lane and the register slot.

A fragment buffer has scope "local" and ends in the axes (lane, slot).  A lane only touches its own slots, so that the
lane axis vanishes when the program is lowered (`lowering.annotated`); as serial loops it holds them all.
Sources: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "m16n8k32"; AMD's CDNA2 and CDNA3 ISA guides, "MFMA".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schedules.core.arch import Arch
from schedules.core.errors import ConfigError

Place = tuple[Any, Any]  # lane, slot


@dataclass(frozen=True)
class Atom:
    """One matrix product  c (m, n) += a (m, k) x b (n, k)  by the lanes of a wave.

    `source` and `sum` are dtypes; `word` is how many elements with neighbouring k a lane keeps together.
    """

    m: int
    n: int
    k: int
    source: str
    sum: str
    wave: int
    word: int

    @property
    def name(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}_{self.source}"

    @property
    def slots(self) -> tuple[int, int, int]:
        """Slots of a lane for a, b and c."""
        return self.m * self.k // self.wave, self.n * self.k // self.wave, self.m * self.n // self.wave

    def a(self, i: Any, k: Any) -> Place:
        """Place of a[i, k]."""
        if self.wave == 64:
            return i + k // self.word * 16, k % self.word
        half = 4 * self.word
        return i % 8 * 4 + k % half // self.word, k // half * (2 * self.word) + i // 8 * self.word + k % self.word

    def b(self, j: Any, k: Any) -> Place:
        """Place of b[j, k]."""
        if self.wave == 64:
            return j + k // self.word * 16, k % self.word
        half = 4 * self.word
        return j * 4 + k % half // self.word, k // half * self.word + k % self.word

    def c(self, i: Any, j: Any) -> Place:
        """Place of c[i, j]."""
        if self.wave == 64:
            return j + i // 4 * 16, i % 4
        return i % 8 * 4 + j // 2, i // 8 * 2 + j % 2


MMA = {
    "float16": Atom(16, 8, 16, "float16", "float32", 32, 2),
    "bfloat16": Atom(16, 8, 16, "bfloat16", "float32", 32, 2),
    "int8": Atom(16, 8, 32, "int8", "int32", 32, 4),
}
MFMA = {
    "float16": Atom(16, 16, 16, "float16", "float32", 64, 4),
    # not bfloat16: TVM's legalisation widens it to float32 before the instruction can take it
    "int8": Atom(16, 16, 16, "int8", "int32", 64, 4),
}
MFMA_INT8_K32 = Atom(16, 16, 32, "int8", "int32", 64, 8)


def why_no_atom(dtype: str, arch: Arch) -> str | None:
    """Why `arch` has no matrix instruction for operands of `dtype`; None if it has one."""
    if arch.kind == "cuda" and dtype in MMA:
        if dtype == "bfloat16" and "bf16" not in arch.features:
            return f"dtype=bfloat16 needs sm_80 or newer tensor cores, not {arch}"
        return None
    if "mfma" in arch.features and dtype in MFMA:
        # TVM 0.27 widens bfloat16 buffers to float32 for AMD, fragments included; LLVM refuses such operands
        return f"dtype=bfloat16 fragments do not build for {arch}" if dtype == "bfloat16" else None
    return f"{arch} has no matrix instruction for dtype={dtype} here"


def atom_for(dtype: str, arch: Arch) -> Atom:
    """The matrix product that `arch` has for operands of `dtype`.  Raises ConfigError if there is none.

    sm_75 takes the same fragments as its successors: its smaller instructions are halves and quarters of theirs.
    """
    reason = why_no_atom(dtype, arch)
    if reason:
        raise ConfigError(reason)
    if arch.kind == "cuda":
        return MMA[dtype]
    return MFMA_INT8_K32 if dtype == "int8" and "mfma_i8_k32" in arch.features else MFMA[dtype]
