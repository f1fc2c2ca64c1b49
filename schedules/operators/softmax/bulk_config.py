"""The config of `bulk`, and what makes one illegal."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.arch import Arch, shared_room
from schedules.core.problem import Config
from schedules.lowering.annotations import check_streaming
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import MOST_ROUNDS, PACK, Frame, check_program, held, row_inputs
from schedules.operators.softmax.rows import itemsize, itemsize_of
from schedules.tirx import BARRIER_PAIR_BYTES

STORES = ("direct", "bulk")
KEPT = ("shared", "packed", "numerators")
ALIGNMENT = 128  # bytes, of the first stage


@dataclass(frozen=True)
class BulkConfig(Config):
    threads: int = 256  # of a row, a power of two
    abreast: int = 1  # rows that a team computes side by side
    groups: int = 1  # teams of a block, where a team is a warp
    rows: int = 1  # of a stage, copied at once
    num_stages: int = 2  # of a team, in shared memory at once
    chunks: int = 1  # of a block's row: its first pass starts when the first of them is there
    blocks_sm: int = 1  # blocks that a multiprocessor holds
    grid: int = 0  # blocks at most, each of which computes stage after stage; 0 makes one for each stage
    kept: str = "shared"  # where a row waits for its reductions: shared, or in registers packed or as numerators
    stores: str = "direct"  # how results leave: direct, or bulk copies out of the stage that the inputs came in
    online: bool = False  # maximum and sum of a block's warps are combined at once, behind one barrier
    streaming: str = "no"  # what the caches keep: no, stores, both, evict_last (see `accesses`)

    @property
    def access(self) -> int:
        """Bytes of a pack."""
        return PACK

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
        return Frame.of_row(problem)

    def rounds(self, problem: SoftmaxProblem) -> int:
        """Packs of a row that a thread has, at most."""
        return -(-self.frame(problem).most // self.threads)

    def chunk_rounds(self, problem: SoftmaxProblem) -> int:
        """Packs of a thread that are waited for together."""
        return -(-self.rounds(problem) // max(1, self.chunks))

    def frames(self, problem: SoftmaxProblem) -> dict[str, Frame]:
        """What a stage holds, by the name of the input, or of an output that has not the place of an input."""
        frames = {
            argument.name: Frame(problem.cols, self.rows, itemsize_of(argument.dtype))
            for argument in row_inputs(problem)
        }
        if self.stores == "bulk":
            for name in self.in_place(problem):
                frames.setdefault(name, Frame(problem.cols, self.rows, itemsize(problem)))
        return frames

    def in_place(self, problem: SoftmaxProblem) -> tuple[str, ...]:
        """Whose place in a stage each output takes that leaves by a bulk copy."""
        if problem.is_grad:
            return ("y",)
        return ("x", "mask" if problem.mask == "full" else "output") if problem.has_dropout else ("x",)

    def stage_bytes(self, problem: SoftmaxProblem) -> int:
        return sum(frame.nbytes for frame in self.frames(problem).values())

    def shared_bytes(self, problem: SoftmaxProblem) -> int:
        """Shared memory of a block: stages, the mask of columns, what reductions exchange, barriers."""
        stages = self.groups * self.num_stages * (self.stage_bytes(problem) + self.chunks * BARRIER_PAIR_BYTES // 2)
        mask = mask_bytes(problem) + BARRIER_PAIR_BYTES if problem.mask == "cols" else 0
        exchange = 4 * 4 * self.team // 32
        return ALIGNMENT + stages + mask + exchange

    def shares_packs(self, problem: SoftmaxProblem) -> bool:
        """Whether results are written beside those of another row into a pack that both are read from."""
        return self.stores == "bulk" and self.rows > 1 and not self.frame(problem).aligned

    def registers(self, problem: SoftmaxProblem) -> int:
        """Registers of a thread, about."""
        inputs = len(row_inputs(problem)) - problem.has_dropout
        # masked packs are begun all at once, unless they are waited for one after the other
        begun = 3 if problem.mask != "none" and self.chunks == 1 else 0
        words, others = {
            # what every pack is addressed by, where rows start anywhere
            "shared": (0 if self.frame(problem).aligned else 3 * inputs - 2, 40),
            "packed": (held(problem, "packed") + begun, 24 if problem.is_grad else 32),
            "numerators": (held(problem, "numerators"), 24),
        }[self.kept]
        aside = 8 if self.abreast > 1 else 0  # which row it is, and whether there is a pack, asked for each
        return others + aside + self.rounds(problem) * words

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if "tma" not in arch.features:
            return f"{arch} has no bulk copies; choose another --schedule"
        for name in ("abreast", "groups", "rows", "num_stages", "chunks", "blocks_sm", "grid"):
            if getattr(self, name) < (name != "grid"):
                return f"{name}={getattr(self, name)} must be at least {int(name != 'grid')}"
        return (
            self._check_words(arch)
            or check_program(problem, arch, self.threads, self.kept, self.online)
            or self._check_sizes(problem, arch)
        )

    def _check_words(self, arch: Arch) -> str | None:
        if self.kept not in KEPT:
            return f"kept={self.kept} is not one of {', '.join(KEPT)}"
        if self.stores not in STORES:
            return f"stores={self.stores} is not one of {', '.join(STORES)}"
        if error := check_streaming(self.streaming, arch):
            return error
        return None

    def _check_sizes(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.kept == "shared" and self.shares_packs(problem):
            return "kept=shared with stores=bulk is for rows of whole packs, others share theirs; take packed"
        if self.team % 32:
            return f"threads={self.threads} x abreast={self.abreast} is no multiple of a warp; take more abreast"
        if self.abreast > 1 and self.threads > 32:
            return f"abreast={self.abreast} is for rows of up to a warp, not of threads={self.threads}; take blocks_sm"
        if self.groups > 1 and self.team > 32:
            return f"groups={self.groups} is for teams of a warp, not of {self.team} threads; take blocks_sm"
        if self.chunks > 1 and (self.threads <= 32 or self.rows > 1):
            return f"chunks={self.chunks} is for stages of one row of more than a warp; take chunks=1"
        if self.rows % self.abreast:
            return f"rows={self.rows} is no multiple of abreast={self.abreast}"
        if self.block > arch.max_threads:
            return f"groups={self.groups} makes {self.block} threads a block, {arch} allows {arch.max_threads}"
        if self.blocks_sm > min(arch.blocks_sm, arch.threads_sm // self.block):
            return f"blocks_sm={self.blocks_sm} of {self.block} threads are more than a multiprocessor of {arch} holds"
        rounds = self.rounds(problem)
        if rounds > MOST_ROUNDS:
            return f"threads={self.threads} gives each {rounds} packs, more than {MOST_ROUNDS}; take more threads"
        if self.chunks > rounds:
            return f"chunks={self.chunks} of {rounds} packs to a thread; take no more than those"
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


def mask_bytes(problem: SoftmaxProblem) -> int:
    """The mask of columns in shared memory: a pack before it and two after it, which rows that start inside a pack
    read across."""
    return Frame(problem.cols, 1, itemsize(problem)).most * PACK + 3 * PACK
