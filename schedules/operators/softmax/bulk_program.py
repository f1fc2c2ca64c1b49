"""The kernel of `bulk`: a ring of stages to each team, filled by bulk copies, under the row program on packs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import TMABar
from tvm.script import tirx as T

from schedules.lowering.accesses import EVICT_FIRST, EVICT_LAST
from schedules.operators.softmax.bulk_config import BulkConfig, mask_bytes
from schedules.operators.softmax.definition import SoftmaxProblem, Values
from schedules.operators.softmax.pack_program import PackKernel, Row, Scalar, module, where
from schedules.operators.softmax.pack_sources import STORE_SHARED
from schedules.operators.softmax.packs import PACK, Frame
from schedules.steps.story import inside_part, part
from schedules.tirx.values import named

_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_COPY_OUT = "cp.async.bulk.global.shared::cta.bulk_group"
_HINT = ".L2::cache_hint"
_LOAD_ANYWHERE = """
__device__ __forceinline__ void bulk_gather_{name}(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
    const void* from) {{
  uint4 v;
#pragma unroll
  for (int i = 0; i < (int)(16 / sizeof({type})); ++i) (({type}*)&v)[i] = ((const {type}*)from)[i];
  a = v.x; b = v.y; c = v.z; d = v.w;
}}
"""
_COPY_ONE = """
__device__ __forceinline__ void bulk_copy_{name}(void* to, const void* from) {{ *({type}*)to = *(const {type}*)from; }}
"""
_CARRIERS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2"}


def program(problem: SoftmaxProblem, config: BulkConfig) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``."""

    def emit(tensors: dict[str, Any], rows: Any, block: Any, warp: Any, lane: Any) -> None:
        BulkKernel(problem, config, tensors, rows, block, warp, lane).emit()

    return module(problem, config.block // 32, partial(blocks, config), config.blocks_sm, emit)


def blocks(config: BulkConfig, rows: Any) -> Any:
    """Blocks of the launch: none without a stage."""
    of_block = config.rows * config.groups
    stages = T.truncdiv(rows + (of_block - 1), T.int64(of_block))
    return T.Cast("int32", T.min(stages, T.int64(config.grid)) if config.grid else stages)


@dataclass(frozen=True)
class StagedRow(Row):
    """A row in a stage of the ring."""

    stage: Any  # bytes from the ring's start to the stage
    local: dict[str, Any]  # first element in the stage's frame of each input
    first: Any  # whether it is the stage's first turn
    last: Any  # and its last


class BulkKernel(PackKernel[StagedRow]):
    """The body of the kernel for one thread; its methods emit statements."""

    def __init__(
        self, problem: SoftmaxProblem, config: BulkConfig, tensors: dict[str, Any], rows: Any, block: Any, warp: Any,
        lane: Any,
    ) -> None:  # fmt: skip
        super().__init__(problem, config, tensors, rows, warp, lane)
        self.config, self.block = config, block
        self.frames = config.frames(problem)
        self.stage_frame = Frame(problem.cols, config.rows, self.frame.itemsize)
        self.chunk_rounds = config.chunk_rounds(problem)
        self.chunks = -(-self.rounds // self.chunk_rounds)
        self.stage_bytes = config.stage_bytes(problem)
        self.by_copy = config.stores == "bulk"
        self.in_place = dict(zip(self.outputs, config.in_place(problem), strict=True))

    # ---- The ring ----

    def emit(self) -> None:
        part("Shared memory: a ring of stages for each team, and a barrier to each that counts its bytes")
        config, stages = self.config, self.config.num_stages
        pool = T.SMEMPool()
        self.ring = pool.alloc((config.groups * stages * self.stage_bytes,), "uint8", align=128)
        with_mask = self.problem.mask == "cols"
        if with_mask:
            self.mask = pool.alloc((mask_bytes(self.problem),), "uint8", align=16)
        if self.wide:
            self.exchange = pool.alloc((4 * config.team // 32,), "float32", align=16)
        self.full = TMABar(pool, config.groups * stages * self.chunks)
        masked = TMABar(pool, 1) if with_mask else None
        pool.commit()
        self.full.init(1)
        if masked:
            masked.init(1)
        T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        T.evaluate(T.cuda.cta_sync())

        part("Which rows are whose: teams take stages of rows in turn")
        team = self.warp if config.groups > 1 else T.int32(0)
        self.thread = named("thread", self.warp * 32 + self.lane if config.team > 32 else self.lane)
        self.elected = self.thread == 0
        self.ring_first = named("ring_first", team * stages)  # number of the team's first stage
        self.teams = named("teams", blocks(config, self.rows) * config.groups)
        self.tiles = named("tiles", T.Cast("int32", T.truncdiv(self.rows + (config.rows - 1), T.int64(config.rows))))
        self.elements = named("elements", self.rows * self.problem.cols)
        if config.kept == "packed":
            self.zero = self.unknown_zero()
        first = named("first", self.block * config.groups + team)
        if masked:
            self.copy_mask(masked)
        with where(self.elected):
            for stage in range(stages):
                self.fetch(first + self.teams * stage, T.int32(stage))
        if masked:
            masked.wait(0, 0)

        part("Stage after stage: wait for its rows, compute them, go on round the ring")
        self.tile = Scalar("tile", first)
        self.stage, self.phase = Scalar("stage", 0), Scalar("phase", 0)
        self.turn = Scalar("turn", 0) if self.wide and self.exchanges == 1 else None
        with T.While(self.tile.value < self.tiles):
            if self.chunks == 1:
                self.wait(0)
            with inside_part("The rows of a stage"):
                self.compute_stage()
            self.tile.set(self.tile.value + self.teams)
            self.advance()
        if self.by_copy:
            with where(self.elected):
                T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    def advance(self) -> None:
        if self.config.num_stages == 1:
            self.phase.set(T.bitwise_xor(self.phase.value, 1))
            return
        self.stage.set(self.stage.value + 1)
        with where(self.stage.value == self.config.num_stages):
            self.stage.set(0)
            self.phase.set(T.bitwise_xor(self.phase.value, 1))

    def fetch(self, tile: Any, stage: Any) -> None:
        """Have the rows of `tile`, if there is one, copied into `stage`; for one thread."""
        config, cols = self.config, self.problem.cols
        with inside_part("Fetch: one thread has the rows of a stage copied in bulk"), where(tile < self.tiles):
            begin = named("begin", T.Cast("int64", tile) * (config.rows * cols))
            end = named("end", T.min(begin + config.rows * cols, self.elements) if config.rows > 1 else begin + cols)
            place = named("place", (self.ring_first + stage) * self.stage_bytes)
            starts: dict[str, Any] = {}
            stops: dict[str, Any] = {}
            for argument in self.inputs:
                name, frame = argument.name, self.frames[argument.name]
                starts[name] = named(f"{name}_start", _down(begin, frame) if not frame.aligned else begin)
                stops[name] = named(f"{name}_stop", self.whole_packs(frame, end))
                self.copy_tail(name, frame, stops[name], end, place + self.offset(name), starts[name])
            for chunk in range(self.chunks):
                self.fetch_chunk(chunk, starts, stops, place, self.full.ptr_to([self.barrier_of(stage, chunk)]))

    def fetch_chunk(self, chunk: int, starts: Values, stops: Values, place: Any, barrier: Any) -> None:
        """Copy what a chunk's rounds read, and expect it."""
        parts = {}
        for argument in self.inputs:
            name, frame = argument.name, self.frames[argument.name]

            def bound(k: int, name: str = name, frame: Frame = frame) -> Any:
                if k in (0, self.chunks):
                    return stops[name] if k else starts[name]
                # a pack of drop, which may hold bytes of two of the tensors' packs, comes with the first of them
                shared = frame.pack if frame.itemsize < self.item and not frame.aligned else 0
                elements = k * self.chunk_rounds * self.config.threads * self.pack + shared
                return T.min(starts[name] + T.int64(elements), stops[name])

            first, last = bound(chunk), bound(chunk + 1)
            size = named(f"{name}_bytes", T.Cast("uint32", (last - first) * frame.itemsize))
            parts[name] = (first, size)
        total = parts[self.inputs[0].name][1]
        for argument in self.inputs[1:]:
            total = total + parts[argument.name][1]
        T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier, total))
        for name, (first, size) in parts.items():
            with where(size > T.uint32(0) if self.problem.cols < 16 or self.chunks > 1 else True):
                target = place + self.offset(name)
                if chunk:
                    target = target + T.Cast("int32", first - starts[name]) * self.frames[name].itemsize
                source = self.tensors[name].ptr_to([first])
                policy = {"both": EVICT_FIRST, "evict_last": EVICT_LAST}.get(self.config.streaming)
                self.copy(_COPY, self.ring.ptr_to([target]), source, size, barrier, policy=policy)

    def barrier_of(self, stage: Any, chunk: int) -> Any:
        number = self.ring_first + stage
        return number * self.chunks + chunk if self.chunks > 1 else number

    def wait(self, chunk: int) -> None:
        self.full.wait(self.barrier_of(self.stage.value, chunk), self.phase.value)

    def copy(self, form: str, *operands: Any, policy: int | None) -> None:
        if policy:
            T.evaluate(T.ptx[form + _HINT](*operands, T.uint64(policy)))
        else:
            T.evaluate(T.ptx[form](*operands))

    def whole_packs(self, frame: Frame, end: Any) -> Any:
        """Up to where elements before `end` are copied: packs that begin before it and do not pass the tensor's end."""
        if frame.unit == frame.pack:
            return end
        return T.min(_down(end + (frame.pack - 1), frame), _down(self.elements, frame))

    def copy_tail(self, name: str, frame: Frame, stop: Any, end: Any, place: Any, start: Any) -> None:
        """Elements of the tensor's last pack, if that is not whole, without a bulk copy: others see them with the
        arrival at the barrier that follows."""
        if frame.unit == frame.pack:
            return
        at = Scalar(f"{name}_at", stop, "int64")
        with T.While(at.value < end):
            to = place + T.Cast("int32", at.value - start) * frame.itemsize
            self.copy_one(frame.itemsize, self.ring.ptr_to([to]), self.tensors[name].ptr_to([at.value]))
            at.set(at.value + 1)

    def copy_one(self, itemsize: int, to: Any, source: Any) -> None:
        kind = _CARRIERS[itemsize]
        self.call(f"bulk_copy_{_plain(kind)}", to, source, source=_typed(_COPY_ONE, kind))

    def offset(self, name: str) -> int:
        """Bytes from a stage's start to an input, or to an output that has a place of its own."""
        before = list(self.frames)
        return sum(self.frames[other].nbytes for other in before[: before.index(name)])

    def copy_mask(self, barrier: Any) -> None:
        """The mask of columns, after a pack of nothing."""
        cols, whole = self.problem.cols, self.problem.cols // self.pack * self.pack
        with where(self.warp * 32 + self.lane == 0):
            for col in range(whole, cols):
                to = self.mask.ptr_to([PACK + col * self.item])
                self.copy_one(self.item, to, self.tensors["mask"].ptr_to([col]))
            size, arrived = T.uint32(whole * self.item), barrier.ptr_to([0])
            T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(arrived, size))
            if whole:
                source, target = self.tensors["mask"].ptr_to([0]), self.mask.ptr_to([PACK])
                self.copy(_COPY, target, source, size, arrived, policy=None)

    # ---- A stage's rows ----

    def compute_stage(self) -> None:
        config = self.config
        side = config.abreast
        count = T.Cast("int32", T.min(self.rows - T.Cast("int64", self.tile.value) * config.rows, T.int64(config.rows)))
        count = named("count", count if config.rows > 1 else 1)
        if config.rows == side:
            self.compute_rows(0, True, True, count)
        else:
            turns = named("turns", count if side == 1 else T.truncdiv(count + (side - 1), side))
            turn = Scalar("row_turn", 0)
            with T.While(turn.value < turns):
                self.compute_rows(turn.value, turn.value == 0, turn.value == turns - 1, count)
                if config.shares_packs(self.problem):
                    self.sync()
                turn.set(turn.value + 1)
        if self.by_copy:
            with inside_part("Copy a stage of results out in bulk"):
                self.copy_out(count)
        elif config.kept == "shared" and not self.late:
            self.sync()
            self.refill(self.tile.value, self.stage.value)

    @property
    def late(self) -> bool:
        """Whether a stage is filled again only behind the first barrier of the next one's rows, which saves one."""
        config = self.config
        return self.wide and not self.by_copy and config.kept == "shared" and config.num_stages > 1

    def refill(self, tile: Any, stage: Any, *conditions: Any) -> None:
        """Fetch what follows `tile` in its stage, which no thread reads any more."""
        needed = [condition for condition in conditions if condition is not True]
        with where(tirx.all(*needed, self.elected) if needed else self.elected):
            self.fetch(tile + self.teams * self.config.num_stages, stage)

    def refill_previous(self, *conditions: Any) -> None:
        """The same for the stage before this one, if there was one."""
        before = self.tile.value - self.teams
        stage = T.Select(self.stage.value == 0, T.int32(self.config.num_stages), self.stage.value) - 1
        self.refill(before, stage, before >= 0, *conditions)

    def behind_first(self, row: StagedRow) -> None:
        """Behind a row's first reduction: with `late` all have read the stage before this one; where a row is kept in
        registers, all have read this one."""
        if self.late:
            self.refill_previous(row.first)
        elif self.config.kept != "shared" and not self.by_copy:
            if not self.wide:
                self.sync()
            self.refill(self.tile.value, self.stage.value, row.last)

    def copy_out(self, count: Any) -> None:
        """Store a stage that holds outputs: whole packs by bulk copies, and elements of the packs that are shared with
        other stages by a thread each.  Then fill the stage before this one again, which had a stage's time to leave."""
        config, frame = self.config, self.stage_frame
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        self.sync()
        begin = named("out_begin", T.Cast("int64", self.tile.value) * (config.rows * self.problem.cols))
        end = named("out_end", begin + T.Cast("int64", count * self.problem.cols))
        start = begin if frame.aligned else named("out_start", _down(begin, frame))
        whole_end = end if frame.unit == self.pack else named("out_whole_end", _down(end, frame))
        whole = begin if frame.aligned else named("out_whole", _down(begin + (self.pack - 1), frame))
        place = named("out_place", (self.ring_first + self.stage.value) * self.stage_bytes)
        size = named("out_bytes", T.Cast("int32", whole_end - whole) * self.item)

        policy = EVICT_FIRST if self.streaming_stores else None

        def source(name: str, element: Any) -> Any:
            at = place + self.offset(self.in_place[name]) + T.Cast("int32", element - start) * self.item
            return self.ring.ptr_to([at])

        with where(self.elected):
            for name in self.outputs:
                with where(size > 0 if frame.unit < self.pack else True):
                    to = self.tensors[name].ptr_to([whole])
                    self.copy(_COPY_OUT, to, source(name, whole), T.Cast("uint32", size), policy=policy)
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())
        if frame.unit < self.pack:
            for far in (True,) if frame.aligned else (False, True):
                k = named("edge_at", (whole_end if far else begin) + T.Cast("int64", self.thread))
                limit = end if far else T.min(whole, end)
                with where(tirx.all(k < limit, k >= whole) if far else k < limit):
                    for name in self.outputs:
                        self.copy_one(self.item, self.tensors[name].ptr_to([k]), source(name, k))
        pending = 0 if config.num_stages == 1 else 1
        with where(self.elected):
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(pending))
        if pending:
            self.refill_previous()
        else:
            if frame.unit < self.pack:
                self.sync()
            self.refill(self.tile.value, self.stage.value)

    def compute_rows(self, turn: Any, first: Any, last: Any, count: Any) -> None:
        self.waits = self.chunks > 1  # for the chunks of the row, in its first pass
        self.fresh = set(self.read_names())  # what has to be read before it is used
        self.compute(self.place(turn, first, last, count))

    def place(self, turn: Any, first: Any, last: Any, count: Any) -> StagedRow:
        part("Where a row lies in its stage, and how far into its first pack of 16 bytes it starts")
        config, cols = self.config, self.problem.cols
        number = turn
        if config.abreast > 1:
            number = turn * config.abreast + T.truncdiv(self.thread, config.threads)
            number = named("number", number)
            self.of_row = named("of_row", T.truncmod(self.thread, config.threads))
        else:
            self.of_row = self.thread
        begin = named("tile_begin", T.Cast("int64", self.tile.value) * (config.rows * cols))
        begin32 = T.Cast("int32", begin)  # its lowest bits
        local = {}
        for argument in self.inputs:
            name, frame = argument.name, self.frames[argument.name]
            before = 0 if frame.aligned else T.bitwise_and(begin32, frame.pack - 1)
            local[name] = named(f"{name}_first", before + number * cols)
        main = self.inputs[0].name
        shift = 0 if self.aligned else named("shift", T.bitwise_and(local[main], self.pack - 1))
        packs = self.least if self.aligned else T.truncdiv(shift + (cols + self.pack - 1), self.pack)
        if config.abreast > 1:
            packs = T.Select(number < count, T.int32(packs) if self.aligned else packs, T.int32(0))
        start = begin + T.Cast("int64", number * cols - shift)
        stage = named("stage_at", (self.ring_first + self.stage.value) * self.stage_bytes)
        packs, start = named("packs", packs), named("start", start)
        return StagedRow(shift, packs, start, True, stage, local, first, last)

    # ---- Packs ----

    def each_pack(self, row: StagedRow, *needs: str, stored: bool = False) -> Iterator[tuple[int, Any]]:
        """Packs out of the row's stage; the first pass of a row that is kept in registers reads all inputs."""
        in_registers = self.config.kept != "shared"
        names = [name for name in self.words if name in self.fresh and (in_registers or name in needs)]
        threads = self.config.threads
        waits, self.waits = self.waits, False
        for p in range(self.rounds):
            if waits and p % self.chunk_rounds == 0:
                self.wait(p // self.chunk_rounds)
            i = self.of_row + p * threads if p else self.of_row
            whole = (p + 1) * threads <= self.least and self.config.abreast == 1
            with where(True if whole else i < row.packs):
                for name in names:
                    self.read(name, row, p, i)
                yield p, i
        if in_registers:
            self.fresh.clear()
            if self.config.kept == "packed":
                self.settle()
        elif not self.wide:
            T.evaluate(T.cuda.warp_sync())  # or the compiler would keep in registers what it reads again

    def read(self, name: str, row: StagedRow, p: int, i: Any) -> None:
        """Pack i of an input into its words."""
        words = [self.word(name, p, k) for k in range(self.words_of(name))]
        if name == "drop":
            at = row.stage + self.offset(name) + row.local[name] - row.shift + i * self.pack
            self.load(words, self.ring.ptr_to([at]))
            return
        if name in self.frames:
            self.load(words, self.ring.ptr_to([self.pack_at(name, row, i)]))
        else:
            at = self.mask.ptr_to([PACK + i * PACK - row.shift * self.item])
            if self.aligned:
                self.load(words, at)
            else:
                kind = _CARRIERS[self.frame.unit * self.item]
                self.call("bulk_gather_" + _plain(kind), *words, at, source=_typed(_LOAD_ANYWHERE, kind))
        self.fill(name, row, p, i)

    def pack_at(self, name: str, row: StagedRow, i: Any) -> Any:
        """Bytes from the ring's start to pack i of an input of the tensors' dtype."""
        base = row.local[self.inputs[0].name] - row.shift
        return row.stage + self.offset(name) + base * self.item + i * PACK

    def write(self, row: StagedRow, results: Values) -> None:
        """A pack with elements of two rows is read for both before either is written."""
        if self.config.shares_packs(self.problem):
            self.sync()
        super().write(row, results)

    def store(self, name: str, row: StagedRow, p: int, i: Any, words: Any) -> None:
        """Into the stage, where results leave by bulk copies."""
        if not self.by_copy:
            super().store(name, row, p, i, words)
            return
        to = self.ring.ptr_to([self.pack_at(self.in_place[name], row, i)])
        if self.config.rows > 1:
            self.store_own(row, p, i, words, to, "pack_store_shared", STORE_SHARED)
        else:  # what `copy_out` leaves out may be written
            self.call("pack_store_shared", *(words[k] for k in range(self.each)), to, source=STORE_SHARED)


def _down(element: Any, frame: Frame) -> Any:
    """The first element, int64, of the pack of `element`."""
    return T.bitwise_and(element, T.int64(-frame.pack))


def _plain(kind: str) -> str:
    return kind.replace(" ", "_")


def _typed(source: str, kind: str) -> str:
    return source.format(type=kind, name=_plain(kind))
