"""Softmax for Hopper with rows that arrive ahead of their use: a persistent kernel in TIRx.

A team of threads, a block or a warp of one, takes stage after stage of `rows` rows.  Each of its `num_stages` stages in
shared memory is filled by one bulk copy of each input (``cp.async.bulk``, counted by an mbarrier) while earlier rows
are reduced and stored, so that memory has work at all times, and no thread has an address to compute for it.

A row that does not start at a multiple of 16 bytes keeps its place among them: the packs of 16 bytes from the one its
first element lies in to the one its last lies in are copied, computed and stored as they lie in memory.  Only those
two hold elements of other rows, which count as neutral and are not stored.  So any width moves 16 bytes at a time.

Sources: the ring of stages is that of `schedules.hopper`; packs and functors are OneFlow's; with `online` the maximum
and the sum of each warp are combined at once (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from schedules.arch import Arch
from schedules.hopper import NO_ROUTES
from schedules.hopper.config import BARRIER_BYTES, RESIDENT, shared_room
from schedules.operator import ScheduleSpec
from schedules.primitives.annotations import STREAMING
from schedules.problem import Argument, Config
from schedules.softmax.definition import SoftmaxProblem
from schedules.softmax.rows import itemsize, itemsize_of

if TYPE_CHECKING:
    import tvm

PACK = 16  # bytes: what bulk copies count in and the widest access
STORES = ("direct", "bulk")
KEPT = ("shared", "packed", "numerators")
MOST_ROUNDS = 32  # packs of a thread, which are unrolled
ALIGNMENT = 128  # bytes, of the first stage


@dataclass(frozen=True)
class Frame:
    """`rows` rows of `cols` elements of one tensor, as the whole packs of 16 bytes that they lie in."""

    cols: int
    rows: int
    itemsize: int

    @property
    def pack(self) -> int:
        """Elements of a pack."""
        return PACK // self.itemsize

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
        return self.most * PACK


@dataclass(frozen=True)
class BulkConfig(Config):
    threads: int = 256  # of a row, a power of two
    abreast: int = 1  # rows that a team computes side by side
    groups: int = 1  # teams of a block, where a team is a warp
    rows: int = 1  # of a stage, copied at once
    num_stages: int = 2  # of a team, in shared memory at once
    blocks_sm: int = 1  # blocks that a multiprocessor holds
    grid: int = RESIDENT[1]  # blocks at most, each of which computes stage after stage
    kept: str = "shared"  # where a row waits for its reductions: shared, or in registers packed or as numerators
    stores: str = "direct"  # how results leave: direct, or bulk copies out of the stage that the inputs came in
    online: bool = False  # maximum and sum of a block's warps are combined at once, behind one barrier
    streaming: str = "no"  # accesses that the caches need not keep: no, stores, both

    @property
    def team(self) -> int:
        """Threads that share stages."""
        return self.threads * self.abreast

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.team * self.groups

    def frame(self, problem: SoftmaxProblem) -> Frame:
        """One row of the tensors of the problem's dtype."""
        return Frame(problem.cols, 1, itemsize(problem))

    def rounds(self, problem: SoftmaxProblem) -> int:
        """Packs of a row that a thread has, at most."""
        return -(-self.frame(problem).most // self.threads)

    def frames(self, problem: SoftmaxProblem) -> dict[str, Frame]:
        """What a stage holds, by the name of the input, or of an output that has not the place of an input."""
        found = {
            argument.name: Frame(problem.cols, self.rows, itemsize_of(argument.dtype))
            for argument in row_inputs(problem)
        }
        if self.stores == "bulk":
            for name in self.in_place(problem):
                found.setdefault(name, Frame(problem.cols, self.rows, itemsize(problem)))
        return found

    def in_place(self, problem: SoftmaxProblem) -> tuple[str, ...]:
        """Whose place in a stage each output takes that leaves by a bulk copy."""
        if problem.is_grad:
            return ("y",)
        return ("x", "mask" if problem.mask == "full" else "output") if problem.has_dropout else ("x",)

    def stage_bytes(self, problem: SoftmaxProblem) -> int:
        return sum(frame.nbytes for frame in self.frames(problem).values())

    def shared_bytes(self, problem: SoftmaxProblem) -> int:
        """Shared memory of a block: stages, the mask of columns, what reductions exchange, barriers."""
        stages = self.groups * self.num_stages * (self.stage_bytes(problem) + BARRIER_BYTES // 2)
        mask = mask_bytes(problem) + BARRIER_BYTES if problem.mask == "cols" else 0
        exchange = 4 * 4 * self.team // 32
        return ALIGNMENT + stages + mask + exchange

    def registers(self, problem: SoftmaxProblem) -> int:
        """Registers of a thread, about."""
        rounds, pack = self.rounds(problem), self.frame(problem).pack
        inputs = len(row_inputs(problem)) - problem.has_dropout
        words = {"shared": 0, "packed": 4 * inputs, "numerators": pack}[self.kept]
        if problem.has_dropout and self.kept != "shared":
            words += pack // 4
        if problem.dtype != "float16" and self.kept == "packed":  # as in `rows.check`: kept widened
            words += (pack - 4) * inputs
        return 40 + rounds * words

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if problem.dtype == "bfloat16" and arch.kind == "cuda" and "bf16" not in arch.features:
            return f"dtype=bfloat16 needs sm_80 or newer, not {arch}"
        if "tma" not in arch.features:
            return f"{arch} has no bulk copies; choose another --schedule"
        if self.threads < 1 or self.threads & (self.threads - 1) or self.threads > arch.max_threads:
            return f"threads={self.threads} is not a power of two up to {arch.max_threads}"
        for name in ("abreast", "groups", "rows", "num_stages", "blocks_sm", "grid"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        return self._check_words(problem) or self._check_sizes(problem, arch)

    def _check_words(self, problem: SoftmaxProblem) -> str | None:
        if self.kept not in KEPT:
            return f"kept={self.kept} is not one of {', '.join(KEPT)}"
        if self.stores not in STORES:
            return f"stores={self.stores} is not one of {', '.join(STORES)}"
        if self.streaming not in STREAMING:
            return f"streaming={self.streaming} is not one of {', '.join(STREAMING)}"
        if self.kept == "numerators" and problem.function != "softmax":
            return f"kept=numerators is for function=softmax, not {problem.function}; take packed"
        if self.online and problem.is_grad:
            return f"online=true is for softmax and log_softmax; {problem.function} has one reduction"
        if self.online and self.threads <= 32:
            return f"online=true is for rows of more than a warp, not of threads={self.threads}"
        return None

    def _check_sizes(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.team % 32:
            return f"threads={self.threads} x abreast={self.abreast} is no multiple of a warp; take more abreast"
        if self.abreast > 1 and self.threads > 32:
            return f"abreast={self.abreast} is for rows of up to a warp, not of threads={self.threads}; take blocks_sm"
        if self.groups > 1 and self.team > 32:
            return f"groups={self.groups} is for teams of a warp, not of {self.team} threads; take blocks_sm"
        if self.rows % self.abreast:
            return f"rows={self.rows} is no multiple of abreast={self.abreast}"
        if self.block > arch.max_threads:
            return f"groups={self.groups} makes {self.block} threads a block, {arch} allows {arch.max_threads}"
        if self.blocks_sm > min(arch.blocks_sm, arch.threads_sm // self.block):
            return f"blocks_sm={self.blocks_sm} of {self.block} threads are more than a multiprocessor of {arch} holds"
        rounds = self.rounds(problem)
        if rounds > MOST_ROUNDS:
            return f"threads={self.threads} gives each {rounds} packs, more than {MOST_ROUNDS}; take more threads"
        allowed = min(arch.registers_thread, arch.registers_sm // (self.block * self.blocks_sm) // 8 * 8)
        if self.registers(problem) > allowed:
            return (
                f"kept={self.kept} needs about {self.registers(problem)} registers for {rounds} packs, "
                f"{arch} has {allowed} for each of {self.block} x {self.blocks_sm} threads"
            )
        shared, room = self.shared_bytes(problem), shared_room(arch, self.blocks_sm)
        if shared > room:
            of_each = f" for each of {self.blocks_sm} blocks" if self.blocks_sm > 1 else ""
            return f"num_stages={self.num_stages} needs {shared} bytes of shared memory, {arch} has {room}{of_each}"
        return None


def row_inputs(problem: SoftmaxProblem) -> tuple[Argument, ...]:
    """The inputs that have rows."""
    return tuple(a for a in problem.arguments() if not a.output and a.runtime_axis is not None)


def mask_bytes(problem: SoftmaxProblem) -> int:
    """The mask of columns in shared memory: a pack before it and two after it, which rows that start inside a pack
    read across."""
    return Frame(problem.cols, 1, itemsize(problem)).most * PACK + 3 * PACK


def schedule(problem: SoftmaxProblem, config: BulkConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows; blocks take stages of rows in turn."""
    from schedules.softmax.bulk_program import program

    return program(problem, config)


def default(problem: SoftmaxProblem, arch: Arch) -> BulkConfig:
    return BulkConfig()


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[BulkConfig]:
    yield BulkConfig()


SCHEDULE = ScheduleSpec(
    name="bulk",
    summary="rows copied ahead by the Hopper's bulk copies, in packs of 16 bytes at any width; persistent blocks",
    kinds=("cuda",),
    config=BulkConfig,
    apply=schedule,
    default=default,
    space=space,
    no_routes=NO_ROUTES,
)
