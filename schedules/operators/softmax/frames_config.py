"""The config of `frames`, and what makes one illegal."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.problem import Config
from schedules.lowering.annotations import check_streaming
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import ACCESSES, KEPT_IN_REGISTERS, PACK, Frame, check_block, check_program, held
from schedules.operators.softmax.rows import itemsize

OTHERS = 24  # registers beside the packs, about
KEPT = (*KEPT_IN_REGISTERS, "widened")  # or as the compiler likes: in float32 where registers are left


@dataclass(frozen=True)
class FramesConfig(Config):
    threads: int = 32  # of a row, a power of two
    groups: int = 1  # thread groups of a block, side by side, of up to a warp each
    rows_per_group: int = 1  # rows that a group computes one after the other
    min_blocks: int = 0  # blocks a multiprocessor should hold (caps registers); 0 leaves it to the compiler
    kept: str = "packed"  # how a row waits for its reductions: packed as it came, numerators in float32, or widened
    online: bool = False  # maximum and sum of a row's warps are combined at once, behind one barrier
    access: int = PACK  # bytes of a pack; fewer where rows are whole ones, and no rows share any
    streaming: str = "no"  # what the caches keep: no, stores, both, evict_last (see `accesses`)

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.groups

    @property
    def team(self) -> int:
        """Threads that synchronize."""
        return self.threads

    def rounds(self, problem: SoftmaxProblem) -> int:
        """Packs of a row that a thread has, at most."""
        return -(-Frame.of_row(problem, self.access).most // self.threads)

    def registers(self, problem: SoftmaxProblem) -> int:
        """Registers of a thread, about."""
        return OTHERS + self.rounds(problem) * held(problem, self.kept, self.access)

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.kept not in KEPT:
            return f"kept={self.kept} is not one of {', '.join(KEPT)}"
        if self.kept == "widened" and itemsize(problem) == 4:
            return f"kept=widened is for elements of 16 bits, not {problem.dtype}; take packed"
        return (
            check_program(problem, arch, self.threads, self.kept, self.online)
            or check_streaming(self.streaming, arch)
            or self._check_access(problem)
            or self._check_sizes(problem, arch)
        )

    def _check_access(self, problem: SoftmaxProblem) -> str | None:
        if self.access not in ACCESSES or self.access < itemsize(problem):
            allowed = ", ".join(map(str, ACCESSES))
            return f"access={self.access} is not one of {allowed} bytes, and at least one element of {problem.dtype}"
        if self.access == PACK:
            return None
        frame = Frame.of_row(problem, self.access)
        if not frame.aligned:
            return f"access={self.access} wants rows of whole packs, not of cols={problem.cols} {problem.dtype}"
        if problem.has_dropout and frame.pack % 4:
            return f"access={self.access} with dropout wants packs of four elements, not of {frame.pack}; take {PACK}"
        return None

    def _check_sizes(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        for name in ("groups", "rows_per_group"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.groups > 1 and self.threads > 32:
            return f"groups={self.groups} is for rows of up to a warp, not of threads={self.threads}"
        if self.block % 32:
            return f"threads={self.threads} x groups={self.groups} is no multiple of a warp; take more groups"
        if self.block > arch.max_threads:
            return f"groups={self.groups} makes {self.block} threads a block, {arch} allows {arch.max_threads}"
        return check_block(
            self.threads, self.block, self.min_blocks, self.rounds(problem), self.registers(problem), arch
        )
