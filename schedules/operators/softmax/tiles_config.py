"""The config of `tiles`, and what makes one illegal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.problem import Config
from schedules.lowering.annotations import check_streaming
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import (
    KEPT_IN_REGISTERS,
    PACK,
    Frame,
    check_block,
    check_program,
    held,
    row_inputs,
)
from schedules.operators.softmax.rows import itemsize

OTHERS = 28  # registers beside a row's elements, about


@dataclass(frozen=True)
class TilesConfig(Config):
    threads: int = 4  # of a row, a power of two up to a warp
    groups: int = 32  # thread groups of a block, side by side
    rows_per_group: int = 1  # rows that a group computes one after the other
    access: int = 2  # bytes that a thread reads of a row at once, in shared memory
    min_blocks: int = 0  # blocks a multiprocessor should hold (caps registers); 0 leaves it to the compiler
    kept: str = "packed"  # how a row waits for its reductions: packed as it came, or as numerators in float32
    streaming: str = "no"  # what the caches keep: no, stores, both, evict_last (see `accesses`)

    online = False

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.groups

    @property
    def team(self) -> int:
        """Threads that synchronize."""
        return self.block

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.groups * self.rows_per_group

    def rounds(self, problem: SoftmaxProblem) -> int:
        """Accesses of a thread to a row, at most."""
        return -(-Frame.of_row(problem, self.access).most // self.threads)

    def registers(self, problem: SoftmaxProblem) -> int:
        """Registers of a thread, about."""
        return OTHERS + self.rounds(problem) * held(problem, self.kept, self.access)

    def shared_bytes(self, problem: SoftmaxProblem) -> int:
        return self.rows * problem.cols * itemsize(problem) * len(row_inputs(problem))

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if problem.has_dropout:
            return "rows of dropout have two outputs and bytes beside their elements; take frames"
        if problem.y_dtype != "same":
            return f"y_dtype={problem.y_dtype} leaves results no place where the elements lay; take frames"
        if self.kept not in KEPT_IN_REGISTERS:
            return f"kept={self.kept} is not one of {', '.join(KEPT_IN_REGISTERS)}"
        if self.threads > 32:
            return f"threads={self.threads} is more than a warp; take frames"
        return (
            check_program(problem, arch, self.threads, self.kept, self.online)
            or check_streaming(self.streaming, arch)
            or self._check_access(problem)
            or self._check_sizes(problem, arch)
        )

    def _check_access(self, problem: SoftmaxProblem) -> str | None:
        if self.access not in (2, 4, 8, 16) or self.access < itemsize(problem):
            return f"access={self.access} is not one of 2, 4, 8, 16 bytes, and at least one element of {problem.dtype}"
        if not Frame.of_row(problem, self.access).aligned:
            return f"access={self.access} does not divide the bytes of a row of cols={problem.cols} {problem.dtype}"
        return None

    def _check_sizes(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        for name in ("groups", "rows_per_group"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.block % 32 or self.block > arch.max_threads:
            return f"threads={self.threads} x groups={self.groups} is no multiple of a warp up to {arch.max_threads}"
        if not Frame(problem.cols, self.rows, itemsize(problem)).aligned:
            return f"rows_per_group={self.rows_per_group} makes tiles of no whole packs; take {self.whole(problem)}"
        rounds, registers = self.rounds(problem), self.registers(problem)
        if reason := check_block(self.threads, self.block, self.min_blocks, rounds, registers, arch):
            return reason
        if self.shared_bytes(problem) > arch.shared_static:
            return (
                f"rows_per_group={self.rows_per_group} needs {self.shared_bytes(problem)} bytes of shared memory, "
                f"{arch} has {arch.shared_static}"
            )
        return None

    def whole(self, problem: SoftmaxProblem) -> int:
        """Rows to a group, at least, that make whole packs."""
        return PACK // math.gcd(self.groups * problem.cols * itemsize(problem), PACK)
