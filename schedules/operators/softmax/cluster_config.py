"""The config of `cluster`, and what makes one illegal."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.arch import Arch, shared_room
from schedules.core.problem import Config
from schedules.lowering.annotations import check_streaming
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import KEPT_IN_REGISTERS, MOST_ROUNDS, PACK, Frame, check_program, held
from schedules.operators.softmax.rows import itemsize_of

CLUSTERS = (2, 4, 8, 16)  # blocks; more than 8 the launch must allow, as TVM's does
OTHERS = 28  # registers beside the packs, about


@dataclass(frozen=True)
class ClusterConfig(Config):
    cluster: int = 8  # blocks of a row
    threads: int = 512  # of a block, a power of two
    in_shared: int = 0  # packs of a thread, of each input, that wait in shared memory, the others in registers
    blocks_sm: int = 2  # blocks a multiprocessor should hold (caps registers)
    grid: int = 0  # blocks at most, whole clusters, which compute row after row; 0 makes a cluster for each row
    kept: str = "packed"  # how a row waits in registers: packed as it came, or as numerators in float32
    online: bool = False  # maximum and sum of a block's warps are combined at once, behind one barrier
    direct: bool = False  # each warp sends what it came to to all blocks, without a barrier of its own block before
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
        numbers = 4 if problem.smoothing else 2
        warps = self.threads // 32
        exchanged = 4 * numbers * (warps + (warps if self.direct else 2) * self.cluster) + 8
        return self.in_shared * self.threads * sum(pack_sizes(problem).values()) + exchanged

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if "cluster" not in arch.features:
            return f"{arch} has no clusters of blocks; choose another --schedule"
        if self.cluster not in CLUSTERS:
            return f"cluster={self.cluster} is not one of {', '.join(map(str, CLUSTERS))}"
        if self.cluster > arch.cluster:
            return f"cluster={self.cluster} is over {arch.cluster}, the most of {arch}; take a smaller one"
        if self.kept not in KEPT_IN_REGISTERS:
            return f"kept={self.kept} is not one of {', '.join(KEPT_IN_REGISTERS)}"
        if self.direct and (self.grid or not (self.online or problem.is_grad)):
            return "direct=true is for one exchange of one row, with online=true and grid=0"
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
    return {argument.name: pack * itemsize_of(argument.dtype) for argument in problem.of_columns}
