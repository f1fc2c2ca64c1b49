"""The config of `parts`, and what makes one illegal."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.problem import Config
from schedules.lowering.annotations import check_streaming
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import MOST_ROUNDS, PACK, Frame, check_block, check_program, held

OTHERS = 40  # registers beside the packs, about
SHARES = 4  # parts of a row that one thread combines, at most


@dataclass(frozen=True)
class PartsConfig(Config):
    threads: int = 256  # of a part and block, a power of two
    packs: int = 2  # of a thread: with `threads` they set the length of a part
    min_blocks: int = 0  # blocks a multiprocessor should hold (caps registers); 0 leaves it to the compiler
    streaming: str = "no"  # what the caches keep: no, stores, both, evict_last (see `accesses`)

    access = PACK
    kept = "packed"
    online = True

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads

    @property
    def team(self) -> int:
        """Threads that synchronize."""
        return self.threads

    @property
    def part(self) -> int:
        """Packs of a part."""
        return self.threads * self.packs

    def rounds(self, problem: SoftmaxProblem) -> int:
        """Packs of a thread."""
        return self.packs

    def parts(self, problem: SoftmaxProblem) -> int:
        """Of a row."""
        return -(-Frame.of_row(problem).most // self.part)

    def least(self, problem: SoftmaxProblem) -> int:
        """Packs of a row's last part, at least; not over 0 where it may have none."""
        return -(-problem.cols // Frame.of_row(problem).pack) - (self.parts(problem) - 1) * self.part

    def registers(self, problem: SoftmaxProblem) -> int:
        """Registers of a thread, about."""
        begun = 3 * self.packs if problem.mask != "none" else 0  # masked packs are begun all at once
        return OTHERS + self.packs * held(problem, self.kept) + begun

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if error := check_program(problem, arch, self.threads, self.kept, False) or check_streaming(
            self.streaming, arch
        ):
            return error
        if self.threads < 64:
            return f"threads={self.threads} must be at least 64"
        if not 1 <= self.packs <= MOST_ROUNDS:
            return f"packs={self.packs} is not from 1 to {MOST_ROUNDS}"
        registers = self.registers(problem)
        if error := check_block(self.threads, self.threads, self.min_blocks, self.packs, registers, arch):
            return error
        if self.parts(problem) > SHARES * self.threads:
            return f"{self.parts(problem)} parts of a row, a block combines at most {SHARES * self.threads}; take more"
        return None
