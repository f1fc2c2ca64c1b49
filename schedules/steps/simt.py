"""The config of tiled schedules on CUDA cores, shared by every operator's `simt`."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.problem import Config, Pair

VECTORS = (1, 2, 4)  # elements of one access


@dataclass(frozen=True)
class TiledConfig(Config):
    """A block's tile of the output as threads x outputs of a thread.  Pairs are (rows, columns) of the tile; what these
    are is the operator's to say."""

    tile: Pair = (8, 8)  # outputs of a thread
    num_thread: Pair = (16, 16)  # threads of a block: (threadIdx.y, threadIdx.x)
    vthread: Pair = (2, 2)  # sub-tiles a thread's outputs are split into
    step: int = 8  # values of the reduction in shared memory at a time
    vector: int = 4  # elements of one global load, where the layout allows it

    @property
    def block(self) -> Pair:
        return self.tile[0] * self.num_thread[0], self.tile[1] * self.num_thread[1]

    @property
    def threads(self) -> int:
        return self.num_thread[0] * self.num_thread[1]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of both operands' tiles, in float32."""
        return sum(self.block) * self.step * 4

    def registers(self) -> int:
        """An estimate for each thread: accumulator, both operands, and addressing."""
        return self.tile[0] * self.tile[1] + sum(self.tile) + 40

    def check_tile(self, arch: Arch) -> str | None:
        """Why the tile is illegal on `arch`, whatever the problem."""
        for name in ("tile", "num_thread", "vthread"):
            if min(getattr(self, name)) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        for axis in (0, 1):
            if self.tile[axis] % self.vthread[axis]:
                return f"tile={self.tile[axis]} is not a multiple of vthread={self.vthread[axis]}"
        if self.step < 1:
            return f"step={self.step} must be at least 1"
        if self.vector not in VECTORS:
            return f"vector={self.vector} is not 1, 2 or 4 (128 bits are 4 float32)"
        if self.threads > arch.max_threads:
            return f"num_thread={self.num_thread} makes blocks of {self.threads}, {arch} allows {arch.max_threads}"
        if self.shared_bytes > arch.shared_static:
            return f"step={self.step} needs {self.shared_bytes} bytes of shared memory, {arch} has {arch.shared_static}"
        if self.registers() > arch.registers_thread:
            return f"tile={self.tile} needs about {self.registers()} registers, {arch} has {arch.registers_thread}"
        return None
