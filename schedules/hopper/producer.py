"""The producer: a warp that has TMA fill every stage of the ring that is free, tile after tile; beside it, where
operand a lies in lines, all threads of its warpgroup that copy these; one more warp has TMA bring residuals.

A warp waits as one, and one of its threads issues: while a thread alone slept, the others could run ahead to where the
warp meets, and overwrite uniform registers that a load on its way had not read yet (wrong blocks of a cluster, then).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from schedules.hopper.geometry import ClusterPlace, Load, Operand, Taps, Work
from schedules.hopper.images import Images
from schedules.hopper.instructions import column_mask, row_mask
from schedules.hopper.launch import Maps, SharedMemory
from schedules.hopper.lines import Lines
from schedules.hopper.residual import owner_of
from schedules.hopper.ring import Ring
from schedules.hopper.shared import LineStaging, TensorMap, aligned
from schedules.hopper.spans import Spans, Turner
from schedules.tirx.types import Buffer, Expr, Index, Tensors, Variable
from schedules.tirx.values import named

_COPIED = "cp.async.mbarrier.arrive.noinc.shared.b64"
_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"


@dataclass(frozen=True)
class Producer:
    """The loads of a block, which stands at `at` of one of `clusters`, by the warp of `thread` of the producer."""

    work: Work
    maps: Maps
    memory: SharedMemory
    ring: Ring
    at: ClusterPlace
    clusters: int
    thread: Expr
    tensors: Tensors

    @T.inline
    def run(self, tile: Variable) -> None:
        """Load the tiles of this block from number `tile` on."""
        turner = T.meta_var(self.turner())
        while tile < self.work.clusters:
            place = T.meta_var(self.work.place(tile, self.at.rank_m, self.at.rank_n))
            window = T.meta_var(self.work.taps(place))
            # blocks that share the reduction take every split_k-th of its stages, over all taps
            chunk: T.int32
            chunk = self.at.rank_k
            if self.work.shifts is not None:
                phase: T.int32
                phase = 0
                while phase < self.work.shifts.phases:
                    self.load_taps(turner, place, tile, window, chunk, phase)
                    phase = phase + 1
            else:
                self.load_taps(turner, place, tile, window, chunk, 0)
            tile = tile + self.clusters
        self.finish(turner)

    @T.inline
    def run_residuals(self, tile: Variable) -> None:
        """Load the residuals of this block's tiles from number `tile` on."""
        while tile < self.work.clusters:
            place = T.meta_var(self.work.place(tile, self.at.rank_m, self.at.rank_n))
            self.load_residual(place, tile)
            tile = tile + self.clusters

    def turner(self) -> Turner | None:
        """What fills operand a, where it is turned."""
        spans = self.work.a.source
        if not isinstance(spans, Spans):
            return None
        return Turner(spans, self.work.a.tile, self.ring, self.tensors[f"flat {spans.tensor}"], self.thread)

    def fill(self, turner: Turner | None, place: Any, tile: Expr, ry: Expr, rx: Expr, chunk: Expr) -> None:
        """Fill the stage when it is free."""

        def load() -> None:
            self.ring.wait_empty()
            with T.If(self.thread == 0 if self.work.a.copied else T.cuda.elect_sync()), T.Then():
                self.load_boxes(place, tile, ry, rx, chunk)

        if turner:
            turner.fill(partial(self.work.pixel_at, place, ry), chunk, load)
            return
        load()
        if self.work.a.copied:
            self.copy_lines(place, ry, chunk)

    def finish(self, turner: Turner | None) -> None:
        """Fill what is left of the last stage."""
        if turner:
            turner.finish()

    @T.inline
    def load_taps(
        self, turner: Turner | None, place: Any, tile: Expr, window: Taps, chunk: Variable, phase: Index
    ) -> None:
        """Load the stages of all taps in `window`, of the chunks of a phase, from `chunk` on."""
        of_phase = T.meta_var(self.work.chunks_of_phase)
        # while: unrolled, the loops would need more registers than the producer keeps
        ry: T.int32
        ry = window[0]
        while ry < window[1]:
            rx: T.int32
            rx = window[2]
            while rx < window[3]:
                while chunk < of_phase:
                    self.fill(turner, place, tile, ry, rx, chunk + phase * of_phase)
                    self.ring.advance()
                    chunk = chunk + self.work.config.split_k
                chunk = chunk - of_phase
                rx = rx + 1
            ry = ry + 1

    def load_boxes(self, place: Any, tile: Expr, ry: Expr, rx: Expr, chunk: Expr) -> None:
        """Have TMA fill the stage."""
        self.ring.expect(self.expected(tile, chunk))
        if isinstance(self.work.a.source, TensorMap):
            self.load_a(self.work.loads_a(place, ry, rx, chunk, self.at.rank_n))
        if isinstance(self.work.a.source, Images):
            self.load_images(self.work.a.source, place, chunk)
        self.load_b(self.work.loads_b(place, ry, rx, chunk, self.at.rank_m), tile, ry, rx, chunk)

    def load_residual(self, place: Any, tile: Expr) -> None:
        """Have TMA bring the tile's residual to those who add it, when they have read their last."""
        arrivals, work = self.memory.residual, self.work
        assert arrivals
        added, staging = arrivals.added, work.output.staging
        owner, turn = owner_of(work.config, tile, self.clusters)
        form = _LOAD.format(added.source.rank)
        for part in range(work.config.parts):
            with T.serial(added.boxes) as box:
                number, column = named("box", arrivals.number(owner + part, box)), box * staging.width
                arrivals.empty.wait(number, turn ^ 1)
                with T.If(T.cuda.elect_sync()), T.Then():
                    arrivals.full.arrive(number, added.box_bytes)
                    arrived = arrivals.full.ptr_to([number])
                    for line in range(added.lines):
                        if isinstance(staging, LineStaging):
                            at = work.line_at(place, part, line * staging.run, column)
                        else:
                            at = work.store_at(place, part, column)
                        to = arrivals.memory.ptr_to([number * added.box_bytes + line * added.source.box_bytes])
                        T.evaluate(T.ptx[form](to, T.address_of(self.maps.residual), *at, arrived))

    def copy_lines(self, place: Any, ry: Expr, chunk: Expr) -> None:
        """Copy this thread's part of operand a, and have it arrive when it is there."""
        lines, position = self.work.a.source, self.work.position_at(place)
        assert isinstance(lines, Lines) and position is not None
        row = ry if self.work.kernel[0] > 1 else 0
        source = self.tensors[f"flat {lines.tensor}"]
        lines.copy(source, position, row, chunk, self.memory.stages, self.ring.start, self.thread)
        T.evaluate(T.ptx[_COPIED](self.ring.arrived))

    def expected(self, tile: Expr, chunk: Expr) -> Index:
        """Bytes that TMA brings into a stage of a chunk of the channels."""
        source = self.work.a.source
        a: Index = self.work.a.loaded if isinstance(source, TensorMap) else 0  # else it arrives elsewhere
        if isinstance(source, Images):
            a = source.nbytes_of(source.left(chunk))
        both = a + self.work.b.loaded
        return T.Select(self.is_first(tile), both, a) if self.work.config.stationary else both

    def is_first(self, tile: Expr) -> Expr:
        """Whether the block multiplies no tile before."""
        return tile < self.clusters

    def load_a(self, loads: Sequence[Load]) -> None:
        """Fill the stage's part of operand a, of all blocks of this one's row of the cluster."""
        self.work.a.check_loads(loads, self.work.config.cluster_n)
        self._load(self.work.a, self.maps.a, loads, self.memory.stages, self.ring.start, self.row_mask)

    @property
    def row_mask(self) -> Expr | None:
        """The blocks that share this one's operand a."""
        n = self.work.config.cluster_n
        return row_mask(n, self.at.first + self.at.rank_m * n)

    def load_images(self, images: Images, place: Any, chunk: Expr) -> None:
        """The same of whole images."""
        part = self.at.rank_n, self.work.config.cluster_n
        source, memory = self.tensors[f"flat {images.tensor}"], self.memory.stages
        first = T.truncdiv(self.work.position_at(place), images.outputs)
        images.load(source, first, chunk, memory, self.ring.start, self.ring.arrived, part, self.row_mask)

    def load_b(self, loads: Sequence[Load], tile: Expr, ry: Expr, rx: Expr, chunk: Expr) -> None:
        """Fill the stage's part of operand b, of all blocks of this one's column of the cluster; where it stays, with
        the block's first tile, in its place of the stage's number in the reduction."""
        work, config = self.work, self.work.config
        mask = column_mask(config.loaders_b, config.cluster_n, self.at.first + self.at.rank_n)
        work.b.check_loads(loads, config.loaders_b)
        if not config.stationary:
            start = self.ring.start + work.b_start
            self._load(work.b, self.maps.b, loads, self.memory.filters, start, mask)
            return
        number = T.truncdiv((ry * work.kernel[1] + rx) * work.chunks + chunk, config.split_k)
        with T.If(self.is_first(tile)), T.Then():
            self._load(work.b, self.maps.b, loads, self.memory.filters, number * aligned(work.b.nbytes), mask)

    def _load(
        self, operand: Operand, tensor_map: Variable, loads: Sequence[Load], memory: Buffer, start: Expr, mask: Expr
    ) -> None:
        """Issue `loads` to `start` bytes into `memory`; with a `mask`, of every block of the cluster that it names."""
        form = _LOAD.format(operand.boxes.rank) + (".multicast::cluster" if mask is not None else "") + self.ring.group
        last = [] if mask is None else [mask]
        for load in operand.all_loads(loads):
            target = memory.ptr_to([start + load.offset])
            T.evaluate(T.ptx[form](target, T.address_of(tensor_map), *load.at, self.ring.arrived, *last))
