"""The kernel of `bulk`: a ring of stages to each team, filled by bulk copies, and the row program on packs of them.

A pack is four 32-bit words.  Pack i of a row holds its elements from E * i - shift on, E to a pack; thread t of a row
has packs t, t + threads, ...; all loops over them are unrolled, so that what is kept of them lies in registers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import TMABar
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.hopper.instructions import pack_16
from schedules.hopper.program import named
from schedules.primitives.annotations import TIRX
from schedules.problem import numpy_dtype
from schedules.softmax.bulk import PACK, BulkConfig, Frame, mask_bytes, row_inputs
from schedules.softmax.definition import Reduction, SoftmaxProblem, Values, row_program
from schedules.tolerance import LARGEST

_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_COPY_OUT = "cp.async.bulk.global.shared::cta.bulk_group"
_HINT = ".L2::cache_hint"
EVICT_FIRST = 0x12F0000000000000  # the policy, as createpolicy encodes it and CUTLASS writes it down
WORDS = 4  # of a pack
LANES = 4  # sums of a thread that do not wait for each other

_LOAD = """
__device__ __forceinline__ void bulk_load_{bytes}({parameters}, const void* from) {{
  {type} v = *(const {type}*)from; {assign}
}}
"""
_LOAD_ANYWHERE = """
__device__ __forceinline__ void bulk_gather_{name}(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
    const void* from) {{
  uint4 v;
#pragma unroll
  for (int i = 0; i < (int)(16 / sizeof({type})); ++i) (({type}*)&v)[i] = ((const {type}*)from)[i];
  a = v.x; b = v.y; c = v.z; d = v.w;
}}
"""
# elements from `first` to before `last` stay, the others are of other rows
_FILL = """
__device__ __forceinline__ void bulk_fill_{bits}(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
    int first, int last, unsigned neutral) {{
  unsigned w[4] = {{a, b, c, d}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {{
    unsigned own = 0;
#pragma unroll
    for (int k = 0; k < 32 / {bits}; ++k)
      if (i * (32 / {bits}) + k >= first && i * (32 / {bits}) + k < last) own |= {ones}u << ({bits} * k);
    w[i] = (w[i] & own) | (neutral & ~own);
  }}
  a = w[0]; b = w[1]; c = w[2]; d = w[3];
}}
"""
_STORE = """
__device__ __forceinline__ void bulk_store_{name}(unsigned a, unsigned b, unsigned c, unsigned d, void* to) {{
  {store}((uint4*)to, make_uint4(a, b, c, d));
}}
"""
_STORE_SHARED = """
__device__ __forceinline__ void bulk_store_shared(unsigned a, unsigned b, unsigned c, unsigned d, void* to) {
  *(uint4*)to = make_uint4(a, b, c, d);
}
"""
# bytes from `first` to before `last`, both multiples of {unit}, in as few stores as their alignment allows
_STORE_SOME = """
__device__ __forceinline__ void bulk_store_some_{unit}(unsigned a, unsigned b, unsigned c, unsigned d, void* to,
    int first, int last) {{
  unsigned v[4] = {{a, b, c, d}};
#pragma unroll
  for (int i = 0; i < 4; i += 2) {{
    if (4 * i >= first && 4 * i + 8 <= last) ((uint2*)to)[i / 2] = make_uint2(v[i], v[i + 1]);
    else if ({unit} < 8)
#pragma unroll
      for (int j = i; j < i + 2; ++j) {{
        if (4 * j >= first && 4 * j + 4 <= last) ((unsigned*)to)[j] = v[j];
        else if ({unit} < 4) {{
          if (4 * j >= first && 4 * j + 2 <= last) ((unsigned short*)to)[2 * j] = (unsigned short)v[j];
          if (4 * j + 2 >= first && 4 * j + 4 <= last) ((unsigned short*)to)[2 * j + 1] = (unsigned short)(v[j] >> 16);
        }}
      }}
  }}
}}
"""
_ZERO = """
__device__ __forceinline__ unsigned bulk_zero(long long elements) { return (unsigned)(elements >> 63); }
"""
_COPY_ONE = """
__device__ __forceinline__ void bulk_copy_{name}(void* to, const void* from) {{ *({type}*)to = *(const {type}*)from; }}
"""
_CARRIERS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2"}
_WIDEN = {  # the low and the high half of a word
    "float16": tuple(f"__half2float(__ushort_as_half((unsigned short)({half})))" for half in ("w", "w >> 16")),
    "bfloat16": ("__uint_as_float(w << 16)", "__uint_as_float(w & 0xffff0000u)"),
    "float32": ("__uint_as_float(w)",),
}
_ELEMENT = """
__device__ __forceinline__ float bulk_element_{name}(unsigned w) {{ return {value}; }}
"""
_LARGEST = """
__device__ __forceinline__ unsigned bulk_{function}_{type}(unsigned a, unsigned b) {{
  {type} m = __h{function}2(*({type}*)&a, *({type}*)&b); return *(unsigned*)&m;
}}
"""
_ACROSS = """
__device__ __forceinline__ float bulk_{kind}_{lanes}(float v) {{
#pragma unroll
  for (int m = {lanes} / 2; m > 0; m /= 2) {{
    float other = __shfl_xor_sync(0xffffffffu, v, m);
    v = {combine};
  }}
  return v;
}}
"""
_COMBINE = {"max": "fmaxf(v, other)", "sum": "v + other"}


def program(problem: SoftmaxProblem, config: BulkConfig) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``."""
    arguments = problem.arguments()
    names = [argument.name for argument in arguments]
    warps = config.block // 32

    def matched(handles: list[Any], rows: Any) -> dict[str, Any]:
        found = {}
        for argument, handle in zip(arguments, handles, strict=False):
            shape = (rows, problem.cols) if argument.runtime_axis is not None else argument.shape
            buffer = T.match_buffer(handle, shape, argument.dtype, align=16)
            IRBuilder.name(argument.name, buffer)
            found[argument.name] = buffer
        return found

    # fmt: off
    @T.prim_func
    def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle) -> None:
        rows = T.int64()
        tensors = T.meta_var(matched([a, b, c, d, e], rows))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": config.blocks_sm})
        block = T.cta_id([blocks(config, rows)])
        warp = T.warp_id([warps])
        lane = T.lane_id([32])
        Kernel(problem, config, tensors, rows, block, warp, lane).emit()
    # fmt: on

    function = tirx.PrimFunc(main.params[: len(names)], main.body, main.ret_type, main.attrs)
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main").with_attr(TIRX, 1)})


def blocks(config: BulkConfig, rows: Any) -> Any:
    """Blocks of the launch: none without a stage."""
    of_block = config.rows * config.groups
    return T.Cast("int32", T.min(T.truncdiv(rows + (of_block - 1), T.int64(of_block)), T.int64(config.grid)))


@dataclass(frozen=True)
class Row:
    """What a thread knows of its row: expressions, int32 unless said."""

    stage: Any  # bytes from the ring's start to the stage
    local: dict[str, Any]  # first element in the stage's frame of each input
    shift: Any  # elements of other rows in the first pack
    packs: Any  # none for what is no row
    start: Any  # of the output: element of the first pack, int64


class Scalar:
    """A variable of a thread."""

    def __init__(self, name: str, value: Any, dtype: str = "int32") -> None:
        self.cell = T.alloc_local((1,), dtype)
        IRBuilder.name(name, self.cell)
        self.set(value)

    @property
    def value(self) -> Any:
        return self.cell[0]

    def set(self, value: Any) -> None:
        T.buffer_store(self.cell, value, [0])


@contextlib.contextmanager
def where(condition: Any) -> Iterator[None]:
    """A body that runs where `condition` holds; without an `if` where that is known."""
    if condition is True:
        yield
    elif condition is not False:
        with T.If(condition), T.Then():
            yield


class Kernel:
    """The body of the kernel for one thread; its methods emit statements."""

    def __init__(
        self, problem: SoftmaxProblem, config: BulkConfig, tensors: dict[str, Any], rows: Any, block: Any, warp: Any,
        lane: Any,
    ) -> None:  # fmt: skip
        self.problem, self.config, self.rows = problem, config, rows
        self.program = row_program(problem)
        self.inputs = row_inputs(problem)
        self.frames = config.frames(problem)
        self.frame = config.frame(problem)
        self.stage_frame = Frame(problem.cols, config.rows, self.frame.itemsize)
        self.pack, self.item = self.frame.pack, self.frame.itemsize
        self.aligned = self.frame.aligned  # rows consist of whole packs
        self.rounds = config.rounds(problem)
        self.chunk_rounds = config.chunk_rounds(problem)
        self.chunks = -(-self.rounds // self.chunk_rounds)
        self.least = -(-problem.cols // self.pack)  # packs of a row
        self.stage_bytes = config.stage_bytes(problem)
        self.outputs = [argument.name for argument in problem.arguments() if argument.output]
        self.block, self.warp, self.lane = block, warp, lane
        self.tensors = {
            name: T.decl_buffer((rows * problem.cols,), buffer.dtype, data=buffer.data) if len(buffer.shape) == 2
            else buffer
            for name, buffer in tensors.items()
        }  # fmt: skip
        # a block's reductions: barriers of a row
        self.exchanges = 1 if problem.is_grad or config.online else 2
        self.wide = config.threads > 32  # whether a row is more than a warp's
        self.by_copy = config.stores == "bulk"
        self.in_place = dict(zip(self.outputs, config.in_place(problem), strict=True))

    # ---- The ring ----

    def emit(self) -> None:
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

        team = self.warp if config.groups > 1 else T.int32(0)
        self.thread = named("thread", self.warp * 32 + self.lane if config.team > 32 else self.lane)
        self.elected = self.thread == 0
        self.ring_first = named("ring_first", team * stages)  # number of the team's first stage
        self.teams = named("teams", blocks(config, self.rows) * config.groups)
        self.tiles = named("tiles", T.Cast("int32", T.truncdiv(self.rows + (config.rows - 1), T.int64(config.rows))))
        self.elements = named("elements", self.rows * self.problem.cols)
        zero = T.cuda.func_call("bulk_zero", self.elements, source_code=_ZERO, return_type="uint32")
        self.zero = named("zero", zero) if config.kept == "packed" else None
        first = named("first", self.block * config.groups + team)
        if masked:
            self.copy_mask(masked)
        with where(self.elected):
            for stage in range(stages):
                self.fetch(first + self.teams * stage, T.int32(stage))
        if masked:
            masked.wait(0, 0)

        self.tile = Scalar("tile", first)
        self.stage, self.phase = Scalar("stage", 0), Scalar("phase", 0)
        self.turn = Scalar("turn", 0) if self.wide and self.exchanges == 1 else None
        with T.While(self.tile.value < self.tiles):
            if self.chunks == 1:
                self.wait(0)
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
        with where(tile < self.tiles):
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
                evict = self.config.streaming == "both"
                self.copy(_COPY, self.ring.ptr_to([target]), source, size, barrier, evict=evict)

    def barrier_of(self, stage: Any, chunk: int) -> Any:
        number = self.ring_first + stage
        return number * self.chunks + chunk if self.chunks > 1 else number

    def wait(self, chunk: int) -> None:
        self.full.wait(self.barrier_of(self.stage.value, chunk), self.phase.value)

    def copy(self, form: str, *operands: Any, evict: bool) -> None:
        if evict:
            T.evaluate(T.ptx[form + _HINT](*operands, T.uint64(EVICT_FIRST)))
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
                self.copy(_COPY, target, source, size, arrived, evict=False)

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
                turn.set(turn.value + 1)
        if self.by_copy:
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

    def behind_first(self, first: Any, last: Any) -> None:
        """Behind a row's first reduction: with `late` all have read the stage before this one; where a row is kept in
        registers, all have read this one."""
        if self.late:
            self.refill_previous(first)
        elif self.config.kept != "shared" and not self.by_copy:
            if not self.wide:
                self.sync()
            self.refill(self.tile.value, self.stage.value, last)

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

        evict = config.streaming != "no"

        def source(name: str, element: Any) -> Any:
            at = place + self.offset(self.in_place[name]) + T.Cast("int32", element - start) * self.item
            return self.ring.ptr_to([at])

        with where(self.elected):
            for name in self.outputs:
                with where(size > 0 if frame.unit < self.pack else True):
                    to = self.tensors[name].ptr_to([whole])
                    self.copy(_COPY_OUT, to, source(name, whole), T.Cast("uint32", size), evict=evict)
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

    def sync(self) -> None:
        T.evaluate(T.cuda.cta_sync() if self.config.team > 32 else T.cuda.warp_sync())

    def compute_rows(self, turn: Any, first: Any, last: Any, count: Any) -> None:
        row = self.place(turn, count)
        self.words = {
            argument.name: T.alloc_local((self.rounds * self.words_of(argument.name),), "uint32")
            for argument in self.inputs
        }
        if self.problem.mask == "cols":
            self.words["mask"] = T.alloc_local((self.rounds * WORDS,), "uint32")
        for name, array in self.words.items():
            IRBuilder.name(f"{name}_words", array)
        self.waits = self.chunks > 1  # for the chunks of the row, in its first pass
        self.fresh = set(self.words)  # what has to be read before it is used
        if self.problem.is_grad:
            results = self.reduce_gradient(row, (first, last))
        elif self.config.online:
            results = self.reduce_online(row, (first, last))
        else:
            results = self.reduce_in_turn(row, (first, last))
        self.write(row, results)

    def place(self, turn: Any, count: Any) -> Row:
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
        return Row(stage, local, shift, named("packs", packs), named("start", start))

    # ---- Packs ----

    def each_pack(self, row: Row, *needs: str) -> Iterator[tuple[int, Any]]:
        """The rounds with the number of the thread's pack, with the inputs of it that the body needs read into words;
        the body is for packs that there are.  The first pass of a row that is kept in registers reads all inputs."""
        kept = self.config.kept != "shared"
        names = [name for name in self.words if name in self.fresh and (kept or name in needs)]
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
        if kept:
            self.fresh.clear()
            if self.config.kept == "packed":
                self.settle()
        elif not self.wide:
            T.evaluate(T.cuda.warp_sync())  # or the compiler would keep in registers what it reads again

    def settle(self) -> None:
        """Have the compiler widen packed words anew for each use, instead of keeping them widened in twice the
        registers: it does not know that a number of elements is not negative."""
        for name in self.words:
            for k in range(self.rounds * self.words_of(name)):
                T.buffer_store(self.words[name], T.bitwise_xor(self.words[name][k], self.zero), [k])

    def edge(self, row: Row, p: int, i: Any) -> tuple[Any, Any, Any] | None:
        """(whether pack i holds elements of other rows, its first own element, its last (exclusive)); None if it never
        does."""
        threads = self.config.threads
        if self.aligned or not (p == 0 or (p + 1) * threads >= self.least):
            return None
        first, last = row.shift - i * self.pack, row.shift + self.problem.cols - i * self.pack
        return tirx.any(first > 0, last < self.pack), first, last

    def words_of(self, name: str) -> int:
        """Words of a pack of that input: bytes of drop stand for elements."""
        return self.pack // 4 if name == "drop" else WORDS

    def word(self, name: str, p: int, k: int) -> Any:
        return self.words[name][p * self.words_of(name) + k]

    def read(self, name: str, row: Row, p: int, i: Any) -> None:
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
        found = self.edge(row, p, i)
        if found:
            edge, first, last = found
            bits = 8 * self.item
            neutral = T.uint32(_repeated(self.program.fill[name], self.problem.dtype))
            source = _FILL.format(bits=bits, ones="0xffffffff" if bits == 32 else "0xffff")
            with where(edge):
                self.call(f"bulk_fill_{bits}", *words, first, last, neutral, source=source)

    def pack_at(self, name: str, row: Row, i: Any) -> Any:
        """Bytes from the ring's start to pack i of an input of the tensors' dtype."""
        base = row.local[self.inputs[0].name] - row.shift
        return row.stage + self.offset(name) + base * self.item + i * PACK

    def load(self, words: list[Any], at: Any) -> None:
        count = len(words)
        names = "xyzw"[:count]
        source = _LOAD.format(
            bytes=4 * count,
            parameters=", ".join(f"unsigned& {name}" for name in names),
            type=f"uint{count}" if count > 1 else "unsigned",
            assign=" ".join(f"{name} = v.{name};" for name in names) if count > 1 else "x = v;",
        )
        self.call(f"bulk_load_{4 * count}", *words, at, source=source)

    def call(self, name: str, *arguments: Any, source: str) -> None:
        T.evaluate(T.cuda.func_call(name, *arguments, source_code=source))

    def element(self, name: str, p: int, v: int) -> Any:
        """Element v of a pack in words, as float32."""
        if name == "drop":
            return _as_float("u8", f"(float)((w >> {8 * (v % 4)}) & 0xff)", self.word(name, p, v // 4), v % 4)
        per = 4 // self.item
        return self.widened(self.word(name, p, v // per), v % per)

    def widened(self, word: Any, half: int) -> Any:
        """An element of the tensors' dtype in a word, as float32."""
        dtype = self.problem.dtype
        return _as_float(dtype, _WIDEN[dtype][half], word, half)

    def columns(self, p: int, v: int) -> Values:
        return _Columns(lambda name: self.element(name, p, v))

    # ---- Reductions ----

    def sums(self, name: str, value: float) -> Any:
        array = T.alloc_local((LANES,), "float32")
        IRBuilder.name(name, array)
        for k in range(LANES):
            T.buffer_store(array, T.float32(value), [k])
        return array

    def total_of(self, array: Any, kind: str) -> Any:
        """What a thread's sums come to."""
        combine: Callable[[Any, Any], Any] = T.max if kind == "max" else lambda a, b: a + b
        return combine(combine(array[0], array[1]), combine(array[2], array[3]))

    def peak_of_thread(self, row: Row) -> Any:
        """The largest of a thread's part; two at a time where elements are 16 bits and stand as they are."""
        step = self.program.reductions[0]
        two = {"float16": "half2", "bfloat16": "nv_bfloat162"}.get(self.problem.dtype)
        if self.problem.mask != "none" or two is None:
            peaks = self.sums("peaks", float(np.finfo(np.float32).min))
            for p, _ in self.each_pack(row, "x", "mask"):
                for v in range(self.pack):
                    k = v % LANES
                    T.buffer_store(peaks, T.max(peaks[k], step.element(self.columns(p, v), {})), [k])
            return self.total_of(peaks, "max")
        rising = self.problem.scale > 0
        function = "max" if rising else "min"
        source = _LARGEST.format(function=function, type=two)
        lowest = _repeated(LARGEST[self.problem.dtype] * (-1 if rising else 1), self.problem.dtype)
        found = T.alloc_local((WORDS,), "uint32")
        IRBuilder.name("peaks", found)

        def larger(a: Any, b: Any) -> Any:
            return T.cuda.func_call(f"bulk_{function}_{two}", a, b, source_code=source, return_type="uint32")

        for k in range(WORDS):
            T.buffer_store(found, T.uint32(lowest), [k])
        for p, _ in self.each_pack(row, "x"):
            for k in range(WORDS):
                T.buffer_store(found, larger(found[k], self.word("x", p, k)), [k])
        T.buffer_store(found, larger(larger(found[0], found[1]), larger(found[2], found[3])), [0])
        low, high = self.widened(found[0], 0), self.widened(found[0], 1)
        return T.max(low, high) if rising else T.float32(0) - T.min(low, high)

    def total_of_thread(self, row: Row, results: Values) -> Any:
        """The sum over a thread's part, of softmax by way of its numerators if those are kept."""
        step = self.program.reductions[-1]
        numerators = self.config.kept == "numerators"
        if numerators:
            self.numerators = T.alloc_local((self.rounds * self.pack,), "float32")
            IRBuilder.name("numerators", self.numerators)
        totals = self.sums("totals", 0)
        needs = ("dy", "drop") if self.problem.function == "log_softmax_grad" else ("y", "dy", "drop")
        for p, _ in self.each_pack(row, *(needs if self.problem.is_grad else ("x", "mask"))):
            for v in range(self.pack):
                value = step.element(self.columns(p, v), results)
                if numerators:
                    T.buffer_store(self.numerators, value, [p * self.pack + v])
                    value = self.numerators[p * self.pack + v]
                T.buffer_store(totals, totals[v % LANES] + value, [v % LANES])
        return self.total_of(totals, "sum")

    def across(self, kind: str, value: Any, lanes: int) -> Any:
        """Over `lanes` neighbouring lanes, by shuffles."""
        if lanes == 1:
            return value
        source = _ACROSS.format(kind=kind, lanes=lanes, combine=_COMBINE[kind])
        return T.cuda.func_call(f"bulk_{kind}_{lanes}", value, source_code=source, return_type="float32")

    def of_row_of(self, parts: dict[str, tuple[str, Any]], turn: tuple[Any, Any] | None) -> dict[str, tuple[Any, Any]]:
        """(this warp's, that of the warp number `lane` modulo the warps) of each of `parts`, name to (kind, a thread's
        part): one barrier for all.  The second is the first where a row has no more than a warp.

        `turn` is whether the row is the stage's first and last, for the row's first reduction."""
        lanes = min(32, self.config.threads)
        mine = {
            name: named(f"{name}_of_warp", self.across(kind, value, lanes)) for name, (kind, value) in parts.items()
        }
        if not self.wide:
            if turn:
                self.behind_first(*turn)
            return {name: (value, value) for name, value in mine.items()}
        warps = self.config.threads // 32
        base = {name: warps * k for k, name in enumerate(("peak", "total"))}
        exchange = self.turn.value * (2 * warps) if self.turn else 0
        with where(self.lane == 0):
            for name, value in mine.items():
                T.buffer_store(self.exchange, value, [exchange + base[name] + self.warp])
        self.sync()
        if turn:
            self.behind_first(*turn)
        found = {
            name: (value, named(f"{name}_of_lane", self.exchange[exchange + base[name] + self.lane % warps]))
            for name, value in mine.items()
        }
        if self.turn:
            self.turn.set(T.bitwise_xor(self.turn.value, 1))
        return found

    def reduced(self, step: Reduction, value: Any, turn: tuple[Any, Any] | None) -> Any:
        """A reduction over the row, from a thread's part."""
        _, part = self.of_row_of({step.name: (step.kind, value)}, turn)[step.name]
        return named(step.name, self.across(step.kind, part, self.config.threads // 32) if self.wide else part)

    def finished(self, results: Values) -> Values:
        """`results` and what is derived of them."""
        derived = dict(results)
        for name, formula in self.program.derived:
            derived[name] = named(name, formula(results))
        return derived

    def reduce_gradient(self, row: Row, turn: tuple[Any, Any]) -> Values:
        (step,) = self.program.reductions
        total = self.total_of_thread(row, {})
        return self.finished({step.name: self.reduced(step, total, turn)})

    def reduce_in_turn(self, row: Row, turn: tuple[Any, Any]) -> Values:
        peak_step, total_step = self.program.reductions
        peak = self.reduced(peak_step, self.peak_of_thread(row), turn)
        total = self.total_of_thread(row, {"peak": peak})
        return self.finished({"peak": peak, "total": self.reduced(total_step, total, None)})

    def reduce_online(self, row: Row, turn: tuple[Any, Any]) -> Values:
        """Sums relative to the warp's peak, which is all a warp need wait for; then peaks and sums at once."""
        _, total_step = self.program.reductions
        peak_of_warp = named("peak_of_warp", self.across("max", self.peak_of_thread(row), 32))
        total = self.total_of_thread(row, {"peak": peak_of_warp})
        found = self.of_row_of({"peak": ("max", peak_of_warp), "total": ("sum", total)}, turn)
        warps = self.config.threads // 32
        part = {name: value for name, (_, value) in found.items()}
        peak = named("peak", self.across("max", part["peak"], warps))
        share = total_step.of_part(part, {"peak": peak})
        results = self.finished({"peak": peak, "total": named("total", self.across("sum", share, warps))})
        if self.config.kept == "numerators":
            unit = {"peak": peak_of_warp, "total": T.float32(1)}
            results["inverse"] = named("factor", results["inverse"] * total_step.of_part(unit, results))
        return results

    # ---- Outputs ----

    def write(self, row: Row, results: Values) -> None:
        numerators = self.config.kept == "numerators"
        for p, i in self.each_pack(row, *self.words):

            def value(v: int, p: int = p) -> Any:
                if numerators:
                    return self.numerators[p * self.pack + v] * results["inverse"]
                return self.program.output(self.columns(p, v), results)

            words = self.packed("out", [value(v) for v in range(self.pack)])
            self.store(self.outputs[0], row, p, i, words)
            dropped = self.program.dropped
            if dropped is not None:
                per = 4 // self.item
                values = [
                    dropped(self.widened(words[v // per], v % per), self.element("drop", p, v))
                    for v in range(self.pack)
                ]
                self.store(self.outputs[1], row, p, i, self.packed("dropped", values))

    def packed(self, name: str, values: list[Any]) -> Any:
        """Four words of elements rounded to the tensors' dtype."""
        words = T.alloc_local((WORDS,), "uint32")
        IRBuilder.name(f"{name}_words", words)
        per = 4 // self.item
        for k in range(WORDS):
            of_word = values[k * per : (k + 1) * per]
            word = pack_16(self.problem.dtype, *of_word) if per == 2 else T.reinterpret("uint32", of_word[0])
            T.buffer_store(words, word, [k])
        return words

    def store(self, name: str, row: Row, p: int, i: Any, words: Any) -> None:
        streaming = self.config.streaming != "no"
        whole = _STORE.format(name="streaming" if streaming else "whole", store="__stcs" if streaming else "__stwb")
        four = [words[k] for k in range(WORDS)]
        found = self.edge(row, p, i)
        if self.by_copy:
            to = self.ring.ptr_to([self.pack_at(self.in_place[name], row, i)])
            name, whole = "bulk_store_shared", _STORE_SHARED
            found = found if self.config.rows > 1 else None  # what `copy_out` leaves out may be written
        else:
            to = self.tensors[name].ptr_to([row.start + T.Cast("int64", i * self.pack)])
            name = f"bulk_store_{'streaming' if streaming else 'whole'}"
        if found is None:
            self.call(name, *four, to, source=whole)
            return
        edge, first, last = found
        unit = self.frame.unit * self.item
        some = _STORE_SOME.format(unit=unit)
        with T.If(edge):
            with T.Then():
                self.call(f"bulk_store_some_{unit}", *four, to, first * self.item, last * self.item, source=some)
            with T.Else():
                self.call(name, *four, to, source=whole)


class _Columns(dict[str, Any]):
    """One column of the inputs, each widened when it is asked for."""

    def __init__(self, element: Callable[[str], Any]) -> None:
        super().__init__()
        self.element = element

    def __missing__(self, name: str) -> Any:
        return self.element(name)


def _as_float(kind: str, value: str, word: Any, part: int) -> Any:
    name = f"{kind}_{part}"
    source = _ELEMENT.format(name=name, value=value)
    return T.cuda.func_call(f"bulk_element_{name}", word, source_code=source, return_type="float32")


def _down(element: Any, frame: Frame) -> Any:
    """The first element, int64, of the pack of `element`."""
    return T.bitwise_and(element, T.int64(-frame.pack))


def _plain(kind: str) -> str:
    return kind.replace(" ", "_")


def _typed(source: str, kind: str) -> str:
    return source.format(type=kind, name=_plain(kind))


def _repeated(value: float, dtype: str) -> int:
    """The bits of a word of which each element is `value`."""
    element = np.array(value, numpy_dtype(dtype))
    return int(np.repeat(element, 4 // element.itemsize).view(np.uint32)[0])
