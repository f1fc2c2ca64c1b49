"""The ring of stages in shared memory between a producer and its consumers.

A stage has two mbarriers.  `full` completes when the bytes that the producer expects have arrived; `empty` when every
consumer that reads the stage has done so, in every block whose loads write into it.  A warpgroup waits for the parity
of its own turn around the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tvm.script import tirx as T

from schedules.hopper.config import HopperConfig
from schedules.tirx.types import Buffer, Expr, Index, Pointer, Variable

if TYPE_CHECKING:
    from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar

FILLS = 1  # arrivals that `full` counts: the producer's, with the bytes that it expects


def writers(config: HopperConfig) -> int:
    """Blocks whose loads write into a block's stages, itself among them: of its row of the cluster, and its column."""
    return config.cluster_m + config.cluster_n - 1


def readers(config: HopperConfig) -> int:
    """Arrivals that `empty` counts: of those that read a stage, from each block, or group of them, that it was loaded
    for."""
    return config.frees * writers(config) // config.cta_group


@dataclass
class Ring:
    """The stages in `memory`, `stage_bytes` apart, as a warpgroup goes around them: it stands before `stage`, and
    `phase` is the parity of its turn."""

    config: HopperConfig
    stage_bytes: int
    memory: Buffer
    full: TMABar
    empty: MBarrier
    stage: Variable
    phase: Variable
    group: ClassVar[str] = ""  # of loads that may arrive at another block's barrier, as PTX says it

    @property
    def start(self) -> Expr:
        """Bytes to the stage."""
        return self.stage * self.stage_bytes

    @property
    def arrived(self) -> Pointer | Expr:
        """The barrier that loads into the stage arrive at."""
        return self.full.ptr_to([self.stage])

    def wait_empty(self) -> None:
        """Wait until the stage may be written."""
        self.empty.wait(self.stage, self.phase ^ 1)

    def expect(self, nbytes: Index) -> None:
        """Have the stage be full when so many bytes have arrived."""
        self.full.arrive(self.stage, nbytes)

    def wait_full(self) -> None:
        """Wait until the stage may be read."""
        self.full.wait(self.stage, self.phase)

    def release(self, stage: Expr, thread: Expr, peer: Expr) -> None:
        """Tell the blocks that write into `stage`, each thread its `peer`, that this consumer has read it."""
        shared = writers(self.config)
        with T.If(thread < shared), T.Then():
            if shared > 1:
                self.empty.arrive(stage, remote=peer)
            else:
                self.empty.arrive(stage)

    @T.inline
    def advance(self) -> None:
        """Go on to the next stage."""
        self.stage = self.stage + 1
        if self.stage == self.config.num_stages:
            self.stage = 0
            self.phase = self.phase ^ 1

    @T.inline
    def skip(self, position: Expr) -> None:
        """Go on to the stage that is number `position` from the first of this turn."""
        self.stage = T.truncmod(position, self.config.num_stages)
        self.phase = self.phase ^ (T.truncdiv(position, self.config.num_stages) & 1)
