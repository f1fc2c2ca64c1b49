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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch, shared_room
from schedules.core.device import Device
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.lowering.annotations import check_streaming
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import MOST_ROUNDS, PACK, Frame, check_program, held, row_inputs
from schedules.operators.softmax.rows import itemsize, itemsize_of
from schedules.tirx import BARRIER_PAIR_BYTES, NO_ROUTES

if TYPE_CHECKING:
    import tvm

STORES = ("direct", "bulk")
KEPT = ("shared", "packed", "numerators")
PACKS = 4  # of a thread, by default
CHUNKS = 4  # of a row that has a multiprocessor's shared memory to itself
MOST_PACKS = 16  # of a thread, in searches
THREADS_SM = 1024  # on a multiprocessor, by default: with 64 registers each
STAGE = 2048  # bytes of a stage to a warp where it has several rows
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


def schedule(problem: SoftmaxProblem, config: BulkConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows; blocks take stages of rows in turn."""
    from schedules.operators.softmax.bulk_program import program

    return program(problem, config)


def keeps(problem: SoftmaxProblem) -> tuple[str, ...]:
    """Where rows of the function may be kept, what saves most work first."""
    return tuple(kept for kept in reversed(KEPT) if kept != "numerators" or problem.function == "softmax")


def default(problem: SoftmaxProblem, arch: Arch) -> BulkConfig:
    """The first of `preferred` that is legal; the last of them if none is."""
    config = BulkConfig()
    for config in preferred(problem, arch.device):
        if config.check(problem, arch) is None:
            break
    return config


def preferred(problem: SoftmaxProblem, device: Device) -> Iterator[BulkConfig]:
    """Configs with eight threads to a row, which are 128 bytes, or as many as make PACKS packs to each, THREADS_SM
    threads on a multiprocessor, or fewer where that leaves room for another stage, and a grid that fills `device`.

    Rows of up to a warp that start inside packs have blocks that compute as many of them side by side as make whole
    packs, so that all of a stage leaves by one copy.  Longer ones store their ends apart, and so do those with dropout,
    whose stages are so large that few would be left.  Estimates, not measured.
    """
    frame = Frame(problem.cols, 1, itemsize(problem))
    threads = 1
    while threads < 1024 and frame.pack * threads * (1 if threads < 8 else PACKS) < problem.cols:
        threads *= 2
    copied = threads <= 32 and not frame.aligned and not problem.has_dropout
    for (least, stages), kept in product(((768, 3), (512, 2), (1, 2), (1, 1)), keeps(problem)):
        for of_row in (threads, threads // 2) if threads > 64 and kept != "shared" else (threads,):
            shape = narrow(problem, of_row, copied) if of_row <= 32 else dict(threads=of_row)
            base = BulkConfig(**shape, kept=kept, stores="bulk" if copied else "direct")  # type: ignore[arg-type]
            blocks = range(max(1, THREADS_SM // base.block), max(1, least // base.block) - 1, -1)
            for blocks_sm in blocks:
                num_stages = stages + copied  # one is leaving
                chunks = min(CHUNKS, base.rounds(problem)) if num_stages == 1 and of_row > 32 else 1
                grid = device.resident(1) * blocks_sm
                yield replace(base, num_stages=num_stages, chunks=chunks, blocks_sm=blocks_sm, grid=grid)


def narrow(problem: SoftmaxProblem, threads: int, copied: bool) -> dict[str, int]:
    """The fields for rows of up to a warp: of teams of a warp; or, where a stage is to leave by one copy, of the
    smallest teams from four warps on whose rows make whole packs."""
    if not copied:
        return teams(problem, threads, 32)
    fitting = (team for team in (128, 256, 512) if Frame(problem.cols, team // threads, itemsize(problem)).aligned)
    return teams(problem, threads, next(fitting), 0)


def teams(problem: SoftmaxProblem, threads: int, team: int, times: int = 1) -> dict[str, int]:
    """The fields of teams of `team` threads for rows of up to a warp: the rows of a stage have about `times` STAGE
    bytes for each warp, at least one for each that is computed; teams of a warp are four to a block."""
    abreast = team // threads
    turns = round(STAGE * times * threads / (32 * problem.cols * itemsize(problem)))
    return dict(threads=threads, abreast=abreast, groups=4 if team == 32 else 1, rows=abreast * max(1, turns))


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[BulkConfig]:
    """Rows of up to a warp in teams of one warp, four or eight, longer ones in blocks of their own; shapes with up to
    sixteen packs to a thread, and 512 to 2048 threads on a multiprocessor."""
    most = Frame(problem.cols, 1, itemsize(problem)).most
    fitting = [
        threads for threads in (1 << k for k in range(11)) if most <= MOST_PACKS * threads < 2 * MOST_PACKS * most
    ]
    narrow_ones = product((threads for threads in fitting if threads <= 32), (32, 128, 256), (0, 2))
    shapes = [teams(problem, *fields) for fields in narrow_ones]
    shapes += [dict(threads=threads) for threads in fitting if threads > 32]
    shapes = [shape for k, shape in enumerate(shapes) if shape not in shapes[:k]]
    for shape, threads_sm, num_stages in product(shapes, (512, 768, 1024, 1536, 2048), (1, 2, 3, 4)):
        base = BulkConfig(**shape, num_stages=num_stages)  # type: ignore[arg-type]
        if threads_sm % base.block:
            continue
        blocks_sm = threads_sm // base.block
        base = replace(base, blocks_sm=blocks_sm, grid=arch.device.resident(1) * blocks_sm)
        for kept, stores, streaming in product(keeps(problem), STORES, ("no", "evict_last")):
            if stores == "bulk" and num_stages < 3:  # one leaves while another is computed
                continue
            long = base.threads > 32
            onlines = (False, True) if long and not problem.is_grad else (False,)
            for online, chunks in product(onlines, (1, CHUNKS) if long and num_stages < 3 else (1,)):
                yield replace(base, chunks=chunks, kept=kept, stores=stores, streaming=streaming, online=online)


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
