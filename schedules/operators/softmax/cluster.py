"""Softmax for Hopper with a row over the blocks of a cluster, read once: for long rows, though they be few.

Each block has a part of the row, and each of its threads `rounds` packs of 16 bytes of that, in flight all at once: the
first `in_shared` of them into shared memory (``cp.async``), where only that thread reads them, the others straight into
registers, as `frames` has it.  A block's maximum and sum, relative to its own maximum (of a gradient the sum), go to
every block of the cluster through distributed shared memory, behind one barrier of the cluster; then each part is
written from where it waits.  So a row is as long as 16 multiprocessors hold, and moves once in and once out.

With a `grid`, clusters compute row after row, and what waits in shared memory of the next row is on its way while this
one is written, each pack into the place of the one that was just read: no thread waits for another.  Without, there is
a cluster for each row, and blocks that share a multiprocessor fill each other's waits.

Sources: CUDA C++ Programming Guide, "Distributed Shared Memory"; rows over a cluster, with what their blocks came to
exchanged by way of shared memory, as in Dao-AILab/quack; the parallel form of the online softmax (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1).
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
from schedules.operators.softmax.packs import KEPT_IN_REGISTERS, MOST_ROUNDS, PACK, Frame, check_program, held
from schedules.operators.softmax.rows import itemsize_of
from schedules.tirx import NO_ROUTES

if TYPE_CHECKING:
    import tvm

CLUSTERS = (2, 4, 8, 16)  # blocks; more than 8 the launch must allow, as TVM's does
OTHERS = 28  # registers beside the packs, about
PART = 16 * 1024  # bytes of a tensor in a block, by default
PACKS = 8  # of a thread, by default
THREADS_SM = 1024  # on a multiprocessor, by default: with 64 registers each
IN_REGISTERS = 32  # registers of a thread for packs, by default, where shared memory does not hold two parts


@dataclass(frozen=True)
class ClusterConfig(Config):
    cluster: int = 8  # blocks of a row
    threads: int = 512  # of a block, a power of two
    in_shared: int = 0  # packs of a thread, of each input, that wait in shared memory, the others in registers
    blocks_sm: int = 2  # blocks a multiprocessor should hold (caps registers)
    grid: int = 0  # blocks at most, whole clusters, which compute row after row; 0 makes a cluster for each row
    kept: str = "packed"  # how a row waits in registers: packed as it came, or as numerators in float32
    online: bool = False  # maximum and sum of a block's warps are combined at once, behind one barrier
    streaming: str = "no"  # of what goes to registers: no, stores, both, evict_last (see `accesses`)

    @property
    def access(self) -> int:
        """Bytes of a pack."""
        return PACK

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads

    @property
    def team(self) -> int:
        """Threads that synchronize."""
        return self.threads

    def part(self, problem: SoftmaxProblem) -> int:
        """Packs of a block, at most."""
        return -(-Frame.of_row(problem).most // self.cluster)

    def least(self, problem: SoftmaxProblem) -> int:
        """Packs of the last block of a row, at least; not over 0 where it may have none."""
        frame = Frame.of_row(problem)
        return -(-problem.cols // frame.pack) - (self.cluster - 1) * self.part(problem)

    def rounds(self, problem: SoftmaxProblem) -> int:
        """Packs of a thread, at most."""
        return -(-self.part(problem) // self.threads)

    def whole_rounds(self, problem: SoftmaxProblem) -> int:
        """Rounds for which each thread of each block has a pack that does not pass a tensor's end."""
        frame = Frame.of_row(problem)
        return max(0, self.least(problem) - (frame.unit < frame.pack)) // self.threads

    def registers(self, problem: SoftmaxProblem) -> int:
        """Registers of a thread, about."""
        each, registered = held(problem, self.kept), self.rounds(problem) - self.in_shared
        begun = 3 * registered if problem.mask != "none" else 0  # masked packs are begun all at once
        read = each + (8 if self.grid else 0) if self.in_shared else 0  # a pack, and the place of the next row's
        return OTHERS + registered * each + begun + read

    def shared_bytes(self, problem: SoftmaxProblem) -> int:
        """Shared memory of a block: packs, what its warps and what the cluster's blocks exchange, barriers."""
        return self.in_shared * self.threads * sum(pack_sizes(problem).values()) + 8 * (
            self.threads // 32 + 2 * self.cluster + 1
        )

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if "cluster" not in arch.features:
            return f"{arch} has no clusters of blocks; choose another --schedule"
        if self.cluster not in CLUSTERS:
            return f"cluster={self.cluster} is not one of {', '.join(map(str, CLUSTERS))}"
        if self.kept not in KEPT_IN_REGISTERS:
            return f"kept={self.kept} is not one of {', '.join(KEPT_IN_REGISTERS)}"
        return (
            check_program(problem, arch, self.threads, self.kept, self.online)
            or check_streaming(self.streaming, arch)
            or self._check_sizes(problem, arch)
        )

    def _check_sizes(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.threads < 64:
            return f"threads={self.threads} must be at least 64"
        most = min(arch.blocks_sm, arch.threads_sm // self.threads)
        if not 1 <= self.blocks_sm <= most:
            return f"blocks_sm={self.blocks_sm} of {self.threads} threads, a multiprocessor of {arch} holds 1 to {most}"
        if self.grid < 0 or self.grid % self.cluster:
            return f"grid={self.grid} is no multiple of cluster={self.cluster}"
        rounds, whole = self.rounds(problem), self.whole_rounds(problem)
        if rounds > MOST_ROUNDS:
            return f"threads={self.threads} gives each {rounds} packs, more than {MOST_ROUNDS}; take more threads"
        if not 0 <= self.in_shared <= whole:
            return f"in_shared={self.in_shared} is not from 0 to {whole}, the packs that every thread has"
        if self.in_shared and self.kept == "numerators":
            return "kept=numerators is for rows that are all in registers; take in_shared=0"
        allowed = min(arch.registers_thread, arch.registers_sm // (self.threads * self.blocks_sm) // 8 * 8)
        if self.registers(problem) > allowed:
            return (
                f"in_shared={self.in_shared} leaves {rounds - self.in_shared} packs in about "
                f"{self.registers(problem)} registers, {arch} has {allowed} for each of {self.threads} x "
                f"{self.blocks_sm} threads; take more blocks, threads or in_shared"
            )
        shared, room = self.shared_bytes(problem), shared_room(arch, self.blocks_sm)
        if shared > room:
            return (
                f"in_shared={self.in_shared} needs {shared} bytes of shared memory, {arch} has {room} "
                f"for each of blocks_sm={self.blocks_sm}"
            )
        return None


def pack_sizes(problem: SoftmaxProblem) -> dict[str, int]:
    """Bytes of a pack of each input by its name."""
    pack = Frame.of_row(problem).pack
    return {a.name: pack * itemsize_of(a.dtype) for a in problem.arguments() if not a.output}


def schedule(problem: SoftmaxProblem, config: ClusterConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows."""
    from schedules.operators.softmax.cluster_program import program

    return program(problem, config)


def default(problem: SoftmaxProblem, arch: Arch) -> ClusterConfig:
    """The first of `preferred` that is legal; the last of them if none is."""
    config = ClusterConfig()
    for config in preferred(problem, arch.device):
        if config.check(problem, arch) is None:
            break
    return config


def preferred(problem: SoftmaxProblem, device: Device) -> Iterator[ClusterConfig]:
    """The smallest cluster with which the rows fill `device` and a part is no longer than PART of a tensor, else the
    largest; then, with PACKS to a thread of 256 or 512, as many packs as can in shared memory, and as many blocks to a
    multiprocessor, up to six or three, as that holds, at least two.  Where searches on an H200 timed it, for 1 to 132
    rows of 65536 and 262144 float16 columns, it was within 4% of the fastest (tuning_logs/nvidia-h200/softmax.jsonl).

    For longer parts two blocks with as many packs in registers as IN_REGISTERS hold, or one: estimates, not measured.
    """
    frame = Frame.of_row(problem)
    enough = [c for c in CLUSTERS if problem.rows * c >= device.multiprocessors and frame.nbytes <= PART * c]
    cluster = enough[0] if enough else CLUSTERS[-1]
    online = not problem.is_grad
    for threads in (256, 512):
        base = ClusterConfig(cluster, threads, online=online)
        if base.rounds(problem) <= PACKS:
            for blocks_sm in range(1536 // threads, 1, -1):
                yield replace(base, in_shared=base.whole_rounds(problem), blocks_sm=blocks_sm)
    for threads in (512, 1024):
        base = ClusterConfig(cluster, threads, 0, THREADS_SM // threads, online=online)
        fewest = max(0, base.rounds(problem) - IN_REGISTERS // held(problem, "packed"))
        for in_shared in range(fewest, max(fewest, base.whole_rounds(problem)) + 1):
            yield replace(base, in_shared=in_shared)


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[ClusterConfig]:
    """Every cluster; blocks of 128 to 1024 threads with up to sixteen packs each, of which none, half, as many as can,
    or all but those that IN_REGISTERS hold and up to two more wait in shared memory; a cluster to each row, or as many
    as are on the GPU at once."""
    for cluster, threads in product(CLUSTERS, (128, 256, 512, 1024)):
        base = ClusterConfig(cluster, threads, blocks_sm=1)
        rounds, whole = base.rounds(problem), base.whole_rounds(problem)
        if rounds > 16 or (rounds == 1 and threads > 128):
            continue
        fewest = rounds - IN_REGISTERS // held(problem, "packed")
        shares = sorted({0, rounds // 2, fewest, fewest + 1, fewest + 2, whole} & set(range(whole + 1)))
        onlines = (True,) if cluster > 4 else (False, True)
        for in_shared, threads_sm in product(shares, (512, 1024, 1536, 2048)):
            blocks_sm = threads_sm // threads
            if not blocks_sm or threads_sm % threads:
                continue
            at_once = arch.device.resident(cluster) * blocks_sm
            grids = (0, at_once) if problem.rows * cluster > at_once else (0,)
            kepts = KEPT_IN_REGISTERS if problem.function == "softmax" and not in_shared else KEPT_IN_REGISTERS[:1]
            onlines_here = (False,) if problem.is_grad else onlines
            for grid, kept, online, streaming in product(grids, kepts, onlines_here, ("no", "evict_last")):
                given = dict(blocks_sm=blocks_sm, grid=grid, kept=kept, online=online, streaming=streaming)
                yield replace(base, in_shared=in_shared, **given)


SCHEDULE = ScheduleSpec(
    name="cluster",
    summary="a row over the blocks of a Hopper's cluster, in registers and shared memory, read once",
    kinds=("cuda",),
    config=ClusterConfig,
    apply=schedule,
    default=default,
    space=space,
    no_routes=NO_ROUTES,
)
