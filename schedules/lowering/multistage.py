"""The main loop of a product: shared memory in stages, fragments in registers, one barrier an iteration.

TVM's own pipeline pass is not used: in 0.27 it emits two barriers an iteration or wrong wait counts, it cannot pad
integers asynchronously, and a fused loop over (kh, kw, ci) makes it divide.  Here the loops stay a nest; a position is
advanced like an odometer, whose wheels may have bounds of each block's own.  Source: CUTLASS's multistage main loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.s_tir.stmt import SBlock, SBlockRealize

from schedules.lowering import reach
from schedules.lowering.annotations import AHEAD, ASYNC, AT_ONCE, PIPELINE, PREFIX, PROXY, SKIP, TILE_SUMS
from schedules.lowering.async_copy import Copies, commit, fence, settle, wait
from schedules.lowering.cursor import Cursor, split
from schedules.lowering.odometer import Odometer
from schedules.lowering.statements import (
    bounds_of,
    flat,
    fresh,
    integer,
    joined,
    loops_of,
    sequence,
    stores_of,
    substitute,
    without_blocks,
)

MAIN_LOOP = "main loop"  # name of the block that it becomes
OWN_BARRIERS = PREFIX + "own_barriers"  # of the scope in it: the barriers there are all that it needs
READ, WRITE = "read", "write"  # the stage whose turn it is


@dataclass(frozen=True)
class Options:
    """What the annotations of a nest ask for."""

    stages: int  # tiles in shared memory at once
    asynchronous: bool  # copies that cp.async can do are left to it
    ahead: bool  # fragments of the next k step are loaded before this one is multiplied, into a second set
    skip: bool  # steps whose tile of an operand is all zeros are left out
    at_once: bool = False  # a tile's product has no k steps, and reads the tiles as they lie
    proxy: bool = False  # that product goes on beside the threads, and reads by the async proxy
    tile_sums: int = 0  # so many tiles are summed apart, from zero, and added to the sums when they are done

    @staticmethod
    def of(annotations: dict[Any, Any]) -> Options:
        return Options(
            stages=int(annotations[PIPELINE]),
            asynchronous=bool(annotations.get(ASYNC, 0)),
            ahead=bool(annotations.get(AHEAD, 1)),
            skip=bool(annotations.get(SKIP, 0)),
            at_once=bool(annotations.get(AT_ONCE, 0)),
            proxy=bool(annotations.get(PROXY, 0)),
            tile_sums=int(annotations.get(TILE_SUMS, 0)),
        )


def multistage(body: Any) -> Any:
    """`body` with every annotated reduction nest turned into a multi-stage loop; lanes and tiles already compact.

    Of the copies that are not asynchronous, an iteration loads the next tile into registers and stores it at its end
    into the stage that the iteration before has read.
    """
    blocks: list[Any] = []

    def grid(loop: Any) -> None:
        if loop.thread_binding is not None and str(loop.thread_binding.thread_tag).startswith("blockIdx"):
            blocks.append(loop.loop_var)

    tvm_ffi.structural_walk(body, (tirx.For, grid))

    def visit(loop: Any) -> Any:
        annotations = dict(loop.annotations)
        if PIPELINE not in annotations:
            return loop
        options = Options.of(annotations)
        return _Nest(loop, blocks, body, options.at_once).emit(options)

    return tvm_ffi.structural_map(body, (tirx.For, visit))


@dataclass(frozen=True)
class _Copy:
    """One tile's copy from global to shared memory, as this thread's loop nest."""

    statement: Any
    buffer: Any


class _Nest:
    """An annotated nest  for .. for: {allocate tiles; copy, copy, for k step: {load fragments; multiply}}, or where the
    product is `at_once`  for .. for: {allocate tiles; copy, copy, multiply}."""

    def __init__(self, root: Any, blocks: Sequence[Any], program: Any, at_once: bool) -> None:
        self.loops = [root]
        while isinstance(self.loops[-1].body, tirx.For):
            self.loops.append(self.loops[-1].body)
        inner = self.loops[-1].body
        self.blocks, self.program = blocks, program
        self.tiles = list(inner.block.alloc_buffers)
        *copies, self.steps = sequence(inner.block.body)
        self.copies = [self._copy(statement) for statement in copies]
        if at_once:
            self.fragments, self.loads, self.multiply = [], [], self.steps
            return
        fragments = self.steps.body
        self.fragments = list(fragments.block.alloc_buffers)
        *self.loads, self.multiply = sequence(fragments.block.body)

    @property
    def followed(self) -> bool:
        """Whether the program has other shared memory, or comes here again, so that the tiles' may be in use."""
        found: list[bool] = []

        def block(node: Any) -> None:
            shared = [buffer for buffer in node.alloc_buffers if str(buffer.scope()).startswith("shared")]
            found.extend(buffer not in self.tiles for buffer in shared)

        def loop(node: Any) -> None:
            if node.thread_binding is None:
                found.extend(inner.loop_var.same_as(self.loops[0].loop_var) for inner in loops_of(node.body))

        tvm_ffi.structural_walk(self.program, (SBlock, block))
        tvm_ffi.structural_walk(self.program, (tirx.For, loop))
        return any(found)

    def _copy(self, statement: Any) -> _Copy:
        stores = stores_of(statement)
        if len(stores) != 1 or not str(stores[0].buffer.scope()).startswith("shared"):
            raise ValueError("a stage of the pipeline is not one store into shared memory")
        return _Copy(without_blocks(statement), stores[0].buffer)

    def emit(self, options: Options) -> Any:
        """The loop as a block.  Raises ValueError where fewer than two stages would need a second barrier."""
        if options.stages < 2 or (not options.asynchronous and options.stages != 2):
            raise ValueError(f"{options.stages} stages do not fit this pipeline")
        if options.proxy and not options.at_once:
            raise ValueError("only a tile's whole product can read by the async proxy")
        if options.proxy and options.tile_sums:
            raise ValueError("sums of products under way cannot be added tile by tile")
        if options.ahead and not options.at_once and int(self.steps.extent) % 2:
            raise ValueError("fragments are double-buffered: the k steps of a tile must be even in number")
        return _Emitter(self, options).block()


class _Emitter:
    def __init__(self, nest: _Nest, options: Options) -> None:
        self.nest, self.stages, self.asynchronous, self.ahead = (
            nest,
            options.stages,
            options.asynchronous,
            options.ahead,
        )
        self.at_once, self.proxy = options.at_once, options.proxy
        self.copies, found = nest.copies, reach.Reach()
        if options.skip:
            found, statements = reach.find([copy.statement for copy in nest.copies], nest.loops, nest.blocks)
            self.copies = [_Copy(new, old.buffer) for new, old in zip(statements, nest.copies, strict=True)]
        self.at = Odometer(nest.loops, found)  # of the tile to fetch next
        self.bounds = bounds_of(nest.program)
        converter = Copies(self.bounds, nest.loops, self.at.follow)
        self.by_async = {
            copy.buffer: converter.convert(copy.statement) if self.asynchronous else None for copy in self.copies
        }
        self.sizes = {tile: math.prod(int(extent) for extent in tile.shape) for tile in nest.tiles}
        self.staged = {
            tile: tirx.decl_buffer([self.stages * size], tile.dtype, tile.name, scope=tile.scope())
            for tile, size in self.sizes.items()
        }
        self.cursors: tuple[list[Cursor], list[Cursor]] = ([], [])  # in the stage to read, in the one to write
        sets = 2 if self.ahead else 1
        self.sets = {fragment: _with_axis(fragment, sets) for fragment in nest.fragments}
        self.together = options.tile_sums  # tiles
        self.sums: dict[Any, Any] = {}  # those of so many tiles, by those of all
        if options.tile_sums:
            self.sums = {total: _like(total, "tile_sums") for total in _written(nest.multiply)}
        self.stage = tirx.decl_buffer([2], "int32", "stage", scope="local")  # to read, to write
        self.registers: dict[Any, Any] = {}

    @property
    def read(self) -> Any:
        return tirx.BufferLoad(self.stage, [integer(0)])

    @property
    def write(self) -> Any:
        return tirx.BufferLoad(self.stage, [integer(1)])

    def turn(self) -> list[Any]:
        """Read the next stage, and write the one read so far."""
        after = self.read + 1
        turned = [
            tirx.BufferStore(self.stage, self.read, [integer(1)]),
            tirx.BufferStore(self.stage, tirx.Select(after == integer(self.stages), integer(0), after), [integer(0)]),
        ]
        for stage, cursors in zip((self.read, self.write), self.cursors, strict=True):
            turned += [cursor.turn(stage == 0, self.stages) for cursor in cursors]
        return turned

    # ---- the pieces ----

    def in_set(self, statement: Any, version: Any) -> Any:
        """`statement` on set `version` of the fragments, and on the sums of a tile if these are apart."""

        def place(buffer: Any, indices: Any) -> tuple[Any, list[Any]]:
            if buffer in self.sets:
                return self.sets[buffer], [version, *indices]
            return self.sums.get(buffer, buffer), list(indices)

        def load(node: Any) -> Any:
            return tirx.BufferLoad(*place(node.source, node.indices))

        def store(node: Any) -> Any:
            buffer, indices = place(node.buffer, node.indices)
            return tirx.BufferStore(buffer, node.value, indices)

        return _replaced(statement, {**self.sets, **self.sums}, load, store)

    def in_stage(self, statement: Any, stage: Any, moving: Collection[Any] = ()) -> Any:
        """`statement` on `stage` of the tiles: a number, or READ or WRITE for the one whose turn it is.

        Then an index is a cursor of the thread's and what its loops and the variables `moving` add, where it can be.
        """
        moving = {*moving, *(loop.loop_var for loop in loops_of(statement))}

        def place(node: Any, size: int) -> Any:
            index = flat(node)
            if not isinstance(stage, str):
                return stage * size + index
            found = split(index, moving, self.bounds)
            if found is None:
                return (self.write if stage is WRITE else self.read) * size + index
            cursor = Cursor(found[0], size)
            self.cursors[stage is WRITE].append(cursor)
            return cursor.place + found[1]

        def load(node: Any) -> Any:
            new = self.staged.get(node.source)
            return node if new is None else tirx.BufferLoad(new, [place(node, self.sizes[node.source])])

        def store(node: Any) -> Any:
            new = self.staged.get(node.buffer)
            if new is None:
                return node
            at = tirx.BufferLoad(node.buffer, node.indices)
            return tirx.BufferStore(new, node.value, [place(at, self.sizes[node.buffer])])

        return _replaced(statement, self.staged, load, store)

    def fetch(self, stage: Any) -> list[Any]:
        """Start what brings the tile at the odometer's position into `stage`, and advance."""
        pieces = []
        for copy in self.copies:
            move = self.by_async[copy.buffer]
            moved = fresh(substitute(move or copy.statement, self.at.position()))
            pieces.append(self.in_stage(moved, stage) if move else self.to_registers(copy, moved))
        return [*pieces, self.at.advance()]

    def store(self, stage: Any) -> list[Any]:
        """Store what `fetch` left in registers."""
        return [self.from_registers(copy, stage) for copy in self.copies if not self.by_async[copy.buffer]]

    def to_registers(self, copy: _Copy, statement: Any) -> Any:
        loops = loops_of(statement)
        at = [loop.loop_var for loop in loops]
        if copy.buffer not in self.registers:
            shape = [loop.extent for loop in loops]
            self.registers[copy.buffer] = tirx.decl_buffer(
                shape or [1], copy.buffer.dtype, copy.buffer.name + "_next", scope="local"
            )
        buffer = self.registers[copy.buffer]
        return tvm_ffi.structural_map(
            statement, (tirx.BufferStore, lambda node: tirx.BufferStore(buffer, node.value, at or [integer(0)]))
        )

    def from_registers(self, copy: _Copy, stage: Any) -> Any:
        statement = fresh(copy.statement)
        at = [loop.loop_var for loop in loops_of(statement)]
        value = tirx.BufferLoad(self.registers[copy.buffer], at or [integer(0)])
        moved = tvm_ffi.structural_map(
            statement, (tirx.BufferStore, lambda node: tirx.BufferStore(node.buffer, value, node.indices))
        )
        return self.in_stage(moved, stage)

    def load(self, stage: Any, step: Any, version: Any, moving: Collection[Any] = ()) -> list[Any]:
        """Fragments of k step `step` of the tile in `stage` into set `version`."""
        pieces = []
        for statement in self.nest.loads:
            moved = substitute(fresh(statement), {self.nest.steps.loop_var: step})
            pieces.append(self.in_set(self.in_stage(moved, stage, moving), version))
        return pieces

    def ready(self) -> list[Any]:
        """Wait until the tile to read next is in shared memory, and everyone is done with the stage to write next."""
        barrier = tirx.Evaluate(tirx.op.tvm_storage_sync(str(self.nest.tiles[0].scope())))
        # products under way read the stage before, and the async proxy has to see what this thread wrote
        handed = [*self.settled(), fence()] if self.proxy else []
        return [wait(self.stages - 2), *handed, barrier] if self.asynchronous else [*handed, barrier]

    def settled(self) -> list[Any]:
        """Wait for the products under way."""
        return [settle(sums) for sums in _written(self.nest.multiply)] if self.proxy else []

    def multiply(self, step: Any, version: Any) -> Any:
        """The products of k step `step` from set `version` of the fragments."""
        moved = substitute(fresh(self.nest.multiply), {self.nest.steps.loop_var: step})
        return self.in_set(moved, version)

    # ---- the whole ----

    def block(self) -> Any:
        prologue = self.at.start()
        for stage in range(self.stages - 1):
            if stage < self.at.most:
                fetch = joined([*self.fetch(integer(stage)), *self.store(integer(stage))])
                prologue.append(
                    tirx.IfThenElse(integer(stage) < self.at.total, fetch, None) if self.at.reach else fetch
                )
            if self.asynchronous:
                prologue.append(commit())
        prologue.append(tirx.BufferStore(self.stage, integer(0), [integer(0)]))
        prologue.append(tirx.BufferStore(self.stage, integer(self.stages - 1), [integer(1)]))
        if self.at_once:
            loop = self.multiplying_at_once()
        else:
            loop = self.loading_ahead() if self.ahead else self.loading_each()
        for stage, cursors in zip((0, self.stages - 1), self.cursors, strict=True):
            prologue += [cursor.set(stage) for cursor in cursors]
        ending = [*self.settled(), *([wait(0)] if self.asynchronous else [])]
        if self.asynchronous or self.nest.followed:  # what follows may reuse this memory
            ending.append(tirx.Evaluate(tirx.op.tvm_storage_sync(str(self.nest.tiles[0].scope()))))
        scope = ir.StringImm(str(self.nest.tiles[0].scope()))
        body = tirx.AttrStmt(scope, OWN_BARRIERS, integer(1), joined([*prologue, *loop, *ending]))
        cursors = [cursor.buffer for group in self.cursors for cursor in group]
        state = [*self.at.buffers, self.stage, *cursors]
        allocations = [
            *self.staged.values(),
            *self.sets.values(),
            *self.sums.values(),
            *self.registers.values(),
            *state,
        ]
        block = SBlock([], [], [], MAIN_LOOP, body, None, allocations, [], {})
        return SBlockRealize([], tirx.const(True, "bool"), block)

    def next_tile(self, tile: Any) -> tuple[list[Any], list[Any]]:
        """What starts the fetch of the tile `stages` - 1 after `tile`, and what finishes it."""
        if self.at.most < self.stages:  # the prologue has fetched all
            return [commit()] if self.asynchronous else [], []
        left = tile < self.at.total - integer(self.stages - 1)
        start = [tirx.IfThenElse(left, joined(self.fetch(WRITE)), None)]
        stores = self.store(WRITE)
        finish = [tirx.IfThenElse(left, joined(stores), None)] if stores else []
        return [*start, commit()] if self.asynchronous else start, finish

    def loading_ahead(self) -> list[Any]:
        """The loop with two sets of fragments: each k step loads the next one's, the last those of the next tile."""
        count = int(self.nest.steps.extent)
        tile, step = tirx.Var("tile", "int32"), tirx.Var("step", "int32")
        start, finish = self.next_tile(tile)
        following = tirx.truncmod(step + 1, integer(count))
        loads = self.load(READ, following, tirx.truncmod(step + 1, integer(2)), [step])
        # all modes store before the stages turn: `write` is then still the stage of the tile that was fetched
        last = [*finish, *(self.ready() if self.at.most >= self.stages or self.asynchronous else []), *self.turn()]
        iteration = [
            *([tirx.IfThenElse(step == 0, joined(start), None)] if start else []),
            tirx.IfThenElse(step == integer(count - 1), joined(last), None),
            *loads,
            self.multiply(step, tirx.truncmod(step, integer(2))),
        ]
        first = [*self.ready(), *self.load(integer(0), integer(0), integer(0))]
        return [*first, self.over_tiles(tile, self.over_steps(step, iteration))]

    def loading_each(self) -> list[Any]:
        """The loop with one set of fragments, which the compiler may double; a k step loads its own."""
        tile, step = tirx.Var("tile", "int32"), tirx.Var("step", "int32")
        start, finish = self.next_tile(tile)
        steps = self.over_steps(step, [*self.load(READ, step, integer(0), [step]), self.multiply(step, integer(0))])
        # the barrier also says that all have read the stage that is written next
        body = [*self.ready(), *start, steps, *finish, *self.turn()]
        return [self.over_tiles(tile, joined(body))]

    def multiplying_at_once(self) -> list[Any]:
        """The loop without fragments: while the product of a tile is under way, the next tile is fetched."""
        tile = tirx.Var("tile", "int32")
        start, finish = self.next_tile(tile)
        product = self.in_set(self.in_stage(fresh(self.nest.multiply), READ), integer(0))
        under_way = [product, *start] if self.proxy else [*start, product]
        body = [*self.ready(), *under_way, *finish, *self.turn()]
        return [self.over_tiles(tile, joined(body))]

    def over_tiles(self, tile: Any, body: Any) -> Any:
        """`body` for each tile; of tiles whose sums are apart, between what clears these and what adds them to those of
        all."""
        if not self.sums:
            return tirx.For(tile, integer(0), self.at.total, tirx.ForKind.SERIAL, body)
        part, count = tile, integer(self.together)
        if self.together > 1:
            part, each = tirx.Var("part", "int32"), tirx.Var("tile", "int32")
            left = tirx.op.min(count, self.at.total - part * count)
            body = tirx.For(each, integer(0), left, tirx.ForKind.SERIAL, substitute(body, {tile: part * count + each}))
        clear, add = [], []
        for total, own in self.sums.items():
            at, loops = _indices(own.shape)
            clear.append(loops(tirx.BufferStore(own, tirx.const(0, str(own.dtype)), at)))
            at, loops = _indices(own.shape)
            sum_of_both = tirx.BufferLoad(total, at) + tirx.BufferLoad(own, at)
            add.append(loops(tirx.BufferStore(total, sum_of_both, at)))
        parts = tirx.truncdiv(self.at.total + integer(self.together - 1), count)
        return tirx.For(part, integer(0), parts, tirx.ForKind.SERIAL, joined([*clear, body, *add]))

    def over_steps(self, step: Any, body: list[Any]) -> Any:
        return tirx.For(step, integer(0), integer(int(self.nest.steps.extent)), tirx.ForKind.UNROLLED, joined(body))


def _replaced(statement: Any, buffers: dict[Any, Any], load: Any, store: Any) -> Any:
    """`statement` with accesses changed by `load` and `store`, and blocks that say so of all of the new `buffers`."""

    def block(node: Any) -> Any:
        def regions(given: Sequence[Any]) -> list[Any]:
            return [
                region
                if (new := buffers.get(region.source)) is None
                else tirx.BufferRegion(new, [ir.Range(0, extent) for extent in new.shape])
                for region in given
            ]

        return SBlock(
            node.iter_vars,
            regions(node.reads),
            regions(node.writes),
            node.name_hint,
            node.body,
            node.init,
            node.alloc_buffers,
            node.match_buffers,
            node.annotations,
        )

    return tvm_ffi.structural_map(statement, ((ir.TensorLoad, load), (tirx.BufferStore, store), (SBlock, block)))


def _written(statement: Any) -> list[Any]:
    """The buffers that the blocks of `statement` write."""
    found: dict[Any, None] = {}
    tvm_ffi.structural_walk(
        statement, (SBlock, lambda block: found.update(dict.fromkeys(region.source for region in block.writes)))
    )
    return list(found)


def _indices(shape: Sequence[Any]) -> tuple[list[Any], Callable[[Any], Any]]:
    """An index into `shape`, and what puts a statement at that index into unrolled loops over all of it."""
    extents = [int(extent) for extent in shape]
    at = [tirx.Var(f"i{axis}", "int32") if extent > 1 else integer(0) for axis, extent in enumerate(extents)]

    def loops(statement: Any) -> Any:
        for variable, extent in reversed(list(zip(at, extents, strict=True))):
            if extent > 1:
                statement = tirx.For(variable, integer(0), integer(extent), tirx.ForKind.UNROLLED, statement)
        return statement

    return at, loops


def _like(buffer: Any, name: str) -> Any:
    return tirx.decl_buffer(buffer.shape, buffer.dtype, name, scope=buffer.scope())


def _with_axis(buffer: Any, extent: int) -> Any:
    return tirx.decl_buffer([extent, *buffer.shape], buffer.dtype, buffer.name, scope=buffer.scope())
