"""Rows as the packs of 16 (or 8) bytes that they lie in.

A row that does not start at a multiple of 16 bytes keeps its place among them: the packs from the one its first element
lies in to the one its last lies in are read, computed and stored as they lie in memory.  Only those two hold elements
of other rows, which count as neutral and are not stored.  So any width moves 16 bytes at a time.  Rows that are whole
packs of 8 bytes may go by these instead: twice the accesses, and no packs that rows share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.problem import Argument
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.rows import itemsize

PACK = 16  # bytes: what bulk copies count in and the widest access
ACCESSES = (16, 8, 4, 2)  # bytes of a pack that ordinary loads and stores may take
KEPT_IN_REGISTERS = ("packed", "numerators")  # as they came, or as numerators in float32
MOST_ROUNDS = 32  # packs of a thread, which are unrolled


@dataclass(frozen=True)
class Frame:
    """`rows` rows of `cols` elements of one tensor, as the whole packs of `access` bytes that they lie in."""

    cols: int
    rows: int
    itemsize: int
    access: int = PACK

    @classmethod
    def of_row(cls, problem: SoftmaxProblem, access: int = PACK) -> Frame:
        """One row of the tensors of the problem's dtype."""
        return cls(problem.cols, 1, itemsize(problem), access)

    @property
    def pack(self) -> int:
        """Elements of a pack."""
        return self.access // self.itemsize

    @property
    def words(self) -> int:
        """32-bit words that a pack lies in."""
        return max(1, self.access // 4)

    @property
    def aligned(self) -> bool:
        """Whether any multiple of `rows` rows starts with a pack."""
        return self.rows * self.cols % self.pack == 0

    @property
    def unit(self) -> int:
        """Elements: every row starts and ends at a multiple of so many."""
        return math.gcd(self.cols, self.pack)

    @property
    def most(self) -> int:
        """Packs that the rows lie in, at most."""
        before = self.pack - math.gcd(self.rows * self.cols, self.pack)
        return -(-(before + self.rows * self.cols) // self.pack)

    @property
    def nbytes(self) -> int:
        return self.most * self.access


def widest(problem: SoftmaxProblem) -> int:
    """Bytes of the widest access that rows consist of."""
    return math.gcd(problem.cols * itemsize(problem), PACK)


def row_inputs(problem: SoftmaxProblem) -> tuple[Argument, ...]:
    """The inputs that have rows."""
    return tuple(a for a in problem.arguments() if not a.output and len(a.shape) == 2)


def held(problem: SoftmaxProblem, kept: str, access: int = PACK) -> int:
    """Registers that a pack of each input takes: `kept` as packed, widened, or as numerators, for which all are first
    read."""
    frame = Frame.of_row(problem, access)
    pack = frame.pack
    drop = 1 if problem.is_drawn else pack // 4 if problem.has_dropout else 0
    inputs = sum(argument.name != "drop" for argument in row_inputs(problem))
    inputs += problem.mask == "cols"
    if kept == "widened":
        return pack * inputs + drop
    packed = frame.words * inputs + drop
    return max(pack + drop, packed) if kept == "numerators" else packed


def check_program(problem: SoftmaxProblem, arch: Arch, threads: int, kept: str, online: bool) -> str | None:
    """Why `threads` threads can not compute a row that waits where `kept` says, or None."""
    if problem.dtype == "bfloat16" and arch.kind == "cuda" and "bf16" not in arch.features:
        return f"dtype=bfloat16 needs sm_80 or newer, not {arch}"
    if threads < 1 or threads & (threads - 1) or threads > arch.max_threads:
        return f"threads={threads} is not a power of two up to {arch.max_threads}"
    if kept == "numerators" and problem.function != "softmax":
        return f"kept=numerators is for function=softmax, not {problem.function}; take packed"
    if online and problem.is_grad:
        return f"online=true is for softmax and log_softmax; {problem.function} has one reduction"
    if online and threads <= 32:
        return f"online=true is for rows of more than a warp, not of threads={threads}"
    return None


def check_block(threads: int, block: int, min_blocks: int, rounds: int, registers: int, arch: Arch) -> str | None:
    """Why `threads` of a row, in blocks of `block`, cannot have `rounds` packs each in about `registers` registers, or
    None."""
    most = min(arch.blocks_sm, arch.threads_sm // block)
    if min_blocks < 0 or min_blocks > most:
        return f"min_blocks={min_blocks} of {block} threads, a multiprocessor of {arch} holds {most}"
    if rounds > MOST_ROUNDS:
        return f"threads={threads} gives each {rounds} packs, more than {MOST_ROUNDS}; take more threads"
    blocks = max(1, min_blocks)
    allowed = min(arch.registers_thread, arch.registers_sm // (block * blocks) // 8 * 8)
    if registers > allowed:
        return (
            f"threads={threads} needs about {registers} registers for {rounds} packs each, {arch} has {allowed} for "
            f"each of {block} x {blocks} threads; take fewer packs to a thread"
        )
    return None
